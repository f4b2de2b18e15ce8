"""What every store does, whatever is behind it. One suite for all; a new backend adds a row to STORES."""

from __future__ import annotations

import ctypes
import os
import pickle
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from store_pools import POOL_BYTES, Pool, eventually

from kvstrata.errors import ConfigurationError, StoreError
from kvstrata.store.base import ByteRange, ReadLease, Status, Store, StoreKey, WriteHandle
from kvstrata.store.faulty import FaultyStore
from kvstrata.store.local import LocalStore
from kvstrata.store.testing import ManualClock, get_bytes, key, pattern, put_bytes, read_bytes, write_bytes

MIB = 1 << 20
LOCAL_BYTES = 4 * MIB


@dataclass(frozen=True, kw_only=True)
class Case:
    """One way to have a store. `open` may be called again for another one on the same bytes."""

    open: Callable[[], Store]
    capacity_bytes: int
    is_pool: bool = False  # runs in servers of its own, which also have their own clock


Make = Callable[[pytest.FixtureRequest, Path, ManualClock], Case]


def local(request: pytest.FixtureRequest, path: Path, clock: ManualClock) -> Case:
    def opened() -> Store:
        return LocalStore.open(path / "store", size_bytes=LOCAL_BYTES, clock=clock)

    return Case(open=opened, capacity_bytes=LOCAL_BYTES)


def local_with_spill(request: pytest.FixtureRequest, path: Path, clock: ManualClock) -> Case:
    def opened() -> Store:
        return LocalStore.open(
            path / "store",
            size_bytes=LOCAL_BYTES,
            spill_path=path / "spill",
            spill_size_bytes=2 * MIB,
            clock=clock,
        )

    return Case(open=opened, capacity_bytes=LOCAL_BYTES)


def faulty_local(request: pytest.FixtureRequest, path: Path, clock: ManualClock) -> Case:
    inner = local(request, path, clock)
    return Case(open=lambda: FaultyStore(inner.open()), capacity_bytes=LOCAL_BYTES)


def mooncake_shared_memory(request: pytest.FixtureRequest, path: Path, clock: ManualClock) -> Case:
    return _pool_case(request, clock, "mooncake", protocol="shm")


def mooncake_tcp(request: pytest.FixtureRequest, path: Path, clock: ManualClock) -> Case:
    return _pool_case(request, clock, "mooncake", protocol="tcp")


def memcache(request: pytest.FixtureRequest, path: Path, clock: ManualClock) -> Case:
    return _pool_case(request, clock, "memcache", protocol=None)


def _pool_case(
    request: pytest.FixtureRequest, clock: ManualClock, backend: str, *, protocol: str | None
) -> Case:
    pool: Pool = request.getfixturevalue(f"{backend}_pool")
    pool.empty()
    return Case(
        open=lambda: pool.open(clock=clock, protocol=protocol), capacity_bytes=POOL_BYTES, is_pool=True
    )


LOCALS: tuple[Make, ...] = (local, local_with_spill, faulty_local)
STORES: tuple[Make, ...] = (*LOCALS, mooncake_shared_memory, mooncake_tcp, memcache)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture(params=STORES, ids=lambda make: make.__name__)
def case(request: pytest.FixtureRequest, tmp_path: Path, clock: ManualClock) -> Case:
    return request.param(request, tmp_path, clock)


@pytest.fixture
def store(case: Case) -> Iterator[Store]:
    made = case.open()
    yield made
    made.check_integrity()
    made.close()


def acquire(store: Store, name: StoreKey, *, ttl_s: float = 60.0) -> ReadLease:
    (lease,) = store.acquire([name], ttl_s=ttl_s)
    assert isinstance(lease, ReadLease)
    return lease


def reserve(store: Store, name: StoreKey, size_bytes: int) -> WriteHandle:
    handle = store.reserve(name, size_bytes, "layout")
    assert isinstance(handle, WriteHandle)
    return handle


def test_an_object_comes_back_as_it_was_written(store: Store) -> None:
    data = pattern(1, 100_001)
    assert put_bytes(store, key(1), data, layout="digest") is Status.OK
    lease = acquire(store, key(1))
    assert (lease.key, lease.size_bytes, lease.layout) == (key(1), len(data), "digest")
    assert read_bytes(store, lease) == data


def test_ranges_are_scattered_into_their_addresses(store: Store) -> None:
    data = pattern(2, 200_000)
    put_bytes(store, key(2), data)
    target = ctypes.create_string_buffer(b"\xee" * 300_000, 300_000)
    base = ctypes.addressof(target)
    ranges = [
        ByteRange(offset=150_000, dst_address=base, size_bytes=50_000),
        ByteRange(offset=1, dst_address=base + 100_000, size_bytes=65_537),
        ByteRange(offset=7, dst_address=base + 200_000, size_bytes=0),
    ]
    assert store.read(acquire(store, key(2)), ranges) is Status.OK
    assert target.raw[:50_000] == data[150_000:]
    assert target.raw[100_000:165_537] == data[1:65_538]
    untouched = target.raw[50_000:100_000] + target.raw[165_537:]
    assert untouched == b"\xee" * len(untouched)


def test_read_many_answers_for_each_object(store: Store) -> None:
    for number in (1, 2):
        put_bytes(store, key(number), pattern(number, 10_000))
    kept, lost = acquire(store, key(1)), acquire(store, key(2))
    store.remove([key(2)], force=True)
    target = ctypes.create_string_buffer(20_000)
    reads = [
        (lease, [ByteRange(offset=0, dst_address=ctypes.addressof(target) + at, size_bytes=10_000)])
        for at, lease in ((0, lost), (10_000, kept))
    ]
    assert store.read_many(reads) == [Status.MISSING, Status.OK]
    assert target.raw[10_000:] == pattern(1, 10_000)
    assert store.read_many([]) == []


def test_nothing_is_visible_before_publish(store: Store) -> None:
    handle = reserve(store, key(1), 5000)
    write_bytes(store, handle, 0, pattern(1, 5000))
    assert store.contains([key(1)]) == [Status.MISSING]
    assert store.acquire([key(1)], ttl_s=1) == [Status.MISSING]
    assert store.publish(handle) is Status.OK
    assert store.contains([key(1)]) == [Status.OK]


def test_the_first_to_publish_wins(store: Store) -> None:
    first, second = reserve(store, key(1), 5000), reserve(store, key(1), 5000)
    write_bytes(store, first, 0, pattern(1, 5000))
    write_bytes(store, second, 0, pattern(2, 5000))
    assert store.publish(second) is Status.OK
    assert store.publish(first) is Status.EXISTS
    assert get_bytes(store, key(1)) == pattern(2, 5000)
    assert store.reserve(key(1), 5000, "layout") is Status.EXISTS
    assert store.statistics().reserved_bytes == 0


@pytest.mark.parametrize("end", ["publish", "abandon"])
def test_a_handle_ends_once(store: Store, end: str) -> None:
    handle = reserve(store, key(1), 100)
    write_bytes(store, handle, 0, bytes(100))
    getattr(store, end)(handle)
    assert write_bytes(store, handle, 0, b"x" * 100) is Status.MISSING
    assert store.publish(handle) is Status.MISSING
    store.abandon(handle)
    expected = bytes(100) if end == "publish" else Status.MISSING
    assert get_bytes(store, key(1)) == expected
    assert store.statistics().reserved_bytes == 0


def test_an_object_with_a_hole_is_not_published(store: Store) -> None:
    handle = reserve(store, key(1), 3000)
    write_bytes(store, handle, 0, bytes(1000))
    write_bytes(store, handle, 1001, bytes(1999))
    with pytest.raises(StoreError, match="never written"):
        store.publish(handle)
    assert store.contains([key(1)]) == [Status.MISSING]
    assert store.statistics().reserved_bytes == 0


def test_writes_in_any_order_from_any_thread_make_one_object(store: Store) -> None:
    data, piece = pattern(9, 64_000), 1000
    handle = reserve(store, key(9), len(data))

    answers: list[Status] = []

    def write(remainder: int) -> None:
        for at in reversed(range(remainder * piece, len(data), 4 * piece)):
            answers.append(write_bytes(store, handle, at, data[at : at + piece]))

    threads = [threading.Thread(target=write, args=(remainder,)) for remainder in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert answers == [Status.OK] * 64
    assert store.publish(handle) is Status.OK
    assert get_bytes(store, key(9)) == data


@pytest.mark.parametrize(
    ("offset", "size_bytes", "shift"), [(-1, 10, 0), (0, 101, 0), (100, 1, 0), (0, -1, 0), (0, 10, None)]
)
def test_ranges_outside_the_object_are_refused(
    store: Store, offset: int, size_bytes: int, shift: int | None
) -> None:
    memory = ctypes.create_string_buffer(b"\xee" * 200, 200)
    address = 0 if shift is None else ctypes.addressof(memory)
    handle = reserve(store, key(1), 100)
    with pytest.raises(ValueError, match=r"leaves the object|not memory"):
        store.write(handle, offset, address, size_bytes)
    write_bytes(store, handle, 0, bytes(100))
    store.publish(handle)
    with pytest.raises(ValueError, match=r"leaves the object|not memory"):
        store.read(
            acquire(store, key(1)),
            [ByteRange(offset=offset, dst_address=address, size_bytes=size_bytes)],
        )
    assert memory.raw == b"\xee" * 200


def test_sizes_and_times_that_make_no_sense_are_refused(store: Store, case: Case) -> None:
    with pytest.raises(ValueError, match="at least one byte"):
        store.reserve(key(1), 0, "layout")
    with pytest.raises(ConfigurationError, match="store_size_GB"):
        store.reserve(key(1), case.capacity_bytes + 1, "layout")
    with pytest.raises(ValueError, match="lease"):
        store.acquire([key(1)], ttl_s=0)


VARIANTS = [
    StoreKey(namespace=namespace, rank=rank, block_hash=block_hash)
    for namespace, rank, block_hash in [
        ("m", "tp0", b"h"),
        ("m2", "tp0", b"h"),
        ("m", "tp1", b"h"),
        ("m", "tp0", b"i"),
        ("mt", "p0", b"h"),
        ("", "mtp0", b"h"),
        ("m", "tp", b"0h"),
        ("m", "tp0h", b""),
        ("m\0", "tp0", b"h"),
        ("m", "\0tp0", b"h"),
        ("m" * 5000, "tp0", b"h"),
    ]
]


def test_every_field_of_a_key_counts(store: Store) -> None:
    assert len({name.encode() for name in VARIANTS}) == len(VARIANTS)
    for number, name in enumerate(VARIANTS):
        assert put_bytes(store, name, pattern(number, 300)) is Status.OK
    assert [get_bytes(store, name) for name in VARIANTS] == [
        pattern(number, 300) for number in range(len(VARIANTS))
    ]


def put_when_there_is_room(store: Store, name: StoreKey, data: bytes) -> None:
    """Pools evict in the background: what is FULL now may fit in a moment."""
    answers: list[Status] = []

    def is_done() -> bool:
        answers.append(put_bytes(store, name, data))
        return answers[-1] is not Status.FULL

    eventually(is_done)
    # FULL may also mean: it was put, and was not found again. The next try then finds it.
    assert answers[-1] in ((Status.OK,) if len(answers) == 1 else (Status.OK, Status.EXISTS))


def test_a_lease_keeps_an_object_through_a_flood(store: Store, case: Case, clock: ManualClock) -> None:
    put_bytes(store, key(0), pattern(0, MIB))
    lease = acquire(store, key(0), ttl_s=1000)
    flood = range(1, 2 * case.capacity_bytes // MIB + 8)
    for number in flood:
        clock.now_s += 2
        put_when_there_is_room(store, key(number), pattern(number, MIB))
    assert read_bytes(store, lease) == pattern(0, MIB)
    kept = [number for number in flood if store.contains([key(number)]) == [Status.OK]]
    assert 0 < len(kept) < len(flood)
    for number in kept:  # one may go between the look and the read: then it is a miss
        assert get_bytes(store, key(number)) in (pattern(number, MIB), Status.MISSING)


def test_full_when_everything_is_leased_and_again_room_after_release(store: Store, case: Case) -> None:
    leases: list[ReadLease] = []
    while (put := put_bytes(store, key(len(leases)), pattern(len(leases), MIB))) is Status.OK:
        leases.append(acquire(store, key(len(leases))))
    assert put is Status.FULL
    assert case.capacity_bytes // MIB * 3 // 4 <= len(leases) <= case.capacity_bytes // MIB
    assert put_bytes(store, key(99), pattern(99, MIB)) is Status.FULL
    assert store.contains([key(99)]) == [Status.MISSING]
    assert [read_bytes(store, lease) for lease in leases] == [pattern(n, MIB) for n in range(len(leases))]
    assert store.statistics().refused_full == 2
    store.release(leases[2:3])
    put_when_there_is_room(store, key(99), pattern(99, MIB))
    assert get_bytes(store, key(99)) == pattern(99, MIB)
    kept = [lease for lease in leases if lease.key != key(2)]
    assert [read_bytes(store, lease) for lease in kept] == [
        pattern(n, MIB) for n in range(len(leases)) if n != 2
    ]


LOCAL_ONLY = pytest.mark.parametrize("case", LOCALS, indirect=True, ids=lambda make: make.__name__)
"""What only a store that owns its memory can promise: exact room, exact order."""


@LOCAL_ONLY
def test_full_when_everything_is_reserved(store: Store) -> None:
    handle = reserve(store, key(1), LOCAL_BYTES)
    assert store.reserve(key(2), 1, "layout") is Status.FULL
    store.abandon(handle)
    assert put_bytes(store, key(2), b"x") is Status.OK


@LOCAL_ONLY
def test_the_least_recently_acquired_object_goes_first(store: Store, clock: ManualClock) -> None:
    for number in range(4):
        clock.now_s += 10
        put_bytes(store, key(number), pattern(number, MIB))
    clock.now_s += 10
    store.release([acquire(store, key(0))])
    clock.now_s += 10
    while store.statistics().spilled_objects < store.statistics().spill_capacity_bytes // MIB:
        clock.now_s += 1
        put_bytes(store, key(int(clock.now_s)), bytes(MIB))
    put_bytes(store, key(5), pattern(5, MIB))
    evicted = [number for number in range(4) if store.contains([key(number)]) == [Status.MISSING]]
    assert evicted == [1]


def test_a_lease_ends_by_time(store: Store, clock: ManualClock) -> None:
    put_bytes(store, key(1), pattern(1, MIB))
    lease = acquire(store, key(1), ttl_s=5)
    clock.now_s += 4.9
    assert read_bytes(store, lease) == pattern(1, MIB)
    assert store.remove([key(1)]) == [Status.LEASED]
    clock.now_s += 0.2
    assert read_bytes(store, lease) is Status.MISSING
    assert store.renew([lease], ttl_s=5) == [Status.MISSING]
    eventually(lambda: store.remove([key(1)]) == [Status.OK])


def test_renew_holds_on(store: Store, clock: ManualClock) -> None:
    put_bytes(store, key(1), pattern(1, 1000))
    lease = acquire(store, key(1), ttl_s=5)
    clock.now_s += 4
    (again,) = store.renew([lease], ttl_s=5)
    assert isinstance(again, ReadLease)
    assert again.expires_at_s == pytest.approx(clock.now_s + 5)
    clock.now_s += 4
    assert read_bytes(store, lease) == pattern(1, 1000)  # another process still has the old copy
    assert store.remove([key(1)]) == [Status.LEASED]


def test_released_leases_read_nothing_and_hold_nothing(store: Store) -> None:
    put_bytes(store, key(1), bytes(10))
    first, second = acquire(store, key(1)), acquire(store, key(1))
    store.release([first])
    store.release([first])
    assert read_bytes(store, first) is Status.MISSING
    assert store.remove([key(1)]) == [Status.LEASED]
    assert read_bytes(store, second) == bytes(10)
    store.release([second])
    eventually(lambda: store.remove([key(1)]) == [Status.OK])


def test_remove_and_force(store: Store) -> None:
    put_bytes(store, key(1), pattern(1, 1000))
    lease = acquire(store, key(1))
    assert store.remove([key(1), key(2)]) == [Status.LEASED, Status.MISSING]
    assert store.remove([key(1)], force=True) == [Status.OK]
    assert read_bytes(store, lease) is Status.MISSING
    assert store.renew([lease], ttl_s=1) == [Status.MISSING]


def test_an_old_lease_never_reads_a_new_object(store: Store) -> None:
    put_bytes(store, key(1), pattern(1, 1000))
    old = acquire(store, key(1))
    store.remove([key(1)], force=True)
    put_bytes(store, key(1), pattern(2, 1000))
    new = acquire(store, key(1))
    assert new.generation != old.generation
    assert read_bytes(store, old) is Status.MISSING
    assert read_bytes(store, new) == pattern(2, 1000)
    assert store.statistics().stale_reads == 1


def test_clear_spares_what_is_leased_or_being_written(store: Store) -> None:
    for number in range(3):
        put_bytes(store, key(number), pattern(number, 1000))
    lease, handle = acquire(store, key(0)), reserve(store, key(7), 1000)
    dropped: list[int] = []  # a pool spares for a moment what was just looked at

    def is_done() -> bool:
        dropped.append(store.clear())
        return sum(dropped) >= 2

    eventually(is_done)
    assert sum(dropped) == 2
    assert read_bytes(store, lease) == pattern(0, 1000)
    assert store.clear(force=True) == 1
    assert store.statistics().objects == 0
    write_bytes(store, handle, 0, pattern(7, 1000))
    assert store.publish(handle) is Status.OK
    assert get_bytes(store, key(7)) == pattern(7, 1000)


def test_leases_travel_as_data(store: Store) -> None:
    put_bytes(store, key(1), pattern(1, 1000))
    lease = pickle.loads(pickle.dumps(acquire(store, key(1))))
    assert read_bytes(store, lease) == pattern(1, 1000)
    handle = reserve(store, key(2), 10)
    assert pickle.loads(pickle.dumps(handle)) == handle


def test_statistics_keep_their_invariants(store: Store, case: Case) -> None:
    for number in range(8):
        put_bytes(store, key(number), pattern(number, MIB - 5))
    kept = reserve(store, key(50), 4097)
    store.abandon(reserve(store, key(51), 10))
    store.acquire([key(7), key(98), key(99)], ttl_s=10)
    store.acquire([key(99)], ttl_s=10)
    seen = store.statistics()
    assert (
        seen.used_bytes + seen.reserved_bytes + seen.free_bytes == seen.capacity_bytes == case.capacity_bytes
    )
    assert seen.reserved_bytes == (4097 if case.is_pool else 8192)
    assert seen.spill_used_bytes + seen.spill_free_bytes == seen.spill_capacity_bytes
    assert (seen.hits, seen.misses) == (1, 3)
    ended = seen.published + seen.publish_lost + seen.abandoned + seen.reclaimed
    assert ended + seen.reservations == seen.granted == 10
    assert seen.published == seen.objects + seen.evictions - seen.spilled_objects
    assert seen.leases == 1
    store.abandon(kept)


@LOCAL_ONLY
def test_a_late_writer_is_quarantined_not_robbed(store: Store, clock: ManualClock) -> None:
    handle = reserve(store, key(1), LOCAL_BYTES)
    clock.now_s += 3600
    assert store.statistics().quarantined_bytes == LOCAL_BYTES
    assert store.reserve(key(2), 1, "layout") is Status.FULL
    data = os.urandom(LOCAL_BYTES)
    write_bytes(store, handle, 0, data)
    assert store.publish(handle) is Status.OK
    assert store.statistics().quarantined_bytes == 0
    assert get_bytes(store, key(1)) == data


def test_a_closed_store_says_so(case: Case) -> None:
    made = case.open()
    handle = reserve(made, key(1), 10)
    made.close()
    made.close()
    with pytest.raises(StoreError, match="closed"):
        made.contains([key(1)])
    with pytest.raises(StoreError, match="closed"):
        made.publish(handle)
    again = case.open()
    assert again.statistics().reserved_bytes == 0
    again.close()


def test_another_store_on_the_same_bytes_finds_what_was_put(store: Store, case: Case) -> None:
    """As another engine does, with a lease that came as data; its reads need nothing of the first one."""
    data = pattern(3, 700_001)
    handle = reserve(store, key(3), len(data))
    for at in range(0, len(data), 100_000):
        write_bytes(store, handle, at, data[at : at + 100_000])
    store.publish(handle)
    lease = pickle.loads(pickle.dumps(acquire(store, key(3))))
    other = case.open()
    assert read_bytes(other, lease, 99_999, 200_002) == data[99_999:300_001]
    assert get_bytes(other, key(3)) == data
    store.remove([key(3)], force=True)
    put_bytes(store, key(3), pattern(4, 700_001))
    assert read_bytes(other, lease) is Status.MISSING
    assert get_bytes(other, key(3)) == pattern(4, 700_001)
    other.close()
