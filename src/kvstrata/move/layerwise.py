"""Layerwise offload of one rank: layers pass through a few physical buffers, their home is the host pool.

The lifecycle of a layer in a forward (seed: Layerwise Prefill Offload, Execution pipeline)::

    begin_step -> acquire(layer) -> [write rows, attend] -> release(layer) -> ... -> end_step

``acquire`` makes the slot safe to write (M1) and the prefix present; ``release`` saves the new rows to the
host and starts loading later layers. Saves run on one lane, loads on another; a load into a slot is ordered
behind the saves out of it, so the host thread waits only for loads that are late. A layer whose slot holds no
other layer never moves: its window is its home.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from kvstrata.core.buffers import BufferPlan, SlotId
from kvstrata.core.gate import Obligation, Outcome, SlotGate
from kvstrata.core.layers import Component
from kvstrata.memory.host_pool import HostPool
from kvstrata.memory.pages import PageView
from kvstrata.move.engine import CopyEngine, CopyToken
from kvstrata.move.plan import CopyPlan, concat, plan_block_copies
from kvstrata.move.step import Int64Array, StepBlocks

LOAD_LANE = "load"
SAVE_LANE = "save"

PageTable = Mapping[tuple[int, Component], PageView]


@dataclass(frozen=True, kw_only=True)
class LayerwiseStatistics:
    """Totals since start; ``prefetched_loads + late_loads`` is the number of layer loads."""

    steps: int = 0
    loaded_bytes: int = 0
    saved_bytes: int = 0
    prefetched_loads: int = 0
    late_loads: int = 0
    load_wait_s: float = 0.0
    save_wait_s: float = 0.0


@dataclass(kw_only=True)
class _Resident:
    """What a slot's window is known to hold in the current step."""

    layer: int
    blocks: Int64Array


class LayerwisePipeline:
    """Moves layers between the host pool and their slots around attention.

    One engine thread calls all methods, in lifecycle order. ``arrivals`` lets another source (the store) put
    rows into a layer's home first: it returns the tokens that a load of the layer must come after.
    """

    def __init__(
        self,
        *,
        plan: BufferPlan,
        windows: PageTable,
        host: HostPool | None,
        engine: CopyEngine,
        gate: SlotGate,
        prefetch_layers: int,
        deadline_s: float,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._plan = plan
        self._windows = windows
        self._host = host
        self._engine = engine
        self._gate = gate
        self._prefetch_layers = prefetch_layers
        self._deadline_s = deadline_s
        self._clock = clock
        self._moving = hosted_layers(plan)
        self._components = {
            bundle.index: (Component.MAIN,) if bundle.indexer is None else (Component.MAIN, Component.INDEXER)
            for bundle in plan.bundles
        }
        self._drafts = {bundle.index for bundle in plan.bundles if bundle.is_draft}
        self._step = 0
        self._held: set[int] = set()
        self._loading: dict[int, CopyToken] = {}
        self._saving: dict[Obligation, tuple[SlotId, CopyToken]] = {}
        self._resident: dict[SlotId, _Resident] = {}
        self._arrivals: Mapping[int, CopyToken] = {}
        self._statistics = LayerwiseStatistics()

    def begin_step(self, arrivals: Mapping[int, CopyToken] | None = None) -> None:
        """Start a forward; ``arrivals`` maps layers to tokens after which their homes hold external rows."""
        assert not self._loading, "a load outlived its step"
        assert not self._saving, "a save outlived its step"
        self._step += 1
        self._held.clear()
        self._resident.clear()
        self._arrivals = arrivals or {}
        self._count(steps=1)

    def acquire(self, layer: int, blocks: StepBlocks) -> None:
        """Return once ``layer``'s window may be written and holds the prefix; legal again until released."""
        if layer in self._held:
            return
        self._held.add(layer)
        if layer not in self._moving:
            arrival = self._arrivals.get(layer)
            if arrival is not None:
                self._wait(arrival, f"store rows of layer {layer}")
            return
        token = self._loading.pop(layer, None)
        if token is None:
            token = self._start_load(layer, blocks)
            self._count(late_loads=1)
        else:
            self._count(prefetched_loads=1)
        self._wait(token, f"load of layer {layer}")
        self._settle_saves_of(self._plan.slot_of(layer))

    def release(self, layer: int, blocks: StepBlocks) -> None:
        """Save the rows this forward wrote, then prefetch; the slot stays ``layer``'s until the save ends."""
        self._held.discard(layer)
        if layer in self._moving:
            self._start_save(layer, blocks)
        self._prefetch_after(layer, blocks)

    def end_step(self) -> None:
        """Wait until every save has reached the host (device constraint 14) and forget unused prefetches."""
        for layer in list(self._loading):
            self._wait(self._loading.pop(layer), f"unused prefetch of layer {layer}")
            slot = self._plan.slot_of(layer)
            self._settle_saves_of(slot)
            self._gate.publish(slot, layer, ())
        begun = self._clock()
        for slot, _ in list(self._saving.values()):
            self._settle_saves_of(slot)
        self._count(save_wait_s=self._clock() - begun)
        for layer in sorted(self._held & self._moving):
            self._gate.publish(self._plan.slot_of(layer), layer, ())
        self._held.clear()
        self._arrivals = {}

    def home(self, layer: int, component: Component) -> PageView:
        """Return where the layer's full KV persists between steps."""
        if layer in self._moving:
            assert self._host is not None
            return self._host.view(layer, component)
        return self._windows[layer, component]

    def statistics(self) -> LayerwiseStatistics:
        """Return totals since start."""
        return self._statistics

    def check_integrity(self) -> None:
        """Check that gate, pool and pipeline agree; between steps nothing may be in flight."""
        self._gate.check_integrity()
        if self._host is not None:
            self._host.check_integrity()
        assert not self._saving or self._held or self._loading or self._step, "saves without a step"

    def _start_load(self, layer: int, blocks: StepBlocks) -> CopyToken:
        slot = self._plan.slot_of(layer)
        resident = self._resident.get(slot)
        wanted = blocks.load
        if resident is not None and resident.layer == layer:
            wanted = np.setdiff1d(wanted, resident.blocks, assume_unique=True)
        behind = self._gate.pending(slot)
        tokens = [self._saving[obligation][1] for obligation in behind]
        arrival = self._arrivals.get(layer)
        if arrival is not None:
            tokens.append(arrival)
        self._gate.claim(slot, layer, ordered_behind=behind)
        copies = self._copies(layer, wanted, to_host=False)
        self._resident[slot] = _Resident(layer=layer, blocks=np.union1d(blocks.load, blocks.save))
        self._count(loaded_bytes=copies.total_bytes)
        return self._engine.lane(LOAD_LANE).submit(copies, after=tokens, name=f"load of layer {layer}")

    def _start_save(self, layer: int, blocks: StepBlocks) -> None:
        slot = self._plan.slot_of(layer)
        copies = self._copies(layer, blocks.save, to_host=True)
        obligation = Obligation(kind="save", key=(self._step, layer, len(self._saving)))
        self._gate.publish(slot, layer, (obligation,))
        token = self._engine.lane(SAVE_LANE).submit(
            copies, after=(self._engine.compute_done(),), name=f"save of layer {layer}"
        )
        self._saving[obligation] = (slot, token)
        self._count(saved_bytes=copies.total_bytes)

    def _prefetch_after(self, layer: int, blocks: StepBlocks) -> None:
        """Start loading later target layers whose slot no earlier layer still needs.

        Draft layers are left out: they may run several times a step, each time with another prefix.
        """
        taken = {self._plan.slot_of(other) for other in self._held | set(self._loading)}
        for later in self._plan.following(layer, self._prefetch_layers):
            if later in self._drafts or later not in self._moving or later in self._loading:
                continue
            slot = self._plan.slot_of(later)
            if slot not in taken:
                self._loading[later] = self._start_load(later, blocks)
                taken.add(slot)

    def _copies(self, layer: int, block_ids: Int64Array, *, to_host: bool) -> CopyPlan:
        assert self._host is not None
        plans = []
        for component in self._components[layer]:
            window, home = self._windows[layer, component], self._host.view(layer, component)
            dst, src = (home, window) if to_host else (window, home)
            plans.append(plan_block_copies(dst, src, block_ids))
        return concat(plans)

    def _settle_saves_of(self, slot: SlotId) -> None:
        for obligation, (owner, token) in list(self._saving.items()):
            if owner == slot:
                token.wait(deadline_s=self._deadline_s, what=f"save {obligation.key}")
                self._gate.settle(slot, obligation, Outcome.DONE)
                del self._saving[obligation]

    def _wait(self, token: CopyToken, what: str) -> None:
        begun = self._clock()
        token.wait(deadline_s=self._deadline_s, what=what)
        self._count(load_wait_s=self._clock() - begun)

    def _count(self, **more: float) -> None:
        now = self._statistics
        self._statistics = replace(now, **{name: getattr(now, name) + value for name, value in more.items()})


def hosted_layers(plan: BufferPlan) -> frozenset[int]:
    """Return the layers whose home is the host: those that share their slot with another layer."""
    return frozenset(layer for slot in plan.slots if len(slot.layers) > 1 for layer in slot.layers)
