"""The compiled row copy: eight rows side by side, the next eight on their way into the cache.

A single row of some hundred bytes is over before the machine's own prefetcher has understood it; eight
streams at once, and asking for the next eight rows, keep enough reads of memory in flight.

Numba's disk cache notices changes of the file that holds a function, not of those it calls: functions
that call one another stay in this file.
"""

# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

# Bytes moved at a time: two vectors of 32, one line of the cache.
LINE_BYTES = 64
VECTOR_BYTES = 32
LANES = 8

_jit = njit(nogil=True, cache=True, error_model="numpy")
_libc_memcpy = types.ExternalFunction("memcpy", types.intp(types.intp, types.intp, types.intp))


def _line_mover(streaming):
    """The code of `_copy_lines` and `_stream_lines`."""
    int32, int64 = ir.IntType(32), ir.IntType(64)
    vector = ir.VectorType(int64, VECTOR_BYTES // 8)
    byte_pointer = ir.IntType(8).as_pointer()
    alignment = VECTOR_BYTES if streaming else 1

    def generate(context, builder, signature, arguments):
        targets, sources, ahead = (cgutils.unpack_tuple(builder, lanes) for lanes in arguments[:3])
        shape = ir.FunctionType(ir.VoidType(), [byte_pointer, int32, int32, int32])
        prefetch = cgutils.get_or_insert_function(builder.module, shape, "llvm.prefetch.p0")
        for base in ahead:
            line = builder.inttoptr(builder.add(base, arguments[3]), byte_pointer)
            # A read, to be kept in every level, of data. A hint: it faults at no address.
            builder.call(prefetch, [line, int32(0), int32(3), int32(1)])
        for target, source in zip(targets, sources, strict=True):
            places = [
                builder.add(arguments[3], int64(offset)) for offset in range(0, LINE_BYTES, VECTOR_BYTES)
            ]
            values = [
                builder.load(builder.inttoptr(builder.add(source, place), vector.as_pointer()), align=1)
                for place in places
            ]
            for value, place in zip(values, places, strict=True):
                pointer = builder.inttoptr(builder.add(target, place), vector.as_pointer())
                store = builder.store(value, pointer, align=alignment)
                if streaming:
                    store.set_metadata("nontemporal", builder.module.add_metadata([int32(1)]))
        return context.get_dummy_value()

    return generate


@intrinsic
def _copy_lines(typing_context, targets, sources, ahead, at):
    """Copy the line `at` bytes into each source to the same place in its target, through the cache.

    All three are tuples of addresses; the same line of `ahead` is asked for. Lanes are copied in order.
    """
    return types.void(targets, sources, ahead, types.int64), _line_mover(streaming=False)


@intrinsic
def _stream_lines(typing_context, targets, sources, ahead, at):
    """As `_copy_lines`, past the cache; the targets' places must divide by VECTOR_BYTES."""
    return types.void(targets, sources, ahead, types.int64), _line_mover(streaming=True)


@intrinsic
def _fence(typing_context):
    """Streaming stores become visible before anything this thread stores later."""

    def generate(context, builder, signature, arguments):
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), generate


@_jit
def _outside(rows, num_rows):
    """Where the first row outside 0..num_rows - 1 stands, or -1."""
    highest = np.uint64(0)
    for i in range(len(rows)):
        highest = max(highest, np.uint64(rows[i]))  # a negative row is a huge one
    if len(rows) == 0 or highest < np.uint64(num_rows):
        return -1
    for i in range(len(rows)):
        if rows[i] < 0 or rows[i] >= num_rows:
            return i
    return -1


@_jit
def first_outside(dst_rows, dst_num_rows, src_rows, src_num_rows):
    """Where the first bad row stands in dst_rows followed by src_rows, or -1."""
    found = _outside(dst_rows, dst_num_rows)
    if found < 0:
        found = _outside(src_rows, src_num_rows)
        if found >= 0:
            found += len(dst_rows)
    return found


@_jit
def _address(row, address, row_bytes, block_tokens, block_stride_bytes):
    """First byte of a row that was checked; block_tokens 0 stands for compact rows."""
    if block_tokens == 0:
        return address + row * row_bytes
    block = np.int64(np.uint64(row) // np.uint64(block_tokens))
    return address + block * block_stride_bytes + (row - block * block_tokens) * row_bytes


@_jit
def _lanes(addresses, i):
    return (
        addresses[i], addresses[i + 1], addresses[i + 2], addresses[i + 3],
        addresses[i + 4], addresses[i + 5], addresses[i + 6], addresses[i + 7],
    )  # fmt: skip


@_jit
def _copy_group(targets, sources, ahead, row_bytes, streaming):
    """Copy one row of at least LINE_BYTES in every lane."""
    line = 0
    while line < row_bytes:
        # The last line ends with the row: it may repeat bytes of the one before, but never leaves the row.
        at = min(line, row_bytes - LINE_BYTES)
        if streaming:
            _stream_lines(targets, sources, ahead, at)
        else:
            _copy_lines(targets, sources, ahead, at)
        line += LINE_BYTES


@_jit
def gather_share(
    worker, workers, dst_rows, src_rows, row_bytes, streaming,
    dst_address, dst_block_tokens, dst_block_stride_bytes,
    src_address, src_block_tokens, src_block_stride_bytes,
):  # fmt: skip
    """Copy this worker's rows, in the order given; ids were checked before.

    Workers share by destination: whoever writes a row writes it each time it is named, so the last one
    stays, as with one worker. streaming asks for destinations that divide by the size of a vector.
    """
    target = np.empty(len(dst_rows), np.int64)
    source = np.empty(len(dst_rows) + LANES, np.int64)
    count = 0
    for i in range(len(dst_rows)):
        row = dst_rows[i]
        if workers > 1 and row % workers != worker:
            continue
        target[count] = _address(row, dst_address, row_bytes, dst_block_tokens, dst_block_stride_bytes)
        source[count] = _address(
            src_rows[i], src_address, row_bytes, src_block_tokens, src_block_stride_bytes
        )
        count += 1
    if row_bytes < LINE_BYTES:
        for i in range(count):
            _libc_memcpy(target[i], source[i], row_bytes)
        return
    if count > 0:
        source[count : count + LANES] = source[count - 1]  # what the last rows ask for ahead
    done = 0
    while done + LANES <= count:
        ahead = _lanes(source, done + LANES)
        _copy_group(_lanes(target, done), _lanes(source, done), ahead, row_bytes, streaming)
        done += LANES
    for i in range(done, count):
        _copy_group((target[i],), (source[i],), (source[i + 1],), row_bytes, streaming)
    if streaming:
        _fence()


@_jit
def gather_checked(
    dst_num_rows, src_num_rows, dst_rows, src_rows, row_bytes, streaming,
    dst_address, dst_block_tokens, dst_block_stride_bytes,
    src_address, src_block_tokens, src_block_stride_bytes,
):  # fmt: skip
    """Check the ids and copy all rows in this thread; return what `first_outside` does, -1 if all went."""
    wrong = first_outside(dst_rows, dst_num_rows, src_rows, src_num_rows)
    if wrong < 0:
        gather_share(
            0, 1, dst_rows, src_rows, row_bytes, streaming,
            dst_address, dst_block_tokens, dst_block_stride_bytes,
            src_address, src_block_tokens, src_block_stride_bytes,
        )  # fmt: skip
    return wrong
