"""The local store against a dict that forgets nothing: every answer is explained, every byte is right."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from kvstrata.store.base import ReadLease, Status, WriteHandle
from kvstrata.store.local import LocalStore
from kvstrata.store.testing import ManualClock, key, pattern, read_bytes, write_bytes

SHM = Path("/dev/shm")
GRANULE = 4096
CAPACITY_BYTES = 16 * GRANULE
SPILL_BYTES = 8 * GRANULE
NUMBERS = st.integers(0, 7)
SIZES = st.integers(1, 9 * GRANULE)


class StoreMachine(RuleBasedStateMachine):
    """Oracle: `published` is every object that may be there; eviction may take from it what is not leased."""

    handles = Bundle("handles")
    leases = Bundle("leases")
    spill_bytes = 0

    def __init__(self) -> None:
        super().__init__()
        self.path = Path(tempfile.mkdtemp(prefix="kvstrata-test-", dir=SHM if SHM.is_dir() else None))
        self.clock = ManualClock()
        self.store = self.open()
        self.published: dict[int, tuple[int, bytes]] = {}  # number -> (version, contents)
        self.live: dict[int, tuple[int, int, float]] = {}  # lease id -> (number, version, expires)
        self.reserved: dict[int, int] = {}  # open handle's generation -> held bytes
        self.versions = 0

    def open(self) -> LocalStore:
        return LocalStore.open(
            self.path / "store",
            size_bytes=CAPACITY_BYTES,
            spill_path=self.path / "spill" if self.spill_bytes else None,
            spill_size_bytes=self.spill_bytes,
            clock=self.clock,
        )

    def teardown(self) -> None:
        self.store.close()
        shutil.rmtree(self.path)

    def is_leased(self, number: int) -> bool:
        version = self.published[number][0]
        return any(
            (leased, at) == (number, version) and expires > self.clock.now_s
            for leased, at, expires in self.live.values()
        )

    def leased_bytes(self) -> int:
        return sum(
            -(-len(data) // GRANULE) * GRANULE
            for number, (_, data) in self.published.items()
            if self.is_leased(number)
        )

    def forget_evicted(self) -> None:
        """Only what nobody leases may have gone."""
        for number in list(self.published):
            if self.store.contains([key(number)]) == [Status.MISSING]:
                assert not self.is_leased(number), f"leased object {number} was evicted"
                del self.published[number]

    @rule(target=handles, number=NUMBERS, size=SIZES)
    def reserve(self, number: int, size: int) -> tuple[int, WriteHandle] | None:
        answer = self.store.reserve(key(number), size, f"layout {size}")
        held = -(-size // GRANULE) * GRANULE
        if answer is Status.EXISTS:
            assert number in self.published
        elif answer is Status.FULL:
            room = CAPACITY_BYTES - sum(self.reserved.values())
            assert held > room - self.leased_bytes(), "FULL although eviction could have made room"
        else:
            assert isinstance(answer, WriteHandle)
            assert number not in self.published
            self.reserved[answer.generation] = held
            self.forget_evicted()
            return number, answer
        return None

    @rule(item=consumes(handles), cut=st.floats(0, 1), ending=st.sampled_from(["publish", "abandon"]))
    def end(self, item: tuple[int, WriteHandle] | None, cut: float, ending: str) -> None:
        if item is None:
            return
        number, handle = item
        if handle.generation not in self.reserved:  # the store was closed since
            assert write_bytes(self.store, handle, 0, b"x") is Status.MISSING
            assert self.store.publish(handle) is Status.MISSING
            return
        self.versions += 1
        data = pattern(self.versions, handle.size_bytes)
        middle = int(cut * len(data))
        assert write_bytes(self.store, handle, middle, data[middle:]) is Status.OK
        assert write_bytes(self.store, handle, 0, data[:middle]) is Status.OK
        del self.reserved[handle.generation]
        if ending == "abandon":
            self.store.abandon(handle)
            return
        expected = Status.EXISTS if number in self.published else Status.OK
        assert self.store.publish(handle) is expected
        if expected is Status.OK:
            self.published[number] = (self.versions, data)

    @rule(target=leases, number=NUMBERS, ttl=st.sampled_from([1.0, 5.0, 1000.0]))
    def acquire(self, number: int, ttl: float) -> ReadLease | None:
        (answer,) = self.store.acquire([key(number)], ttl_s=ttl)
        if number not in self.published:
            assert answer is Status.MISSING
            return None
        assert isinstance(answer, ReadLease)
        version, data = self.published[number]
        assert (answer.size_bytes, answer.layout) == (len(data), f"layout {len(data)}")
        self.live[answer.lease_id] = (number, version, self.clock.now_s + ttl)
        return answer

    @rule(lease=leases, start=st.floats(0, 1), stop=st.floats(0, 1))
    def read(self, lease: ReadLease | None, start: float, stop: float) -> None:
        if lease is None:
            return
        low, high = sorted((int(start * lease.size_bytes), int(stop * lease.size_bytes)))
        answer = read_bytes(self.store, lease, low, high - low)
        held = self.live.get(lease.lease_id)
        if held is None or held[2] <= self.clock.now_s:
            assert answer is Status.MISSING
            return
        number, version, _ = held
        assert self.published[number][0] == version
        assert answer == self.published[number][1][low:high]

    @rule(lease=leases)
    def renew(self, lease: ReadLease | None) -> None:
        if lease is None:
            return
        (answer,) = self.store.renew([lease], ttl_s=50.0)
        held = self.live.get(lease.lease_id)
        if held is None or held[2] <= self.clock.now_s:
            assert answer is Status.MISSING
        else:
            assert isinstance(answer, ReadLease)
            self.live[lease.lease_id] = (held[0], held[1], self.clock.now_s + 50.0)

    @rule(lease=consumes(leases))
    def release(self, lease: ReadLease | None) -> None:
        if lease is not None:
            self.store.release([lease])
            self.live.pop(lease.lease_id, None)

    @rule(number=NUMBERS, force=st.booleans())
    def remove(self, number: int, force: bool) -> None:
        (answer,) = self.store.remove([key(number)], force=force)
        if number not in self.published:
            assert answer is Status.MISSING
        elif self.is_leased(number) and not force:
            assert answer is Status.LEASED
        else:
            assert answer is Status.OK
            self.drop(number)

    @rule(force=st.booleans())
    def clear(self, force: bool) -> None:
        going = [number for number in self.published if force or not self.is_leased(number)]
        assert self.store.clear(force=force) == len(going)
        for number in going:
            self.drop(number)

    def drop(self, number: int) -> None:
        del self.published[number]
        for lease_id in [name for name, held in self.live.items() if held[0] == number]:
            del self.live[lease_id]

    @rule(seconds=st.sampled_from([0.5, 2.0, 20.0]))
    def wait(self, seconds: float) -> None:
        self.clock.now_s += seconds

    @rule()
    def reopen(self) -> None:
        """Close with handles open: they are abandoned, everything published stays."""
        self.store.close()
        self.reserved.clear()
        self.store = self.open()

    @invariant()
    def every_byte_has_one_owner(self) -> None:
        self.store.check_integrity()
        statistics = self.store.statistics()
        assert statistics.reserved_bytes == sum(self.reserved.values())
        assert statistics.objects == len(self.published)


class SpillingStoreMachine(StoreMachine):
    spill_bytes = SPILL_BYTES


budget = settings(
    max_examples=40,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestStore = StoreMachine.TestCase
TestStore.settings = budget
TestSpillingStore = SpillingStoreMachine.TestCase
TestSpillingStore.settings = budget
