"""The parts of the local store that a whole-store test cannot corner: races, integrity, faults on order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from store_cases import MIB, acquire, spilling_store

from kvstrata.errors import StoreError, StoreFormatError
from kvstrata.memory.processes import Holder, current_holder, may_be_alive
from kvstrata.store.base import ReadLease, Status, WriteHandle
from kvstrata.store.extents import round_up
from kvstrata.store.faulty import Call, FaultyStore, LeaseFault, on
from kvstrata.store.integrity import _problems
from kvstrata.store.local import LocalStore
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
    with spilling_store(tmp_path, clock) as made:
        yield made


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
