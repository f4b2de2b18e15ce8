"""Lightning indexer (DeepSeek-V3.2 sparse attention): which positions a token attends to.

score[t, j] = sum over h of weights[t, h] * relu(q[t, h] . k[j]), for j up to the token's own position.
Many scores tie at zero, so the rule for equals is part of the contract: the lower position wins.
Positions come out in ascending order, so that attention sums them in an order that does not depend on
the scores. A score is the same bits however the prompt was chunked (see `compiled`), hence so is the
selection.
"""

from __future__ import annotations

import torch

from kvstrata.kernels.batch import BatchPlan
from kvstrata.kernels.compiled import LI_C8, index_tiles
from kvstrata.kernels.parallel import run_shares
from kvstrata.kernels.quantise import SCALE_BYTES
from kvstrata.kernels.rows import flat_rows

_STAGING_BYTES = 64 << 20


def index_topk(
    q: torch.Tensor,
    weights: torch.Tensor,
    cache: torch.Tensor,
    plan: BatchPlan,
    topk: int,
    out: torch.Tensor,
    *,
    quantised: bool,
    near: torch.Tensor | None = None,
) -> None:
    """Write each token's min(topk, position + 1) best positions into out: ascending, then -1.

    q [>=T, Hi, D], weights [>=T, Hi]; cache [B, N, D] in a float dtype, or with quantised [B, N, D + 4]
    uint8 as `write_quantised_rows` leaves it, already holding the new tokens' rows. out [>=T, >=topk]
    int32; rows beyond the plan's T tokens are left alone. A token with no more than topk positions takes
    them all and is not scored. Scratch is one tile's scores per thread: tile tokens x context x 4 bytes.

    near [>=T, N] int32, if wanted, gets the min(N, position + 1 - topk) positions that come next after those
    in out: ascending, then -1, by the same rule for equals. Hot rows keep what may soon be selected by it.
    """
    width = q.shape[2]
    assert cache.shape[1] == plan.block_tokens
    assert plan.highest_block < cache.shape[0], "a block beyond the cache"
    assert cache.shape[2] == width + (SCALE_BYTES if quantised else 0)
    assert 0 < topk <= out.shape[1]
    assert plan.tokens <= min(q.shape[0], out.shape[0])
    rows = flat_rows(cache)
    assert (rows.kind == LI_C8) == quantised
    target = out[: plan.tokens]
    near_target = torch.empty(plan.tokens, 0, dtype=torch.int32) if near is None else near[: plan.tokens]
    assert near_target.shape[0] == plan.tokens
    positions, near_positions = _writable(target), _writable(near_target)
    for tiles, tokens in plan.tile_groups(4 * q.shape[1] * (width + 1), _STAGING_BYTES):
        arguments = (
            *plan.tile_arguments(tiles),
            tokens.start,
            *plan.page_arguments(),
            *rows.arguments(),
            q[tokens].float().contiguous().numpy(),
            weights[tokens].float().contiguous().numpy(),
            topk,
            positions.numpy(),
            near_positions.numpy(),
        )
        run_shares(
            index_tiles,
            arguments,
            shares=tiles.stop - tiles.start,
            multiply_adds=plan.pairs(tiles) * q.shape[1] * width,
        )
    if positions is not target:
        target.copy_(positions)
    if near_positions is not near_target:
        near_target.copy_(near_positions)


def _writable(target: torch.Tensor) -> torch.Tensor:
    """The tensor if the loops can write it as it is, else one of its shape that they can."""
    if target.dtype == torch.int32 and target.is_contiguous():
        return target
    return torch.empty(target.shape, dtype=torch.int32)
