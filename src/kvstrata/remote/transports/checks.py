"""What every transport refuses before a byte moves, and how large reads are cut into pieces."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np

from kvstrata.errors import TransferFailed
from kvstrata.remote.transports.base import Destination, Int64Array, ReadPlan, TransportStatistics
from kvstrata.remote.transports.loops import count_misplaced, count_outside


class Counts:
    """A transport's counters by their names in TransportStatistics. Any thread may call."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()

    def add(self, **amounts: int) -> None:
        """Add to the counters named."""
        with self._lock:
            self._counts.update(amounts)

    def statistics(self) -> TransportStatistics:
        """Return the counts so far."""
        with self._lock:
            return TransportStatistics(**self._counts)


class Destinations:
    """The memory that one reader may write; answers for whole plans at once."""

    def __init__(self, destinations: Sequence[Destination]) -> None:
        for destination in destinations:
            if destination.address <= 0 or destination.size_bytes <= 0:
                raise ValueError(f"{destination} needs a positive address and size")
        ordered = sorted(destinations, key=lambda one: one.address)
        self._starts = np.array([one.address for one in ordered], dtype=np.int64)
        ends = np.array([one.address + one.size_bytes for one in ordered], dtype=np.int64)
        # The furthest end of all that begin at or before each: right even if destinations overlap.
        self._ends = np.maximum.accumulate(ends) if len(ends) else ends

    def outside(self, dst: Int64Array, size: Int64Array) -> int:
        """How many of the ranges, of positive sizes, no single destination holds."""
        return int(count_misplaced(dst, size, self._starts, self._ends))


def check_plan(plan: ReadPlan, region_bytes: Int64Array, destinations: Destinations, counts: Counts) -> None:
    """Raise TransferFailed, and count the ranges, if any leaves its region or every destination.

    `region_bytes[i]` is the size of the producer's region i.
    """
    _check_shape(plan)
    outside = int(count_outside(plan.region, plan.offset, plan.size, region_bytes))
    if outside:
        counts.add(refused_ranges=outside)
        reason = describe_outside(plan.region, plan.offset, plan.size, region_bytes)
        raise TransferFailed(f"remote read: {outside} of {len(plan)} ranges are {reason}")
    misplaced = destinations.outside(plan.dst, plan.size)
    if misplaced:
        counts.add(refused_ranges=misplaced)
        ranges = zip(plan.dst, plan.size, strict=True)
        dst, size = next(one for one in ranges if destinations.outside(*(np.array([x]) for x in one)))
        raise TransferFailed(
            f"remote read: {misplaced} of {len(plan)} ranges lie in no registered destination, the first "
            f"with {size} bytes at {int(dst):#x}"
        )


def describe_outside(
    region: Int64Array, offset: Int64Array, size: Int64Array, region_bytes: Int64Array
) -> str:
    """Say what is wrong with the first range that is outside its region."""
    for ranges in zip(region, offset, size, strict=True):
        if count_outside(*(np.array([one]) for one in ranges), region_bytes):
            index, start, length = (int(one) for one in ranges)
            what = f"outside their region, the first with {length} bytes at {start} of region {index}"
            if 0 <= index < len(region_bytes):
                return f"{what}, which has {region_bytes[index]} bytes"
            return f"{what}, but there are {len(region_bytes)} regions"
    raise AssertionError("every range is inside its region")


def cut(
    plan: ReadPlan, *, max_bytes: int, max_ranges: int
) -> Iterator[tuple[Int64Array, Int64Array, Int64Array, Int64Array]]:
    """The plan's (region, offset, dst, size) in pieces of at most that many bytes and ranges, in order."""
    region, offset, dst, size = plan.region, plan.offset, plan.dst, plan.size
    if len(size) and int(size.max()) > max_bytes:
        parts = -(-size // max_bytes)
        which = np.repeat(np.arange(len(size)), parts)
        within = (np.arange(len(which)) - np.repeat(np.cumsum(parts) - parts, parts)) * max_bytes
        region, offset, dst = region[which], offset[which] + within, dst[which] + within
        size = np.minimum(size[which] - within, max_bytes)
    ends = np.cumsum(size)
    first = 0
    while first < len(size):
        before = int(ends[first - 1]) if first else 0
        end = int(np.searchsorted(ends, before + max_bytes, side="right"))
        end = min(max(end, first + 1), first + max_ranges)
        yield region[first:end], offset[first:end], dst[first:end], size[first:end]
        first = end


def _check_shape(plan: ReadPlan) -> None:
    arrays = {name: getattr(plan, name) for name in ("region", "offset", "dst", "size")}
    for name, array in arrays.items():
        if array.dtype != np.int64 or array.ndim != 1 or not array.flags.c_contiguous:
            raise TypeError(
                f"read plan: {name} must be a contiguous 1-D int64 array, got {array.dtype} {array.shape}"
            )
    if len({len(array) for array in arrays.values()}) != 1:
        lengths = ", ".join(f"{len(array)} of {name}" for name, array in arrays.items())
        raise ValueError(f"read plan: its arrays have different lengths: {lengths}")
