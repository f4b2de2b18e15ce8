"""What one process did with a pool, counted."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Sequence

from kvstrata.store.base import StoreKey, StoreStatistics, WriteHandle


class Counts:
    """Thread-safe. `capacity_bytes`: of the pool."""

    def __init__(self, capacity_bytes: int) -> None:
        self._capacity_bytes = capacity_bytes
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._published: dict[StoreKey, int] = {}  # bytes of what we put and did not see go

    def add(self, **more: int) -> None:
        """Add to counters, which have the names of `StoreStatistics`."""
        with self._lock:
            self._counts.update(more)

    def published(self, key: StoreKey, size_bytes: int) -> None:
        """An object of ours is in the pool."""
        with self._lock:
            self._counts["published"] += 1
            self._published[key] = size_bytes
            self._evict(0)

    def gone(self, keys: Iterable[StoreKey]) -> None:
        """Objects are not in the pool any more."""
        with self._lock:
            for key in keys:
                self._published.pop(key, None)

    def known(self) -> list[StoreKey]:
        """What we put and did not see go."""
        with self._lock:
            return list(self._published)

    def statistics(self, *, leases: int, handles: Sequence[WriteHandle], now_s: float) -> StoreStatistics:
        """As `StoreStatistics`; the oldest objects count as evicted once more is published than fits."""
        reserved_bytes = sum(handle.size_bytes for handle in handles)
        with self._lock:
            capacity_bytes = self._capacity_bytes
            reserved_bytes = min(reserved_bytes, capacity_bytes)
            used_bytes = self._evict(reserved_bytes)
            counts = self._counts
            return StoreStatistics(
                objects=len(self._published),
                capacity_bytes=capacity_bytes,
                used_bytes=used_bytes,
                reserved_bytes=reserved_bytes,
                quarantined_bytes=min(
                    reserved_bytes,
                    sum(handle.size_bytes for handle in handles if handle.deadline_at_s < now_s),
                ),
                free_bytes=capacity_bytes - used_bytes - reserved_bytes,
                leases=leases,
                reservations=len(handles),
                hits=counts["hits"],
                misses=counts["misses"],
                stale_reads=counts["stale_reads"],
                evictions=counts["evictions"],
                granted=counts["granted"],
                published=counts["published"],
                publish_lost=counts["publish_lost"],
                abandoned=counts["abandoned"],
                reclaimed=0,
                refused_full=counts["refused_full"],
                spill_capacity_bytes=0,
                spill_used_bytes=0,
                spill_free_bytes=0,
                spilled_objects=0,
                spill_evictions=0,
                spill_corrupt=0,
            )

    def _evict(self, reserved_bytes: int) -> int:
        """Forget the oldest objects beyond the pool's capacity; bytes of the rest."""
        used_bytes = sum(self._published.values())
        while used_bytes + reserved_bytes > self._capacity_bytes:
            used_bytes -= self._published.pop(next(iter(self._published)))
            self._counts["evictions"] += 1
        return used_bytes
