"""The compiled copy loop: libc memcpy over flat arrays, with the GIL released for the whole plan.

Measured against `ctypes.memmove` in a Python loop: equal for ranges of a mebibyte, 2-3 times faster at 4 KiB,
and Python threads run on meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from numba import types

from kvstrata.move.plan import CopyPlan, Int64Array

# Resolved by name when the code is linked, so that (unlike a ctypes pointer) it can be cached on disk.
_libc_memcpy = types.ExternalFunction("memcpy", types.intp(types.intp, types.intp, types.intp))


def _copy_loop(dst: Int64Array, src: Int64Array, size: Int64Array) -> None:
    for i in range(len(size)):
        _libc_memcpy(dst[i], src[i], size[i])


def _compiled(loop: Callable[..., None]) -> Any:
    try:
        return numba.njit(nogil=True, cache=True)(loop)
    except RuntimeError:  # no writable place for the cache: compile in every process instead
        return numba.njit(nogil=True)(loop)


_copy_ranges = _compiled(_copy_loop)


def copy_ranges(plan: CopyPlan) -> None:
    """Copy every range of `plan` in order, in the calling thread, without holding the GIL.

    The ranges must be valid memory: nothing can be checked here, a wild address ends the process.
    """
    _copy_ranges(plan.dst, plan.src, plan.size)


def prepare() -> None:
    """Compile (or load) the loop now, so that the first layer does not wait for it."""
    nothing = np.empty(0, dtype=np.int64)
    _copy_ranges(nothing, nothing, nothing)
