"""The inner loops, compiled: one token's result is the same bits whatever else is in the batch.

Every sum here runs in an order fixed by the token's own keys (blocks of KEY_BLOCK keys from the first,
then the widths of the row), never by how many tokens or requests share the call; a BLAS product
promises no such thing. Loops run over a worker's share of tiles and hold no GIL.

Numba's disk cache notices changes of the file that holds a function, not of those it calls: functions
that call one another stay in this file.
"""

# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

import numpy as np
from numba import njit
from numba.extending import register_jitable

KEY_BLOCK = 64
# How a cache row is stored: which of the three flat arrays below is read, and how. A packed main row is
# SFA_C8 + the kind of its rope part; there the three arrays are views of the same bytes.
FLOAT32, BFLOAT16, FLOAT16, LI_C8, SFA_C8 = 0, 1, 2, 3, 4

_jit = njit(nogil=True, cache=True, error_model="numpy", fastmath={"contract"})
# Sums over a row may be split into lanes; NaN and infinity keep their meaning.
_jit_lanes = njit(nogil=True, cache=True, error_model="numpy", fastmath={"contract", "reassoc"})


@_jit
def _widen(kind, f32, u16, u8, at, width, bits, row):
    """row[:width] = the stored row that starts at element `at`; bits is row's memory as uint32."""
    if kind == FLOAT32:
        words = f32[at : at + width]
        for d in range(width):
            row[d] = words[d]
    elif kind == BFLOAT16:
        halves = u16[at : at + width]
        for d in range(width):
            bits[d] = np.uint32(halves[d]) << np.uint32(16)
    elif kind == FLOAT16:
        halves = u16[at : at + width]
        for d in range(width):
            half = np.uint32(halves[d])
            magnitude = (half & np.uint32(0x7FFF)) << np.uint32(13)
            # Infinity and NaN carry the largest exponent in both formats; the multiplication below
            # moves every other exponent from bias 15 to bias 127, subnormals included.
            special = np.uint32(0x70000000) if magnitude >= np.uint32(0x0F800000) else np.uint32(0)
            bits[d] = magnitude | special | ((half & np.uint32(0x8000)) << np.uint32(16))
        for d in range(width):
            row[d] *= np.float32(2.0**112)
    else:
        packed = u8[at : at + width + 4]
        for i in range(4):
            bits[0] = (bits[0] >> np.uint32(8)) | (np.uint32(packed[width + i]) << np.uint32(24))
        scale = row[0]
        for d in range(width):
            row[d] = np.float32(np.int8(packed[d])) * scale


@register_jitable
def packed_layout(rank):
    """(values that share a scale, byte of the first scale, byte of the rope part) of an SFA-C8 row."""
    group = 128 if rank % 128 == 0 else rank
    scales_at = (rank + 3) // 4 * 4
    return group, scales_at, scales_at + 4 * (rank // group)


@_jit
def _widen_packed(kind, f32, u16, u8, at, width, rank, bits, row):
    """row[:width] = the SFA-C8 row that starts at byte `at`."""
    group, scales_at, rope_at = packed_layout(rank)
    first_scale = (at + scales_at) // 4
    values = u8[at : at + rank]
    for low in range(0, rank, group):
        scale = f32[first_scale + low // group]
        steps, part = values[low : low + group], row[low : low + group]
        for d in range(group):
            part[d] = np.float32(np.int8(steps[d])) * scale
    rope_kind = kind - SFA_C8
    rope = (at + rope_at) // (4 if rope_kind == FLOAT32 else 2)
    _widen(rope_kind, f32, u16, u8, rope, width - rank, bits[rank:width], row[rank:width])


@_jit
def _row_at(block_table, request, position, block_tokens, block_stride, row_stride):
    """Element offset of a request's row; int64 throughout."""
    block = np.int64(block_table[request, position // block_tokens])
    return block * block_stride + (position % block_tokens) * row_stride


@_jit
def _widened_at(kind, f32, u16, u8, at, slot, width, rank, bits, widened):
    """Where in `widened` (memory: bits) the row stored at `at` begins, once widened into its slot."""
    to = slot * width
    bits, row = bits[to : to + width], widened[to : to + width]
    if kind >= SFA_C8:
        _widen_packed(kind, f32, u16, u8, at, width, rank, bits, row)
    else:
        _widen(kind, f32, u16, u8, at, width, bits, row)
    return to


@_jit_lanes
def _scores(q, keys, offsets, count, width, scale, scores):
    """scores[h, j] = scale * (q[h] . key j)."""
    heads = q.shape[0]
    for j in range(count):
        key = keys[offsets[j] : offsets[j] + width]
        h = 0
        while h + 4 <= heads:
            q0, q1, q2, q3 = q[h], q[h + 1], q[h + 2], q[h + 3]
            s0 = s1 = s2 = s3 = np.float32(0)
            for d in range(width):
                s0 += q0[d] * key[d]
                s1 += q1[d] * key[d]
                s2 += q2[d] * key[d]
                s3 += q3[d] * key[d]
            scores[h, j] = s0 * scale
            scores[h + 1, j] = s1 * scale
            scores[h + 2, j] = s2 * scale
            scores[h + 3, j] = s3 * scale
            h += 4
        while h < heads:
            q0 = q[h]
            s0 = np.float32(0)
            for d in range(width):
                s0 += q0[d] * key[d]
            scores[h, j] = s0 * scale
            h += 1


@_jit
def _add_values(scores, keys, offsets, count, rank, out):
    """out[h] += sum over j of scores[h, j] * value j, in the order of j."""
    j = 0
    while j + 4 <= count:
        # Four values stay in the first-level cache while every head takes its share of them.
        v0 = keys[offsets[j] : offsets[j] + rank]
        v1 = keys[offsets[j + 1] : offsets[j + 1] + rank]
        v2 = keys[offsets[j + 2] : offsets[j + 2] + rank]
        v3 = keys[offsets[j + 3] : offsets[j + 3] + rank]
        for h in range(out.shape[0]):
            p0, p1, p2, p3 = scores[h, j], scores[h, j + 1], scores[h, j + 2], scores[h, j + 3]
            row = out[h]
            for d in range(rank):
                row[d] = (((row[d] + p0 * v0[d]) + p1 * v1[d]) + p2 * v2[d]) + p3 * v3[d]
        j += 4
    while j < count:
        v0 = keys[offsets[j] : offsets[j] + rank]
        for h in range(out.shape[0]):
            p0 = scores[h, j]
            row = out[h]
            for d in range(rank):
                row[d] += p0 * v0[d]
        j += 1


@_jit
def _attend_block(q, keys, offsets, count, width, rank, scale, scores, top, total, out):
    """Fold `count` more keys of one token into its running softmax (top, total) and out [H, rank]."""
    _scores(q, keys, offsets, count, width, scale, scores)
    for h in range(q.shape[0]):
        highest = top[h]
        for j in range(count):
            highest = max(highest, scores[h, j])
        fade = np.exp(top[h] - highest)
        top[h] = highest
        added = np.float32(0)
        for j in range(count):
            p = np.exp(scores[h, j] - highest)
            scores[h, j] = p
            added += p
        total[h] = total[h] * fade + added
        if fade != np.float32(1):
            for d in range(rank):
                out[h, d] *= fade
    _add_values(scores, keys, offsets, count, rank, out)


@_jit
def attend_tiles(
    worker, workers, tile_request, tile_start, tile_count, token_position, first_token,
    block_table, block_tokens, block_stride, row_stride, kind, f32, u16, u8,
    q, scale, rank, dense, selected, out, lse,
):  # fmt: skip
    """Attention of this worker's tiles; q [t, H, width] and out [t, H, rank] begin at first_token.

    So does lse [t, H]; [0, 0] where it is not wanted.
    """
    heads, width = q.shape[1], q.shape[2]
    most = 0
    for tile in range(worker, tile_request.shape[0], workers):
        most = max(most, tile_count[tile])
    bits = np.empty(KEY_BLOCK * width if kind != FLOAT32 else 0, np.uint32)
    widened = bits.view(np.float32)
    keys = f32 if kind == FLOAT32 else widened
    offsets = np.empty(KEY_BLOCK, np.int64)
    scores = np.empty((heads, KEY_BLOCK), np.float32)
    top = np.empty((most, heads), np.float32)
    total = np.empty((most, heads), np.float32)

    for tile in range(worker, tile_request.shape[0], workers):
        request, start, tokens = tile_request[tile], tile_start[tile], tile_count[tile]
        top[:tokens] = -np.inf
        total[:tokens] = 0
        begin = start - first_token
        out[begin : begin + tokens] = 0
        if dense:
            last = token_position[start + tokens - 1]
            for low in range(0, last + 1, KEY_BLOCK):
                for j in range(min(KEY_BLOCK, last + 1 - low)):
                    at = _row_at(block_table, request, low + j, block_tokens, block_stride, row_stride)
                    if kind == FLOAT32:
                        offsets[j] = at  # in place
                    else:
                        offsets[j] = _widened_at(kind, f32, u16, u8, at, j, width, rank, bits, widened)
                for i in range(tokens):
                    count = min(KEY_BLOCK, token_position[start + i] + 1 - low)
                    if count > 0:
                        _attend_block(
                            q[begin + i], keys, offsets, count, width, rank, scale, scores,
                            top[i], total[i], out[begin + i],
                        )  # fmt: skip
        else:
            columns = selected.shape[1]
            for i in range(tokens):
                count = 0
                for column in range(columns):
                    position = np.int64(selected[start + i, column])
                    if position >= 0:
                        at = _row_at(block_table, request, position, block_tokens, block_stride, row_stride)
                        if kind == FLOAT32:
                            offsets[count] = at
                        else:
                            offsets[count] = _widened_at(
                                kind, f32, u16, u8, at, count, width, rank, bits, widened
                            )
                        count += 1
                    if count == KEY_BLOCK or (count > 0 and column == columns - 1):
                        _attend_block(
                            q[begin + i], keys, offsets, count, width, rank, scale, scores,
                            top[i], total[i], out[begin + i],
                        )  # fmt: skip
                        count = 0
        for i in range(tokens):
            for h in range(heads):
                if total[i, h] > 0:
                    share = np.float32(1) / total[i, h]
                    for d in range(rank):
                        out[begin + i, h, d] *= share
                if lse.shape[0] > 0:
                    lse[begin + i, h] = top[i, h] + np.log(total[i, h])


@_jit
def _score_block(q, weights, keys, dots, scores):
    """scores[j] = sum over h of weights[h] * relu(q[h] . keys[:, j]); keys [D, KEY_BLOCK]."""
    heads, width = q.shape
    for j in range(KEY_BLOCK):
        scores[j] = 0
    for h in range(heads):
        for j in range(KEY_BLOCK):
            dots[j] = 0
        d = 0
        while d + 8 <= width:
            # Eight steps for one load and store of the running sums.
            q0, q1, q2, q3, q4, q5, q6, q7 = (
                q[h, d], q[h, d + 1], q[h, d + 2], q[h, d + 3],
                q[h, d + 4], q[h, d + 5], q[h, d + 6], q[h, d + 7],
            )  # fmt: skip
            k0, k1, k2, k3 = keys[d], keys[d + 1], keys[d + 2], keys[d + 3]
            k4, k5, k6, k7 = keys[d + 4], keys[d + 5], keys[d + 6], keys[d + 7]
            for j in range(KEY_BLOCK):
                half = (((dots[j] + q0 * k0[j]) + q1 * k1[j]) + q2 * k2[j]) + q3 * k3[j]
                dots[j] = (((half + q4 * k4[j]) + q5 * k5[j]) + q6 * k6[j]) + q7 * k7[j]
            d += 8
        while d < width:
            q0, k0 = q[h, d], keys[d]
            for j in range(KEY_BLOCK):
                dots[j] += q0 * k0[j]
            d += 1
        weight = weights[h]
        for j in range(KEY_BLOCK):
            scores[j] += weight * max(dots[j], np.float32(0))


@_jit
def _sortable(bits):
    """Float bits as an unsigned integer of the same order."""
    if bits & np.uint32(0x80000000):
        return ~bits
    return bits | np.uint32(0x80000000)


@_jit
def _cut(bits, n, wanted, counts):
    """The wanted-th largest of n sortable scores, and how many equal to it are among the wanted ones."""
    prefix = np.uint32(0)
    mask = np.uint32(0)
    for shift, size in ((21, 2048), (10, 2048), (0, 1024)):
        counts[:size] = 0
        digit_mask = np.uint32(size - 1)
        for j in range(n):
            if (bits[j] & mask) == prefix:
                counts[(bits[j] >> np.uint32(shift)) & digit_mask] += 1
        digit = size - 1
        while counts[digit] < wanted:
            wanted -= counts[digit]
            digit -= 1
        prefix |= np.uint32(digit) << np.uint32(shift)
        mask |= digit_mask << np.uint32(shift)
    return prefix, wanted


@_jit
def _select(bits, n, topk, counts, out, near):
    """out[:topk] = positions of the topk largest of n scores, ascending; of equals, the lowest positions.

    near[:] = positions of those that come next, likewise, then -1. bits [n] are the scores' float bits and
    are overwritten. Radix descents find the smallest of both.
    """
    for j in range(n):
        bits[j] = _sortable(bits[j])
    cut, at_cut = _cut(bits, n, topk, counts)
    near_cut, at_near_cut = cut, at_cut
    if near.shape[0] > 0:
        near_cut, at_near_cut = _cut(bits, n, min(topk + near.shape[0], n), counts)
    if near_cut == cut:
        at_near_cut -= at_cut
    found = 0
    beside = 0
    for j in range(n):
        if bits[j] > cut:
            out[found] = j
            found += 1
        elif bits[j] == cut and at_cut > 0:
            out[found] = j
            found += 1
            at_cut -= 1
        elif bits[j] > near_cut:
            near[beside] = j
            beside += 1
        elif bits[j] == near_cut and at_near_cut > 0:
            near[beside] = j
            beside += 1
            at_near_cut -= 1
    near[beside:] = -1
    return found


@_jit
def index_tiles(
    worker, workers, tile_request, tile_start, tile_count, token_position, first_token,
    block_table, block_tokens, block_stride, row_stride, kind, f32, u16, u8,
    q, weights, topk, out, near,
):  # fmt: skip
    """Selection for this worker's tiles; q [t, Hi, D] begins at first_token, out [>=T, topk] at token 0.

    near [>=T, N] likewise, N = 0: not wanted.
    """
    width = q.shape[2]
    most, longest = 0, 0
    for tile in range(worker, tile_request.shape[0], workers):
        most = max(most, tile_count[tile])
        longest = max(longest, token_position[tile_start[tile] + tile_count[tile] - 1] + 1)
    longest = (longest + KEY_BLOCK - 1) // KEY_BLOCK * KEY_BLOCK
    scores = np.empty((most, longest), np.float32)
    keys = np.zeros((width, KEY_BLOCK), np.float32)
    dots = np.empty(KEY_BLOCK, np.float32)
    bits = np.empty(width, np.uint32)
    row = bits.view(np.float32)
    counts = np.empty(2048, np.int32)

    for tile in range(worker, tile_request.shape[0], workers):
        request, start, tokens = tile_request[tile], tile_start[tile], tile_count[tile]
        last = token_position[start + tokens - 1]
        if last >= topk:
            for low in range(0, last + 1, KEY_BLOCK):
                for j in range(min(KEY_BLOCK, last + 1 - low)):
                    at = _row_at(block_table, request, low + j, block_tokens, block_stride, row_stride)
                    _widen(kind, f32, u16, u8, at, width, bits, row)
                    for d in range(width):
                        keys[d, j] = row[d]
                for i in range(tokens):
                    position = token_position[start + i]
                    if position >= topk and position >= low:
                        token = start + i - first_token
                        _score_block(q[token], weights[token], keys, dots, scores[i, low : low + KEY_BLOCK])
        for i in range(tokens):
            position = token_position[start + i]
            if position < topk:
                found = position + 1
                for j in range(found):
                    out[start + i, j] = j
                near[start + i] = -1
            else:
                found = _select(
                    scores[i].view(np.uint32), position + 1, topk, counts, out[start + i], near[start + i]
                )
            for j in range(found, out.shape[1]):
                out[start + i, j] = -1
