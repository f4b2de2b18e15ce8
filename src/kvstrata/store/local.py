"""The store of one host: shared memory for the bytes, lmdb for everything else.

Crash safety: an object exists when its record has committed, never before, and its bytes were complete
before that. A process killed at any point leaves at most a reservation and some leases, which name it;
whoever needs room next finds it dead and takes the room back. See docs/store.md.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from kvstrata.errors import ConfigurationError, StoreError
from kvstrata.memory.processes import Liveness
from kvstrata.store import ledger
from kvstrata.store.attachment import Attachment, attachments
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
from kvstrata.store.directory import StoreDirectory
from kvstrata.store.eviction import Evictor
from kvstrata.store.format import StoreParameters
from kvstrata.store.index import IndexFull
from kvstrata.store.integrity import check_index
from kvstrata.store.ledger import Ledger
from kvstrata.store.records import Extent, ObjectRecord, Place
from kvstrata.store.session import FAULTS, Session, to_us
from kvstrata.store.summary import summarise
from kvstrata.store.writes import OpenWrites

logger = logging.getLogger(__name__)

DEADLINE_S = 60.0
LOCK_TIMEOUT_S = 5.0


class LocalStore:
    """Implements `Store` for the processes of one host. Open it in each process, after any fork."""

    def __init__(
        self, attachment: Attachment, path: Path, *, clock: Callable[[], float], deadline_s: float
    ) -> None:
        """Use `open` or `attach`."""
        self._session = Session(attachment, path, clock)
        self._files = attachment.files
        self._ledger = Ledger(
            Evictor(self._files.arena, self._files.spill), attachment.holder, deadline_us=to_us(deadline_s)
        )
        self._writes: OpenWrites[tuple[Extent, ...]] = OpenWrites()

    @classmethod
    def open(
        cls,
        path: str | Path,
        *,
        size_bytes: int,
        spill_path: str | Path | None = None,
        spill_size_bytes: int = 0,
        clock: Callable[[], float] = time.time,
        deadline_s: float = DEADLINE_S,
        lock_timeout_s: float = LOCK_TIMEOUT_S,
    ) -> LocalStore:
        """Open the store in directory `path`, making it first if there is none.

        `size_bytes` of memory are taken when the store is made. `spill_path` is a directory on disk.
        A store made with other sizes is left as it is: `ConfigurationError` names both. `clock` is wall
        clock time, the same for all processes. A reservation older than `deadline_s` counts as
        quarantined; it also bounds the wait for another process that is just making the store.
        `lock_timeout_s` bounds every other wait for the store's lock; then calls answer BACKEND_DOWN.

        Raises also `StoreUnavailable`, `StoreFormatError` and `DeadlineExceeded`.
        """
        parameters = StoreParameters.checked(size_bytes, spill_path, spill_size_bytes)
        directory = StoreDirectory(Path(path), lock_timeout_s=lock_timeout_s)
        attachment = attachments.attach(
            Path(path), lambda: directory.open_or_create(parameters, deadline_s=deadline_s)
        )
        store = cls(attachment, Path(path), clock=clock, deadline_s=deadline_s)
        try:
            directory.check_agreement(attachment.files.parameters, parameters)
            with store._session.write("clean up after dead processes") as changes:
                store._ledger.sweep(changes, now_us=store._session.now_us(), is_alive=Liveness())
        except BaseException:
            store.close()
            raise
        return store

    @classmethod
    def attach(
        cls,
        path: str | Path,
        *,
        clock: Callable[[], float] = time.time,
        deadline_s: float = DEADLINE_S,
        lock_timeout_s: float = LOCK_TIMEOUT_S,
    ) -> LocalStore:
        """Open a store with the sizes it was made with; `StoreUnavailable` when there is none."""
        directory = StoreDirectory(Path(path), lock_timeout_s=lock_timeout_s)
        attachment = attachments.attach(Path(path), lambda: directory.open_existing(deadline_s=deadline_s))
        return cls(attachment, Path(path), clock=clock, deadline_s=deadline_s)

    @staticmethod
    def delete(path: str | Path, *, lock_timeout_s: float = LOCK_TIMEOUT_S) -> None:
        """Delete a store's files, readable or not; `StoreUnavailable` while a process uses it."""
        StoreDirectory(Path(path), lock_timeout_s=lock_timeout_s).delete()

    def contains(self, keys: Sequence[StoreKey]) -> list[Status]:
        with self._session.call():
            try:
                with self._session.read() as view:
                    return [Status.OK if view.has(key) else Status.MISSING for key in keys]
            except FAULTS as error:
                return [self._session.down("contains", error)] * len(keys)

    def acquire(self, keys: Sequence[StoreKey], *, ttl_s: float) -> list[ReadLease | Status]:
        ttl_us = _ttl_us(ttl_s)
        with self._session.call():
            try:
                with self._session.read() as view:
                    has_any = any(view.has(key) for key in keys)
                if not has_any:  # the common case of a new prompt: no need to wait for other writers
                    self._session.count_misses(len(keys))
                    return [Status.MISSING] * len(keys)
                now_us = self._session.now_us()
                with self._session.write("acquire leases") as changes:
                    return [self._ledger.leased(changes, key, ttl_us=ttl_us, now_us=now_us) for key in keys]
            except FAULTS as error:
                return [self._session.down("acquire", error)] * len(keys)

    def renew(self, leases: Sequence[ReadLease], *, ttl_s: float) -> list[ReadLease | Status]:
        ttl_us = _ttl_us(ttl_s)
        with self._session.call():
            try:
                now_us = self._session.now_us()
                with self._session.write("renew leases") as changes:
                    return [ledger.renewed(changes, lease, ttl_us=ttl_us, now_us=now_us) for lease in leases]
            except FAULTS as error:
                return [self._session.down("renew", error)] * len(leases)

    def release(self, leases: Sequence[ReadLease]) -> None:
        with self._session.call():
            try:
                with self._session.write("release leases") as changes:
                    for lease in leases:
                        changes.delete_lease(lease.generation, lease.lease_id)
            except FAULTS as error:
                self._session.down("release", error)  # they expire

    def read(self, lease: ReadLease, ranges: Sequence[ByteRange]) -> Status:
        return self.read_many([(lease, ranges)])[0]

    def read_many(self, reads: Sequence[tuple[ReadLease, Sequence[ByteRange]]]) -> list[Status]:
        for lease, ranges in reads:
            check_ranges(lease.size_bytes, ranges)
        with self._session.call():
            try:
                now_us = self._session.now_us()
                with self._session.read() as view:
                    records = [ledger.leased_object(view, lease, now_us=now_us) for lease, _ in reads]
                copied = [
                    record is not None and self._copied(record, lease, ranges)
                    for record, (lease, ranges) in zip(records, reads, strict=True)
                ]
                with self._session.read() as view:
                    whole = [
                        was_copied and view.generation(lease.key) == lease.generation
                        for was_copied, (lease, _) in zip(copied, reads, strict=True)
                    ]
            except FAULTS as error:
                return [self._session.down("read", error)] * len(reads)
            self._session.count_stale_reads(whole.count(False))
            return [Status.OK if is_whole else Status.MISSING for is_whole in whole]

    def reserve(self, key: StoreKey, size_bytes: int, layout: str) -> WriteHandle | Status:
        self._check_size(size_bytes)
        with self._session.call():
            try:
                with self._session.read() as view:
                    if view.has(key):
                        return Status.EXISTS
                now_us = self._session.now_us()
                with self._session.write("reserve room") as changes:
                    made = self._ledger.reserved(changes, key, size_bytes, layout, now_us=now_us)
            except IndexFull as error:
                logger.warning("reserve: %s", error)
                return Status.FULL
            except FAULTS as error:
                return self._session.down("reserve", error)
            if isinstance(made, Status):
                return made
            handle, extents = made
            self._writes.add(handle, extents)
            return handle

    def write(self, handle: WriteHandle, offset: int, src_address: int, size_bytes: int) -> Status:
        check_range(handle.size_bytes, offset, src_address, size_bytes)
        with self._session.call():
            extents = self._writes.begin(handle)
            if extents is None:
                return Status.MISSING
            try:
                self._files.arena.write(extents, offset, src_address, size_bytes)
            finally:
                if self._writes.end(handle, offset, size_bytes):
                    self._session.give_up([handle.generation])
            return Status.OK

    def publish(self, handle: WriteHandle) -> Status:
        with self._session.call():
            try:
                if self._writes.finish(handle) is Status.MISSING:
                    return Status.MISSING
            except StoreError:
                self.abandon(handle)
                raise
            try:
                with self._session.write("publish an object") as changes:
                    return self._ledger.published(changes, handle, now_us=self._session.now_us())
            except IndexFull as error:
                logger.warning("publish: %s", error)
                self._session.give_up([handle.generation])
                return Status.FULL
            except FAULTS as error:
                self._session.give_up([handle.generation])
                return self._session.down("publish", error)

    def abandon(self, handle: WriteHandle) -> None:
        with self._session.call():
            if self._writes.abandon(handle.generation):
                self._session.give_up([handle.generation])

    def remove(self, keys: Sequence[StoreKey], *, force: bool = False) -> list[Status]:
        with self._session.call():
            try:
                now_us, is_alive = self._session.now_us(), Liveness()
                with self._session.write("remove objects") as changes:
                    return [
                        ledger.removed(changes, key, force=force, now_us=now_us, is_alive=is_alive)
                        for key in keys
                    ]
            except FAULTS as error:
                return [self._session.down("remove", error)] * len(keys)

    def clear(self, *, force: bool = False) -> int:
        """As `Store.clear`; raises `StoreError` or `DeadlineExceeded` when the index does not answer."""
        with self._session.call():
            now_us, is_alive = self._session.now_us(), Liveness()
            with self._session.write("clear the store") as changes:
                self._ledger.sweep(changes, now_us=now_us, is_alive=is_alive)
                return ledger.cleared(changes, force=force, now_us=now_us, is_alive=is_alive)

    def statistics(self) -> StoreStatistics:
        """As `Store.statistics`; what other processes counted since their last write is not in yet."""
        with self._session.call(), self._session.read() as view:
            return summarise(view, self._files.parameters, self._session.unsaved(), self._session.now_us())

    def check_integrity(self) -> None:
        with self._session.call(), self._session.read() as view:
            parameters = self._files.parameters
            check_index(
                view,
                self._session.path,
                capacity_bytes=parameters.size_bytes,
                spill_bytes=parameters.spill_size_bytes,
            )

    def prefault(self) -> None:
        """Map all of the memory now, about a second a GiB, so that the first copies run at full speed."""
        with self._session.call():
            self._files.arena.prefault()

    def close(self) -> None:
        self._session.close(self._writes.abandon_all)

    def _copied(self, record: ObjectRecord, lease: ReadLease, ranges: Sequence[ByteRange]) -> bool:
        """Copy the ranges; False when a spilled object fails its checksum."""
        if record.place is Place.ARENA:
            for item in ranges:
                self._files.arena.read(record.extents, item.offset, item.dst_address, item.size_bytes)
            return True
        spill = self._files.spill
        assert spill is not None, "objects are spilled only where there is a spill file"
        if all(spill.read(record, item.offset, item.dst_address, item.size_bytes) for item in ranges):
            return True
        self._drop_corrupt(lease)
        return False

    def _drop_corrupt(self, lease: ReadLease) -> None:
        with self._session.write("drop a corrupt object") as changes:
            if ledger.dropped_as_corrupt(changes, lease):
                logger.warning("a spilled object failed its checksum and was dropped: %s", lease.key)

    def _check_size(self, size_bytes: int) -> None:
        if size_bytes <= 0:
            raise ValueError(f"an object has at least one byte, not {size_bytes}")
        capacity_bytes = self._files.parameters.size_bytes
        if size_bytes > capacity_bytes:
            raise ConfigurationError(
                f"an object of {size_bytes} bytes can never fit into store_size_GB, which gives "
                f"{capacity_bytes} bytes. Fix: raise store_size_GB."
            )


def _ttl_us(ttl_s: float) -> int:
    if not ttl_s > 0:
        raise ValueError(f"a lease of {ttl_s} s is none")
    return to_us(ttl_s)
