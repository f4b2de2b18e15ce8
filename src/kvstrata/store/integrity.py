"""Every byte of the store has exactly one owner: checked record by record, on one consistent view."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from kvstrata.errors import StoreFormatError
from kvstrata.store.extents import GRANULE_BYTES, round_up
from kvstrata.store.index import IndexTransaction, how_to_clear
from kvstrata.store.records import Extent, ObjectRecord, Place
from kvstrata.store.spill import CHUNK_BYTES


def check_index(view: IndexTransaction, path: Path, *, capacity_bytes: int, spill_bytes: int) -> None:
    """Raise `StoreFormatError` naming the first thing that is wrong. Walks everything: not for a hot path."""
    for problem in _problems(view, capacity_bytes, spill_bytes):
        raise StoreFormatError(f"the store in {path} is inconsistent: {problem}. {how_to_clear(path)}")


def _problems(view: IndexTransaction, capacity_bytes: int, spill_bytes: int) -> Iterator[str]:
    counters = view.counters
    records = dict(view.objects())
    reservations = dict(view.reservations())
    arena = [(extent, "an object") for record in _in(Place.ARENA, records) for extent in record.extents]
    arena += [(extent, "a reservation") for item in reservations.values() for extent in item.extents]
    spill = [(extent, "an object") for record in _in(Place.SPILL, records) for extent in record.extents]
    yield from _gaps_and_overlaps("memory", arena, list(view.free(Place.ARENA)), capacity_bytes)
    yield from _gaps_and_overlaps("the spill file", spill, list(view.free(Place.SPILL)), spill_bytes)

    for name, counted, found in (
        ("free_bytes", counters.free_bytes, _total(view.free(Place.ARENA))),
        ("spill_free_bytes", counters.spill_free_bytes, _total(view.free(Place.SPILL))),
        ("reserved_bytes", counters.reserved_bytes, sum(r.held_bytes for r in reservations.values())),
        ("spilled_objects", counters.spilled_objects, sum(1 for _ in _in(Place.SPILL, records))),
        (
            "reservations ever granted",
            counters.published + counters.publish_lost + counters.abandoned + counters.reclaimed,
            counters.granted - len(reservations),
        ),
    ):
        if counted != found:
            yield f"{name} is counted as {counted} and found to be {found}"

    for place in Place:
        order = {key_digest for _, key_digest in view.oldest_first(place)}
        if order != {key for key, record in records.items() if record.place is place}:
            yield f"the eviction order of the {place.name.lower()} and its objects differ"
    generations = [record.generation for record in records.values()] + list(reservations)
    if len(set(generations)) != len(generations) or max(generations, default=0) >= counters.next_serial:
        yield "a generation is used twice"
    for record in records.values():
        if record.held_bytes != round_up(record.size_bytes):
            yield f"an object of {record.size_bytes} bytes holds {record.held_bytes}"
        chunks = -(-record.size_bytes // CHUNK_BYTES) if record.place is Place.SPILL else 0
        if len(record.checksums) != chunks:
            yield f"an object in the {record.place.name.lower()} has {len(record.checksums)} checksums"
    published = {record.generation for record in records.values()}
    for generation, lease_id, _ in view.leases():
        if generation not in published:
            yield f"lease {lease_id} is on generation {generation}, which no object has"


def _gaps_and_overlaps(
    where: str, held: list[tuple[Extent, str]], free: list[Extent], capacity_bytes: int
) -> Iterator[str]:
    position, previous = 0, "the start"
    for extent, owner in sorted(
        held + [(extent, "free space") for extent in free], key=lambda item: item[0].offset
    ):
        if extent.offset % GRANULE_BYTES or extent.size_bytes % GRANULE_BYTES or extent.size_bytes <= 0:
            yield f"{extent} of {owner} in {where} is not in whole granules"
        if extent.offset != position:
            verb = "overlaps" if extent.offset < position else "leaves a gap after"
            yield f"{extent} of {owner} in {where} {verb} {previous}, which ends at {position}"
        if owner == previous == "free space":
            yield f"{extent} of {where} is free like its neighbour, but not merged with it"
        position, previous = extent.end, owner
    if position != capacity_bytes:
        yield f"{where} has {capacity_bytes} bytes, but its owners end at {position}"


def _in(place: Place, records: dict[bytes, ObjectRecord]) -> Iterator[ObjectRecord]:
    return (record for record in records.values() if record.place is place)


def _total(extents: Iterable[Extent]) -> int:
    return sum(extent.size_bytes for extent in extents)
