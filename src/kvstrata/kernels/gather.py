"""Copies of single rows: the misses of a hot buffer out of the host pool, new rows into it.

Source: seed section 4, steps 2 and 5. CPU; `triton_gather` is the same for a device.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kvstrata.kernels.gather_loops import VECTOR_BYTES, first_outside, gather_checked, gather_share
from kvstrata.kernels.parallel import run_shares, worth_threads
from kvstrata.memory.rows import RowView

Rows = npt.NDArray[np.int64]

_INT64 = np.dtype(np.int64)
_STREAM_FROM_BYTES = 4 << 20
# A thread moves about as many bytes in the time of so many multiply-adds (see `run_shares`).
_MULTIPLY_ADDS_A_BYTE = 2


def gather_rows(dst: RowView, dst_rows: Rows, src: RowView, src_rows: Rows) -> None:
    """Copy row src_rows[i] of src over row dst_rows[i] of dst, for every i, in the calling thread.

    Both [n] int64. The GIL is released; the rows are there when the call returns. Of a destination named
    twice the last row stays. Raises IndexError for a row outside its view (-1 too), ValueError for views of
    other row sizes or lists of other lengths, TypeError for other arrays; nothing was copied then. The two
    views must not share rows. Nobody else may write these rows meanwhile; any thread may call.
    """
    if _is_any(dst, dst_rows, src, src_rows):
        _gather_here(dst, dst_rows, src, src_rows)


def gather_rows_shared(dst: RowView, dst_rows: Rows, src: RowView, src_rows: Rows) -> None:
    """As `gather_rows`, by several threads where there is enough to move."""
    if not _is_any(dst, dst_rows, src, src_rows):
        return
    work = len(dst_rows) * dst.row_bytes * _MULTIPLY_ADDS_A_BYTE
    if worth_threads(work):
        _check(first_outside(dst_rows, dst.num_rows, src_rows, src.num_rows), dst, dst_rows, src, src_rows)
        arguments = _arguments(dst, dst_rows, src, src_rows)
        run_shares(gather_share, arguments, shares=len(dst_rows), multiply_adds=work)
    else:  # a decode step of a few requests: one call instead of three
        _gather_here(dst, dst_rows, src, src_rows)


def prepare() -> None:
    """Compile (or load) the loops now, so that the first step does not wait for them."""
    row = np.zeros(2, dtype=np.uint8)
    view = RowView(address=row.ctypes.data, row_bytes=1, block_tokens=1, block_stride_bytes=1, num_blocks=2)
    gather_rows(view, np.array([0]), view, np.array([1]))
    first_outside(np.array([0]), 2, np.array([1]), 2)
    gather_share(0, 1, *_arguments(view, np.array([0]), view, np.array([1])))


def _is_any(dst: RowView, dst_rows: Rows, src: RowView, src_rows: Rows) -> bool:
    """Check everything but the ids; whether there is anything to do."""
    if dst.row_bytes != src.row_bytes:
        raise ValueError(f"rows of {src.row_bytes} bytes cannot go into rows of {dst.row_bytes} bytes")
    for side, rows in (("destination", dst_rows), ("source", src_rows)):
        if rows.dtype != _INT64 or rows.ndim != 1:
            raise TypeError(f"{side} rows must be a 1-D int64 array, got {rows.dtype} {rows.shape}")
    if len(dst_rows) != len(src_rows):
        raise ValueError(f"{len(src_rows)} source rows for {len(dst_rows)} destinations")
    return len(dst_rows) > 0


def _check(wrong: int, dst: RowView, dst_rows: Rows, src: RowView, src_rows: Rows) -> None:
    """Raise IndexError for the id that `first_outside` found."""
    if wrong >= len(dst_rows):
        row = src_rows[wrong - len(dst_rows)]
        raise IndexError(f"source row {row} is outside 0..{src.num_rows - 1}")
    if wrong >= 0:
        raise IndexError(f"destination row {dst_rows[wrong]} is outside 0..{dst.num_rows - 1}")


def _gather_here(dst: RowView, dst_rows: Rows, src: RowView, src_rows: Rows) -> None:
    arguments = _arguments(dst, dst_rows, src, src_rows)
    _check(gather_checked(dst.num_rows, src.num_rows, *arguments), dst, dst_rows, src, src_rows)


def _arguments(dst: RowView, dst_rows: Rows, src: RowView, src_rows: Rows) -> tuple[Any, ...]:
    """What `gather_share` takes after the worker."""
    return (dst_rows, src_rows, dst.row_bytes, _streams(dst, len(dst_rows)), *_place(dst), *_place(src))


def _streams(dst: RowView, rows: int) -> bool:
    """Whether to write past the cache.

    Attention reads the rows next. Measured on an EPYC with 32 MiB of third-level cache, destination cold,
    time to copy and then read the copy: up to 2 MB streaming takes 0 to 8 % less, and a destination that
    is in the cache already is better written there; from 9 MB on it takes 13 to 20 % less, as nothing is
    fetched only to be overwritten.
    """
    parts = (dst.address, dst.row_bytes, dst.block_stride_bytes)
    return rows * dst.row_bytes >= _STREAM_FROM_BYTES and all(part % VECTOR_BYTES == 0 for part in parts)


def _place(view: RowView) -> tuple[int, int, int]:
    return view.address, 0 if view.is_compact else view.block_tokens, view.block_stride_bytes
