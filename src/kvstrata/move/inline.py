"""A deterministic copy engine without threads: the named fake for tests of whatever uses an engine.

Nothing runs at submission. Operations run when somebody waits for a token, drains a lane, closes the engine
or calls `run_until_idle`, so code that forgets to wait finds its bytes missing instead of lucky.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from kvstrata.errors import DeadlineExceeded, TransferFailed
from kvstrata.move.engine import CopyToken, EngineStatistics
from kvstrata.move.ledger import AlreadyDone, LaneLedger, Ticket, still_running
from kvstrata.move.memcpy import copy_ranges
from kvstrata.move.operation import Copy, Operation, Runner
from kvstrata.move.plan import CopyPlan


class InlineLane:
    """One FIFO, run by whoever waits. Made by `InlineEngine.lane`.

    `held = True` stops the lane as a slow copy would: waiting for its tokens exceeds any deadline at once.
    """

    def __init__(self, *, name: str, copy: Copy) -> None:
        self.name = name
        self.held = False
        self.ledger = LaneLedger(name)
        self._runner = Runner(ledger=self.ledger, copy=copy, clock=lambda: 0.0, dependency_deadline_s=0.0)
        self._queue: deque[Operation] = deque()
        self._closed = False

    def submit(self, plan: CopyPlan, *, after: Sequence[CopyToken] = (), name: str) -> CopyToken:
        return self._enqueue(plan, after, name)

    def call(self, fn: Callable[[], None], *, after: Sequence[CopyToken] = (), name: str) -> CopyToken:
        return self._enqueue(fn, after, name)

    def drain(self, *, deadline_s: float) -> None:
        self.run_until_idle()
        if self._queue:
            what = (
                f"draining lane {self.name!r}, where {self._queue[0].ticket.name!r} is still running and "
                f"{len(self._queue) - 1} operations are behind it"
            )
            raise DeadlineExceeded(what, deadline_s)
        self.ledger.raise_untold()

    def run_until_idle(self) -> None:
        """Run what is queued, in order, until nothing is left or nothing can run."""
        while self._advance():
            pass

    def close(self) -> str | None:
        """Run what can run and fail the rest. Returns the name of the operation that is stuck, if any."""
        self._closed = True
        self.run_until_idle()
        stuck = str(self._queue[0].ticket) if self._queue and self.held else None
        while self._queue:
            self._runner.abandon(self._queue.popleft(), TransferFailed("the copy engine was closed"))
        return stuck

    def check_integrity(self) -> None:
        counts = self.ledger.statistics()
        assert counts.pending == len(self._queue), f"lane {self.name!r}: {counts}, queued {len(self._queue)}"
        assert counts.unreported <= counts.failures, f"lane {self.name!r}: {counts}"

    def _enqueue(
        self, work: CopyPlan | Callable[[], None], after: Sequence[CopyToken], name: str
    ) -> CopyToken:
        ticket = Ticket(name=name, lane=self.name, wait_until_settled=self._run_until_settled)
        if self._closed:
            raise TransferFailed(f"{ticket} refused: the copy engine was closed")
        self.ledger.add_submitted()
        self._queue.append(Operation(ticket=ticket, after=tuple(after), work=work))
        return ticket

    def _run_until_settled(self, ticket: Ticket, deadline_s: float) -> None:
        while not ticket.settled.is_set() and self._advance():
            pass

    def _advance(self) -> bool:
        """Run the first operation; False if there is none, or it or what it comes after is held."""
        if self.held or not self._queue:
            return False
        for token in self._queue[0].after:
            if isinstance(token, Ticket) and not token.try_settle():
                return False
        self._runner.run(self._queue.popleft(), may_start=lambda _: True)
        return True


class InlineEngine:
    """Deterministic engine for unit tests; its clock stands still. See `engine.CopyEngine`."""

    def __init__(self, *, copy: Copy = copy_ranges) -> None:
        self._copy = copy
        self._lanes: dict[str, InlineLane] = {}
        self._closed = False

    def lane(self, name: str) -> InlineLane:
        if name not in self._lanes:
            if self._closed:
                raise TransferFailed(f"lane {name!r} refused: the copy engine was closed")
            self._lanes[name] = InlineLane(name=name, copy=self._copy)
        return self._lanes[name]

    def compute_done(self) -> CopyToken:
        return AlreadyDone("compute")

    def run_until_idle(self) -> None:
        """Run everything on every lane that is not held, as if a long time had passed."""
        for lane in list(self._lanes.values()):
            lane.run_until_idle()

    def statistics(self) -> EngineStatistics:
        return EngineStatistics(lanes={name: lane.ledger.statistics() for name, lane in self._lanes.items()})

    def check_integrity(self) -> None:
        for lane in self._lanes.values():
            lane.check_integrity()

    def close(self, deadline_s: float) -> None:
        self._closed = True
        stuck = [what for lane in self._lanes.values() if (what := lane.close()) is not None]
        if stuck:
            raise still_running(stuck, deadline_s)
