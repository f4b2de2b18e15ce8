"""Eight neighbours at once: where those of many numbers are that are negative, without a branch for each.

Numba's disk cache notices changes of the file that holds a function, not of those it calls: one who changes
this file must touch `residency_loops` as well.
"""

# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import njit, types
from numba.extending import intrinsic

LANES = 8

_STEP = np.uint64(LANES)
# For every set of eight neighbours: the places of its members, ascending, a byte each.
_PLACES = np.array(
    [
        sum(place << (8 * i) for i, place in enumerate(p for p in range(LANES) if members >> p & 1))
        for members in range(1 << LANES)
    ],
    np.uint64,
)


def _lanes(context, builder, kind, array, at, bits):
    """A pointer to eight lanes of an array, from `at`."""
    data = context.make_array(kind)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [at]), ir.VectorType(ir.IntType(bits), LANES).as_pointer())


@intrinsic
def _negative(typing_context, items, at):
    """The set of those of items[at : at + LANES] that are negative as signed numbers, a bit each."""

    def generate(context, builder, signature, arguments):
        kind = signature.args[0]
        pointer = _lanes(context, builder, kind, arguments[0], arguments[1], kind.dtype.bitwidth)
        lanes = builder.load(pointer, align=1)
        negative = builder.icmp_signed("<", lanes, ir.Constant(lanes.type, [0] * LANES))
        return builder.bitcast(negative, ir.IntType(LANES))

    return types.uint8(items, types.uint64), generate


@intrinsic
def _put_places(typing_context, numbers, at, base, places):
    """Set the numbers from `at` to base + place; all eight are stored, however many places there are."""

    def generate(context, builder, signature, arguments):
        bits = signature.args[0].dtype.bitwidth
        vector, int32 = ir.VectorType(ir.IntType(bits), LANES), ir.IntType(32)
        offsets = builder.bitcast(arguments[3], ir.VectorType(ir.IntType(8), LANES))
        base = arguments[2] if bits == 64 else builder.trunc(arguments[2], ir.IntType(bits))
        undefined = ir.Constant(vector, ir.Undefined)
        bases = builder.shuffle_vector(
            builder.insert_element(undefined, base, int32(0)),
            undefined,
            ir.Constant(ir.VectorType(int32, LANES), [0] * LANES),
        )
        pointer = _lanes(context, builder, signature.args[0], arguments[0], arguments[1], bits)
        builder.store(builder.add(builder.zext(offsets, vector), bases), pointer, align=1)
        return context.get_dummy_value()

    return types.void(numbers, types.uint64, types.int64, types.uint64), generate


@intrinsic
def _members(typing_context, places):
    """How many members a set has."""

    def generate(context, builder, signature, arguments):
        return builder.zext(builder.ctpop(arguments[0]), ir.IntType(64))

    return types.uint64(types.uint8), generate


@njit(nogil=True, cache=True, error_model="numpy")
def find_negative(items, size, found):
    """found[:n] = where items[:size] are negative as signed numbers, ascending; returns n.

    items int32 or uint8; those from size up to the next multiple of LANES are not negative. found int32 or
    int64 has room for LANES more.
    """
    n = np.uint64(0)
    for at in range(np.uint64(0), np.uint64(size), _STEP):
        places = _negative(items, at)
        _put_places(found, n, np.int64(at), _PLACES[np.uint64(places)])
        n += _members(places)
    return np.int64(n)
