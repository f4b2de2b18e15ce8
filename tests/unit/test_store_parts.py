"""The parts of the local store that a whole-store test cannot corner: races, corruption, the free map."""

from __future__ import annotations

import itertools
import os
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import lmdb
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstrata.errors import ConfigurationError, StoreError, StoreFormatError
from kvstrata.store.base import ReadLease, Status, WriteHandle
from kvstrata.store.extents import GRANULE_BYTES, FreeMap, round_up, segments
from kvstrata.store.faulty import Call, FaultyStore, LeaseFault, on
from kvstrata.store.integrity import _problems
from kvstrata.store.local import LocalStore
from kvstrata.store.processes import Holder, current_holder, may_be_alive
from kvstrata.store.records import Counters, Extent, Place
from kvstrata.store.testing import (
    ManualClock,
    get_bytes,
    key,
    pattern,
    put_bytes,
    read_bytes,
    write_bytes,
)

MIB = 1 << 20


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def store(tmp_path: Path, clock: ManualClock) -> Iterator[LocalStore]:
    made = LocalStore.open(tmp_path / "store", size_bytes=2 * MIB, clock=clock)
    yield made
    made.close()


@pytest.fixture
def spilling(tmp_path: Path, clock: ManualClock) -> Iterator[LocalStore]:
    made = LocalStore.open(
        tmp_path / "store",
        size_bytes=MIB,
        spill_path=tmp_path / "spill",
        spill_size_bytes=2 * MIB,
        clock=clock,
    )
    yield made
    made.check_integrity()
    made.close()


def acquire(store: LocalStore | FaultyStore, number: int, ttl_s: float = 60.0) -> ReadLease:
    (lease,) = store.acquire([key(number)], ttl_s=ttl_s)
    assert isinstance(lease, ReadLease)
    return lease


# Losing the object in the middle of a read


@pytest.mark.parametrize("moment", ["before the copy", "after the copy"])
@pytest.mark.parametrize("loss", ["removed by force", "expired and evicted"])
def test_an_object_lost_while_it_is_copied_is_missing(
    store: LocalStore, clock: ManualClock, monkeypatch: pytest.MonkeyPatch, moment: str, loss: str
) -> None:
    put_bytes(store, key(1), pattern(1, 2 * MIB))
    lease = acquire(store, 1, ttl_s=10)
    arena, copy = store._files.arena, store._files.arena.read

    def lose() -> None:
        if loss == "removed by force":
            store.remove([key(1)], force=True)
        else:
            clock.now_s += 11
        assert put_bytes(store, key(2), pattern(2, 2 * MIB)) is Status.OK  # over the same memory

    def read(*arguments: object) -> None:
        monkeypatch.setattr(arena, "read", copy)
        if moment == "before the copy":
            lose()
        copy(*arguments)  # type: ignore[arg-type]
        if moment == "after the copy":
            lose()

    monkeypatch.setattr(arena, "read", read)
    assert read_bytes(store, lease) is Status.MISSING
    assert store.statistics().stale_reads == 1
    assert get_bytes(store, key(2)) == pattern(2, 2 * MIB)


def test_an_object_spilled_while_it_is_copied_is_missing(
    spilling: LocalStore, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The object is still there, but no longer where the copy takes its bytes from."""
    put_bytes(spilling, key(1), pattern(1, MIB))
    lease = acquire(spilling, 1, ttl_s=10)
    arena, copy = spilling._files.arena, spilling._files.arena.read

    def read(*arguments: object) -> None:
        clock.now_s += 11
        assert put_bytes(spilling, key(2), pattern(2, MIB)) is Status.OK
        copy(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(arena, "read", read)
    assert read_bytes(spilling, lease) is Status.MISSING
    monkeypatch.setattr(arena, "read", copy)
    assert get_bytes(spilling, key(1)) == pattern(1, MIB)


@pytest.mark.parametrize("ending", ["abandon", "publish"])
def test_room_given_up_under_a_write_comes_back_when_the_write_ends(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    handle = store.reserve(key(1), 2 * MIB, "layout")
    assert isinstance(handle, WriteHandle)
    arena, copy = store._files.arena, store._files.arena.write
    during: list[object] = []

    def write(*arguments: object) -> None:
        monkeypatch.setattr(arena, "write", copy)
        if ending == "abandon":
            store.abandon(handle)
        else:
            with pytest.raises(StoreError, match="1 writes are in progress"):
                store.publish(handle)
        during.append(store.reserve(key(2), 1, "layout"))
        during.append(store.publish(handle))
        during.append(write_bytes(store, handle, 0, b"y"))
        copy(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(arena, "write", write)
    write_bytes(store, handle, 0, b"x")
    assert during == [Status.FULL, Status.MISSING, Status.MISSING], "the room is taken until the write ends"
    assert store.statistics().reserved_bytes == 0
    assert put_bytes(store, key(2), b"x") is Status.OK


def test_close_during_a_copy_lets_the_copy_finish(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    put_bytes(store, key(1), pattern(1, MIB))
    lease = acquire(store, 1)
    arena, copy = store._files.arena, store._files.arena.read

    def read(*arguments: object) -> None:
        store.close()
        copy(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(arena, "read", read)
    assert read_bytes(store, lease) == pattern(1, MIB)
    with pytest.raises(StoreError, match="closed"):
        read_bytes(store, lease)


# Spill


def spill_file(tmp_path: Path) -> Path:
    (file,) = (tmp_path / "spill").iterdir()
    return file


def test_evicted_objects_come_back_from_disk(spilling: LocalStore) -> None:
    sizes = [300_000 + number for number in range(8)]
    for number, size in enumerate(sizes):
        assert put_bytes(spilling, key(number), pattern(number, size)) is Status.OK
    seen = spilling.statistics()
    assert (seen.spilled_objects, seen.spill_evictions, seen.objects) == (5, 0, 8)
    for number, size in enumerate(sizes):
        lease = acquire(spilling, number)
        assert read_bytes(spilling, lease) == pattern(number, size)
        assert read_bytes(spilling, lease, 65_000, 70_001) == pattern(number, size)[65_000:135_001]
        assert read_bytes(spilling, lease, size, 0) == b""


def test_a_full_spill_file_lets_its_oldest_go(spilling: LocalStore, clock: ManualClock) -> None:
    for number in range(5):
        clock.now_s += 2
        put_bytes(spilling, key(number), pattern(number, MIB))
    assert spilling.contains([key(number) for number in range(5)]) == [Status.MISSING] * 2 + [Status.OK] * 3
    assert spilling.statistics().spill_evictions == 2


def test_a_leased_spilled_object_stays(spilling: LocalStore, clock: ManualClock) -> None:
    put_bytes(spilling, key(0), pattern(0, MIB))
    put_bytes(spilling, key(1), pattern(1, MIB))
    lease = acquire(spilling, 0, ttl_s=1000)
    for number in range(2, 7):
        clock.now_s += 2
        put_bytes(spilling, key(number), pattern(number, MIB))
    assert read_bytes(spilling, lease) == pattern(0, MIB)


@pytest.mark.parametrize("damage", ["changed", "cut off"])
def test_corrupt_spill_is_missing_and_forgotten(spilling: LocalStore, tmp_path: Path, damage: str) -> None:
    put_bytes(spilling, key(0), pattern(0, MIB))
    put_bytes(spilling, key(1), pattern(1, MIB))
    lease = acquire(spilling, 0)
    if damage == "changed":
        with spill_file(tmp_path).open("r+b") as file:
            file.seek(4096 + 500_000)
            file.write(b"!")
    else:
        os.truncate(spill_file(tmp_path), 4096 + 500_000)
    assert read_bytes(spilling, lease, 0, 1000) == pattern(0, 1000), "the chunks before it are sound"
    assert read_bytes(spilling, lease, 499_000, 2000) is Status.MISSING
    assert spilling.contains([key(0)]) == [Status.MISSING]
    seen = spilling.statistics()
    assert (seen.spill_corrupt, seen.spill_used_bytes, seen.leases) == (1, 0, 0)


def test_a_spill_file_that_cannot_be_written_costs_objects_not_the_store(
    spilling: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object) -> int:
        raise OSError(5, "Input/output error")

    put_bytes(spilling, key(0), pattern(0, MIB))
    monkeypatch.setattr("kvstrata.store.spill.os.pwrite", fail)
    assert put_bytes(spilling, key(1), pattern(1, MIB)) is Status.OK
    assert spilling.contains([key(0), key(1)]) == [Status.MISSING, Status.OK]


def test_a_spill_file_of_the_users_is_left_alone(tmp_path: Path) -> None:
    options = {"spill_path": tmp_path / "spill", "spill_size_bytes": MIB}
    LocalStore.open(tmp_path / "store", size_bytes=MIB, **options).close()  # type: ignore[arg-type]
    file = spill_file(tmp_path)
    LocalStore.delete(tmp_path / "store")
    file.write_text("my notes")
    with pytest.raises(ConfigurationError, match="store_spill_path"):
        LocalStore.open(tmp_path / "store", size_bytes=MIB, **options)  # type: ignore[arg-type]
    assert file.read_text() == "my notes"


def test_a_spill_file_whose_store_is_gone_is_taken_over(tmp_path: Path) -> None:
    options = {"spill_path": tmp_path / "spill", "spill_size_bytes": MIB}
    for path in (tmp_path / "store", tmp_path / "store"):
        LocalStore.open(path, size_bytes=MIB, **options).close()  # type: ignore[arg-type]
        for file in path.rglob("*.*"):
            file.unlink()
        (path / "kvstrata-index").rmdir()
    assert spill_file(tmp_path).stat().st_size == 4096 + MIB


# The free map


@settings(max_examples=60, deadline=None)
@given(st.lists(st.one_of(st.integers(1, 9), st.integers(-20, -1)), max_size=40))
def test_the_free_map_hands_out_each_granule_once(steps: list[int]) -> None:
    """Positive: allocate so many granules; negative: give back that allocation, counted from the last."""
    capacity = 24
    free = set(range(capacity))
    taken: list[set[int]] = []
    with tempfile.TemporaryDirectory() as path:
        environment = lmdb.open(path, max_dbs=1, sync=False)
        database = environment.open_db(b"free")
        with environment.begin(write=True) as transaction:
            free_map = FreeMap(transaction, database)
            free_map.give_back([Extent(0, capacity * GRANULE_BYTES)])
            for step in steps:
                if step > 0 and step <= len(free):
                    extents = free_map.allocate(step * GRANULE_BYTES)
                    got = granules(extents)
                    assert len(got) == step
                    assert got <= free
                    free -= got
                    taken.append(got)
                elif step < 0 and -step <= len(taken):
                    back = taken.pop(step)
                    free_map.give_back([Extent(item * GRANULE_BYTES, GRANULE_BYTES) for item in sorted(back)])
                    free |= back
                left = list(free_map)
                assert granules(left) == free
                assert all(one.end < two.offset for one, two in itertools.pairwise(left))
            transaction.abort()
        environment.close()


def granules(extents: list[Extent] | tuple[Extent, ...]) -> set[int]:
    return {
        number
        for extent in extents
        for number in range(extent.offset // GRANULE_BYTES, extent.end // GRANULE_BYTES)
    }


def test_giving_back_twice_is_noticed(tmp_path: Path) -> None:
    environment = lmdb.open(str(tmp_path), max_dbs=1)
    database = environment.open_db(b"free")
    with environment.begin(write=True) as transaction:
        free_map = FreeMap(transaction, database)
        free_map.give_back([Extent(0, 8192)])
        for extent in (Extent(0, 4096), Extent(4096, 4096), Extent(4096, 8192)):
            with pytest.raises(AssertionError, match="freed twice"):
                free_map.give_back([extent])
    environment.close()


@given(st.lists(st.integers(1, 5), min_size=1, max_size=5), st.data())
def test_segments_are_the_bytes_of_the_object(lengths: list[int], data: st.DataObject) -> None:
    extents = [Extent(1000 * number, length) for number, length in enumerate(lengths)]
    addresses = [extent.offset + at for extent in extents for at in range(extent.size_bytes)]
    offset = data.draw(st.integers(0, len(addresses)))
    size = data.draw(st.integers(0, len(addresses) - offset))
    pieces = list(segments(extents, offset, size))
    assert [piece.offset + at for piece in pieces for at in range(piece.size_bytes)] == (
        addresses[offset : offset + size]
    )


def test_objects_in_pieces_read_whole(store: LocalStore) -> None:
    for number in range(8):
        put_bytes(store, key(number), bytes(MIB // 4))
    store.remove([key(number) for number in range(1, 8, 2)])
    assert put_bytes(store, key(99), pattern(99, MIB)) is Status.OK
    with store._files.index.read() as view:
        record = view.find(key(99))
    assert record is not None
    assert len(record.extents) == 4
    assert read_bytes(store, acquire(store, 99), 200_000, 700_000) == pattern(99, MIB)[200_000:900_000]


# check_integrity must be able to fail


def break_counter(store: LocalStore, name: str) -> None:
    with store._files.index.write("break it") as changes:
        setattr(changes.counters, name, getattr(changes.counters, name) + 4096)


def break_record(store: LocalStore, **changed: object) -> None:
    with store._files.index.write("break it") as changes:
        key_digest, record = next(iter(changes.objects()))
        changes.take_out(key_digest, record)
        changes.put(key_digest, replace(record, **changed))  # type: ignore[arg-type]


BREAKAGES = {
    "free_bytes is counted": lambda store: break_counter(store, "free_bytes"),
    "reserved_bytes is counted": lambda store: break_counter(store, "reserved_bytes"),
    "reservations ever granted": lambda store: break_counter(store, "abandoned"),
    "spilled_objects is counted": lambda store: break_counter(store, "spilled_objects"),
    "overlaps": lambda store: break_record(store, extents=(Extent(0, 8192),)),
    "gap": lambda store: break_record(store, extents=(Extent(0, 0),)),
    "whole granules": lambda store: break_record(store, extents=(Extent(0, 4000),)),
    "its owners end at": lambda store: break_record(store, extents=(Extent(4 * MIB, 4096),)),
    "generation is used twice": lambda store: break_record(store, generation=2),
    "which no object has": lambda store: break_record(store, generation=0),
    "object of 9000 bytes": lambda store: break_record(store, size_bytes=9000),
    "checksums": lambda store: break_record(store, checksums=(1,)),
}


@pytest.mark.parametrize("problem", BREAKAGES)
def test_check_integrity_finds(store: LocalStore, problem: str) -> None:
    put_bytes(store, key(1), bytes(1000))  # generation 1
    put_bytes(store, key(2), bytes(1000))  # generation 2
    with store._files.index.read() as view:
        assert {record.generation for _, record in view.objects()} == {1, 2}
    store.acquire([key(1), key(2)], ttl_s=10)
    store.check_integrity()
    if problem == "generation is used twice":
        with store._files.index.read() as view:
            _, first = next(iter(view.objects()))
        break_record(store, generation=3 - first.generation)
    else:
        BREAKAGES[problem](store)
    with store._files.index.read() as view:
        found = "\n".join(_problems(view, 2 * MIB, 0))
    assert problem in found
    with pytest.raises(StoreFormatError, match="inconsistent"):
        store.check_integrity()


def test_a_garbled_record_is_down_not_wrong(store: LocalStore) -> None:
    put_bytes(store, key(1), bytes(1000))
    lease = acquire(store, 1)
    with store._files.index.write("break it") as changes:
        key_digest, _ = next(iter(changes.objects()))
        changes._put("objects", key_digest, b"\xff" * 20)
    assert read_bytes(store, lease) is Status.BACKEND_DOWN
    assert store.acquire([key(1)], ttl_s=1) == [Status.BACKEND_DOWN]
    with pytest.raises(StoreFormatError, match="corrupt"):
        store.check_integrity()


# Processes


def test_who_is_alive() -> None:
    me = current_holder()
    assert may_be_alive(me)
    assert not may_be_alive(replace(me, start_ticks=me.start_ticks - 1)), "the id was used again"
    assert not may_be_alive(replace(me, pid=4_194_305)), "above Linux's highest id"
    assert may_be_alive(replace(me, pid=4_194_305, pid_namespace=1)), "nobody can tell from here"
    assert Holder.unpack(me.pack()) == me


def test_room_of_a_writer_in_another_container_is_never_taken(store: LocalStore) -> None:
    handle = store.reserve(key(1), 2 * MIB, "layout")
    assert isinstance(handle, WriteHandle)
    with store._files.index.write("pretend") as changes:
        reservation = changes.reservation(handle.generation)
        assert reservation is not None
        foreign = replace(reservation.holder, pid_namespace=1, pid=4_194_305)
        changes.put_reservation(handle.generation, replace(reservation, holder=foreign, deadline_us=0))
    assert store.reserve(key(2), 1, "layout") is Status.FULL
    assert store.statistics().quarantined_bytes == 2 * MIB


# Faults on order


def test_scripted_faults_strike_where_they_should(store: LocalStore) -> None:
    seen: list[Call] = []

    def script(call: Call) -> Status | LeaseFault | None:
        seen.append(call)
        return (
            {"acquire": Status.PEER_LOST, "contains": Status.BACKEND_DOWN}.get(call.method)
            if (call.key == key(2))
            else None
        )

    faulty = FaultyStore(store, script)
    for number in (1, 2, 3):
        put_bytes(faulty, key(number), pattern(number, 100))
    down = Status.BACKEND_DOWN
    assert faulty.contains([key(1), key(2), key(9), key(3)]) == [Status.OK, down, Status.MISSING, Status.OK]
    first, second, third = faulty.acquire([key(1), key(2), key(3)], ttl_s=9)
    assert isinstance(first, ReadLease)
    assert second is Status.PEER_LOST
    assert isinstance(third, ReadLease)
    assert [lease.key for lease in (first, third)] == [key(1), key(3)]
    assert [call.count for call in seen if call.method == "publish"] == [1, 2, 3]


@pytest.mark.parametrize("method", ["reserve", "write", "publish"])
@pytest.mark.parametrize("fault", [Status.FULL, Status.BACKEND_DOWN, Status.PEER_LOST])
def test_a_failed_put_leaves_nothing_behind(store: LocalStore, method: str, fault: Status) -> None:
    faulty = FaultyStore(store, on(method, 2, fault))
    assert put_bytes(faulty, key(1), b"x") is Status.OK
    assert put_bytes(faulty, key(2), b"x") is fault
    assert faulty.contains([key(1), key(2)]) == [Status.OK, Status.MISSING]
    assert faulty.statistics().reserved_bytes == 0
    assert put_bytes(faulty, key(2), b"x") is Status.OK


def test_a_lease_lost_on_order_is_missing(store: LocalStore) -> None:
    faulty = FaultyStore(store, on("read", 2, LeaseFault.LOST))
    put_bytes(faulty, key(1), pattern(1, 100))
    lease = acquire(faulty, 1)
    assert read_bytes(faulty, lease) == pattern(1, 100)
    assert read_bytes(faulty, lease) is Status.MISSING


# Records


def test_records_survive_packing() -> None:
    counters = Counters(next_serial=1 << 63, hits=7, spill_corrupt=9)
    assert Counters.unpack(counters.pack()) == counters
    assert round_up(1) == round_up(4096) == 4096
    assert Place(0) is Place.ARENA
