"""One operation of a lane, and how it runs: wait for what it comes after, do it, settle its ticket."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvstrata.errors import TransferFailed
from kvstrata.move.engine import CopyToken
from kvstrata.move.ledger import Failure, LaneLedger, Ticket
from kvstrata.move.plan import CopyPlan

Copy = Callable[[CopyPlan], None]
Clock = Callable[[], float]


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class Operation:
    ticket: Ticket
    after: tuple[CopyToken, ...]
    work: CopyPlan | Callable[[], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Runner:
    """Runs operations for one lane, in whatever thread calls `run`.

    `dependency_deadline_s` bounds each wait for a token that an operation comes after.
    """

    ledger: LaneLedger
    copy: Copy
    clock: Clock
    dependency_deadline_s: float

    def run(self, operation: Operation, may_start: Callable[[Ticket], bool]) -> None:
        """Settle the operation's ticket, whatever happens in between.

        `may_start` is asked once the waiting is over: the engine may have been closed meanwhile.
        """
        ticket = operation.ticket
        failure = self._wait_for_dependencies(operation)
        if failure is None:
            if may_start(ticket):
                failure = self._do(operation)
            else:
                failure = self.ledger.add_failure(str(ticket), TransferFailed("closed before it ran"))
        ticket.settle(failure)

    def abandon(self, operation: Operation, cause: BaseException) -> None:
        """Settle the ticket of an operation that will never run."""
        operation.ticket.settle(self.ledger.add_failure(str(operation.ticket), cause))

    def _wait_for_dependencies(self, operation: Operation) -> Failure | None:
        if not operation.after:
            return None
        started_s = self.clock()
        try:
            for token in operation.after:
                if isinstance(token, Ticket):
                    # Not `wait`: passing a failure on is not the same as somebody having been told.
                    failure = token.outcome(self.dependency_deadline_s)
                    if failure is not None:
                        self.ledger.add_skipped()
                        return failure
                else:
                    token.wait(deadline_s=self.dependency_deadline_s, what=f"{operation.ticket}")
        except BaseException as cause:  # a foreign token may raise anything
            return self.ledger.add_failure(str(operation.ticket), cause)
        finally:
            self.ledger.add_time(stalled_s=self.clock() - started_s)
        return None

    def _do(self, operation: Operation) -> Failure | None:
        failed_by: BaseException | None = None
        started_s = self.clock()
        try:
            if isinstance(operation.work, CopyPlan):
                self.copy(operation.work)
            else:
                operation.work()
        except BaseException as cause:  # even SystemExit: it must reach the waiter, not end the lane
            failed_by = cause
        self.ledger.add_time(busy_s=self.clock() - started_s)
        if failed_by is not None:
            return self.ledger.add_failure(str(operation.ticket), failed_by)
        work = operation.work
        self.ledger.add_success(copied_bytes=work.total_bytes if isinstance(work, CopyPlan) else None)
        return None
