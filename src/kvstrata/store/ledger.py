"""The steps of the local store's calls, each inside one transaction of the index.

| thing | owner | owning means |
|---|---|---|
| free extent | the free map | may be given to a writer |
| reserved extent | the writer's process | may write; nobody else touches it while that process may live |
| object's extents | the record | never written again; readers with a lease may copy |
| lease | the process that acquired it | the object stays where it is until expiry, release or its death |
"""

from __future__ import annotations

from dataclasses import replace

from kvstrata.memory.processes import Holder, Liveness
from kvstrata.store.base import ReadLease, Status, StoreKey, WriteHandle
from kvstrata.store.eviction import Evictor, allocate, drop_object, give_back, is_leased
from kvstrata.store.extents import round_up
from kvstrata.store.index import IndexTransaction, digest
from kvstrata.store.records import Extent, LeaseRecord, ObjectRecord, Place, Reservation

TOUCH_INTERVAL_US = 1_000_000
"""An object moves in the eviction order at most once in this time: a hot one costs no write a read."""


class Ledger:
    """Who owns what, on behalf of one process. Keeps nothing itself: all state is in the index."""

    def __init__(self, evictor: Evictor, holder: Holder, *, deadline_us: int) -> None:
        self._evictor = evictor
        self._holder = holder
        self._deadline_us = deadline_us

    def leased(
        self, changes: IndexTransaction, key: StoreKey, *, ttl_us: int, now_us: int
    ) -> ReadLease | Status:
        """Pin an object, or MISSING."""
        record = changes.find(key)
        if record is None:
            changes.counters.misses += 1
            return Status.MISSING
        changes.counters.hits += 1
        if now_us - record.touched_us >= TOUCH_INTERVAL_US:
            changes.take_out(digest(key), record)
            changes.put(digest(key), replace(record, touched_us=now_us))
        lease_id, expires_us = changes.new_serial(), now_us + ttl_us
        changes.put_lease(
            record.generation, lease_id, LeaseRecord(holder=self._holder, expires_us=expires_us)
        )
        return ReadLease(
            key=key,
            generation=record.generation,
            lease_id=lease_id,
            size_bytes=record.size_bytes,
            layout=record.layout,
            expires_at_s=expires_us / 1e6,
        )

    def reserved(
        self, changes: IndexTransaction, key: StoreKey, size_bytes: int, layout: str, *, now_us: int
    ) -> tuple[WriteHandle, tuple[Extent, ...]] | Status:
        """A handle and the extents behind it; EXISTS or FULL."""
        if changes.find(key) is not None:
            return Status.EXISTS
        held_bytes = round_up(size_bytes)
        if not self._evictor.make_room(changes, held_bytes, now_us=now_us, is_alive=Liveness()):
            changes.counters.refused_full += 1
            return Status.FULL
        reservation = Reservation(
            holder=self._holder,
            deadline_us=now_us + self._deadline_us,
            size_bytes=size_bytes,
            extents=allocate(changes, Place.ARENA, held_bytes),
        )
        handle = WriteHandle(
            key=key,
            generation=changes.new_serial(),
            size_bytes=size_bytes,
            layout=layout,
            deadline_at_s=reservation.deadline_us / 1e6,
        )
        changes.put_reservation(handle.generation, reservation)
        changes.counters.reserved_bytes += held_bytes
        changes.counters.granted += 1
        return handle, reservation.extents

    def published(self, changes: IndexTransaction, handle: WriteHandle, *, now_us: int) -> Status:
        """Turn a reservation into an object, or free it when another writer was first."""
        reservation = changes.reservation(handle.generation)
        assert reservation is not None, "the reservation of a live writer is never taken back"
        changes.delete_reservation(handle.generation)
        changes.counters.reserved_bytes -= reservation.held_bytes
        if changes.find(handle.key) is not None:
            give_back(changes, Place.ARENA, reservation.extents)
            changes.counters.publish_lost += 1
            return Status.EXISTS
        record = ObjectRecord(
            generation=handle.generation,
            place=Place.ARENA,
            size_bytes=handle.size_bytes,
            touched_us=now_us,
            extents=reservation.extents,
            layout=handle.layout,
            encoded_key=handle.key.encode(),
        )
        changes.put(digest(handle.key), record)
        changes.counters.published += 1
        return Status.OK

    def sweep(self, changes: IndexTransaction, *, now_us: int, is_alive: Liveness) -> None:
        """Free what dead writers left, and forget the leases that ended."""
        self._evictor.reclaim_dead(changes, is_alive)
        for generation in {generation for generation, _, _ in changes.leases()}:
            is_leased(changes, generation, now_us=now_us, is_alive=is_alive)


def leased_object(view: IndexTransaction, lease: ReadLease, *, now_us: int) -> ObjectRecord | None:
    """The object, if the lease is held and names the copy that is there now."""
    record = view.find(lease.key)
    held = view.lease(lease.generation, lease.lease_id)
    if record is None or record.generation != lease.generation or held is None:
        return None
    return record if held.expires_us > now_us else None


def renewed(changes: IndexTransaction, lease: ReadLease, *, ttl_us: int, now_us: int) -> ReadLease | Status:
    """Let a lease that is still held end later."""
    found = changes.lease(lease.generation, lease.lease_id)
    if found is None or found.expires_us <= now_us:
        return Status.MISSING
    changes.put_lease(lease.generation, lease.lease_id, replace(found, expires_us=now_us + ttl_us))
    return replace(lease, expires_at_s=(now_us + ttl_us) / 1e6)


def removed(
    changes: IndexTransaction, key: StoreKey, *, force: bool, now_us: int, is_alive: Liveness
) -> Status:
    """Drop one object."""
    record = changes.find(key)
    if record is None:
        return Status.MISSING
    if not force and is_leased(changes, record.generation, now_us=now_us, is_alive=is_alive):
        return Status.LEASED
    drop_object(changes, digest(key), record)
    return Status.OK


def cleared(changes: IndexTransaction, *, force: bool, now_us: int, is_alive: Liveness) -> int:
    """Drop all objects, with `force` the leased ones too; how many."""
    dropped = 0
    for key_digest, record in list(changes.objects()):
        if force or not is_leased(changes, record.generation, now_us=now_us, is_alive=is_alive):
            drop_object(changes, key_digest, record)
            dropped += 1
    return dropped


def dropped_as_corrupt(changes: IndexTransaction, lease: ReadLease) -> bool:
    """Drop the very copy that failed its checksum; False when it was only overwritten while it was read."""
    record = changes.find(lease.key)
    if record is None or record.generation != lease.generation:
        return False
    drop_object(changes, digest(lease.key), record)
    changes.counters.spill_corrupt += 1
    return True
