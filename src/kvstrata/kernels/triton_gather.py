"""Row gather for a device, untested on a GPU: checked in Triton's interpreter on a CPU only.

As `gather`, but plans are device tensors, -1 padded, so that no count has to come back to the host: what
`triton_residency` writes goes in as it is. Rows are addressed by int64 bytes, so a side may be pinned host
memory that the device reads through the bus. Nothing imports this module unless a device asks for it.

What a GPU does differently: it needs host memory registered with the driver and the address under which the
device sees it (with unified addressing the same number); the interpreter takes any address of the process.
Source: seed section 4, step 5; device constraints 5 and 7.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvstrata.memory.rows import RowView

# A row is copied in words where everything divides by them, else in bytes; lanes make wide accesses of them.
_WORD_BYTES = 8
_MAX_LANES = 1024


@triton.jit
def _row_address(row, address, row_bytes, block_tokens, block_stride_bytes):
    block = row // block_tokens
    return address + block * block_stride_bytes + (row - block * block_tokens) * row_bytes


@triton.jit
def gather_kernel(
    dst_rows, dst_address, dst_num_rows, dst_block_tokens, dst_block_stride_bytes,
    src_rows, src_address, src_num_rows, src_block_tokens, src_block_stride_bytes,
    row_bytes, wrong,
    words: tl.constexpr, lanes: tl.constexpr,
):  # fmt: skip
    """One program a row. words: everything divides by 8; `wrong` counts rows outside their views."""
    entry = tl.program_id(0)
    dst_row = tl.load(dst_rows + entry)
    src_row = tl.load(src_rows + entry)
    named = (dst_row >= 0) & (src_row >= 0)
    inside = (dst_row < dst_num_rows) & (src_row < src_num_rows)
    if named & inside:
        target = _row_address(dst_row, dst_address, row_bytes, dst_block_tokens, dst_block_stride_bytes)
        source = _row_address(src_row, src_address, row_bytes, src_block_tokens, src_block_stride_bytes)
        if words:
            target_words = target.to(tl.pointer_type(tl.int64), bitcast=True)
            source_words = source.to(tl.pointer_type(tl.int64), bitcast=True)
            for first in range(0, row_bytes // 8, lanes):
                at = first + tl.arange(0, lanes)
                inside_row = at < row_bytes // 8
                tl.store(target_words + at, tl.load(source_words + at, mask=inside_row), mask=inside_row)
        else:
            target_bytes = target.to(tl.pointer_type(tl.int8), bitcast=True)
            source_bytes = source.to(tl.pointer_type(tl.int8), bitcast=True)
            for first in range(0, row_bytes, lanes):
                at = first + tl.arange(0, lanes)
                inside_row = at < row_bytes
                tl.store(target_bytes + at, tl.load(source_bytes + at, mask=inside_row), mask=inside_row)
    if named & (inside == 0):
        tl.atomic_add(wrong, 1)


def gather_rows(
    dst: RowView, dst_rows: torch.Tensor, src: RowView, src_rows: torch.Tensor, wrong: torch.Tensor
) -> None:
    """Enqueue the copy of row src_rows[i] of src over row dst_rows[i] of dst, for every i.

    Both [n] int64, contiguous, on the device. A pair with a negative row is skipped. A pair with a row
    outside its view moves nothing and adds one to wrong [1] int32: the host looks at it when it next waits
    for the device, and must then throw the step away. Destinations must differ: two copies to one row leave
    a mixture. The rows are there for whatever is enqueued later on the same stream.
    """
    if dst.row_bytes != src.row_bytes:
        raise ValueError(f"rows of {src.row_bytes} bytes cannot go into rows of {dst.row_bytes} bytes")
    for side, rows in (("destination", dst_rows), ("source", src_rows)):
        if rows.dtype != torch.int64 or rows.dim() != 1 or not rows.is_contiguous():
            raise TypeError(
                f"{side} rows must be a contiguous [n] int64 tensor, got {rows.dtype} {rows.shape}"
            )
    if len(dst_rows) != len(src_rows):
        raise ValueError(f"{len(src_rows)} source rows for {len(dst_rows)} destinations")
    if len(dst_rows) == 0:
        return
    places = (dst.address, dst.block_stride_bytes, src.address, src.block_stride_bytes, dst.row_bytes)
    words = all(place % _WORD_BYTES == 0 for place in places)
    lanes = triton.next_power_of_2(dst.row_bytes // _WORD_BYTES if words else dst.row_bytes)
    gather_kernel[(len(dst_rows),)](
        dst_rows, dst.address, dst.num_rows, dst.block_tokens, dst.block_stride_bytes,
        src_rows, src.address, src.num_rows, src.block_tokens, src.block_stride_bytes,
        dst.row_bytes, wrong,
        words=words, lanes=min(lanes, _MAX_LANES),
    )  # fmt: skip
