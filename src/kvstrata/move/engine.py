"""What every copy engine offers: lanes that run in order beside computation, and tokens to wait for.

Members: `threads.ThreadEngine` (CPU), `streams.StreamEngine` (accelerators), `inline.InlineEngine` (a
deterministic fake). All pass `tests/conformance/test_copy_engine.py`, except where no device is present.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvstrata.move.plan import CopyPlan


class CopyToken(Protocol):
    """The promise of one submitted operation."""

    @property
    def name(self) -> str: ...

    def done(self) -> bool:
        """True once the operation has succeeded. Never blocks.

        Raises TransferFailed if it failed: a caller who polls can neither take a failure for success nor
        poll for ever.
        """
        ...

    def wait(self, *, deadline_s: float, what: str) -> None:
        """Return when the bytes may be used; `deadline_s` is counted from this call.

        Where the device can wait for itself, this enqueues the wait on the current stream and returns at once
        (device constraint 3). Raises DeadlineExceeded naming `what`, TransferFailed with the root cause.
        After DeadlineExceeded the operation may still be running: its memory may not be reused.
        """
        ...


class Lane(Protocol):
    """Operations of one lane run one at a time, in the order submitted. Any thread may submit."""

    @property
    def name(self) -> str: ...

    def submit(self, plan: CopyPlan, *, after: Sequence[CopyToken] = (), name: str) -> CopyToken:
        """Copy the ranges of `plan` once every token in `after` is done. Returns without waiting.

        The caller keeps the memory behind the plan alive until the token is done. If a token in `after`
        fails, nothing is copied and the new token fails with the same root cause; later operations of the
        lane run all the same.
        """
        ...

    def call(self, fn: Callable[[], None], *, after: Sequence[CopyToken] = (), name: str) -> CopyToken:
        """Run a host function in lane order, for instance a store write. Its exception fails the token."""
        ...

    def drain(self, *, deadline_s: float) -> None:
        """Wait until everything submitted to this lane so far is settled.

        Raises DeadlineExceeded naming the operation in progress, and TransferFailed if an operation of this
        lane failed and nobody has been told so by its token yet (every such failure is told once).
        """
        ...


@dataclass(frozen=True, kw_only=True)
class LaneStatistics:
    """Counts since the lane was made. `submitted == copies + calls + failures + skipped + pending`."""

    submitted: int
    pending: int
    copies: int
    calls: int
    copied_bytes: int
    busy_s: float
    """Time spent copying and in calls."""
    stalled_s: float
    """Time spent waiting for tokens that operations come after."""
    failures: int
    """Operations that raised, waited too long for another token, or were left over when the lane ended."""
    skipped: int
    """Operations not run because one they come after failed."""
    unreported: int
    """Failures that no waiter has seen, neither here nor through an operation that was skipped for one."""


@dataclass(frozen=True, kw_only=True)
class EngineStatistics:
    lanes: Mapping[str, LaneStatistics]

    @property
    def copied_bytes(self) -> int:
        return sum(lane.copied_bytes for lane in self.lanes.values())

    @property
    def failures(self) -> int:
        return sum(lane.failures for lane in self.lanes.values())

    @property
    def unreported(self) -> int:
        return sum(lane.unreported for lane in self.lanes.values())


class CopyEngine(Protocol):
    """A set of named lanes. Lanes run beside each other and beside the caller's computation."""

    def lane(self, name: str) -> Lane:
        """The lane of that name, created on first use."""
        ...

    def compute_done(self) -> CopyToken:
        """Done when all that the caller's compute stream has enqueued so far is done (on a CPU: already)."""
        ...

    def statistics(self) -> EngineStatistics: ...

    def check_integrity(self) -> None:
        """Assert that counts add up; raise TransferFailed if a lane can no longer run anything."""
        ...

    def close(self, deadline_s: float) -> None:
        """Refuse new work, finish what is pending, stop.

        Work that did not finish in time fails with TransferFailed. If an operation is still running then,
        raises DeadlineExceeded: memory that it may touch must not be reused or freed. Closing twice is
        harmless.
        """
        ...
