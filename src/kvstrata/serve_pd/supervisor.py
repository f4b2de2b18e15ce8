"""Keeps the processes of a launch running, until it is told to stop or one of them cannot be kept.

    state     move    next      when
    NEW       start   STARTING  the launch begins
    STARTING  ready   READY     its health check is answered
    STARTING  ended   PAUSED    its process ended, had been ready in an earlier life, and may be restarted
    STARTING  ended   FAILED    its process ended otherwise, or was not ready in time
    READY     ended   PAUSED    its process ended, and may be restarted
    READY     ended   FAILED    its process ended, and may not
    PAUSED    start   STARTING  the pause is over
    any       stop    ENDED     the launch ends
A process that is ready and no longer answers is the proxy's business: it gets no requests until it does.
"""

from __future__ import annotations

import enum
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvstrata.serve_pd.children import Process, Start
from kvstrata.serve_pd.plan import Launch


class State(enum.StrEnum):
    """Of one process."""

    NEW = "new"
    STARTING = "starting"
    READY = "ready"
    PAUSED = "restarts soon"
    FAILED = "failed"
    ENDED = "ended"


_MOVES = {
    "start": {State.NEW: {State.STARTING}, State.PAUSED: {State.STARTING}},
    "ready": {State.STARTING: {State.READY}},
    "ended": {
        State.STARTING: {State.PAUSED, State.FAILED},
        State.READY: {State.PAUSED, State.FAILED},
    },
    "stop": {state: {State.ENDED} for state in State},
}


@dataclass(frozen=True, kw_only=True)
class ChildStatistics:
    """One process as the supervisor sees it now."""

    launch: Launch
    state: State
    restarts: int
    in_state_s: float
    why: str  # it ended the last time


class _Child:
    def __init__(self, launch: Launch) -> None:
        self.launch, self.state = launch, State.NEW
        self.process: Process | None = None
        self.restarts, self.why = 0, ""
        self.was_ready = False  # in any life; what has never worked is not tried again
        self.since_s = 0.0

    def move(self, move: str, state: State, now_s: float) -> None:
        assert state in _MOVES[move].get(self.state, ()), f"{self.launch.name}: {move} in {self.state}"
        self.state, self.since_s = state, now_s


class Supervisor:
    """Runs in one thread: `start`, `step` again and again, `stop`."""

    def __init__(
        self,
        launches: Sequence[Launch],
        *,
        start: Start,
        is_up: Callable[[Launch], bool],
        clock: Callable[[], float],
        start_deadline_s: float,
        restarts: int,
        first_pause_s: float = 1.0,
        longest_pause_s: float = 30.0,
    ) -> None:
        """`restarts` is how often each process may be started again."""
        self._children = [_Child(launch) for launch in launches]
        self._start, self._is_up, self._clock = start, is_up, clock
        self._start_deadline_s, self._restarts = start_deadline_s, restarts
        self._first_pause_s, self._longest_pause_s = first_pause_s, longest_pause_s

    def start(self) -> None:
        """Start every process."""
        for child in self._children:
            self._begin(child)

    def step(self) -> None:
        """Look at every process once, and do what has to be done."""
        for child in self._children:
            self._look_at(child)

    @property
    def failed(self) -> ChildStatistics | None:
        """The process that cannot be kept running, if there is one: the launch is over."""
        return next((s for s in self.statistics() if s.state is State.FAILED), None)

    @property
    def is_ready(self) -> bool:
        """Whether every process is ready."""
        return all(child.state is State.READY for child in self._children)

    def stop(self, *, deadline_s: float, wait: Callable[[float], bool]) -> bool:
        """End every process, the proxy first; whoever is still there after `deadline_s` is killed.

        `wait(seconds)` lets time pass; once it returns False, the end is forced at once. Returns whether all
        ended by themselves. Nothing is left afterwards, not even a child of a process that has ended.
        """
        running = [child for child in self._children if child.process is not None]
        for child in sorted(running, key=lambda child: child.launch.role != "proxy"):
            self._send(child, signal.SIGTERM)
        ends_s = self._clock() + deadline_s
        while any(self._is_running(child) for child in running) and self._clock() < ends_s:
            if not wait(0.05):
                break
        in_time = not any(self._is_running(child) for child in running)
        for child in running:
            self._send(child, signal.SIGKILL)
        killed_s = self._clock() + deadline_s
        while not all(_is_gone(child) for child in running) and self._clock() < killed_s:
            wait(0.05)
        for child in self._children:
            child.move("stop", State.ENDED, self._clock())
        return in_time

    def statistics(self) -> tuple[ChildStatistics, ...]:
        """Return every process's state."""
        now_s = self._clock()
        return tuple(
            ChildStatistics(
                launch=child.launch,
                state=child.state,
                restarts=child.restarts,
                in_state_s=now_s - child.since_s,
                why=child.why,
            )
            for child in self._children
        )

    def _look_at(self, child: _Child) -> None:
        now_s = self._clock()
        if child.state in (State.STARTING, State.READY):
            assert child.process is not None
            status = child.process.status()
            if status is not None:
                self._ended(child, _why(status))
            elif child.state is State.STARTING:
                if self._is_up(child.launch):
                    child.was_ready = True
                    child.move("ready", State.READY, now_s)
                elif now_s - child.since_s >= self._start_deadline_s:
                    child.why = f"start: not ready within {self._start_deadline_s:g} s"
                    child.move("ended", State.FAILED, now_s)
        elif child.state is State.PAUSED and now_s - child.since_s >= self._pause_s(child):
            child.restarts += 1
            self._begin(child)

    def _ended(self, child: _Child, why: str) -> None:
        child.why = why
        self._send(child, signal.SIGKILL)  # what it has left behind
        child.process = None
        may_restart = child.was_ready and child.restarts < self._restarts
        state = State.PAUSED if may_restart else State.FAILED
        child.move("ended", state, self._clock())

    def _pause_s(self, child: _Child) -> float:
        return min(self._longest_pause_s, self._first_pause_s * 2.0 ** min(child.restarts, 30))

    def _begin(self, child: _Child) -> None:
        child.process = self._start(child.launch)
        child.move("start", State.STARTING, self._clock())

    def _send(self, child: _Child, how: signal.Signals) -> None:
        if child.process is not None:
            child.process.end(how)

    def _is_running(self, child: _Child) -> bool:
        return child.process is not None and child.process.status() is None


def _is_gone(child: _Child) -> bool:
    return child.process is None or child.process.is_gone()


def _why(status: int) -> str:
    if status >= 0:
        return f"ended with status {status}"
    try:
        return f"was ended by {signal.Signals(-status).name}"
    except ValueError:
        return f"was ended by signal {-status}"
