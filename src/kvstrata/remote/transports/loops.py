"""Compiled loops over the ranges of a read: checks, copies and socket calls, all without the GIL.

An engine whose own thread runs Python gives the GIL up every few milliseconds only, and a loop in Python
would pay that once a range. After a copy of megabytes the caches are cold, too: a few dozen calls of numpy
then cost as much as the copy of a short prompt's layer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np
import numpy.typing as npt
from numba import carray, types

Int64Array = npt.NDArray[np.int64]

_CLOCK_MONOTONIC = 1
_MSG_WAITALL, _MSG_NOSIGNAL, _MSG_MORE = 0x100, 0x4000, 0x8000

# Resolved by name when the code is linked, so that the code can be cached on disk.
_recv = types.ExternalFunction("recv", types.intp(types.int32, types.intp, types.intp, types.int32))
_send = types.ExternalFunction("send", types.intp(types.int32, types.intp, types.intp, types.int32))
_memcpy = types.ExternalFunction("memcpy", types.intp(types.intp, types.intp, types.intp))
_clock_gettime = types.ExternalFunction("clock_gettime", types.int32(types.int32, types.intp))
_errno_location = types.ExternalFunction("__errno_location", types.CPointer(types.int32)())

# Where a loop stands: index of the range, bytes of it that are done; behind them room for a `timespec`.
_RANGE, _DONE, _TIME = 0, 1, 2


def new_progress() -> Int64Array:
    """The state that `copy_piece`, `receive` and `send` continue from."""
    return np.zeros(4, dtype=np.int64)


def _compiled(function: Callable[..., Any]) -> Any:
    try:
        return numba.njit(nogil=True, cache=True)(function)
    except RuntimeError:  # no writable place for the cache: compile in every process instead
        return numba.njit(nogil=True)(function)


@_compiled
def count_outside(region: Int64Array, offset: Int64Array, size: Int64Array, region_bytes: Int64Array) -> int:
    """How many ranges are not inside their region; any 64-bit numbers may come in."""
    wrong = 0
    for i in range(len(region)):
        if (
            not 0 <= region[i] < len(region_bytes)
            or size[i] <= 0
            or offset[i] < 0
            or offset[i] > region_bytes[region[i]]
            or size[i] > region_bytes[region[i]] - offset[i]
        ):
            wrong += 1
    return wrong


@_compiled
def count_misplaced(dst: Int64Array, size: Int64Array, starts: Int64Array, ends: Int64Array) -> int:
    """How many ranges no destination holds. Destination i begins at `starts[i]`, ascending.

    `ends[i]` is the furthest end of those up to i. Sizes are positive. Room is compared, not ends: a wild
    address and its size could overflow.
    """
    wrong = 0
    for i in range(len(dst)):
        at = np.searchsorted(starts, dst[i], side="right") - 1
        if at < 0 or dst[i] > ends[at] or size[i] > ends[at] - dst[i]:
            wrong += 1
    return wrong


@_compiled
def copy_piece(
    region: Int64Array,
    offset: Int64Array,
    dst: Int64Array,
    size: Int64Array,
    addresses: Int64Array,
    progress: Int64Array,
    max_bytes: int,
) -> bool:
    """Copy up to `max_bytes` more, ranges in order, from the regions at `addresses`; whether that was all.

    The ranges must have been checked: a wild address ends the process.
    """
    left = max_bytes
    while progress[_RANGE] < len(size) and left > 0:
        i, done = progress[_RANGE], progress[_DONE]
        count = min(size[i] - done, left)
        _memcpy(dst[i] + done, addresses[region[i]] + offset[i] + done, count)
        left -= count
        progress[_DONE] += count
        if progress[_DONE] == size[i]:
            progress[_RANGE] += 1
            progress[_DONE] = 0
    return bool(progress[_RANGE] == len(size))


@_compiled
def _is_late(progress: Int64Array, give_up_ns: int) -> bool:
    time = progress[_TIME:]
    _clock_gettime(_CLOCK_MONOTONIC, time.ctypes.data)
    return bool(time[0] * 1_000_000_000 + time[1] > give_up_ns)


@_compiled
def receive(fd: int, address: Int64Array, size: Int64Array, progress: Int64Array, give_up_ns: int) -> int:
    """Fill the ranges in order: 1 when all are full or time is up, 0 at the stream's end, else -errno."""
    while progress[_RANGE] < len(size):
        i = progress[_RANGE]
        result = _recv(fd, address[i] + progress[_DONE], size[i] - progress[_DONE], _MSG_WAITALL)
        if result == 0:
            return 0
        if result < 0:
            return -int(carray(_errno_location(), 1)[0])
        progress[_DONE] += result
        if progress[_DONE] == size[i]:
            progress[_RANGE] += 1
            progress[_DONE] = 0
        if _is_late(progress, give_up_ns):
            break
    return 1


@_compiled
def send(fd: int, address: Int64Array, size: Int64Array, progress: Int64Array, give_up_ns: int) -> int:
    """Send the ranges in order: 1 when all are sent or time is up, else -errno."""
    while progress[_RANGE] < len(size):
        i = progress[_RANGE]
        flags = _MSG_NOSIGNAL if i + 1 == len(size) else _MSG_NOSIGNAL | _MSG_MORE
        result = _send(fd, address[i] + progress[_DONE], size[i] - progress[_DONE], flags)
        if result < 0:
            return -int(carray(_errno_location(), 1)[0])
        progress[_DONE] += result
        if progress[_DONE] == size[i]:
            progress[_RANGE] += 1
            progress[_DONE] = 0
        if _is_late(progress, give_up_ns):
            break
    return 1


def prepare() -> None:
    """Compile (or load) the loops now, so that the first read does not wait for it."""
    nothing = np.empty(0, dtype=np.int64)
    count_outside(nothing, nothing, nothing, nothing)
    count_misplaced(nothing, nothing, nothing, nothing)
    copy_piece(nothing, nothing, nothing, nothing, nothing, new_progress(), 1)
    receive(-1, nothing, nothing, new_progress(), 0)
    send(-1, nothing, nothing, new_progress(), 0)
