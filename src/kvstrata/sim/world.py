"""Virtual time, the processes that live in it, and what happened so far.

One heap of events. An event that belongs to a process waits while the process is stopped and vanishes when it
crashes, as a thread or a timer of a real process does.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from enum import IntEnum
from heapq import heappop, heappush
from random import Random
from typing import Any

Action = Callable[..., None]


class Violation(AssertionError):  # noqa: N818 - named for what happened
    """An invariant does not hold; `invariant` is its number in the architecture's list, or a name."""

    def __init__(self, invariant: str, what: str) -> None:
        super().__init__(f"{invariant}: {what}")
        self.invariant = invariant


class Kind(IntEnum):
    """What an event is to a process that was stopped when it came due: the order after it goes on."""

    MESSAGE = 0  # from a socket or pipe: heard first, in the order of arrival
    TICK = 1  # of a machine: after everything that came was heard
    WORK = 2  # of other threads: whenever they get to run


class World:
    """The clock, the events to come, the random choices and the trace."""

    def __init__(self, random: Random, *, trace_events: int | None) -> None:
        """`trace_events` is how many of the last events the trace keeps; None keeps them all."""
        self.now_s = 0.0
        self.random = random
        self.events = 0
        self.counts: Counter[str] = Counter()
        self.trace: deque[tuple[float, str, str, tuple[Any, ...]]] = deque(maxlen=trace_events)
        self.last_release_s = 0.0
        self.last_fault_s = 0.0
        self._milestones: dict[tuple[str, int], list[tuple[Action, tuple[Any, ...]]]] = {}
        self._heap: list[tuple[float, int, Process | None, int, Kind, Action, tuple[Any, ...]]] = []
        self._number = 0

    def at(self, delay_s: float, action: Action, *args: Any) -> None:
        """Run `action(*args)` after `delay_s`, whatever happens to any process."""
        self._number = number = self._number + 1
        heappush(self._heap, (self.now_s + delay_s, number, None, 0, Kind.WORK, action, args))

    def push(
        self, time_s: float, process: Process, kind: Kind, action: Action, args: tuple[Any, ...]
    ) -> None:
        """Run `action(*args)` as a part of `process` at `time_s`."""
        self._number = number = self._number + 1
        heappush(self._heap, (time_s, number, process, process.life, kind, action, args))

    def run(self, limit_s: float) -> bool:
        """Run until nothing is left to do; False if the next event lies behind `limit_s`."""
        heap = self._heap
        while heap:
            time_s, _, process, life, kind, action, args = heappop(heap)
            if time_s > limit_s:
                return False
            if process is not None:
                if life != process.life:
                    continue
                if process.is_stopped:
                    process.backlog.append((kind, action, args))
                    continue
            self.now_s = time_s
            self.events += 1
            action(*args)
        return True

    def count(self, name: str) -> None:
        """Count what may be a milestone."""
        self.counts[name] += 1
        for action, args in self._milestones.pop((name, self.counts[name]), ()):
            self.at(0.0, action, *args)

    def when(self, name: str, number: int, action: Action, *args: Any) -> None:
        """Run `action(*args)` right after `name` was counted for the `number`th time, if ever."""
        self._milestones.setdefault((name, number), []).append((action, args))

    def drop_events(self) -> None:
        """Forget what is still to happen: the run is over."""
        self._heap.clear()

    def note(self, who: str, what: str, *values: Any) -> None:
        """Add to the trace. `values` are formatted when the trace is read, so they may not change."""
        self.trace.append((self.now_s, who, what, values))

    def release(self) -> None:
        """State that something that was held, open or waited for is so no more."""
        self.last_release_s = self.now_s

    def trace_lines(self) -> list[str]:
        """The trace, a line an event."""
        return [
            f"{time_s:10.6f} {who:<8} {what} {' '.join(map(str, values))}".rstrip()
            for time_s, who, what, values in self.trace
        ]


class Process:
    """One process of an engine: a clock that is off, and events that stop and die with it."""

    def __init__(self, world: World, name: str, *, offset_s: float = 0.0, rate: float = 1.0) -> None:
        """Its clock shows `offset_s + rate * virtual time`."""
        self.world = world
        self.name = name
        self.life = 1
        self.is_up = True
        self.is_stopped = False
        self.resumed_s = 0.0
        self.backlog: list[tuple[Kind, Action, tuple[Any, ...]]] = []
        self._offset_s = offset_s
        self._rate = rate

    def clock(self) -> float:
        """What this process takes for the time."""
        return self._offset_s + self._rate * self.world.now_s

    def virtual_s(self, clock_s: float) -> float:
        """When its clock will show `clock_s`; a trifle later, so that it then surely does."""
        return (clock_s - self._offset_s) / self._rate + 1e-6

    def after(self, delay_s: float, action: Action, *args: Any) -> None:
        """Have a thread of this process run `action` after `delay_s`."""
        world = self.world
        world.push(world.now_s + delay_s, self, Kind.WORK, action, args)

    def hear(self, action: Action, *args: Any) -> None:
        """Something arrived: handle it now, or once the process goes on. It must be up."""
        if self.is_stopped:
            self.backlog.append((Kind.MESSAGE, action, args))
        else:
            action(*args)

    def stop(self) -> None:
        """As SIGSTOP does."""
        self.is_stopped = True

    def go_on(self) -> None:
        """As SIGCONT does: hears what came, then ticks; other threads go on within a moment."""
        if not self.is_stopped:
            return
        self.is_stopped = False
        self.resumed_s = self.world.now_s
        backlog, self.backlog = self.backlog, []
        for kind, action, args in sorted(backlog, key=lambda event: event[0]):
            if kind is Kind.WORK:
                self.after(self.world.random.random() * 0.01, action, *args)
            else:
                action(*args)

    def crash(self) -> None:
        """As SIGKILL does; memory and threads are gone at once."""
        self.life += 1
        self.is_up = self.is_stopped = False
        self.backlog.clear()

    def restart(self) -> None:
        """Begin a new life."""
        self.is_up = True
        self.resumed_s = self.world.now_s


class Pipe:
    """Messages between processes of one engine: reliable and in order; gone with a crash of the receiver."""

    def __init__(self, target: Process, delay_s: float) -> None:
        self._target = target
        self._delay_s = delay_s
        self._last_s = 0.0

    def send(self, action: Action, *args: Any) -> None:
        """Have the receiver run `action(*args)` once it hears of it."""
        world = self._target.world
        self._last_s = max(self._last_s, world.now_s + self._delay_s * world.random.random()) + 1e-6
        world.push(self._last_s, self._target, Kind.MESSAGE, action, args)
