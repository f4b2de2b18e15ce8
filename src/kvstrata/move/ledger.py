"""What a lane counts, and the promises (tickets) it gives out. Shared by the engines that run on the host."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvstrata.errors import DeadlineExceeded, TransferFailed
from kvstrata.move.engine import LaneStatistics

logger = logging.getLogger(__name__)

MAX_REMEMBERED_FAILURES = 256


@dataclass(eq=False, slots=True)
class Failure:
    """One root cause, shared by the operation that failed and by all that come after it."""

    origin: str
    cause: BaseException
    ledger: LaneLedger
    told: bool = False

    def error(self, about: str, *, what: str | None = None) -> TransferFailed:
        """An exception for one waiter; from now on the failure counts as reported."""
        self.ledger.mark_told(self)
        if about == self.origin:
            message = f"{about} failed: {_text(self.cause)}"
        else:
            message = f"{about} was not run, because {self.origin} failed: {_text(self.cause)}"
        error = TransferFailed(message if what is None else f"{what}: {message}")
        error.__cause__ = self.cause
        return error


def _text(cause: BaseException) -> str:
    return f"{type(cause).__name__}: {cause}"


@dataclass(slots=True)
class LaneLedger:
    """Counters of one lane, safe to update from any thread."""

    lane: str
    submitted: int = 0
    copies: int = 0
    calls: int = 0
    copied_bytes: int = 0
    busy_s: float = 0.0
    stalled_s: float = 0.0
    failures: int = 0
    skipped: int = 0
    unreported: int = 0
    _untold: deque[Failure] = field(default_factory=lambda: deque(maxlen=MAX_REMEMBERED_FAILURES))
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add_submitted(self) -> None:
        with self._lock:
            self.submitted += 1

    def add_success(self, *, copied_bytes: int | None) -> None:
        """`copied_bytes` is None for a host function."""
        with self._lock:
            if copied_bytes is None:
                self.calls += 1
            else:
                self.copies += 1
                self.copied_bytes += copied_bytes

    def add_time(self, *, busy_s: float = 0.0, stalled_s: float = 0.0) -> None:
        with self._lock:
            self.busy_s += busy_s
            self.stalled_s += stalled_s

    def add_skipped(self) -> None:
        with self._lock:
            self.skipped += 1

    def add_failure(self, origin: str, cause: BaseException) -> Failure:
        failure = Failure(origin=origin, cause=cause, ledger=self)
        with self._lock:
            self.failures += 1
            self.unreported += 1
            self._untold.append(failure)
        logger.warning("%s failed: %s", origin, _text(cause))
        return failure

    def mark_told(self, failure: Failure) -> None:
        with self._lock:
            if not failure.told:
                failure.told = True
                self.unreported -= 1

    def raise_untold(self) -> None:
        """Raise the first failure that no waiter has seen, and count all of them as seen."""
        with self._lock:
            untold = [failure for failure in self._untold if not failure.told]
            self._untold.clear()
        for other in untold[1:]:
            self.mark_told(other)
        if untold:
            error = untold[0].error(untold[0].origin)
            if len(untold) > 1:
                error.add_note(f"{len(untold) - 1} more operations of lane {self.lane!r} failed, see the log")
            raise error

    def statistics(self) -> LaneStatistics:
        with self._lock:
            settled = self.copies + self.calls + self.failures + self.skipped
            return LaneStatistics(
                submitted=self.submitted,
                pending=self.submitted - settled,
                copies=self.copies,
                calls=self.calls,
                copied_bytes=self.copied_bytes,
                busy_s=self.busy_s,
                stalled_s=self.stalled_s,
                failures=self.failures,
                skipped=self.skipped,
                unreported=self.unreported,
            )


class Ticket:
    """A CopyToken settled by the host: it succeeds once or fails once, for a root cause.

    `wait_until_settled(seconds)` is the engine's way to wait: it returns early only if the ticket is settled,
    and raises TransferFailed when nobody is left to settle it.
    """

    def __init__(self, *, name: str, lane: str, wait_until_settled: Callable[[Ticket, float], None]) -> None:
        self.name = name
        self.lane = lane
        self.settled = threading.Event()
        self.failure: Failure | None = None
        self._wait_until_settled = wait_until_settled

    def __repr__(self) -> str:
        state = "pending" if not self.settled.is_set() else "failed" if self.failure else "done"
        return f"<{self} {state}>"

    def __str__(self) -> str:
        return f"{self.name!r} on lane {self.lane!r}"

    def settle(self, failure: Failure | None = None) -> None:
        assert not self.settled.is_set(), f"{self} settled twice"
        self.failure = failure
        self.settled.set()

    def try_settle(self) -> bool:
        """Whether it is settled, after the engine did what it can without waiting."""
        if not self.settled.is_set():
            self._wait_until_settled(self, 0.0)
        return self.settled.is_set()

    def outcome(self, deadline_s: float) -> Failure | None:
        """How it ended, without counting a failure as reported. Raises DeadlineExceeded."""
        if not self.settled.is_set():
            self._wait_until_settled(self, deadline_s)
            if not self.settled.is_set():
                raise DeadlineExceeded(str(self), deadline_s)
        return self.failure

    def done(self) -> bool:
        if not self.settled.is_set():
            return False
        if self.failure is not None:
            raise self.failure.error(str(self))
        return True

    def wait(self, *, deadline_s: float, what: str) -> None:
        try:
            failure = self.outcome(deadline_s)
        except DeadlineExceeded as error:
            raise DeadlineExceeded(f"{what}, waiting for {self}", error.seconds) from None
        if failure is not None:
            raise failure.error(str(self), what=what)


class AlreadyDone:
    """A CopyToken for what has happened before anyone asks."""

    def __init__(self, name: str) -> None:
        self.name = name

    def done(self) -> bool:
        return True

    def wait(self, *, deadline_s: float, what: str) -> None:
        """Returns at once."""


def still_running(operations: Sequence[str], deadline_s: float) -> DeadlineExceeded:
    """What `close` raises when bytes may still be moving."""
    what = f"closing the copy engine, where memory must not be freed yet, for {', '.join(operations)}"
    return DeadlineExceeded(what, deadline_s)
