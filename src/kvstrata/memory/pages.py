"""Where the pages of one component of one layer lie: base address, stride between blocks, bytes of a page."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch


def checked_block_ids(block_ids: npt.NDArray[np.integer], num_blocks: int) -> npt.NDArray[np.int64]:
    """`block_ids` as 1-D int64, every one of them in [0, num_blocks).

    Raises IndexError for any other id: a bad id must never become block 0 or wrap to the end.
    """
    ids = np.asarray(block_ids)
    if ids.size == 0:
        return np.empty(0, dtype=np.int64)
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise TypeError(f"block ids must be a 1-D integer array, got {ids.dtype} {ids.shape}")
    _check_bounds(int(ids.min()), int(ids.max()), num_blocks)
    return np.ascontiguousarray(ids, dtype=np.int64)


def ascending_block_ids(block_ids: npt.NDArray[np.integer], num_blocks: int) -> npt.NDArray[np.int64]:
    """As `checked_block_ids`, sorted and each id once; cheap for ids that are ascending already."""
    ids = np.asarray(block_ids)
    # Compared, not subtracted: differences of unsigned ids would wrap.
    is_plain = ids.ndim == 1 and ids.dtype.kind in "iu" and ids.size > 0
    if not is_plain or not (ids[1:] > ids[:-1]).all():
        return np.unique(checked_block_ids(ids, num_blocks))
    _check_bounds(int(ids[0]), int(ids[-1]), num_blocks)
    return ids.astype(np.int64, copy=False)


def _check_bounds(lowest: int, highest: int, num_blocks: int) -> None:
    if lowest < 0 or highest >= num_blocks:
        wrong = lowest if lowest < 0 else highest
        raise IndexError(f"block id {wrong} is outside 0..{num_blocks - 1}")


@dataclass(frozen=True, kw_only=True)
class PageView:
    """Addresses of `num_blocks` pages of `page_bytes` each, `block_stride_bytes` apart.

    The view holds an address, not memory: its maker keeps that memory alive while the view is used. A page is
    opaque here (device constraint 5); pages may have gaps between them, as where one block holds every
    component (device constraint 4).
    """

    address: int
    block_stride_bytes: int
    page_bytes: int
    num_blocks: int

    def __post_init__(self) -> None:
        if self.address <= 0 or self.page_bytes <= 0 or self.num_blocks <= 0:
            raise ValueError(f"a page view needs a positive address, page size and block count: {self}")
        if self.block_stride_bytes < self.page_bytes:
            raise ValueError(
                f"pages overlap: {self.page_bytes} bytes each, but {self.block_stride_bytes} bytes apart"
            )

    @classmethod
    def of_tensor(cls, tensor: torch.Tensor) -> PageView:
        """Pages of a tensor `[num_blocks, ...]`; a block itself must be contiguous, blocks may lie apart."""
        if tensor.dim() < 2 or tensor.numel() == 0:
            raise ValueError(
                f"pages need a tensor [num_blocks, ...] that is not empty, got {tuple(tensor.shape)}"
            )
        if not tensor[0].is_contiguous():
            raise ValueError(
                f"a block of shape {tuple(tensor.shape[1:])} is not contiguous: strides {tensor.stride()[1:]}"
            )
        page_bytes = tensor[0].numel() * tensor.element_size()
        num_blocks = tensor.shape[0]
        # The stride of a dimension of length one is arbitrary.
        stride = tensor.stride(0) * tensor.element_size() if num_blocks > 1 else page_bytes
        return cls(
            address=tensor.data_ptr(),
            block_stride_bytes=stride,
            page_bytes=page_bytes,
            num_blocks=num_blocks,
        )

    @property
    def is_compact(self) -> bool:
        """True when adjacent blocks are adjacent bytes, so that copies of neighbours may be merged."""
        return self.block_stride_bytes == self.page_bytes

    @property
    def span_bytes(self) -> int:
        """From the first byte of the first page to the last byte of the last one."""
        return (self.num_blocks - 1) * self.block_stride_bytes + self.page_bytes

    def page_address(self, block_ids: npt.NDArray[np.integer]) -> npt.NDArray[np.int64]:
        """First byte of each page, `[len(block_ids)]`. Raises IndexError for an id outside the view."""
        return self.address_of(checked_block_ids(block_ids, self.num_blocks))

    def address_of(self, checked_ids: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """As `page_address`, for ids that `checked_block_ids` has passed for this view."""
        return np.int64(self.address) + checked_ids * np.int64(self.block_stride_bytes)
