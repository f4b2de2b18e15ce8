"""Absorbed MLA over a paged cache: one latent row per token is key and, in its first columns, value.

Scores, softmax and sums are float32 whatever the cache holds. A token's result is bit-equal however its
prompt was chunked and whatever else is in the batch (see `compiled`); a selection that names every
position in ascending order gives the bits of dense attention.
"""

from __future__ import annotations

import numpy as np
import torch

from kvstrata.kernels.batch import BatchPlan
from kvstrata.kernels.compiled import LI_C8, attend_tiles
from kvstrata.kernels.packed_rows import PackedRows
from kvstrata.kernels.parallel import run_shares
from kvstrata.kernels.rows import flat_rows

# Float32 copies of queries and results are made for this many bytes of tokens at a time.
_STAGING_BYTES = 64 << 20
_NO_SELECTION = torch.empty((0, 0), dtype=torch.int32)
_NO_LSE = torch.empty((0, 0), dtype=torch.float32)


def dense_mla(
    q: torch.Tensor,
    cache: torch.Tensor,
    plan: BatchPlan,
    *,
    scale: float,
    kv_lora_rank: int,
    packed: PackedRows | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention of every query token over its whole context: [len(q), H, kv_lora_rank].

    q [>=T, H, row] holds the plan's T tokens first; rows beyond them (padding) give zeros. cache
    [B, N, row] already holds the new tokens' rows; the value is a row's first kv_lora_rank columns.
    Only rows of the tokens' own contexts are read. With packed, cache [B, N, packed.row_bytes] uint8 holds
    SFA-C8 rows, which are widened as they are read.
    """
    return _attend(q, cache, plan, None, scale, kv_lora_rank, packed, out, None)


def sparse_mla(
    q: torch.Tensor,
    cache: torch.Tensor,
    plan: BatchPlan,
    topk_indices: torch.Tensor,
    *,
    scale: float,
    kv_lora_rank: int,
    packed: PackedRows | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of every query token over the positions selected for it: [len(q), H, kv_lora_rank].

    As `dense_mla`; topk_indices [>=T, K] int32 are positions in the token's own request, none above the
    token's own. -1 may stand anywhere and contributes nothing; a token that selects nothing gives zeros.
    Positions are summed in the order given. lse [>=T, H] float32, if given, receives the logarithm of each
    softmax's sum (-inf for a token that selects nothing), with which parts of a selection can be joined.
    """
    return _attend(q, cache, plan, topk_indices, scale, kv_lora_rank, packed, out, lse)


def join_parts(out: torch.Tensor, lse: torch.Tensor, part: torch.Tensor, part_lse: torch.Tensor) -> None:
    """Fold the attention `part` over more rows into `out`, in place; both [T, H, rank] with their lse [T, H].

    The result is attention over the rows of both, up to rounding. A part over nothing (-inf) changes nothing.
    """
    joined = torch.logaddexp(lse, part_lse)
    reached = joined > -torch.inf
    for side, side_lse in ((out, lse), (part, part_lse)):
        side *= torch.where(reached, side_lse - joined, -torch.inf).exp_().unsqueeze(-1).to(side.dtype)
    out += part
    lse.copy_(joined)


def _attend(
    q: torch.Tensor,
    cache: torch.Tensor,
    plan: BatchPlan,
    selected: torch.Tensor | None,
    scale: float,
    rank: int,
    packed: PackedRows | None,
    out: torch.Tensor | None,
    lse: torch.Tensor | None,
) -> torch.Tensor:
    heads, width = q.shape[1], q.shape[2]
    assert cache.shape[1] == plan.block_tokens
    assert plan.highest_block < cache.shape[0], "a block beyond the cache"
    assert width == (cache.shape[2] if packed is None else packed.width)
    assert rank <= width
    assert plan.tokens <= q.shape[0]
    if out is None:
        out = q.new_empty(q.shape[0], heads, rank)
    out[plan.tokens :] = 0
    dense = selected is None
    chosen = (_NO_SELECTION if selected is None else selected[: plan.tokens]).to(torch.int32).contiguous()
    if chosen.numel():
        assert int(chosen.max()) < plan.max_kv_tokens, "a selected position beyond every context"
    rows = flat_rows(cache) if packed is None else packed.flat(cache)
    assert packed is None or packed.kv_lora_rank == rank
    assert rows.kind != LI_C8
    for tiles, tokens in plan.tile_groups(4 * heads * (width + rank), _STAGING_BYTES):
        queries = q[tokens].float().contiguous()
        target = out[tokens]
        direct = target.dtype == torch.float32 and target.is_contiguous()
        result = target if direct else torch.empty(target.shape, dtype=torch.float32)
        arguments = (
            *plan.tile_arguments(tiles),
            tokens.start,
            *plan.page_arguments(),
            *rows.arguments(),
            queries.numpy(),
            np.float32(scale),
            rank,
            dense,
            chosen.numpy(),
            result.numpy(),
            (_NO_LSE if lse is None else lse[tokens]).numpy(),
        )
        pairs = plan.pairs(tiles) if dense else chosen[tokens].numel()
        run_shares(
            attend_tiles,
            arguments,
            shares=tiles.stop - tiles.start,
            multiply_adds=pairs * heads * (width + rank),
        )
        if not direct:
            target.copy_(result)
    return out
