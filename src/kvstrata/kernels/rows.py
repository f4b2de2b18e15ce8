"""Rows of a paged cache: written by slot, read by row id."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kvstrata.kernels.compiled import BFLOAT16, FLOAT16, FLOAT32, LI_C8

_NONE = {
    size: np.empty(0, dtype) for size, dtype in ((4, np.float32), (2, np.uint16), (1, np.uint8))
}  # what a loop is given for caches of other element sizes
KINDS = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16, torch.float16: FLOAT16, torch.uint8: LI_C8}


def write_rows(cache: torch.Tensor, rows: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """Store rows[i] at slot_mapping[i]; -1 is skipped and touches nothing.

    cache [B, N, row], any block stride; rows [>=T, row] in any float dtype; slot_mapping [T] int64,
    slot = block * N + offset. A slot given twice leaves one of the two rows.
    """
    rows = rows[: slot_mapping.shape[0]]
    slots = slot_mapping.to(torch.int64)
    if slots.numel() and int(slots.min()) < 0:
        kept = slots >= 0
        rows, slots = rows[kept], slots[kept]
    if slots.numel() == 0:
        return
    if cache.is_contiguous():  # the same in one call, and a small batch is mostly calls
        cache.view(-1, cache.shape[2]).index_copy_(0, slots, rows.to(cache.dtype))
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


@dataclass(frozen=True, kw_only=True)
class FlatRows:
    """A paged cache as the compiled loops address it: one flat array and strides in elements.

    Whatever the layout of the pages, the same machine code reads them, so the same bits come out.
    """

    kind: int
    f32: np.ndarray[Any, Any]
    u16: np.ndarray[Any, Any]
    u8: np.ndarray[Any, Any]
    block_stride: int
    row_stride: int

    def arguments(self) -> tuple[Any, ...]:
        """In the order the compiled loops take them."""
        return self.block_stride, self.row_stride, self.kind, self.f32, self.u16, self.u8


def flat_rows(cache: torch.Tensor) -> FlatRows:
    """View cache [B, N, row] (float32, bfloat16, float16, or uint8 for LI-C8) without copying it.

    For SFA-C8 rows see `PackedRows.flat`.
    """
    blocks, block_tokens, width = cache.shape
    block_stride, row_stride, step = cache.stride()
    assert step == 1, "the elements of a row must be adjacent"
    span = (blocks - 1) * block_stride + (block_tokens - 1) * row_stride + width
    flat = cache.as_strided((max(span, 0),), (1,))
    size = cache.element_size()
    elements = (flat.view(torch.uint16) if size == 2 else flat).numpy()
    return FlatRows(
        kind=KINDS[cache.dtype],
        f32=elements if size == 4 else _NONE[4],
        u16=elements if size == 2 else _NONE[2],
        u8=elements if size == 1 else _NONE[1],
        block_stride=block_stride,
        row_stride=row_stride,
    )
