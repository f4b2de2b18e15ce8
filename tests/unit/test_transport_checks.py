"""Ranges are refused or cut up exactly, whatever numbers come in."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstrata.errors import TransferFailed
from kvstrata.remote.transports.base import Destination, ReadPlan
from kvstrata.remote.transports.checks import Counts, Destinations, check_plan, cut, describe_outside
from kvstrata.remote.transports.loops import copy_piece, count_outside, new_progress
from kvstrata.remote.transports.testing import plan_of

INT64 = st.integers(-(1 << 63), (1 << 63) - 1)
NEAR = st.integers(-2, 40)


def int64(values: list[int]) -> np.ndarray:
    return np.array(values, dtype=np.int64)


@settings(deadline=None)  # the first call compiles
@given(
    st.lists(st.tuples(st.integers(-1, 3) | INT64, NEAR | INT64, NEAR | INT64), max_size=20),
    st.lists(st.integers(0, 30) | st.integers(0, 1 << 62), max_size=3),
)
def test_a_range_is_outside_its_region_exactly_when_a_byte_of_it_is(ranges, region_bytes):
    region, offset, size = (int64([one[i] for one in ranges]) for i in range(3))
    expected = [
        i
        for i, (r, o, s) in enumerate(ranges)
        if not (0 <= r < len(region_bytes) and o >= 0 and s > 0 and o + s <= region_bytes[r])
    ]
    limits = int64(region_bytes)
    assert count_outside(region, offset, size, limits) == len(expected)
    if expected:
        _, first_offset, first_size = ranges[expected[0]]
        assert f"{first_size} bytes at {first_offset}" in describe_outside(region, offset, size, limits)


@settings(deadline=None)  # the first call compiles
@given(
    st.lists(st.tuples(st.integers(1, 50), st.integers(1, 20)), max_size=5),
    st.lists(
        st.tuples(st.integers(0, 80) | INT64, st.integers(1, 25) | st.integers(1, 1 << 62)), max_size=20
    ),
)
def test_a_range_needs_one_destination_that_holds_all_of_it(destinations, ranges):
    held = Destinations([Destination(address=a, size_bytes=s) for a, s in destinations])
    dst, size = (int64([one[i] for one in ranges]) for i in range(2))
    expected = [
        i
        for i, (d, s) in enumerate(ranges)
        if not any(a <= d and d + s <= a + room for a, room in destinations)
    ]
    assert held.outside(dst, size) == len(expected)


@settings(deadline=None)  # the first call compiles
@given(
    st.lists(st.integers(1, 100), max_size=30),
    st.integers(1, 60),
    st.integers(1, 7),
)
def test_pieces_are_the_plan_in_order_and_within_both_bounds(sizes, max_bytes, max_ranges):
    plan = plan_of([(i % 3, i * 1000, 1 + i * 2000, size) for i, size in enumerate(sizes)])
    moved = []
    for region, offset, dst, size in cut(plan, max_bytes=max_bytes, max_ranges=max_ranges):
        assert 0 < size.sum() <= max_bytes
        assert 0 < len(size) <= max_ranges
        for r, o, d, s in zip(region, offset, dst, size, strict=True):
            moved += [(r, o + k, d + k) for k in range(s)]
    expected = [(i % 3, i * 1000 + k, 1 + i * 2000 + k) for i, size in enumerate(sizes) for k in range(size)]
    assert moved == expected


@settings(deadline=None)  # the first call compiles
@given(st.lists(st.integers(1, 100), max_size=30), st.integers(1, 60))
def test_a_copy_in_pieces_goes_on_where_it_stopped(sizes, max_bytes):
    memory = [np.random.default_rng(i).integers(0, 256, 8000, dtype=np.uint8) for i in range(3)]
    target, expected = np.zeros(8000, dtype=np.uint8), np.zeros(8000, dtype=np.uint8)
    ranges = [(i % 3, i * 200 + 7, target.ctypes.data + i * 130, size) for i, size in enumerate(sizes)]
    for region, offset, dst, size in ranges:
        at = dst - target.ctypes.data
        expected[at : at + size] = memory[region][offset : offset + size]
    plan, progress, calls = plan_of(ranges), new_progress(), 1
    addresses = int64([one.ctypes.data for one in memory])
    while not copy_piece(plan.region, plan.offset, plan.dst, plan.size, addresses, progress, max_bytes):
        calls += 1
    assert np.array_equal(target, expected)
    assert calls == max(1, -(-sum(sizes) // max_bytes))


def test_pieces_are_as_large_as_they_may_be():
    plan = plan_of([(0, i, 1 + i, 10) for i in range(10)])
    assert [len(size) for *_, size in cut(plan, max_bytes=40, max_ranges=100)] == [4, 4, 2]
    assert [len(size) for *_, size in cut(plan, max_bytes=1000, max_ranges=100)] == [10]


def test_refused_ranges_are_counted_and_described():
    counts = Counts()
    held = Destinations([Destination(address=100, size_bytes=50)])
    with pytest.raises(
        TransferFailed, match=r"2 of 3 ranges are outside their region.*9 bytes at 4 of region 0"
    ):
        check_plan(plan_of([(0, 0, 100, 1), (0, 4, 100, 9), (5, 0, 100, 1)]), int64([10]), held, counts)
    with pytest.raises(TransferFailed, match=r"1 of 1 ranges lie in no registered destination.*0x96"):
        check_plan(plan_of([(0, 0, 150, 1)]), int64([10]), held, counts)
    check_plan(plan_of([(0, 0, 149, 1)]), int64([10]), held, counts)
    assert counts.statistics().refused_ranges == 3


def test_a_plan_of_other_arrays_is_an_error_of_the_caller():
    good = plan_of([(0, 0, 100, 1)])
    held = Destinations([Destination(address=100, size_bytes=50)])
    for wrong in (good.size.astype(np.int32), good.size.reshape(1, 1), np.arange(4, dtype=np.int64)[::2]):
        plan = ReadPlan(region=good.region, offset=good.offset, dst=good.dst, size=wrong)
        with pytest.raises(TypeError, match="size must be a contiguous 1-D int64 array"):
            check_plan(plan, int64([10]), held, Counts())
    plan = ReadPlan(region=good.region, offset=good.offset, dst=good.dst, size=int64([1, 1]))
    with pytest.raises(ValueError, match="different lengths"):
        check_plan(plan, int64([10]), held, Counts())


def test_a_destination_needs_an_address_and_a_size():
    for address, size in ((0, 1), (1, 0), (-4, 8)):
        with pytest.raises(ValueError, match="positive"):
            Destinations([Destination(address=address, size_bytes=size)])
