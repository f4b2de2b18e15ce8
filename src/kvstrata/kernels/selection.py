"""Selected positions as host rows, and the part of a selection that lies in one piece of memory.

A host row is block_id * block_tokens + offset: the same for all layers, and unique over all requests, which
is why hot rows are kept by it (seed section 4: logical positions are remapped to physical ones).
"""

# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from numba import njit

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]

_jit = njit(nogil=True, cache=True, error_model="numpy")


@_jit
def _host_rows(selected, token_request, block_table, block_tokens, rows):
    for t in range(selected.shape[0]):
        request = token_request[t]
        for k in range(selected.shape[1]):
            position = np.int64(selected[t, k])
            if position < 0:
                rows[t, k] = -1
            else:
                block = np.int64(block_table[request, position // block_tokens])
                rows[t, k] = block * block_tokens + position % block_tokens


@_jit
def _select_fresh(rows, fresh, out):
    for t in range(rows.shape[0]):
        for k in range(rows.shape[1]):
            row = rows[t, k]
            out[t, k] = fresh[row] if row >= 0 else -1


@_jit
def _select_piece(selected, rows, fresh, first, end, base, out):
    for t in range(selected.shape[0]):
        for k in range(selected.shape[1]):
            position = np.int64(selected[t, k])
            inside = first[t] <= position < end[t] and fresh[rows[t, k]] < 0
            out[t, k] = base[t] + position - first[t] if inside else -1


def host_rows(
    selected: Int32Array, token_request: Int64Array, block_table: Int32Array, block_tokens: int
) -> Int64Array:
    """Return the host row of every selected position, [T, K]; -1 stays -1.

    selected [T, K] holds positions within each token's request, token_request [T] that request's row of
    block_table [R, blocks]. No position may lie beyond its request's context.
    """
    rows = np.empty(selected.shape, dtype=np.int64)
    _host_rows(selected, token_request, block_table, block_tokens, rows)
    return rows


def select_fresh(rows: Int64Array, fresh: Int32Array) -> Int32Array:
    """Return, [T, K], the index among this forward's new rows of every selected one; -1 for all others.

    fresh maps every host row to its index, or to -1.
    """
    out = np.empty(rows.shape, dtype=np.int32)
    _select_fresh(rows, fresh, out)
    return out


def select_piece(
    selected: Int32Array,
    rows: Int64Array,
    fresh: Int32Array,
    first: Int64Array,
    end: Int64Array,
    base: Int64Array,
) -> Int32Array:
    """Return, [T, K], where the selected positions first[t]..end[t]-1 of token t lie in a window; else -1.

    base [T] is where the token's piece begins in the window. Fresh rows are left out: they are not home yet.
    """
    out = np.empty(selected.shape, dtype=np.int32)
    _select_piece(selected, rows, fresh, first, end, base, out)
    return out
