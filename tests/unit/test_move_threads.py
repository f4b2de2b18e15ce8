"""What only the thread engine has: real concurrency, affinity, threads that can die."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

from kvstrata.errors import ConfigurationError, DeadlineExceeded, TransferFailed
from kvstrata.move.plan import CopyPlan
from kvstrata.move.threads import ThreadEngine, ThreadLane

LONG_S = 30.0
SHORT_S = 0.02


@pytest.fixture
def engine() -> Iterator[ThreadEngine]:
    engine = ThreadEngine()
    yield engine
    engine.close(LONG_S)


def nothing() -> None:
    pass


def block(lane: ThreadLane) -> tuple[threading.Event, threading.Event]:
    """Occupy the lane until the second event is set; the first tells that it has begun."""
    entered, release = threading.Event(), threading.Event()

    def hold() -> None:
        entered.set()
        assert release.wait(LONG_S)

    lane.call(hold, name="blocker")
    assert entered.wait(LONG_S)
    return entered, release


def test_python_runs_while_a_copy_runs(engine: ThreadEngine) -> None:
    """The copy's first range raises a flag; Python answers by changing the bytes its last range reads.

    If the loop held the GIL, no Python could run between the two and the old byte would arrive.
    """
    flag, answer = np.zeros(1, dtype=np.uint8), np.zeros(1, dtype=np.uint8)
    one, question = np.ones(1, dtype=np.uint8), np.full(1, 7, dtype=np.uint8)
    big = [torch.zeros(16 << 20, dtype=torch.uint8) for _ in range(2)]
    times = 100
    plan = CopyPlan(
        dst=np.array([flag.ctypes.data, *[big[0].data_ptr()] * times, answer.ctypes.data]),
        src=np.array([one.ctypes.data, *[big[1].data_ptr()] * times, question.ctypes.data]),
        size=np.array([1, *[16 << 20] * times, 1]),
    )
    token = engine.lane("load").submit(plan, name="long copy")
    give_up_s = time.monotonic() + LONG_S
    while flag[0] == 0:
        assert time.monotonic() < give_up_s, "the copy never began"
    question[0] = 42
    token.wait(deadline_s=LONG_S, what="test")
    assert answer[0] == 42


def test_lanes_run_at_the_same_time(engine: ThreadEngine) -> None:
    meeting = threading.Barrier(2, timeout=LONG_S)
    tokens = [engine.lane(name).call(lambda: meeting.wait() and None, name=name) for name in ("load", "save")]
    for token in tokens:
        token.wait(deadline_s=LONG_S, what="both lanes at the barrier")


def test_a_late_dependency_fails_the_operation_by_name() -> None:
    engine = ThreadEngine(dependency_deadline_s=SHORT_S)
    _, release = block(engine.lane("save"))
    saved = engine.lane("save").call(nothing, name="store layer 2")
    token = engine.lane("load").call(nothing, after=[saved], name="load layer 4")
    with pytest.raises(TransferFailed, match=r"load layer 4.*store layer 2") as caught:
        token.wait(deadline_s=LONG_S, what="test")
    assert isinstance(caught.value.__cause__, DeadlineExceeded)
    engine.lane("load").call(nothing, name="load layer 5").wait(deadline_s=LONG_S, what="test")
    assert engine.statistics().lanes["load"].stalled_s > 0
    release.set()
    engine.close(LONG_S)


class DyingClock:
    """Raises in one lane's thread once told to: a fault of the engine itself, outside any operation."""

    def __init__(self, lane: str) -> None:
        self.thread_name = f"kvstrata-{lane}"
        self.broken = threading.Event()

    def __call__(self) -> float:
        if self.broken.is_set() and threading.current_thread().name == self.thread_name:
            raise RuntimeError("clock is gone")
        return 0.0


def test_a_dead_lane_is_an_error_for_everyone_who_waits() -> None:
    clock = DyingClock("save")
    engine = ThreadEngine(clock=clock)
    lane = engine.lane("save")
    _, release = block(lane)
    current = lane.call(nothing, name="store layer 1")
    queued = lane.call(nothing, name="store layer 2")
    elsewhere = engine.lane("load")
    dependent = elsewhere.call(nothing, after=[queued], name="load layer 4")
    clock.broken.set()
    release.set()
    for token in (current, queued, dependent):
        with pytest.raises(TransferFailed, match="clock is gone"):
            token.wait(deadline_s=LONG_S, what="test")
    with pytest.raises(TransferFailed, match="clock is gone"):
        lane.call(nothing, name="store layer 3")
    with pytest.raises(TransferFailed, match="blocker"):
        lane.drain(deadline_s=LONG_S)
    elsewhere.call(nothing, name="load layer 5").wait(deadline_s=LONG_S, what="test")
    with pytest.raises(TransferFailed, match=r"save.*gone"):
        engine.check_integrity()
    assert engine.statistics().lanes["save"].pending == 0
    engine.close(LONG_S)


def _use_after_fork(engine: ThreadEngine, results: multiprocessing.SimpleQueue[str]) -> None:
    uses: list[Callable[[], object]] = [
        lambda: engine.lane("save").call(nothing, name="store"),
        engine.check_integrity,
    ]
    for use in uses:
        try:
            use()
            results.put("nothing happened")
        except TransferFailed as error:
            results.put(str(error))


def test_a_forked_process_is_told_rather_than_left_waiting(engine: ThreadEngine) -> None:
    engine.lane("save").call(nothing, name="store").wait(deadline_s=LONG_S, what="test")
    context = multiprocessing.get_context("fork")
    results: multiprocessing.SimpleQueue[str] = context.SimpleQueue()
    child = context.Process(target=_use_after_fork, args=(engine, results))
    child.start()
    child.join(LONG_S)
    assert child.exitcode == 0
    assert "fork" in results.get()
    assert "gone" in results.get()


def test_waiting_for_a_thread_that_vanished_ends(
    monkeypatch: pytest.MonkeyPatch, engine: ThreadEngine
) -> None:
    lane = engine.lane("save")
    _, release = block(lane)
    token = lane.call(nothing, name="store layer 2")
    monkeypatch.setattr(lane._thread, "is_alive", lambda: False)
    with pytest.raises(TransferFailed, match="no running thread"):
        token.wait(deadline_s=LONG_S, what="test")
    monkeypatch.undo()
    release.set()


class NeverDone:
    """A token of another engine that holds its waiter until released."""

    name = "remote read"

    def __init__(self) -> None:
        self.entered, self.release = threading.Event(), threading.Event()

    def done(self) -> bool:
        return False

    def wait(self, *, deadline_s: float, what: str) -> None:
        self.entered.set()
        assert self.release.wait(LONG_S)


def test_close_stops_an_operation_that_still_waits_from_ever_starting() -> None:
    engine = ThreadEngine()
    ran: list[str] = []
    remote = NeverDone()
    engine.lane("load").call(nothing, name="load layer 0").wait(deadline_s=LONG_S, what="test")
    token = engine.lane("load").call(lambda: ran.append("x"), after=[remote], name="load layer 1")
    assert remote.entered.wait(LONG_S)
    engine.close(SHORT_S)  # no bytes are moving, so nothing forbids freeing memory
    remote.release.set()
    with pytest.raises(TransferFailed, match="closed"):
        token.wait(deadline_s=LONG_S, what="test")
    assert ran == []


def test_copy_threads_run_where_they_are_told() -> None:
    mine = os.sched_getaffinity(0)
    cpu = max(mine)
    engine = ThreadEngine(cpu_ids=[cpu])
    seen: list[set[int]] = []
    engine.lane("load").call(lambda: seen.append(os.sched_getaffinity(0)), name="look").wait(
        deadline_s=LONG_S, what="test"
    )
    assert seen == [{cpu}]
    assert os.sched_getaffinity(0) == mine
    engine.close(LONG_S)


@pytest.mark.parametrize("cpu_ids", [[], [-1], [10**6], [2**70]], ids=str)
def test_cpus_that_do_not_exist_are_refused(cpu_ids: list[int]) -> None:
    with pytest.raises(ConfigurationError, match="cpu_ids"):
        ThreadEngine(cpu_ids=cpu_ids).lane("load")


def test_submitting_from_many_threads_loses_nothing(engine: ThreadEngine) -> None:
    ran: list[int] = []
    lane = engine.lane("save")

    def submit(first: int) -> None:
        for i in range(first, first + 100):
            lane.call(lambda i=i: ran.append(i), name=f"call {i}")

    threads = [threading.Thread(target=submit, args=(first,)) for first in (0, 100, 200)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG_S)
    lane.drain(deadline_s=LONG_S)
    assert sorted(ran) == list(range(300))
    engine.check_integrity()
