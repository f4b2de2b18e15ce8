"""Rows of a paged cache: written by slot, read by row id."""

from __future__ import annotations

import torch


def write_rows(cache: torch.Tensor, rows: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """Store rows[i] at slot_mapping[i]; -1 is skipped and touches nothing.

    cache [B, N, row], any block stride; rows [>=T, row] in any float dtype; slot_mapping [T] int64,
    slot = block * N + offset. A slot given twice leaves one of the two rows.
    """
    rows = rows[: slot_mapping.shape[0]]
    slots = slot_mapping.to(torch.int64)
    kept = slots >= 0
    if not bool(kept.all()):
        rows, slots = rows[kept], slots[kept]
    if slots.numel() == 0:
        return
    block_tokens = cache.shape[1]
    block = torch.div(slots, block_tokens, rounding_mode="floor")
    cache[block, slots - block * block_tokens] = rows.to(cache.dtype)


def gather_rows(cache: torch.Tensor, row_ids: torch.Tensor) -> torch.Tensor:
    """A copy of the rows named by row_ids (slots, int, any shape, none negative): [*row_ids, row]."""
    ids = row_ids.to(torch.int64)
    block_tokens = cache.shape[1]
    block = torch.div(ids, block_tokens, rounding_mode="floor")
    return cache[block, ids - block * block_tokens]
