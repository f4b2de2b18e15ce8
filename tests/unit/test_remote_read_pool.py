"""The read pool: every read is reported once, one at a time a peer, several peers at once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from kvstrata.errors import TransferFailed
from kvstrata.remote.consumer.read_pool import ReadJob, ReadPool, Unreadable
from kvstrata.remote.holds import Hold, HoldRevoked
from kvstrata.remote.testing.sides import poll_until
from kvstrata.remote.transports.base import ReadPlan, TransportStatistics
from kvstrata.store.testing import ManualClock

DEADLINE_S = 20.0
GRACE_S = 1.0


class FakeReader:
    """Reads when it is let, unless it is closed meanwhile."""

    def __init__(self, fails_with: BaseException | None = None, *, is_gated: bool = False) -> None:
        self.fails_with = fails_with
        self.began = threading.Event()
        self.gate = threading.Event()
        self.is_closed = False
        self.reads = 0
        if not is_gated:
            self.gate.set()

    def read(self, plan: ReadPlan, hold: Hold, *, deadline_s: float) -> None:
        self.reads += 1
        self.began.set()
        assert self.gate.wait(DEADLINE_S)
        if self.is_closed:
            raise TransferFailed("closed under the read")
        if self.fails_with is not None:
            raise self.fails_with

    def statistics(self) -> TransportStatistics:
        return TransportStatistics(reads=self.reads)

    def close(self) -> None:
        self.is_closed = True
        self.gate.set()


class Reports:
    def __init__(self) -> None:
        self.by_number: dict[int, tuple[str | None, bool]] = {}
        self._changed = threading.Condition()

    def __call__(self, number: int, error: str | None, *, is_final: bool) -> None:
        with self._changed:
            assert number not in self.by_number, f"read {number} was reported twice"
            self.by_number[number] = (error, is_final)
            self._changed.notify_all()

    def wait_for(self, *numbers: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: set(numbers) <= self.by_number.keys(), DEADLINE_S), numbers


def plan_of(size_bytes: int = 8) -> ReadPlan:
    one = np.ones(1 if size_bytes else 0, dtype=np.int64)
    return ReadPlan(region=one, offset=one, dst=one, size=one * size_bytes)


def job(number: int, peer: str = "a", transfer: str = "t", plan: Callable[[], ReadPlan] = plan_of) -> ReadJob:
    return ReadJob(number=number, peer=peer, transfer=transfer, hold=Hold(slot=0, generation=1), plan=plan)


@pytest.fixture
def reports() -> Reports:
    return Reports()


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def pool(reports: Reports, clock: ManualClock) -> Iterator[ReadPool]:
    made = ReadPool(readers=2, read_deadline_s=5.0, cancel_grace_s=GRACE_S, report=reports, clock=clock)
    yield made
    made.close(deadline_s=DEADLINE_S)
    made.check_integrity()


def test_a_read_that_succeeds_is_reported_without_an_error(pool: ReadPool, reports: Reports) -> None:
    reader = FakeReader()
    pool.submit(job(1), lambda: reader)
    reports.wait_for(1)
    assert reports.by_number == {1: (None, False)}
    assert pool.statistics().read_bytes == 8


@pytest.mark.parametrize("cause", [TransferFailed("x"), MemoryError(), SystemExit(3), KeyError("k")])
def test_whatever_a_read_raises_is_reported_and_the_thread_lives(
    pool: ReadPool, reports: Reports, cause: BaseException
) -> None:
    reader = FakeReader(cause)
    for number in range(1, 6):
        pool.submit(job(number), lambda: reader)
    reports.wait_for(*range(1, 6))
    assert all(error and not is_final for error, is_final in reports.by_number.values())


def test_a_plan_that_is_refused_is_final_and_connects_nowhere(pool: ReadPool, reports: Reports) -> None:
    def refuse() -> ReadPlan:
        raise Unreadable("layer 9 is unknown")

    pool.submit(job(1, plan=refuse), lambda: pytest.fail("connected"))
    reports.wait_for(1)
    assert reports.by_number[1] == ("layer 9 is unknown", True)


def test_a_read_of_a_revoked_hold_is_final(pool: ReadPool, reports: Reports) -> None:
    reader = FakeReader(HoldRevoked("the producer ended it"))
    pool.submit(job(1), lambda: reader)
    reports.wait_for(1)
    assert reports.by_number[1] == ("the producer ended it", True)


def test_a_connection_that_fails_is_reported_and_made_anew(pool: ReadPool, reports: Reports) -> None:
    def fail() -> FakeReader:
        raise TransferFailed("nobody there")

    pool.submit(job(1), fail)
    reports.wait_for(1)
    pool.submit(job(2), FakeReader)
    reports.wait_for(2)
    assert reports.by_number == {1: ("nobody there", False), 2: (None, False)}


def test_a_part_without_bytes_for_this_rank_needs_no_connection(pool: ReadPool, reports: Reports) -> None:
    pool.submit(job(1, plan=lambda: plan_of(0)), lambda: pytest.fail("connected"))
    reports.wait_for(1)
    assert reports.by_number[1] == (None, False)


def test_one_peer_has_one_read_at_a_time_and_another_does_not_wait(pool: ReadPool, reports: Reports) -> None:
    slow, fast = FakeReader(is_gated=True), FakeReader()
    pool.submit(job(1, "slow"), lambda: slow)
    pool.submit(job(2, "slow"), lambda: slow)
    assert slow.began.wait(DEADLINE_S)
    for number in range(3, 20):
        pool.submit(job(number, "fast"), lambda: fast)
    reports.wait_for(*range(3, 20))
    assert slow.reads == 1
    assert not {1, 2} & reports.by_number.keys()
    slow.gate.set()
    reports.wait_for(1, 2)


def test_reads_that_wait_are_reported_at_once_when_their_transfer_ends(
    pool: ReadPool, reports: Reports
) -> None:
    reader = FakeReader(is_gated=True)
    pool.submit(job(1, transfer="other"), lambda: reader)
    assert reader.began.wait(DEADLINE_S)
    pool.submit(job(2, transfer="ended"), lambda: reader)
    pool.submit(job(3, transfer="other"), lambda: reader)
    pool.cancel("ended")
    assert reports.by_number == {2: ("its transfer ended", True)}
    reader.gate.set()
    reports.wait_for(1, 3)
    assert reader.reads == 2


def test_a_cancelled_read_may_end_by_itself_and_is_cut_off_after_the_grace(
    pool: ReadPool, reports: Reports, clock: ManualClock
) -> None:
    reader = FakeReader(is_gated=True)
    pool.submit(job(1), lambda: reader)
    assert reader.began.wait(DEADLINE_S)
    pool.cancel("t")
    due_s = pool.next_tick_s()
    assert due_s == clock.now_s + GRACE_S
    pool.tick()
    assert not reader.is_closed
    clock.now_s += GRACE_S
    pool.tick()
    reports.wait_for(1)
    assert reader.is_closed
    assert reports.by_number[1] == ("closed under the read", False)
    poll_until(lambda: pool.next_tick_s() is None, DEADLINE_S, "the read to be over")


def test_a_lost_peer_is_cut_off_and_its_waiting_reads_are_final(pool: ReadPool, reports: Reports) -> None:
    reader, after = FakeReader(is_gated=True), FakeReader()
    pool.submit(job(1), lambda: reader)
    assert reader.began.wait(DEADLINE_S)
    pool.submit(job(2), lambda: reader)
    pool.lose("a")
    pool.submit(job(3), lambda: after)
    reports.wait_for(1, 2, 3)
    assert reader.is_closed
    assert after.reads == 1
    assert reports.by_number[2] == ("the producer is gone", True)
    assert reports.by_number[3] == (None, False)


def test_a_peer_lost_while_it_is_being_connected_to_is_not_read_from(
    pool: ReadPool, reports: Reports
) -> None:
    reader = FakeReader()
    connecting, go_on = threading.Event(), threading.Event()

    def connect() -> FakeReader:
        connecting.set()
        assert go_on.wait(DEADLINE_S)
        return reader

    pool.submit(job(1), connect)
    assert connecting.wait(DEADLINE_S)
    pool.lose("a")
    go_on.set()
    reports.wait_for(1)
    assert reports.by_number[1] == ("the producer is gone", True)
    assert reader.is_closed
    assert reader.reads == 0


def test_a_reader_that_fails_twice_is_replaced(pool: ReadPool, reports: Reports) -> None:
    broken, good = FakeReader(TransferFailed("broken")), FakeReader()
    readers = iter([broken, good])
    for number in (1, 2, 3):
        pool.submit(job(number), lambda: next(readers))
        reports.wait_for(number)
    assert (broken.reads, broken.is_closed, good.reads) == (2, True, 1)


def test_closing_reports_everything(reports: Reports, clock: ManualClock) -> None:
    pool = ReadPool(readers=1, read_deadline_s=5.0, cancel_grace_s=GRACE_S, report=reports, clock=clock)
    reader = FakeReader(is_gated=True)
    pool.submit(job(1), lambda: reader)
    assert reader.began.wait(DEADLINE_S)
    pool.submit(job(2), lambda: reader)
    pool.submit(job(3, peer="b"), lambda: reader)
    pool.close(deadline_s=DEADLINE_S)
    pool.submit(job(4), lambda: reader)
    assert reports.by_number.keys() == {1, 2, 3, 4}
    assert reports.by_number[4] == ("the endpoint is closing", True)
    pool.check_integrity()
