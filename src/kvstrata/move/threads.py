"""The CPU copy engine: one daemon thread a lane, copying beside computation with the GIL released."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from kvstrata.errors import ConfigurationError, DeadlineExceeded, TransferFailed
from kvstrata.move.engine import CopyToken, EngineStatistics
from kvstrata.move.ledger import AlreadyDone, LaneLedger, Ticket, still_running
from kvstrata.move.memcpy import copy_ranges, prepare
from kvstrata.move.operation import Clock, Copy, Operation, Runner
from kvstrata.move.plan import CopyPlan

logger = logging.getLogger(__name__)

# How often a waiter looks whether the lane's thread still exists. A thread that ends settles its tickets
# itself; this is for threads that vanish, as in a forked process.
LIVENESS_CHECK_S = 0.2


class ThreadLane:
    """One FIFO and its thread. Made by `ThreadEngine.lane`."""

    def __init__(self, *, name: str, copy: Copy, clock: Clock, dependency_deadline_s: float) -> None:
        self.name = name
        self.ledger = LaneLedger(name)
        self._runner = Runner(
            ledger=self.ledger, copy=copy, clock=clock, dependency_deadline_s=dependency_deadline_s
        )
        self._changed = threading.Condition()
        self._queue: deque[Operation] = deque()
        self._last: Ticket | None = None
        self._current: Operation | None = None
        self._running: Ticket | None = None  # past its dependencies: bytes may be moving
        self._closed_by: BaseException | None = None  # why nothing new is accepted
        self._stopping = False
        self._abandoned = False
        self._thread = threading.Thread(target=self._serve, name=f"kvstrata-{name}", daemon=True)
        self._thread.start()

    def bind(self, cpu_ids: Sequence[int]) -> None:
        """Run the lane's thread on these CPUs only. Raises OSError where the system refuses."""
        assert self._thread.native_id is not None
        os.sched_setaffinity(self._thread.native_id, cpu_ids)

    def submit(self, plan: CopyPlan, *, after: Sequence[CopyToken] = (), name: str) -> CopyToken:
        return self._enqueue(plan, after, name)

    def call(self, fn: Callable[[], None], *, after: Sequence[CopyToken] = (), name: str) -> CopyToken:
        return self._enqueue(fn, after, name)

    def drain(self, *, deadline_s: float) -> None:
        with self._changed:
            last = self._last
        if last is not None:
            try:
                last.outcome(deadline_s)
            except DeadlineExceeded:
                what = f"draining lane {self.name!r}, where {self._describe_work()}"
                raise DeadlineExceeded(what, deadline_s) from None
        self.ledger.raise_untold()

    def refuse_new_work(self, reason: str) -> None:
        with self._changed:
            if self._closed_by is None:
                self._closed_by = TransferFailed(reason)
            self._stopping = True
            self._changed.notify_all()

    def join(self, seconds: float) -> bool:
        """Wait for the thread to finish its queue and end."""
        self._thread.join(max(0.0, seconds))
        return not self._thread.is_alive()

    def abandon(self, reason: str) -> str | None:
        """Fail what has not begun. Returns the name of the operation that has, if any."""
        with self._changed:
            self._abandoned = True
            running = None if self._running is None else str(self._running)
        self._abandon_queue(TransferFailed(reason))
        return running

    def check_integrity(self) -> None:
        counts = self.ledger.statistics()
        assert counts.pending >= 0, f"lane {self.name!r} settled more than was submitted: {counts}"
        assert counts.unreported <= counts.failures, f"lane {self.name!r}: {counts}"
        with self._changed:
            assert len(self._queue) <= counts.pending or self._closed_by is not None, f"lane {self.name!r}"
            ended = self._closed_by is not None or not self._thread.is_alive()
        if ended and not self._stopping:
            raise TransferFailed(f"the thread of copy lane {self.name!r} is gone")

    def _enqueue(
        self, work: CopyPlan | Callable[[], None], after: Sequence[CopyToken], name: str
    ) -> CopyToken:
        ticket = Ticket(name=name, lane=self.name, wait_until_settled=self._wait_until_settled)
        with self._changed:
            if self._closed_by is not None:
                raise TransferFailed(f"{ticket} refused: {self._closed_by}") from self._closed_by
            if not self._thread.is_alive():
                raise TransferFailed(f"{ticket} refused: {self._explain_missing_thread()}")
            self.ledger.add_submitted()
            self._queue.append(Operation(ticket=ticket, after=tuple(after), work=work))
            self._last = ticket
            self._changed.notify_all()
        return ticket

    def _wait_until_settled(self, ticket: Ticket, deadline_s: float) -> None:
        remaining_s = max(0.0, deadline_s)
        give_up_s = time.monotonic() + deadline_s
        while remaining_s > 0 and not ticket.settled.wait(min(remaining_s, LIVENESS_CHECK_S)):
            if not self._thread.is_alive() and not ticket.settled.is_set():
                raise TransferFailed(f"{ticket} will never be done: {self._explain_missing_thread()}")
            remaining_s = give_up_s - time.monotonic()

    def _explain_missing_thread(self) -> str:
        return (
            f"lane {self.name!r} has no running thread in process {os.getpid()}; "
            "copy engines do not survive fork, make one in each process"
        )

    def _describe_work(self) -> str:
        with self._changed:
            running, waiting = self._running, len(self._queue)
        doing = (
            f"{running.name!r} is still running" if running else "an operation still waits for another token"
        )
        return f"{doing} and {waiting} operations are behind it"

    def _serve(self) -> None:
        cause: BaseException = TransferFailed(f"lane {self.name!r} was closed")
        try:
            while (operation := self._next()) is not None:
                self._runner.run(operation, may_start=self._claim)
                with self._changed:
                    self._current = self._running = None
                del operation  # or the last plan's memory would live until the next one comes
        except BaseException as error:  # a defect outside the operation itself: tell everyone who waits
            logger.exception("the thread of copy lane %r died", self.name)
            cause = TransferFailed(f"its thread died ({type(error).__name__}: {error})")
            cause.__cause__ = error
        finally:
            self._end(cause)

    def _next(self) -> Operation | None:
        with self._changed:
            while not self._queue:
                if self._stopping:
                    return None
                self._changed.wait()
            self._current = self._queue.popleft()
            return self._current

    def _claim(self, ticket: Ticket) -> bool:
        with self._changed:
            if self._abandoned:
                return False
            self._running = ticket
            return True

    def _end(self, cause: BaseException) -> None:
        with self._changed:
            if self._closed_by is None:
                self._closed_by = cause
            interrupted, self._current, self._running = self._current, None, None
        if interrupted is not None and not interrupted.ticket.settled.is_set():
            self._runner.abandon(interrupted, cause)
        self._abandon_queue(cause)

    def _abandon_queue(self, cause: BaseException) -> None:
        with self._changed:
            left, self._queue = self._queue, deque()
        for operation in left:
            self._runner.abandon(operation, cause)


class ThreadEngine:
    """Copy engine of the CPU. See `engine.CopyEngine` for what its methods promise.

    `cpu_ids` binds the copy threads, so that they do not take turns with the compute threads.
    `dependency_deadline_s` bounds each wait of an operation for one it comes after.
    `copy` and `clock` are passed in by tests.
    """

    def __init__(
        self,
        *,
        cpu_ids: Sequence[int] | None = None,
        dependency_deadline_s: float = 60.0,
        copy: Copy = copy_ranges,
        clock: Clock = time.monotonic,
    ) -> None:
        if cpu_ids is not None and (len(cpu_ids) == 0 or min(cpu_ids) < 0):
            raise ConfigurationError(f"cpu_ids must name at least one CPU by its number, got {list(cpu_ids)}")
        prepare()
        self._cpu_ids = cpu_ids
        self._dependency_deadline_s = dependency_deadline_s
        self._copy = copy
        self._clock = clock
        self._lock = threading.Lock()
        self._lanes: dict[str, ThreadLane] = {}
        self._closed = False

    def lane(self, name: str) -> ThreadLane:
        with self._lock:
            lane = self._lanes.get(name)
            if lane is None:
                if self._closed:
                    raise TransferFailed(f"lane {name!r} refused: the copy engine was closed")
                lane = ThreadLane(
                    name=name,
                    copy=self._copy,
                    clock=self._clock,
                    dependency_deadline_s=self._dependency_deadline_s,
                )
                if self._cpu_ids is not None:
                    self._bind(lane, self._cpu_ids)
                self._lanes[name] = lane
            return lane

    def compute_done(self) -> CopyToken:
        return AlreadyDone("compute")

    def statistics(self) -> EngineStatistics:
        with self._lock:
            return EngineStatistics(
                lanes={name: lane.ledger.statistics() for name, lane in self._lanes.items()}
            )

    def check_integrity(self) -> None:
        with self._lock:
            lanes = list(self._lanes.values())
        for lane in lanes:
            lane.check_integrity()

    def close(self, deadline_s: float) -> None:
        with self._lock:
            self._closed = True
            lanes = list(self._lanes.values())
        reason = "the copy engine was closed"
        give_up_s = time.monotonic() + deadline_s
        for lane in lanes:
            lane.refuse_new_work(reason)
        late = [lane for lane in lanes if not lane.join(give_up_s - time.monotonic())]
        running = [what for lane in late if (what := lane.abandon(reason)) is not None]
        unreported = self.statistics().unreported
        if unreported:
            logger.warning("copy engine closed with %d failures that nobody asked about", unreported)
        if running:
            raise still_running(running, deadline_s)

    def _bind(self, lane: ThreadLane, cpu_ids: Sequence[int]) -> None:
        try:
            lane.bind(cpu_ids)
        except (OSError, OverflowError) as error:
            lane.refuse_new_work("its CPUs are not available")
            raise ConfigurationError(
                f"cpu_ids = {list(cpu_ids)}: the system refuses to run copy threads there ({error}); "
                f"this process may use {sorted(os.sched_getaffinity(0))}"
            ) from error
