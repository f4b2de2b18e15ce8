"""The leases that this process gave out on objects of a pool, and the thread that keeps them alive.

Pools know no leases as `Store` has them: they keep an object from eviction for a time of their own after it
was asked for. So a lease is an entry here, and `Keeper` asks for the leased objects again and again while it
lasts. A pool may drop an object all the same; a reader then gets MISSING.

A lease that another process gave out is not in this table. It is judged by its object alone.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Callable, Iterable, Sequence

from kvstrata.store.base import ReadLease, StoreKey
from kvstrata.store.pool.envelope import Envelope
from kvstrata.store.pool.seldom import SeldomLog

logger = logging.getLogger(__name__)

_COUNT_BITS = 32


class LeaseTable:
    """Thread-safe. Times are on the store's clock."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._mine = secrets.randbits(31) << _COUNT_BITS
        self._count = 0
        self._ends: dict[int, tuple[float, StoreKey]] = {}  # by lease id

    def grant(self, key: StoreKey, envelope: Envelope, *, now_s: float, ttl_s: float) -> ReadLease:
        """A new lease on the object that `envelope` names."""
        with self._lock:
            self._prune(now_s)
            self._count += 1
            lease_id = self._mine | self._count
            self._ends[lease_id] = (now_s + ttl_s, key)
        return ReadLease(
            key=key,
            generation=envelope.generation,
            lease_id=lease_id,
            size_bytes=envelope.size_bytes,
            layout=envelope.layout,
            expires_at_s=now_s + ttl_s,
        )

    def is_live(self, lease: ReadLease, *, now_s: float) -> bool:
        """Whether one may read with it: neither expired nor released, or given out elsewhere."""
        with self._lock:
            if lease.lease_id >> _COUNT_BITS != self._mine >> _COUNT_BITS:
                return True
            found = self._ends.get(lease.lease_id)
            return found is not None and found[0] > now_s

    def renew(self, lease: ReadLease, *, now_s: float, ttl_s: float) -> None:
        """Make a live lease end later. One of another process is renewed for this process only."""
        with self._lock:
            self._ends[lease.lease_id] = (now_s + ttl_s, lease.key)

    def release(self, leases: Iterable[ReadLease]) -> None:
        """End leases; ones that ended or are not ours are passed over."""
        with self._lock:
            for lease in leases:
                self._ends.pop(lease.lease_id, None)

    def held(self, *, now_s: float) -> set[StoreKey]:
        """The objects under a live lease of this process."""
        with self._lock:
            self._prune(now_s)
            return {key for _, key in self._ends.values()}

    def __len__(self) -> int:
        with self._lock:
            return len(self._ends)

    def _prune(self, now_s: float) -> None:
        for lease_id in [lease_id for lease_id, (end, _) in self._ends.items() if end <= now_s]:
            del self._ends[lease_id]


class Keeper:
    """Calls `hold` with the leased objects every `every_s` seconds, in a thread of its own."""

    def __init__(
        self,
        *,
        held: Callable[[], set[StoreKey]],
        hold: Callable[[Sequence[StoreKey]], None],
        every_s: float,
    ) -> None:
        """The thread starts with the first `wake`, so that a store without leases costs nothing."""
        self._held = held
        self._hold = hold
        self._every_s = every_s
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    def wake(self) -> None:
        """There is a lease now."""
        with self._lock:
            if self._thread is None and not self._closing.is_set():
                self._thread = threading.Thread(target=self._run, name="kvstrata-pool-leases", daemon=True)
                self._thread.start()

    def close(self, *, timeout_s: float) -> None:
        """Stop; waits for a round in progress, but not longer than `timeout_s`."""
        self._closing.set()
        with self._lock:
            thread = self._thread
        if thread is not None:
            thread.join(timeout_s)

    def _run(self) -> None:
        log = SeldomLog(logger)
        while not self._closing.wait(self._every_s):
            keys = sorted(self._held(), key=StoreKey.encode)
            if keys:
                try:
                    self._hold(keys)
                except Exception as error:  # the objects may go; readers then get a miss
                    log.warning("kept", f"leases on {len(keys)} objects could not be kept alive: {error!r}")
