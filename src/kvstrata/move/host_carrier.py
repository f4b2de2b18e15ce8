"""Layerwise offload's carrier: layers that share a buffer have their home in this rank's host pool."""

from __future__ import annotations

from collections.abc import Sequence

from kvstrata.core.buffers import BufferPlan
from kvstrata.core.bundle import Bundle
from kvstrata.core.layers import Component
from kvstrata.memory.host_pool import HostPool
from kvstrata.memory.pages import PageView
from kvstrata.move.carrier import LOAD_LANE, SAVE_LANE, CarrierStatistics, PageTable
from kvstrata.move.engine import CopyEngine, CopyToken
from kvstrata.move.plan import CopyPlan, concat, plan_block_copies
from kvstrata.move.step import Int64Array


class HostCarrier:
    """Copies layers between the host pool and their windows, loads on one lane and saves on another.

    The pool is the caller's; it may be None where no two layers share a buffer. A layer may be loaded several
    times in a forward.
    """

    def __init__(
        self, *, plan: BufferPlan, windows: PageTable, host: HostPool | None, engine: CopyEngine
    ) -> None:
        self.moving = hosted_layers(plan)
        assert host is not None or not self.moving, "layers share buffers and have no home"
        self._plan = plan
        self._windows = windows
        self._host = host
        self._engine = engine
        self._loaded_bytes = 0
        self._saved_bytes = 0

    def begin_step(self) -> None:
        """Nothing to prepare: each load and save stands for itself."""

    def load(self, layer: int, block_ids: Int64Array, *, after: Sequence[CopyToken]) -> CopyToken:
        copies = self._copies(layer, block_ids, to_host=False)
        token = self._engine.lane(LOAD_LANE).submit(copies, after=after, name=f"load of layer {layer}")
        self._loaded_bytes += copies.total_bytes
        return token

    def save(self, layer: int, block_ids: Int64Array, *, after: Sequence[CopyToken]) -> CopyToken | None:
        copies = self._copies(layer, block_ids, to_host=True)
        token = self._engine.lane(SAVE_LANE).submit(copies, after=after, name=f"save of layer {layer}")
        self._saved_bytes += copies.total_bytes
        return token

    def home(self, layer: int, component: Component) -> PageView:
        if self._host is None:
            raise KeyError(f"layer {layer} {component.value} has no home in a host pool")
        return self._host.view(layer, component)

    def end_step(self) -> None:
        """Nobody else waits for this rank."""

    def statistics(self) -> CarrierStatistics:
        return CarrierStatistics(loaded_bytes=self._loaded_bytes, saved_bytes=self._saved_bytes)

    def check_integrity(self) -> None:
        if self._host is not None:
            self._host.check_integrity()

    def close(self) -> None:
        """The pool is the caller's."""

    def _copies(self, layer: int, block_ids: Int64Array, *, to_host: bool) -> CopyPlan:
        plans = []
        for component in components(self._plan.bundle(layer)):
            window, home = self._windows[layer, component], self.home(layer, component)
            dst, src = (home, window) if to_host else (window, home)
            plans.append(plan_block_copies(dst, src, block_ids))
        return concat(plans)


def components(bundle: Bundle) -> tuple[Component, ...]:
    """The caches of a layer, main first."""
    return (Component.MAIN,) if bundle.indexer is None else (Component.MAIN, Component.INDEXER)


def hosted_layers(plan: BufferPlan) -> frozenset[int]:
    """Return the layers whose home is the host: those that share their slot with another layer."""
    return frozenset(layer for slot in plan.slots if len(slot.layers) > 1 for layer in slot.layers)
