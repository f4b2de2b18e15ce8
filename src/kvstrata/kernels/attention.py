"""Absorbed MLA over a paged cache: one latent row per token is key and, in its first columns, value."""

from __future__ import annotations

import torch

from kvstrata.kernels.batch import BatchPlan
from kvstrata.kernels.rows import gather_rows

_CHUNK_BYTES = 64 << 20


def _attend(
    q: torch.Tensor,
    cache: torch.Tensor,
    plan: BatchPlan,
    positions: torch.Tensor,  # [t, K], -1 = absent
    first: int,
    scale: float,
    kv_lora_rank: int,
) -> torch.Tensor:
    tokens = slice(first, first + positions.shape[0])
    present = positions >= 0
    safe = positions.clamp(min=0).to(torch.int64)
    blocks = plan.block_table[plan.token_request[tokens, None], safe // plan.block_tokens].to(torch.int64)
    rows = gather_rows(cache, blocks * plan.block_tokens + safe % plan.block_tokens).float()
    scores = torch.einsum("thd,tkd->thk", q[tokens].float(), rows) * scale
    scores = scores.masked_fill(~present[:, None, :], float("-inf"))
    weights = torch.nan_to_num(torch.softmax(scores, dim=-1), nan=0.0)
    return torch.bmm(weights, rows[..., :kv_lora_rank])


def dense_mla(
    q: torch.Tensor,
    cache: torch.Tensor,
    plan: BatchPlan,
    *,
    scale: float,
    kv_lora_rank: int,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention of every query token over its whole context."""
    if out is None:
        out = q.new_empty(q.shape[0], q.shape[1], kv_lora_rank)
    out[plan.tokens :] = 0
    first = 0
    while first < plan.tokens:
        n = plan.max_kv_tokens
        step = max(1, _CHUNK_BYTES // (4 * q.shape[2] * n))
        position = plan.token_position[first : first + step]
        span = torch.arange(n)
        positions = torch.where(span[None] <= position[:, None], span[None], -1)
        got = _attend(q, cache, plan, positions, first, scale, kv_lora_rank)
        out[first : first + positions.shape[0]] = got.to(out.dtype)
        first += step
    return out


def sparse_mla(
    q: torch.Tensor,
    cache: torch.Tensor,
    plan: BatchPlan,
    topk_indices: torch.Tensor,
    *,
    scale: float,
    kv_lora_rank: int,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of every query token over the positions selected for it."""
    if out is None:
        out = q.new_empty(q.shape[0], q.shape[1], kv_lora_rank)
    out[plan.tokens :] = 0
    step = max(1, _CHUNK_BYTES // (4 * q.shape[2] * topk_indices.shape[1]))
    for first in range(0, plan.tokens, step):
        positions = topk_indices[first : min(first + step, plan.tokens)]
        got = _attend(q, cache, plan, positions, first, scale, kv_lora_rank)
        out[first : first + positions.shape[0]] = got.to(out.dtype)
    return out
