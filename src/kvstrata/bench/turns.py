"""Two sides that are timed by turns, on one machine."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

from kvstrata.terminal import Terminal


@dataclass(frozen=True, kw_only=True)
class Turns:
    """Seconds of every timed turn; the base has the first of each two."""

    base_s: tuple[float, ...]
    other_s: tuple[float, ...]

    @property
    def ratios(self) -> list[float]:
        """Time of the other over time of the base, of turns that followed each other."""
        return [other / base for other, base in zip(self.other_s, self.base_s, strict=True)]

    @property
    def ratio(self) -> float:
        """Median of `ratios`."""
        return median(self.ratios)

    def as_json(self, *, base: str, other: str) -> dict[str, Any]:
        """Return all of it for the result file, with these names of the sides."""
        return {f"{base}_s": list(self.base_s), f"{other}_s": list(self.other_s), "ratio": self.ratios}


def take_turns(
    base: Callable[[], float],
    other: Callable[[], float],
    *,
    warm_ups: int,
    repeats: int,
    terminal: Terminal,
    title: str,
    quiet_s: float,
    pause: Callable[[float], None] = time.sleep,
) -> Turns:
    """Call both by turns, `warm_ups` times for nothing, `repeats` times to keep the seconds they return.

    Before every call there are `quiet_s` in which the threads of the other side go to sleep.
    """
    turns: list[tuple[float, float]] = []
    with terminal.step(title):
        for _ in range(warm_ups + repeats):
            times = []
            for side in (base, other):
                pause(quiet_s)
                times.append(side())
            turns.append((times[0], times[1]))
    timed = turns[warm_ups:]
    return Turns(base_s=tuple(base for base, _ in timed), other_s=tuple(other for _, other in timed))
