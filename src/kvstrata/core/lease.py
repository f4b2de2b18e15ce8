"""Holds that end by themselves: deadlines, heartbeats, generations.

    state    move     next     condition
    FREE     acquire  HELD     -
    HELD     renew    HELD     same generation; keeps the generation
    HELD     release  FREE     same generation
    HELD     (time)   LAPSED   the clock reaches expires_at_s
    LAPSED   acquire  HELD     a new generation; the lapsed lease is still reported by expire
    LAPSED   expire   FREE     -
Any other renew or release is refused and counted. A lapsed lease is dead at once, whether or not anyone has
called `expire`: it neither blocks an acquire nor can it be renewed.
"""

import heapq
import itertools
from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace

__all__ = ["Lease", "LeaseStatistics", "LeaseTable"]


@dataclass(frozen=True)
class Lease:
    """Proof of a hold on `key`. A later hold on the same key has a greater `generation`."""

    key: Hashable
    holder: str
    generation: int
    expires_at_s: float


@dataclass(frozen=True, kw_only=True)
class LeaseStatistics:
    """Counts since construction; `acquired == released + expired + live + lapsed`."""

    acquired: int
    refused_held: int  # acquire of a key that another lease holds
    renewed: int
    released: int
    expired: int  # reported by expire()
    rejected_stale: int  # renew or release with a lapsed, released or superseded lease
    live: int
    lapsed: int  # ended, not yet reported by expire()


class LeaseTable:
    """One exclusive lease a key. Shared holds are made of keys that contain the holder. Not thread-safe."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock` returns monotonic seconds."""
        self._clock = clock
        # One counter for all keys: generations grow per key without remembering keys that are gone.
        self._generations = itertools.count(1)
        self._ticks = itertools.count()
        self._current: dict[Hashable, Lease] = {}
        self._superseded: list[Lease] = []
        # (expires_at_s, tick, lease); an entry whose lease is no longer current is skipped when met, so a
        # renewal never hides the entries behind it.
        self._by_deadline: list[tuple[float, int, Lease]] = []
        self._counts: Counter[str] = Counter()

    def acquire(self, key: Hashable, holder: str, duration_s: float) -> Lease | None:
        """Hold `key` for `duration_s` from now; None, and counted, while another lease on it is live."""
        _check_duration(duration_s)
        now_s = self._clock()
        before = self._current.get(key)
        if before is not None:
            if now_s < before.expires_at_s:
                self._counts["refused_held"] += 1
                return None
            self._superseded.append(before)
        self._counts["acquired"] += 1
        return self._set(Lease(key, holder, next(self._generations), now_s + duration_s))

    def renew(self, lease: Lease, duration_s: float) -> Lease | None:
        """Move the end of a live lease to `duration_s` from now; None, and counted, if it is stale.

        Any copy of the lease with the current generation counts, however often it was renewed since.
        """
        _check_duration(duration_s)
        if not self._accept(lease):
            return None
        self._counts["renewed"] += 1
        return self._set(replace(self._current[lease.key], expires_at_s=self._clock() + duration_s))

    def release(self, lease: Lease) -> bool:
        """End a live lease early; False, and counted, if it is stale."""
        if not self._accept(lease):
            return False
        self._counts["released"] += 1
        del self._current[lease.key]
        return True

    def expire(self) -> tuple[Lease, ...]:
        """Remove and return every lapsed lease, each exactly once, so that what it held can be reclaimed."""
        now_s = self._clock()
        lapsed, self._superseded = self._superseded, []
        while self._by_deadline and self._by_deadline[0][0] <= now_s:
            lease = heapq.heappop(self._by_deadline)[2]
            if self._current.get(lease.key) is lease:
                del self._current[lease.key]
                lapsed.append(lease)
        self._counts["expired"] += len(lapsed)
        return tuple(lapsed)

    def current(self, key: Hashable) -> Lease | None:
        """Return the live lease on `key`, if any."""
        lease = self._current.get(key)
        return lease if lease is not None and self._clock() < lease.expires_at_s else None

    def is_live(self, lease: Lease) -> bool:
        """Whether `lease` still protects its key; changes nothing and counts nothing."""
        held = self.current(lease.key)
        return held is not None and held.generation == lease.generation

    def statistics(self) -> LeaseStatistics:
        """Return the counts since construction."""
        now_s = self._clock()
        live = sum(now_s < lease.expires_at_s for lease in self._current.values())
        return LeaseStatistics(
            acquired=self._counts["acquired"],
            refused_held=self._counts["refused_held"],
            renewed=self._counts["renewed"],
            released=self._counts["released"],
            expired=self._counts["expired"],
            rejected_stale=self._counts["rejected_stale"],
            live=live,
            lapsed=len(self._current) - live + len(self._superseded),
        )

    def check_integrity(self) -> None:
        """Assert what holds between any two calls."""
        counts = self.statistics()
        assert counts.acquired == counts.released + counts.expired + counts.live + counts.lapsed, counts
        queued = {id(lease) for _, _, lease in self._by_deadline}
        for key, lease in self._current.items():
            assert lease.key == key, lease
            assert id(lease) in queued, f"{lease} would never expire"

    def _accept(self, lease: Lease) -> bool:
        if self.is_live(lease):
            return True
        self._counts["rejected_stale"] += 1
        return False

    def _set(self, lease: Lease) -> Lease:
        self._current[lease.key] = lease
        heapq.heappush(self._by_deadline, (lease.expires_at_s, next(self._ticks), lease))
        return lease


def _check_duration(duration_s: float) -> None:
    if not 0 < duration_s < float("inf"):
        raise ValueError(f"a lease of {duration_s} s would never hold or never end; use a positive duration")
