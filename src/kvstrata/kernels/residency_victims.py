"""Which slots go: those of the lowest (priority, slot), found by counting and without sorting them.

Loops here are plain, so that they are compiled to look at 32 priorities of a byte at a time. Numba's disk
cache: one who changes this file must touch `residency_loops` as well.
"""

# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code=assignment

from __future__ import annotations

import numpy as np
from numba import njit

_jit = njit(nogil=True, cache=True, error_model="numpy")
_GOES = np.uint8(255)  # negative as a signed byte
_CHUNK = 128  # a byte can count this far


@_jit
def _count_below(keys, limit):
    """How many keys are smaller."""
    below = np.int64(0)
    whole = keys.shape[0] // _CHUNK * _CHUNK
    for low in range(0, whole, _CHUNK):
        few = np.uint8(0)
        for i in range(_CHUNK):
            few = np.uint8(few + np.uint8(keys[low + i] < limit))
        below += np.int64(few)
    for i in range(whole, keys.shape[0]):
        below += np.int64(keys[i] < limit)
    return below


@_jit
def find_cut(keys, low, high, guess, wanted):
    """The least key of low..high that at least `wanted` keys do not exceed; found fast near the guess."""
    first, last = low, high
    at = min(max(guess, low), high)
    step = np.int64(1)
    while first < last:
        if _count_below(keys, keys.dtype.type(at + 1)) >= wanted:
            last = at
            at -= step
        else:
            first = at + 1
            at += step
        step *= 2
        if at < first or at >= last or step > 8:  # the key is not near: halve what is left
            at = (first + last) >> 1
    return first


@_jit
def _end_of_ties(keys, cut, spare):
    """The end of the shortest run of slots from 0 that has `spare` keys equal to cut."""
    begin = np.int64(0)
    while begin + _CHUNK <= keys.shape[0]:
        few = np.uint8(0)
        for i in range(_CHUNK):
            few = np.uint8(few + np.uint8(keys[begin + i] == cut))
        if few >= spare:
            break
        spare -= np.int64(few)
        begin += _CHUNK
    while spare > 0:
        spare -= np.int64(keys[begin] == cut)
        begin += 1
    return begin


@_jit
def choose(keys, cut, wanted, goes):
    """Mark the `wanted` slots of lowest (key, slot); cut is what `find_cut` found."""
    cut = keys.dtype.type(cut)
    ties = np.uint64(_end_of_ties(keys, cut, wanted - _count_below(keys, cut)))
    for slot in range(ties):
        goes[slot] = _GOES if keys[slot] <= cut else np.uint8(0)
    for slot in range(ties, np.uint64(keys.shape[0])):
        goes[slot] = _GOES if keys[slot] < cut else np.uint8(0)
