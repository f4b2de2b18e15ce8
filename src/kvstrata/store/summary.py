"""What a store tells of itself."""

from __future__ import annotations

from kvstrata.memory.processes import Liveness
from kvstrata.store.base import StoreStatistics
from kvstrata.store.format import StoreParameters
from kvstrata.store.index import IndexTransaction
from kvstrata.store.session import Taken


def summarise(
    view: IndexTransaction, parameters: StoreParameters, unsaved: Taken, now_us: int
) -> StoreStatistics:
    """The statistics of one consistent view of the index plus what this process has not saved."""
    counters, is_alive = view.counters, Liveness()
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
        misses=counters.misses + unsaved.misses,
        stale_reads=counters.stale_reads + unsaved.stale_reads,
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
