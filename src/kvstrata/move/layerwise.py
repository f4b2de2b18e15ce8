"""Layers of one rank pass through a few physical buffers; a carrier brings their rows and takes them home.

The lifecycle of a layer in a forward (seed: Layerwise Prefill Offload, Execution pipeline; KVPP, Full-layer
broadcast and prefetch)::

    begin_step -> start_forward -> acquire(layer) -> [write rows, attend] -> release(layer) -> ... -> end_step

``acquire`` makes the slot safe to write (M1) and the prefix present, then starts loading later layers whose
slots are free; ``release`` takes the new rows home and starts what that set free. A load into a slot is
ordered behind the saves out of it, so the host thread waits only for loads that are late. A layer that its
carrier does not move stays in its window.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from kvstrata.core.buffers import BufferPlan, SlotId
from kvstrata.core.gate import GateState, Obligation, Outcome, SlotGate
from kvstrata.core.layers import Component
from kvstrata.errors import DeadlineExceeded, KVStrataError, TransferFailed
from kvstrata.memory.pages import PageView
from kvstrata.move.carrier import Carrier, PageTable
from kvstrata.move.engine import CopyEngine, CopyToken
from kvstrata.move.step import Int64Array, StepBlocks


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
    """Decides when layers move into their slots and out of them, around attention.

    One engine thread calls all methods, in lifecycle order. ``arrivals`` lets another source (the store) put
    rows into a layer's home first: it returns the tokens that a load of the layer must come after.
    ``prefetch_layers`` is how many layers ahead of the running one are loaded; ``deadline_s`` must leave the
    carrier's own deadlines room, so that a load ends by itself.
    """

    def __init__(
        self,
        *,
        plan: BufferPlan,
        windows: PageTable,
        carrier: Carrier,
        engine: CopyEngine,
        gate: SlotGate,
        prefetch_layers: int,
        deadline_s: float,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._plan = plan
        self._windows = windows
        self._carrier = carrier
        self._engine = engine
        self._gate = gate
        self._prefetch_layers = prefetch_layers
        self._deadline_s = deadline_s
        self._clock = clock
        self._moving = carrier.moving
        self._drafts = {bundle.index for bundle in plan.bundles if bundle.is_draft}
        self._serial = itertools.count()
        self._held: set[int] = set()
        self._released: set[int] = set()
        self._loading: dict[int, CopyToken] = {}
        self._saving: dict[Obligation, tuple[SlotId, CopyToken]] = {}
        self._saved: dict[int, CopyToken] = {}  # of this step, by layer; the last one where there were more
        self._resident: dict[SlotId, _Resident] = {}
        self._arrivals: Mapping[int, CopyToken] = {}
        self._statistics = LayerwiseStatistics()

    def begin_step(self, arrivals: Mapping[int, CopyToken] | None = None) -> None:
        """Start a forward; ``arrivals`` maps layers to tokens after which their homes hold external rows.

        A forward that broke off before its ``end_step`` is ended first, and raises here what that would have.
        """
        if self._loading or self._saving or self._held:
            self.end_step()
        self._resident.clear()
        self._released.clear()
        self._saved.clear()
        self._arrivals = arrivals or {}
        self._carrier.begin_step()
        self._count(steps=1)

    def start_forward(self, blocks: StepBlocks) -> None:
        """Start loading the first layers, where the forward has history; nothing moves where it has none."""
        if blocks.load.size:
            self._prefetch(self._plan.execution_order[: self._prefetch_layers], blocks)

    def acquire(self, layer: int, blocks: StepBlocks) -> None:
        """Return once ``layer``'s window may be written and holds the prefix; legal again until released.

        Raises TransferFailed or DeadlineExceeded, again for every further try in this step: the window does
        not hold the prefix and may not be used.
        """
        if layer in self._held:
            return
        if layer in self._moving:
            is_early = layer in self._loading
            self._count(prefetched_loads=int(is_early), late_loads=int(not is_early))
            if not is_early:
                self._loading[layer] = self._start_load(layer, blocks)
            self._wait(self._loading[layer], f"load of layer {layer}")
            del self._loading[layer]
            self._settle_saves_of(self._plan.slot_of(layer))
        elif layer in self._arrivals:
            self._wait(self._arrivals[layer], f"store rows of layer {layer}")
        self._held.add(layer)
        self._prefetch_after(layer, blocks)

    def release(self, layer: int, blocks: StepBlocks) -> None:
        """Save the rows this forward wrote, then prefetch; the slot stays ``layer``'s until the save ends."""
        if layer in self._moving:
            self._start_save(layer, blocks)
        self._held.discard(layer)
        self._released.add(layer)
        self._prefetch_after(layer, blocks)

    def end_step(self) -> None:
        """Wait until every save is home (device constraint 14) and forget unused prefetches.

        All that has ended is put in order before the first failure is raised, so that the next step starts
        clean. What still moves after the deadline keeps its slot, and the next call waits for it again (M3).
        """
        troubles: list[KVStrataError] = []
        for layer, token in list(self._loading.items()):
            try:
                self._wait(token, f"unused load of layer {layer}")
            except TransferFailed as trouble:
                troubles.append(trouble)
            except DeadlineExceeded as trouble:
                troubles.append(trouble)
                continue
            del self._loading[layer]
            self._gate.publish(self._plan.slot_of(layer), layer, ())
        begun = self._clock()
        for obligation in list(self._saving):
            try:
                self._settle_save(obligation)
            except (TransferFailed, DeadlineExceeded) as trouble:
                troubles.append(trouble)
        self._count(save_wait_s=self._clock() - begun)
        for layer in sorted(self._held & self._moving):
            self._gate.publish(self._plan.slot_of(layer), layer, ())
        self._held.clear()
        self._arrivals = {}
        self._carrier.end_step()
        if troubles:
            raise troubles[0]

    def saved(self, layer: int) -> CopyToken | None:
        """Return the token after which the rows that a released layer wrote in this step are home.

        None where they are: the layer's window is its home.
        """
        return self._saved.get(layer)

    def ran_all_target_layers(self) -> bool:
        """Whether the forward got through; if not, its blocks lack rows and may not be shown to anyone."""
        return self._released.issuperset(self._plan.execution_order[: -len(self._drafts) or None])

    def home(self, layer: int, component: Component) -> PageView:
        """Return where the layer's full KV persists between steps."""
        if layer in self._moving:
            return self._carrier.home(layer, component)
        return self._windows[layer, component]

    def statistics(self) -> LayerwiseStatistics:
        """Return totals since start."""
        moved = self._carrier.statistics()
        return replace(self._statistics, loaded_bytes=moved.loaded_bytes, saved_bytes=moved.saved_bytes)

    def check_integrity(self) -> None:
        """Check that gate, carrier and pipeline agree on every slot."""
        self._gate.check_integrity()
        self._carrier.check_integrity()
        for layer in (self._held & self._moving) | set(self._loading):
            slot = self._plan.slot_of(layer)
            assert self._gate.owner(slot) == layer, f"slot {slot} was taken from layer {layer}"
            assert self._gate.state(slot) is GateState.CLAIMED, f"slot {slot} of layer {layer} is not claimed"
        for obligation, (slot, _) in self._saving.items():
            assert obligation in self._gate.pending(slot), f"{obligation} does not hold slot {slot}"

    def _start_load(self, layer: int, blocks: StepBlocks) -> CopyToken:
        slot = self._plan.slot_of(layer)
        resident = self._resident.get(slot)
        wanted = blocks.load
        if resident is not None and resident.layer == layer:
            wanted = np.setdiff1d(wanted, resident.blocks, assume_unique=True)
        behind = self._gate.pending(slot)
        tokens = [self._saving[obligation][1] for obligation in behind]
        if layer in self._arrivals:
            tokens.append(self._arrivals[layer])
        self._gate.claim(slot, layer, ordered_behind=behind)
        try:
            token = self._carrier.load(layer, wanted, after=tokens)
        except BaseException:
            self._gate.publish(slot, layer, ())  # nothing was started: the slot is free again
            raise
        self._resident[slot] = _Resident(layer=layer, blocks=np.union1d(blocks.load, blocks.save))
        return token

    def _start_save(self, layer: int, blocks: StepBlocks) -> None:
        slot = self._plan.slot_of(layer)
        obligation = Obligation(kind="save", key=(layer, next(self._serial)))
        self._gate.publish(slot, layer, (obligation,))
        self._held.discard(layer)
        try:
            token = self._carrier.save(layer, blocks.save, after=(self._engine.compute_done(),))
        except BaseException:
            self._gate.settle(slot, obligation, Outcome.FAILED)
            raise
        if token is None:
            self._gate.settle(slot, obligation, Outcome.DONE)
            return
        self._saving[obligation] = (slot, token)
        self._saved[layer] = token

    def _prefetch_after(self, layer: int, blocks: StepBlocks) -> None:
        self._prefetch(self._plan.following(layer, self._prefetch_layers), blocks)

    def _prefetch(self, layers: Sequence[int], blocks: StepBlocks) -> None:
        """Start loading those of the target layers whose slot no earlier layer still needs.

        Draft layers are left out: they may run several times a step, each time with another prefix.
        """
        for later in layers:
            if later in self._drafts or later not in self._moving:
                continue
            if self._gate.state(self._plan.slot_of(later)) is not GateState.CLAIMED:
                self._loading[later] = self._start_load(later, blocks)

    def _settle_saves_of(self, slot: SlotId) -> None:
        for obligation, (owner, _) in list(self._saving.items()):
            if owner == slot:
                self._settle_save(obligation)

    def _settle_save(self, obligation: Obligation) -> None:
        """Wait for one save; past its deadline it still reads the slot, so the obligation stands."""
        slot, token = self._saving[obligation]
        try:
            token.wait(deadline_s=self._deadline_s, what=f"end of {token.name}")
        except TransferFailed:
            del self._saving[obligation]
            self._gate.settle(slot, obligation, Outcome.FAILED)
            raise
        del self._saving[obligation]
        self._gate.settle(slot, obligation, Outcome.DONE)

    def _wait(self, token: CopyToken, what: str) -> None:
        begun = self._clock()
        try:
            token.wait(deadline_s=self._deadline_s, what=what)
        finally:
            self._count(load_wait_s=self._clock() - begun)

    def _count(self, **more: float) -> None:
        now = self._statistics
        self._statistics = replace(now, **{name: getattr(now, name) + value for name, value in more.items()})
