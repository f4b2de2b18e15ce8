"""Making room: what may be taken back, from whom, and in which order.

| thing | comes back when |
|---|---|
| object | it is the least recently used one that nobody leases |
| lease | it expired, or its holder died |
| reservation | its writer published, abandoned, or died |

A reservation never comes back by time alone: a late writer may still be writing (M3).
"""

from __future__ import annotations

import logging
from dataclasses import replace

from kvstrata.memory.processes import Liveness
from kvstrata.store.arena import Arena
from kvstrata.store.index import IndexTransaction
from kvstrata.store.records import Extent, ObjectRecord, Place, Reservation
from kvstrata.store.spill import SpillFile

logger = logging.getLogger(__name__)


class Evictor:
    """Takes room back inside the caller's transaction. Holds nothing of its own but the two files."""

    def __init__(self, arena: Arena, spill: SpillFile | None) -> None:
        self._arena = arena
        self._spill = spill

    def make_room(
        self, changes: IndexTransaction, size_bytes: int, *, now_us: int, is_alive: Liveness
    ) -> bool:
        """Free `size_bytes` (whole granules) of memory; False, evicting nothing, when that cannot be done."""
        if changes.counters.free_bytes >= size_bytes:
            return True
        self.reclaim_dead(changes, is_alive)
        missing_bytes = size_bytes - changes.counters.free_bytes
        victims = _victims(changes, Place.ARENA, missing_bytes, now_us=now_us, is_alive=is_alive)
        if victims is None:
            return False
        for key_digest, record in victims:
            self._evict(changes, key_digest, record, now_us=now_us, is_alive=is_alive)
        return True

    def reclaim_dead(self, changes: IndexTransaction, is_alive: Liveness) -> None:
        """Free the reservations of writers that died; their bytes were never visible."""
        dead = [item for item in changes.reservations() if not is_alive(item[1].holder)]
        for generation, reservation in dead:
            free_reservation(changes, generation, reservation)
            changes.counters.reclaimed += 1

    def _evict(
        self,
        changes: IndexTransaction,
        key_digest: bytes,
        record: ObjectRecord,
        *,
        now_us: int,
        is_alive: Liveness,
    ) -> None:
        spilled = self._spilled(changes, record, now_us=now_us, is_alive=is_alive)
        drop_object(changes, key_digest, record)
        changes.counters.evictions += 1
        if spilled is not None:
            changes.put(key_digest, spilled)
            changes.counters.spilled_objects += 1

    def _spilled(
        self, changes: IndexTransaction, record: ObjectRecord, *, now_us: int, is_alive: Liveness
    ) -> ObjectRecord | None:
        """The record of the object's copy in the spill file; None when it has to go altogether."""
        if self._spill is None:
            return None
        missing_bytes = record.held_bytes - changes.counters.spill_free_bytes
        victims = _victims(changes, Place.SPILL, missing_bytes, now_us=now_us, is_alive=is_alive)
        if victims is None:
            return None
        for victim_digest, victim in victims:
            drop_object(changes, victim_digest, victim)
            changes.counters.spill_evictions += 1
        extents = allocate(changes, Place.SPILL, record.held_bytes)
        try:
            checksums = self._spill.write(extents, self._arena, record.extents, record.size_bytes)
        except OSError as error:
            logger.warning("an evicted object was dropped: the spill file cannot be written: %s", error)
            give_back(changes, Place.SPILL, extents)
            return None
        return replace(
            record,
            generation=changes.new_serial(),
            place=Place.SPILL,
            extents=extents,
            checksums=checksums,
        )


def is_leased(changes: IndexTransaction, generation: int, *, now_us: int, is_alive: Liveness) -> bool:
    """Whether anybody may still read this copy; forgets the leases that ended."""
    leased = False
    for lease_id, lease in changes.leases_of(generation):
        if lease.expires_us > now_us and is_alive(lease.holder):
            leased = True
        else:
            changes.delete_lease(generation, lease_id)
    return leased


def drop_object(changes: IndexTransaction, key_digest: bytes, record: ObjectRecord) -> None:
    """Forget an object, with its leases, and free its room. Its readers find the generation gone."""
    for lease_id, _ in changes.leases_of(record.generation):
        changes.delete_lease(record.generation, lease_id)
    changes.take_out(key_digest, record)
    give_back(changes, record.place, record.extents)
    if record.place is Place.SPILL:
        changes.counters.spilled_objects -= 1


def free_reservation(changes: IndexTransaction, generation: int, reservation: Reservation) -> None:
    """Forget a reservation and free its room. The caller knows that its writer has stopped."""
    changes.delete_reservation(generation)
    changes.counters.reserved_bytes -= reservation.held_bytes
    give_back(changes, Place.ARENA, reservation.extents)


def allocate(changes: IndexTransaction, place: Place, size_bytes: int) -> tuple[Extent, ...]:
    """Take free room that is known to be there; `size_bytes` in whole granules."""
    extents = changes.free(place).allocate(size_bytes)
    _add_free(changes, place, -size_bytes)
    return extents


def give_back(changes: IndexTransaction, place: Place, extents: tuple[Extent, ...]) -> None:
    changes.free(place).give_back(extents)
    _add_free(changes, place, sum(extent.size_bytes for extent in extents))


def _add_free(changes: IndexTransaction, place: Place, size_bytes: int) -> None:
    if place is Place.ARENA:
        changes.counters.free_bytes += size_bytes
    else:
        changes.counters.spill_free_bytes += size_bytes


def _victims(
    changes: IndexTransaction, place: Place, missing_bytes: int, *, now_us: int, is_alive: Liveness
) -> list[tuple[bytes, ObjectRecord]] | None:
    """The oldest unleased objects that hold `missing_bytes` together; None when all of them hold less."""
    victims: list[tuple[bytes, ObjectRecord]] = []
    if missing_bytes <= 0:
        return victims
    for _, key_digest in changes.oldest_first(place):
        record = changes.find_by_digest(key_digest)
        if is_leased(changes, record.generation, now_us=now_us, is_alive=is_alive):
            continue
        victims.append((key_digest, record))
        missing_bytes -= record.held_bytes
        if missing_bytes <= 0:
            return victims
    return None
