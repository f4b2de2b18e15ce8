"""The transport that fails on purpose does so as told; names and settings find the others."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from kvstrata.errors import ConfigurationError, DeadlineExceeded, TransferFailed
from kvstrata.memory.region import HostRegion
from kvstrata.remote.holds import HoldTable
from kvstrata.remote.transports.faulty import Call, FaultyTransport, ReadFault, Script, on, seeded
from kvstrata.remote.transports.registry import transport_for, transports_for, usable_transports
from kvstrata.remote.transports.shm import ShmTransport
from kvstrata.remote.transports.testing import CANARY, Memory, pattern, plan_of

SIZE = 4096
SECRET = b"of both sides"
LONG_S = 60.0


class Setting:
    def __init__(self) -> None:
        self.region = HostRegion.create(SIZE, "faulty-test", huge_pages=False)
        self.region.tensor().numpy()[:] = pattern(0, 0, SIZE, salt=1)
        self.holds = HoldTable()
        self.memory = Memory(SIZE)
        self.pauses: list[float] = []
        self.exporter = ShmTransport().export([self.region], self.holds, host="", secret=SECRET)

    def reader(self, script: Script, *, delay_s: float = 1.0):
        transport = FaultyTransport(
            ShmTransport(), script, delay_s=delay_s, pause=self.pauses.append, clock=lambda: 0.0
        )
        return transport.connect(
            self.exporter.ticket, [self.memory.destination], secret=SECRET, deadline_s=LONG_S
        )

    def read(self, reader, *, deadline_s: float = LONG_S) -> None:
        ranges = [(0, at, self.memory.address + at, 1024) for at in range(0, SIZE, 1024)]
        reader.read(plan_of(ranges), self.holds.grant(), deadline_s=deadline_s)

    def has_landed(self) -> bool:
        return np.array_equal(self.memory.bytes, pattern(0, 0, SIZE, salt=1))

    def close(self) -> None:
        self.exporter.close()
        self.holds.close()
        self.region.close()
        self.memory.check()


@pytest.fixture
def setting() -> Iterator[Setting]:
    setting = Setting()
    yield setting
    setting.close()


@pytest.mark.parametrize("fault", [ReadFault.FAIL, ReadFault.WRONG_HOLD])
def test_a_read_that_fails_moves_nothing_and_the_next_one_works(setting, fault):
    reader = setting.reader(on(1, fault))
    with pytest.raises(TransferFailed):
        setting.read(reader)
    assert setting.memory.is_untouched()
    setting.read(reader)
    assert setting.has_landed()
    reader.close()


def test_a_read_that_is_cut_off_leaves_half(setting):
    reader = setting.reader(on(1, ReadFault.TRUNCATE))
    with pytest.raises(TransferFailed, match="cut off"):
        setting.read(reader)
    assert int((setting.memory.bytes == CANARY).sum()) >= SIZE // 2
    assert not setting.memory.is_untouched()
    setting.read(reader)
    assert setting.has_landed()
    reader.close()


def test_a_dead_producer_stays_dead_for_this_reader_only(setting):
    script = on(2, ReadFault.DEATH)
    reader = setting.reader(script)
    setting.read(reader)
    for _ in range(3):
        with pytest.raises(TransferFailed, match="dead"):
            setting.read(reader)
    other = setting.reader(script)
    setting.read(other)
    reader.close()
    other.close()


def test_a_late_read_works_or_misses_its_deadline(setting):
    reader = setting.reader(lambda call: ReadFault.DELAY, delay_s=1.0)
    setting.read(reader)
    assert setting.has_landed()
    with pytest.raises(DeadlineExceeded):
        setting.read(reader, deadline_s=0.25)
    assert setting.pauses == [1.0, 0.25]
    reader.close()


def test_a_read_that_lands_twice_is_still_exact(setting):
    reader = setting.reader(on(1, ReadFault.DUPLICATE))
    setting.read(reader)
    assert setting.has_landed()
    assert reader.statistics().reads == 2
    reader.close()


def test_a_read_that_moves_nothing_says_that_all_is_well(setting):
    reader = setting.reader(on(1, ReadFault.NOTHING))
    setting.read(reader)
    assert setting.memory.is_untouched()
    setting.read(reader)
    assert setting.has_landed()
    reader.close()


def test_a_read_that_its_script_holds_up_ends_with_its_reader_and_holds_up_no_other(setting):
    held = threading.Event()

    def script(call: Call) -> None:
        if not held.is_set():
            held.set()
            assert call.closed.wait(call.deadline_s)
            raise TransferFailed("closed under a held read")

    first, second = setting.reader(script), setting.reader(script)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(setting.read, first)
        assert held.wait(LONG_S)
        setting.read(second)  # of a transport of its own, with the same script
        assert setting.has_landed()
        first.close()
        with pytest.raises(TransferFailed, match="held read"):
            waiting.result(LONG_S)
    second.close()


def test_the_same_seed_gives_the_same_faults():
    rates = {ReadFault.FAIL: 0.2, ReadFault.DEATH: 0.1}

    def draw(seed: int) -> list[ReadFault | None]:
        script = seeded(seed, rates)
        return [script(Call(count=i, total_bytes=1)) for i in range(1, 1001)]

    assert draw(5) == draw(5) != draw(6)
    assert {ReadFault.FAIL, ReadFault.DEATH, None} == set(draw(5))
    assert 100 < draw(5).count(ReadFault.FAIL) < 300
    assert {seeded(1, {})(Call(count=1, total_bytes=1)) for _ in range(9)} == {None}
    for wrong in ({ReadFault.FAIL: 0.7, ReadFault.DELAY: 0.4}, {ReadFault.FAIL: -0.1}):
        with pytest.raises(ValueError, match="probabilities"):
            seeded(1, wrong)


def test_names_and_auto_find_transports_in_order_of_preference():
    assert [transport.name for transport in usable_transports()] == ["shm", "tcp"]
    assert [transport.name for transport in transports_for("auto")] == ["shm", "tcp"]
    for name in ("shm", "tcp"):
        assert transport_for(name).name == name
        assert [transport.name for transport in transports_for(name)] == [name]


@pytest.mark.parametrize("name", ["rdma", "faulty", ""])
def test_a_transport_that_is_not_here_is_refused_by_name(name):
    with pytest.raises(ConfigurationError, match=f"transfer_backend='{name}'.*shm, tcp"):
        transports_for(name)
