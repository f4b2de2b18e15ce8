"""A `Store` on a pool: leases, generations, sizes, checksums and deadlines are ours, bytes are the pool's.

What differs from the local store, because pools know less: see docs/data_plane.md.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from kvstrata.errors import ConfigurationError, StoreFormatError
from kvstrata.store.base import (
    ByteRange,
    ReadLease,
    Status,
    StoreKey,
    StoreStatistics,
    WriteHandle,
    check_range,
    check_ranges,
)
from kvstrata.store.pool.client import PoolClient
from kvstrata.store.pool.counts import Counts
from kvstrata.store.pool.envelope import LONGEST_HEAD_BYTES, Envelope, pool_key
from kvstrata.store.pool.leases import Keeper, LeaseTable
from kvstrata.store.pool.puts import StagedWrites
from kvstrata.store.pool.reads import read_checked
from kvstrata.store.pool.session import FAULTS, PoolLimits, PoolSession

logger = logging.getLogger(__name__)

_KNOWN_LIMIT = 4096
"""Heads kept for reads to come; the oldest go first and cost one more read."""

_DEFAULT_LIMITS = PoolLimits()


class PooledStore:
    """Implements `Store` for one process. Open it in each process, after any fork.

    Statistics are this process's. A lease is kept by the process that acquired it; in others it reads as long
    as the object is there, whatever became of the lease.
    """

    def __init__(
        self,
        client: PoolClient,
        *,
        capacity_bytes: int,
        staging_bytes: int,
        clock: Callable[[], float] = time.time,
        limits: PoolLimits = _DEFAULT_LIMITS,
    ) -> None:
        """Own `client` from now on. `capacity_bytes` is what the pool was given, the limit of one object.

        `staging_bytes` holds what is being written and read; the largest object and its head fit twice.
        Raises `StoreUnavailable`.
        """
        self._session = PoolSession(client, staging_bytes=staging_bytes, clock=clock, limits=limits)
        self._capacity_bytes = capacity_bytes
        self._writes = StagedWrites(self._session)
        self._leases = LeaseTable()
        self._counts = Counts(capacity_bytes)
        self._lock = threading.Lock()
        self._known: dict[tuple[StoreKey, int], Envelope] = {}
        self._keeper = Keeper(held=self._held, hold=self._hold_again, every_s=limits.keep_every_s)

    def contains(self, keys: Sequence[StoreKey]) -> list[Status]:
        self._session.check_open()
        names = [pool_key(key) for key in keys]
        if not names:
            return []
        try:
            return self._session.run(f"looking for {len(names)} keys", lambda: self._client.present(names))
        except FAULTS as error:
            return [self._session.down("contains", error)] * len(keys)

    def acquire(self, keys: Sequence[StoreKey], *, ttl_s: float) -> list[ReadLease | Status]:
        _check_ttl(ttl_s)
        self._session.check_open()
        different = list(dict.fromkeys(keys))
        try:
            found = dict(zip(different, self._session.envelopes(different, ttl_s=ttl_s), strict=True))
        except FAULTS as error:
            return [self._session.down("acquire", error)] * len(keys)
        now_s = self._session.clock()
        answers: list[ReadLease | Status] = []
        for key in keys:
            envelope = found[key]
            if isinstance(envelope, Envelope):
                self._remember(key, envelope)
                answers.append(self._leases.grant(key, envelope, now_s=now_s, ttl_s=ttl_s))
            else:
                answers.append(envelope)
        hits = sum(isinstance(answer, ReadLease) for answer in answers)
        self._counts.add(hits=hits, misses=len(answers) - hits)
        if hits:
            self._keeper.wake()
        return answers

    def renew(self, leases: Sequence[ReadLease], *, ttl_s: float) -> list[ReadLease | Status]:
        _check_ttl(ttl_s)
        self._session.check_open()
        now_s = self._session.clock()
        live = [lease for lease in leases if self._leases.is_live(lease, now_s=now_s)]
        try:
            found = self._session.envelopes([lease.key for lease in live], ttl_s=ttl_s) if live else []
        except FAULTS as error:
            return [self._session.down("renew", error)] * len(leases)
        there = {
            lease.lease_id: envelope.generation == lease.generation
            if isinstance(envelope, Envelope)
            else envelope
            for lease, envelope in zip(live, found, strict=True)
        }
        answers: list[ReadLease | Status] = []
        for lease in leases:
            answer = there.get(lease.lease_id, False)
            if answer is True:
                self._leases.renew(lease, now_s=now_s, ttl_s=ttl_s)
                answers.append(replace(lease, expires_at_s=now_s + ttl_s))
            else:
                answers.append(answer if isinstance(answer, Status) else Status.MISSING)
        return answers

    def release(self, leases: Sequence[ReadLease]) -> None:
        """As `Store.release`; the pool itself keeps the objects for its own lease time."""
        self._session.check_open()
        self._leases.release(leases)

    def read(self, lease: ReadLease, ranges: Sequence[ByteRange]) -> Status:
        return self.read_many([(lease, ranges)])[0]

    def read_many(self, reads: Sequence[tuple[ReadLease, Sequence[ByteRange]]]) -> list[Status]:
        for lease, ranges in reads:
            check_ranges(lease.size_bytes, ranges)
        self._session.check_open()
        now_s = self._session.clock()
        statuses = [Status.MISSING] * len(reads)
        live = [at for at, (lease, _) in enumerate(reads) if self._leases.is_live(lease, now_s=now_s)]
        try:
            envelopes = self._envelopes_of([reads[at][0] for at in live])
            wanted = []
            for at in live:
                envelope = envelopes[reads[at][0]]
                if isinstance(envelope, Envelope):
                    wanted.append((at, envelope))
                else:
                    statuses[at] = envelope
            answers = read_checked(
                self._session, [(reads[at][0], envelope, reads[at][1]) for at, envelope in wanted]
            )
        except FAULTS as error:
            return [self._session.down("read", error)] * len(reads)
        for (at, _), answer in zip(wanted, answers, strict=True):
            statuses[at] = answer
        self._counts.add(stale_reads=sum(status is Status.MISSING for status in statuses))
        return statuses

    def reserve(self, key: StoreKey, size_bytes: int, layout: str) -> WriteHandle | Status:
        self._session.check_open()
        self._check_size(size_bytes)
        (there,) = self.contains([key])
        if there is not Status.MISSING:
            return Status.EXISTS if there is Status.OK else there
        handle = self._writes.reserve(key, size_bytes, layout)
        if handle is None:
            self._counts.add(refused_full=1)
            return Status.FULL
        self._counts.add(granted=1)
        return handle

    def write(self, handle: WriteHandle, offset: int, src_address: int, size_bytes: int) -> Status:
        check_range(handle.size_bytes, offset, src_address, size_bytes)
        self._session.check_open()
        return self._writes.write(handle, offset, src_address, size_bytes)

    def publish(self, handle: WriteHandle) -> Status:
        """As `Store.publish`; FULL and BACKEND_DOWN are possible here, where the bytes go to the pool.

        After BACKEND_DOWN the object may still appear: whole, or not at all.
        """
        self._session.check_open()
        try:
            status = self._writes.publish(handle)
        except FAULTS as error:
            if self._writes.abandon(handle):  # it was not complete, which is the caller's fault
                self._counts.add(abandoned=1)
                raise
            status = self._session.down("publish", error)
        if status is Status.OK:
            self._counts.published(handle.key, handle.size_bytes)
        elif status is Status.EXISTS:
            self._counts.add(publish_lost=1)
        elif status is not Status.MISSING:
            self._counts.add(abandoned=1, refused_full=int(status is Status.FULL))
        return status

    def abandon(self, handle: WriteHandle) -> None:
        self._session.check_open()
        self._counts.add(abandoned=int(self._writes.abandon(handle)))

    def remove(self, keys: Sequence[StoreKey], *, force: bool = False) -> list[Status]:
        self._session.check_open()
        held = set() if force else self._held()
        free = [key for key in keys if key not in held]
        try:
            removed = self._session.run(
                "removing", lambda: self._client.remove([pool_key(key) for key in free], force=force)
            )
        except FAULTS as error:
            return [self._session.down("remove", error)] * len(keys)
        answers = dict(zip(free, removed, strict=True))
        self._counts.gone([key for key, status in answers.items() if status is not Status.LEASED])
        return [answers.get(key, Status.LEASED) for key in keys]

    def clear(self, *, force: bool = False) -> int:
        """As `Store.clear`; raises `StoreError` or `DeadlineExceeded` when the pool does not answer.

        Where the pool cannot spare what is held, and this process holds something, only objects that this
        process published go.
        """
        self._session.check_open()
        held = self._held()
        known = [key for key in self._counts.known() if force or key not in held]
        if held and not force and not self._client.spares_held:
            return self.remove(known).count(Status.OK)
        dropped = self._session.run("clearing", lambda: self._client.clear(force=force))
        self._counts.gone(known)
        return len(known) if dropped is None else dropped

    def statistics(self) -> StoreStatistics:
        """As `Store.statistics`, of this process alone: what it published and has not seen go."""
        self._session.check_open()
        return self._counts.statistics(
            leases=len(self._leases),
            handles=self._writes.handles(),
            now_s=self._session.clock(),
        )

    def check_integrity(self) -> None:
        """As `Store.check_integrity`, of what this process keeps."""
        self._session.check_open()
        self._session.staging.check_integrity()
        taken_bytes, _ = self._session.staging.usage()
        reserved_bytes = sum(handle.size_bytes for handle in self._writes.handles())
        if reserved_bytes > taken_bytes:
            raise StoreFormatError(f"{reserved_bytes} bytes are reserved in {taken_bytes} of staging memory")

    def close(self) -> None:
        if self._session.is_closed:
            return
        self._counts.add(abandoned=self._writes.abandon_all())
        self._keeper.close(timeout_s=self._session.limits.deadline_s)
        self._session.close()

    @property
    def _client(self) -> PoolClient:
        return self._session.client

    def _held(self) -> set[StoreKey]:
        return self._leases.held(now_s=self._session.clock())

    def _hold_again(self, keys: Sequence[StoreKey]) -> None:
        names = [pool_key(key) for key in keys]
        hold_s = self._session.limits.hold_s
        self._session.run(f"keeping {len(names)} objects", lambda: self._client.hold(names, ttl_s=hold_s))

    def _envelopes_of(self, leases: Sequence[ReadLease]) -> dict[ReadLease, Envelope | Status]:
        """The heads that leases name: from memory, else from the pool; MISSING if another took its place."""
        with self._lock:
            found: dict[ReadLease, Envelope | Status] = {
                lease: self._known[lease.key, lease.generation]
                for lease in leases
                if (lease.key, lease.generation) in self._known
            }
        unknown = [lease for lease in dict.fromkeys(leases) if lease not in found]
        heads = self._session.envelopes([lease.key for lease in unknown]) if unknown else []
        for lease, head in zip(unknown, heads, strict=True):
            if isinstance(head, Envelope) and head.generation != lease.generation:
                head = Status.MISSING
            if isinstance(head, Envelope):
                self._remember(lease.key, head)
            found[lease] = head
        return found

    def _remember(self, key: StoreKey, envelope: Envelope) -> None:
        with self._lock:
            self._known[key, envelope.generation] = envelope
            while len(self._known) > _KNOWN_LIMIT:
                del self._known[next(iter(self._known))]

    def _check_size(self, size_bytes: int) -> None:
        if size_bytes <= 0:
            raise ValueError(f"an object has at least one byte, not {size_bytes}")
        limit_bytes = min(self._capacity_bytes, self._session.staging.size_bytes // 2 - LONGEST_HEAD_BYTES)
        if size_bytes > limit_bytes:
            raise ConfigurationError(
                f"an object of {size_bytes} bytes can never fit into store_size_GB, which gives "
                f"{limit_bytes} bytes. Fix: raise store_size_GB."
            )


def _check_ttl(ttl_s: float) -> None:
    if not ttl_s > 0:
        raise ValueError(f"a lease of {ttl_s} s is none")
