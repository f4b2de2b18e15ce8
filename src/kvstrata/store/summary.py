"""What a store tells of itself, and what a process has counted but not written down yet."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from kvstrata.store.base import StoreStatistics
from kvstrata.store.format import StoreParameters
from kvstrata.store.index import IndexTransaction
from kvstrata.store.processes import Liveness


@dataclass(frozen=True, kw_only=True)
class Taken:
    """Unsaved numbers on their way into a transaction."""

    misses: int = 0
    stale_reads: int = 0
    given_up: tuple[int, ...] = ()  # generations of reservations whose room should go back


class Unsaved:
    """Goes into the index with the next write, so that a miss and a read need no write of their own."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._now = Taken()

    def add_misses(self, count: int) -> int:
        """How many are unsaved now."""
        return self._add(Taken(misses=count)).misses

    def add_stale_reads(self, count: int) -> None:
        if count:
            self._add(Taken(stale_reads=count))

    def add_given_up(self, generation: int) -> None:
        self._add(Taken(given_up=(generation,)))

    def peek(self) -> Taken:
        with self._lock:
            return self._now

    @contextmanager
    def taken(self) -> Iterator[Taken]:
        """Everything so far; it comes back if the block raises."""
        with self._lock:
            taken, self._now = self._now, Taken()
        try:
            yield taken
        except BaseException:
            self._add(taken)
            raise

    def _add(self, more: Taken) -> Taken:
        with self._lock:
            self._now = Taken(
                misses=self._now.misses + more.misses,
                stale_reads=self._now.stale_reads + more.stale_reads,
                given_up=self._now.given_up + more.given_up,
            )
            return self._now


def summarise(
    view: IndexTransaction, parameters: StoreParameters, unsaved: Unsaved, now_us: int
) -> StoreStatistics:
    """The statistics of one consistent view of the index plus what this process has not saved."""
    counters, mine, is_alive = view.counters, unsaved.peek(), Liveness()
    return StoreStatistics(
        objects=view.count("objects"),
        capacity_bytes=parameters.size_bytes,
        used_bytes=parameters.size_bytes - counters.free_bytes - counters.reserved_bytes,
        reserved_bytes=counters.reserved_bytes,
        quarantined_bytes=sum(
            reservation.held_bytes
            for _, reservation in view.reservations()
            if reservation.deadline_us <= now_us and is_alive(reservation.holder)
        ),
        free_bytes=counters.free_bytes,
        leases=view.count("leases"),
        reservations=view.count("reservations"),
        hits=counters.hits,
        misses=counters.misses + mine.misses,
        stale_reads=counters.stale_reads + mine.stale_reads,
        evictions=counters.evictions,
        granted=counters.granted,
        published=counters.published,
        publish_lost=counters.publish_lost,
        abandoned=counters.abandoned,
        reclaimed=counters.reclaimed,
        refused_full=counters.refused_full,
        spill_capacity_bytes=parameters.spill_size_bytes,
        spill_used_bytes=parameters.spill_size_bytes - counters.spill_free_bytes,
        spill_free_bytes=counters.spill_free_bytes,
        spilled_objects=counters.spilled_objects,
        spill_evictions=counters.spill_evictions,
        spill_corrupt=counters.spill_corrupt,
    )
