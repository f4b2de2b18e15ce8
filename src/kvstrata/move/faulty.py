"""A copy engine that drops the copies of chosen lanes: the negative control of every exactness test.

With the data path switched off an answer must change; if it does not, the test could not have failed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import numpy as np

from kvstrata.move.engine import CopyEngine, CopyToken, EngineStatistics, Lane
from kvstrata.move.plan import CopyPlan


class DroppingLane:
    """A lane whose copies move nothing; order and tokens are the inner lane's."""

    def __init__(self, inner: Lane) -> None:
        self._inner = inner

    @property
    def name(self) -> str:
        return self._inner.name

    def submit(self, plan: CopyPlan, *, after: Sequence[CopyToken] = (), name: str) -> CopyToken:
        nothing = np.empty(0, dtype=np.int64)
        return self._inner.submit(CopyPlan(dst=nothing, src=nothing, size=nothing), after=after, name=name)

    def call(self, fn: Callable[[], None], *, after: Sequence[CopyToken] = (), name: str) -> CopyToken:
        return self._inner.call(fn, after=after, name=name)

    def drain(self, *, deadline_s: float) -> None:
        self._inner.drain(deadline_s=deadline_s)


class DroppingEngine:
    """Wraps an engine; copies on ``lanes`` are dropped, everything else passes through."""

    def __init__(self, inner: CopyEngine, *, lanes: Collection[str]) -> None:
        self._inner = inner
        self._dropped = frozenset(lanes)

    def lane(self, name: str) -> Lane:
        lane = self._inner.lane(name)
        return DroppingLane(lane) if name in self._dropped else lane

    def compute_done(self) -> CopyToken:
        return self._inner.compute_done()

    def statistics(self) -> EngineStatistics:
        return self._inner.statistics()

    def check_integrity(self) -> None:
        self._inner.check_integrity()

    def close(self, deadline_s: float) -> None:
        self._inner.close(deadline_s)
