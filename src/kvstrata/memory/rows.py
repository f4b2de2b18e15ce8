"""Where the rows of one layer's main KV lie: block `i` begins `i` strides after the first, its rows follow.

A row is named by one int64, `block * block_tokens + offset`: vLLM's slot number in a host pool or a paged
cache, the slot in a hot buffer. Sources: seed section 4, device constraints 4, 5 and 8.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch

from kvstrata.memory.pages import PageView

_INT64_END = 1 << 63


@dataclass(frozen=True, kw_only=True)
class RowView:
    """Addresses of `num_blocks * block_tokens` rows of `row_bytes` each; any thread may ask.

    Rows of one block are adjacent; blocks may have a gap behind their rows (padding, or other components of
    the block). The view holds an address, not memory: its maker keeps that memory alive while it is used.
    """

    address: int
    row_bytes: int
    block_tokens: int
    block_stride_bytes: int
    num_blocks: int

    def __post_init__(self) -> None:
        if min(self.address, self.row_bytes, self.block_tokens, self.num_blocks) <= 0:
            raise ValueError(f"a row view needs a positive address, row size and number of rows: {self}")
        if self.block_stride_bytes < self.block_tokens * self.row_bytes:
            raise ValueError(
                f"rows overlap: {self.block_tokens} rows of {self.row_bytes} bytes a block, but blocks are "
                f"{self.block_stride_bytes} bytes apart"
            )
        if self.address + self.num_blocks * self.block_stride_bytes >= _INT64_END:
            raise ValueError(f"the rows end beyond 2^63, where no address is: {self}")

    @classmethod
    def of_pages(cls, pages: PageView, *, block_tokens: int, row_bytes: int) -> RowView:
        """The rows at the start of every page; a page may be longer than its rows (padding)."""
        if block_tokens * row_bytes > pages.page_bytes:
            raise ValueError(
                f"{block_tokens} rows of {row_bytes} bytes take {block_tokens * row_bytes} bytes, "
                f"but a page has {pages.page_bytes}"
            )
        return cls(
            address=pages.address,
            row_bytes=row_bytes,
            block_tokens=block_tokens,
            block_stride_bytes=pages.block_stride_bytes,
            num_blocks=pages.num_blocks,
        )

    @classmethod
    def of_tensor(cls, tensor: torch.Tensor) -> RowView:
        """Rows of a paged cache `[B, N, row]` or of a hot buffer `[capacity, row]`, which may have gaps.

        The elements of a row must be adjacent, and so must the rows of a block; blocks (of a hot buffer:
        rows) may lie apart, in ascending order. Raises ValueError for any other tensor, and an empty one.
        """
        if tensor.dim() not in (2, 3) or tensor.numel() == 0:
            raise ValueError(f"rows need a tensor [B, N, row] or [capacity, row], got {tuple(tensor.shape)}")
        if not tensor[0].is_contiguous():
            raise ValueError(
                f"the rows of a block must be adjacent, in shape {tuple(tensor.shape)} with strides "
                f"{tensor.stride()} they are not"
            )
        row_bytes = tensor.shape[-1] * tensor.element_size()
        block_tokens = tensor.shape[1] if tensor.dim() == 3 else 1
        num_blocks = tensor.shape[0]
        # The stride of a dimension of length one is arbitrary.
        stride = tensor.stride(0) * tensor.element_size() if num_blocks > 1 else block_tokens * row_bytes
        return cls(
            address=tensor.data_ptr(),
            row_bytes=row_bytes,
            block_tokens=block_tokens,
            block_stride_bytes=stride,
            num_blocks=num_blocks,
        )

    @cached_property
    def num_rows(self) -> int:
        return self.num_blocks * self.block_tokens

    @cached_property
    def is_compact(self) -> bool:
        """True when row `i` lies `i * row_bytes` after the first."""
        return self.num_blocks == 1 or self.block_stride_bytes == self.block_tokens * self.row_bytes

    def address_of(self, rows: npt.NDArray[np.integer]) -> npt.NDArray[np.int64]:
        """First byte of each row, in the shape of `rows`.

        Raises IndexError for a row outside the view, -1 included: it never wraps to another row.
        """
        ids = np.asarray(rows)
        if ids.dtype.kind not in "iu":
            raise TypeError(f"rows must be integers, got {ids.dtype}")
        if ids.size:
            lowest, highest = int(ids.min()), int(ids.max())
            if lowest < 0 or highest >= self.num_rows:
                wrong = lowest if lowest < 0 else highest
                raise IndexError(f"row {wrong} is outside 0..{self.num_rows - 1}")
        checked: npt.NDArray[np.int64] = ids.astype(np.int64)
        block: npt.NDArray[np.int64] = checked // np.int64(self.block_tokens)
        offset: npt.NDArray[np.int64] = checked - block * np.int64(self.block_tokens)
        return block * np.int64(self.block_stride_bytes) + offset * np.int64(self.row_bytes) + self.address
