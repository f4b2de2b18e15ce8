"""Copies as flat arrays: (source, destination, size), ready for a compiled loop or a device kernel.

A plan is built on the host from page views and block ids and holds no tensors: whoever submits it keeps the
memory behind the addresses alive until the copy's token is done.
Source: seed, Layerwise Prefill Offload, "Execution pipeline" (layer-sized ranges known ahead).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from kvstrata.memory.pages import PageView, ascending_block_ids

Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, eq=False)
class CopyPlan:
    """Byte ranges to copy, each from `src[i]` to `dst[i]`; ranges are independent of each other.

    All three arrays are 1-D, C-contiguous int64 of one length, `[ranges]`. Addresses and sizes
    are positive: a plan that carries a null address is refused here, before any byte moves.
    """

    dst: Int64Array
    src: Int64Array
    size: Int64Array

    def __post_init__(self) -> None:
        for name in ("dst", "src", "size"):
            array = getattr(self, name)
            if array.dtype != np.int64 or array.ndim != 1 or not array.flags.c_contiguous:
                raise TypeError(
                    f"copy plan: {name} must be a contiguous 1-D int64 array, got {array.dtype} {array.shape}"
                )
        if not len(self.dst) == len(self.src) == len(self.size):
            raise ValueError(
                f"copy plan: {len(self.dst)} destinations, {len(self.src)} sources, {len(self.size)} sizes"
            )
        if len(self.size) and min(self.dst.min(), self.src.min(), self.size.min()) <= 0:
            raise ValueError("copy plan: every address and every size must be positive")

    @classmethod
    def empty(cls) -> CopyPlan:
        nothing = np.empty(0, dtype=np.int64)
        return cls(dst=nothing, src=nothing, size=nothing)

    @cached_property
    def total_bytes(self) -> int:
        return int(self.size.sum())

    def __len__(self) -> int:
        """Number of ranges, not of blocks: neighbours may have been merged."""
        return len(self.size)


def plan_block_copies(dst: PageView, src: PageView, block_ids: npt.NDArray[np.integer]) -> CopyPlan:
    """Copy the pages `block_ids` of `src` to the same ids of `dst`.

    Ids may come in any order and more than once; each page is copied once, in ascending order, so that
    neighbours can be merged. They are merged only where both sides have no gap between pages.
    Raises ValueError when the page sizes differ and IndexError for an id that either side lacks.
    """
    ids = ascending_block_ids(block_ids, min(dst.num_blocks, src.num_blocks))
    return plan_page_copies(dst, ids, src, ids)


def concat(plans: Iterable[CopyPlan]) -> CopyPlan:
    """One plan for several, order kept. Ranges of different plans are not merged: memory that only happens to
    be adjacent may belong to two registrations."""
    parts = [plan for plan in plans if len(plan)]
    if not parts:
        return CopyPlan.empty()
    if len(parts) == 1:
        return parts[0]
    return CopyPlan(
        dst=np.concatenate([plan.dst for plan in parts]),
        src=np.concatenate([plan.src for plan in parts]),
        size=np.concatenate([plan.size for plan in parts]),
    )


def merge_adjacent(plan: CopyPlan) -> CopyPlan:
    """Join each range with the one before it where both source and destination continue without a gap.

    Order is kept, so unsorted neighbours stay apart. Meant for one allocation on each side (see `concat`).
    """
    if len(plan) < 2:
        return plan
    ends_dst = plan.dst[:-1] + plan.size[:-1]
    ends_src = plan.src[:-1] + plan.size[:-1]
    breaks = (plan.dst[1:] != ends_dst) | (plan.src[1:] != ends_src)
    starts = np.concatenate(([0], np.flatnonzero(breaks) + 1))
    return CopyPlan(dst=plan.dst[starts], src=plan.src[starts], size=np.add.reduceat(plan.size, starts))


def plan_page_copies(
    dst: PageView,
    dst_ids: npt.NDArray[np.integer],
    src: PageView,
    src_ids: npt.NDArray[np.integer],
) -> CopyPlan:
    """Copy page `src_ids[i]` of `src` to page `dst_ids[i]` of `dst`; neighbours on both sides are merged.

    Raises ValueError when page sizes or counts differ and IndexError for an id that its side lacks.
    """
    if dst.page_bytes != src.page_bytes:
        raise ValueError(f"page sizes differ: {src.page_bytes} bytes at the source, {dst.page_bytes} here")
    if len(dst_ids) != len(src_ids):
        raise ValueError(f"{len(src_ids)} pages to copy to {len(dst_ids)} places")
    size = np.full(len(src_ids), src.page_bytes, dtype=np.int64)
    return merge_adjacent(CopyPlan(dst=dst.page_address(dst_ids), src=src.page_address(src_ids), size=size))
