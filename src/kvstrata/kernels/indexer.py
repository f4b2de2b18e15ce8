"""Lightning indexer (DeepSeek-V3.2 sparse attention): which positions a token attends to."""

from __future__ import annotations

import torch

from kvstrata.kernels.batch import BatchPlan
from kvstrata.kernels.quantise import dequantise_rows
from kvstrata.kernels.rows import gather_rows

_CHUNK_BYTES = 64 << 20


def index_topk(
    q: torch.Tensor,
    weights: torch.Tensor,
    cache: torch.Tensor,
    plan: BatchPlan,
    topk: int,
    out: torch.Tensor,
    *,
    quantised: bool,
) -> None:
    """Write the request-local positions each token attends to: ascending, then -1."""
    n = plan.max_kv_tokens
    span = torch.arange(n)
    step = max(1, _CHUNK_BYTES // (4 * (q.shape[1] + q.shape[2]) * max(n, 1)))
    for first in range(0, plan.tokens, step):
        tokens = slice(first, min(first + step, plan.tokens))
        position = plan.token_position[tokens]
        safe = torch.minimum(span[None], position[:, None])
        blocks = plan.block_table[plan.token_request[tokens, None], safe // plan.block_tokens].to(torch.int64)
        rows = gather_rows(cache, blocks * plan.block_tokens + safe % plan.block_tokens)
        keys = dequantise_rows(rows) if quantised else rows.float()
        scores = torch.einsum("thd,tkd->thk", q[tokens].float(), keys).relu_()
        scores = torch.einsum("thk,th->tk", scores, weights[tokens].float())
        scores = scores.masked_fill(span[None] > position[:, None], float("-inf"))
        picked = torch.sort(scores, dim=1, descending=True, stable=True).indices[:, :topk]
        picked = torch.where(picked <= position[:, None], picked, n).sort(dim=1).values
        out[tokens, :topk] = -1
        out[tokens, : picked.shape[1]] = torch.where(picked < n, picked, -1).to(out.dtype)
