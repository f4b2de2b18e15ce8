"""Tables of state machines: from which state which event leads where. A move that is in no table is a defect.

`remote.tables` renders them for docs/protocol.md.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

NEVER_S = float("inf")
"""A time on no clock."""

S = TypeVar("S", bound=enum.Enum)
E = TypeVar("E", bound=enum.Enum)


@dataclass(frozen=True)
class Move(Generic[S]):
    """Where an event leads, and in words what is done on the way."""

    to: S
    effect: str


class Moves(Generic[S, E]):
    """The table of one machine."""

    def __init__(self, moves: Mapping[tuple[S, E], Move[S]]) -> None:
        self.rows = dict(moves)

    def after(self, state: S, event: E) -> S:
        """Return the next state; AssertionError for a move that the table does not have."""
        move = self.rows.get((state, event))
        assert move is not None, f"{event.name} is no move from {state.name}"
        return move.to


@dataclass(slots=True)
class Resend:
    """When to say something again: after `first_s`, then ever later, `slowest_s` apart in the end.

    Later and later, since what is slow to be answered is more often slow than lost.
    """

    first_s: float
    slowest_s: float
    due_s: float = NEVER_S
    interval_s: float = 0.0

    def start(self, now_s: float) -> None:
        """It was said for the first time, or there was progress."""
        self.interval_s = self.first_s
        self.due_s = now_s + self.interval_s

    def again(self, now_s: float) -> None:
        """It was repeated."""
        self.interval_s = min(2 * self.interval_s, max(self.first_s, self.slowest_s))
        self.due_s = now_s + self.interval_s

    def stop(self) -> None:
        """It was answered."""
        self.due_s = NEVER_S
