"""Traces by name: a recorded file, or one of the synthetic profiles."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import cast

import numpy as np
from numpy.typing import NDArray

from kvstrata.bench.topk_traces import PROFILES, TraceProfile, synthetic_trace
from kvstrata.core.eviction import near_rows_per_token
from kvstrata.errors import ConfigurationError
from kvstrata.trace.events import Event, Selection, TraceSource
from kvstrata.trace.recording import TopkTrace

# Hot rows of four times top-k are full after some 30 steps.
SYNTHETIC_WARM_UP = 64
_NO_ROWS = np.empty(0, np.int64)


@dataclass(frozen=True, kw_only=True)
class SyntheticSource:
    """One request's decode as `synthetic_trace` makes it; host rows are positions.

    Each share group has a seed of its own: what one trace happens to miss more, another misses less.
    """

    name: TraceProfile
    topk: int = 2048
    tokens: int = 32768
    steps: int = 320
    seeds: tuple[int, ...] = (1, 2, 3)

    @property
    def host_rows(self) -> int:
        """All rows are below this."""
        return self.tokens

    def events(self) -> Iterator[Event]:
        """Yield every step of one share group after the other; near rows are the next best positions."""
        return iter(self._events)

    @cached_property
    def _events(self) -> list[Event]:
        # Made once: replaying takes a pass for each policy and size, and making it is the slower part.
        return [
            Selection(
                layer=layer,
                step=step,
                rows=positions.astype(np.int64)[np.newaxis],
                fresh_rows=_NO_ROWS,
                near_rows=self._next_best(scores),
            )
            for layer, seed in enumerate(self.seeds)
            for step, (positions, scores) in enumerate(
                synthetic_trace(self.name, tokens=self.tokens, topk=self.topk, steps=self.steps, seed=seed)
            )
        ]

    def _next_best(self, scores: NDArray[np.float32]) -> NDArray[np.int64]:
        end = self.tokens - self.topk
        first = end - near_rows_per_token(self.topk)
        return np.sort(np.argpartition(scores, (first, end))[first:end])


def open_source(name: str) -> tuple[TraceSource, int]:
    """Return the trace called `name`, and how many selections of it warm up by default.

    Raises ConfigurationError if it is neither a profile nor a file, TraceFormatError if it is another file.
    """
    if name in PROFILES:
        return SyntheticSource(name=cast(TraceProfile, name)), SYNTHETIC_WARM_UP
    path = Path(name)
    if not path.is_file():
        raise ConfigurationError(
            f"trace {name!r}: no such file; give one that `kvstrata trace record` made, "
            f"or one of {', '.join(PROFILES)}"
        )
    return TopkTrace(path), 0
