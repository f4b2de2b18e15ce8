"""Engines and carriers that do not move what they should: the negative controls of exactness tests.

With the data path switched off an answer must change; if it does not, the test could not have failed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import numpy as np

from kvstrata.core.layers import Component
from kvstrata.memory.pages import PageView
from kvstrata.move.carrier import Carrier, CarrierStatistics
from kvstrata.move.engine import CopyEngine, CopyToken, EngineStatistics, Lane
from kvstrata.move.plan import CopyPlan
from kvstrata.move.step import Int64Array


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


class IdleCarrier:
    """A carrier whose loads move nothing, on every rank alike; everything else is the inner carrier's."""

    def __init__(self, inner: Carrier) -> None:
        self._inner = inner

    @property
    def moving(self) -> frozenset[int]:
        return self._inner.moving

    def begin_step(self) -> None:
        self._inner.begin_step()

    def load(self, layer: int, block_ids: Int64Array, *, after: Sequence[CopyToken]) -> CopyToken:
        return self._inner.load(layer, block_ids[:0], after=after)

    def save(self, layer: int, block_ids: Int64Array, *, after: Sequence[CopyToken]) -> CopyToken | None:
        return self._inner.save(layer, block_ids, after=after)

    def home(self, layer: int, component: Component) -> PageView:
        return self._inner.home(layer, component)

    def end_step(self) -> None:
        self._inner.end_step()

    def statistics(self) -> CarrierStatistics:
        return self._inner.statistics()

    def check_integrity(self) -> None:
        self._inner.check_integrity()

    def close(self) -> None:
        self._inner.close()
