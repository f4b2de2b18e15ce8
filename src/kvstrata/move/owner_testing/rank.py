"""For tests of KVPP: one rank over real memory, and the forwards that it runs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from kvstrata.core.buffers import BufferPlan, plan_buffers
from kvstrata.core.gate import PhysicalRange, SlotGate
from kvstrata.core.layers import Component
from kvstrata.errors import KVStrataError
from kvstrata.memory.allocator import SharedMemoryAllocator
from kvstrata.memory.host_pool import HostPool
from kvstrata.memory.pages import PageView
from kvstrata.memory.region import HostRegion
from kvstrata.move.carrier import Carrier
from kvstrata.move.engine import CopyEngine, CopyToken
from kvstrata.move.host_carrier import components
from kvstrata.move.layerwise import LayerwisePipeline
from kvstrata.move.memcpy import copy_ranges
from kvstrata.move.owner_testing.shape import UNIFORM, OwnerShape, page_of
from kvstrata.move.owner_turns import Payload
from kvstrata.move.peer_memory import Exchange, PeerMemoryCarrier
from kvstrata.move.plan import CopyPlan
from kvstrata.move.step import StepBlocks
from kvstrata.move.threads import ThreadEngine

HomeKind = Literal["window", "host"]
POISON = 0xA5


MakeCarrier = Callable[["OwnerRank"], Carrier]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a rank made of a forward."""

    error: str | None
    kind: str | None
    wrong: tuple[str, ...]
    acquired: tuple[int, ...]


class OwnerRank:
    """Windows, homes and a pipeline of one rank; `forward` does what a model does with them.

    Whatever a forward writes is a function of (layer, component, block, version), so each rank knows what
    every page must hold, and no two pages ever hold the same bytes.
    """

    def __init__(
        self,
        *,
        member: int,
        group_size: int,
        exchange: Exchange,
        make: MakeCarrier | None = None,
        shape: OwnerShape | None = None,
        home: HomeKind = "window",
        payload: Payload = "referenced",
        deadline_s: float = 60.0,
    ) -> None:
        self.member, self.home_kind, self.payload, self.deadline_s = member, home, payload, deadline_s
        self.exchange = exchange
        self.shape = shape or (OwnerShape() if home == "window" else UNIFORM)
        self.plan = self.shape.plan(group_size)
        self.allocator = SharedMemoryAllocator()
        self.buffers = self._buffers()
        self.region = self.allocator.alloc(
            self.buffers.physical_page_bytes * self.shape.num_blocks, f"windows-{member}"
        )
        self._bytes: npt.NDArray[np.uint8] = self.region.tensor().numpy()
        self._bytes[:] = POISON
        self.windows = {
            (bundle.index, component): self._window(bundle.index, component)
            for bundle in self.plan.bundles
            for component in components(bundle)
        }
        owned = self.plan.owned(member)
        self.host = (
            HostPool(self.plan.bundles, self.shape.num_blocks, self.allocator, layers=owned)
            if home == "host" and owned
            else None
        )
        self.faults: list[Callable[[], None]] = []  # each runs in place of one copy's start
        self.before_arrival: Callable[[], object] = lambda: None
        self.engine: CopyEngine = ThreadEngine(copy=self._copy)
        self.carrier = (make or shm_carrier)(self)
        self.pipeline = LayerwisePipeline(
            plan=self.buffers,
            windows=self.windows,
            carrier=self.carrier,
            engine=self.engine,
            gate=SlotGate(self._slot_ranges()),
            prefetch_layers=1,
            deadline_s=10 * deadline_s,
        )
        self.versions = np.zeros(self.shape.num_blocks, dtype=np.int64)

    @property
    def homes(self) -> dict[tuple[int, Component], PageView]:
        """Where the owned layers persist."""
        keys = [key for key in self.windows if key[0] in self.plan.owned(self.member)]
        return {key: self.host.view(*key) if self.host else self.windows[key] for key in keys}

    @property
    def home_regions(self) -> Sequence[HostRegion]:
        return [self.region] if self.host is None else [self.host.region]

    def forward(
        self,
        load: Collection[int],
        save: Collection[int],
        *,
        arrivals: Collection[int] = (),
        failing_arrivals: Collection[int] = (),
        stop_after: int | None = None,
    ) -> Outcome:
        """Run all layers; check every loaded page, write the pages of `save` anew.

        `arrivals` are blocks that a store brings to the homes of owned layers at the start;
        `failing_arrivals` are layers for which it fails to. `stop_after` breaks the forward off behind one.
        """
        blocks = StepBlocks(load=_ids(load), save=_ids(save))
        wrong: list[str] = []
        acquired: list[int] = []
        error: Exception | None = None
        for block in arrivals:
            self.versions[block] += 1
        before = self.versions.copy()
        self.versions[blocks.save] += 1
        try:
            self.pipeline.begin_step(self._arrive(_ids(arrivals), failing_arrivals, before))
            self.pipeline.start_forward(blocks)
            for layer in self.buffers.execution_order:
                self.pipeline.acquire(layer, blocks)
                acquired.append(layer)
                wrong += self._wrong_pages(layer, blocks.load, before)
                for component in components(self.buffers.bundle(layer)):
                    for block in blocks.save:
                        page_of(self.windows[layer, component], block)[:] = self.shape.pattern(
                            layer, component, int(block), int(self.versions[block])
                        )
                self.pipeline.release(layer, blocks)
                if layer == stop_after:
                    break
        except KVStrataError as trouble:
            error = trouble
        try:
            self.pipeline.end_step()
        except KVStrataError as trouble:
            error = error or trouble
        self.pipeline.check_integrity()
        self._poison_shared_windows()
        return Outcome(
            error=None if error is None else str(error),
            kind=None if error is None else type(error.__cause__ or error).__name__,
            wrong=tuple(wrong),
            acquired=tuple(acquired),
        )

    def fail_next_copy(self, reason: str) -> None:
        def fail() -> None:
            raise OSError(reason)

        self.faults.append(fail)

    def statistics(self) -> dict[str, float]:
        """The pipeline's and the carrier's totals."""
        return dict(vars(self.carrier.statistics())) | dict(vars(self.pipeline.statistics()))

    def close(self) -> None:
        self.engine.close(self.deadline_s)
        self.carrier.close()
        if self.host is not None:
            self.host.close()

    def _copy(self, plan: CopyPlan) -> None:
        if self.faults and len(plan):
            self.faults.pop(0)()
        copy_ranges(plan)

    def _buffers(self) -> BufferPlan:
        if self.home_kind == "window":
            return self.plan.buffer_plan(self.member)
        drafts = tuple(at for at, bundle in enumerate(self.plan.bundles) if bundle.is_draft)
        return plan_buffers(self.plan.bundles, num_shared_buffers=2, independent_layers=drafts)

    def _window(self, layer: int, component: Component) -> PageView:
        bundle = self.buffers.bundle(layer)
        spec = bundle.main if component is Component.MAIN else bundle.indexer
        assert spec is not None
        offset = self.buffers.offset_bytes(layer, component, self.shape.num_blocks)
        return PageView(
            address=self.region.address + offset,
            block_stride_bytes=spec.page_bytes,
            page_bytes=spec.page_bytes,
            num_blocks=self.shape.num_blocks,
        )

    def _slot_ranges(self) -> dict[Any, PhysicalRange]:
        ranges, start = {}, self.region.address
        for slot in self.buffers.slots:
            size_bytes = slot.page_bytes * self.shape.num_blocks
            ranges[slot.id] = PhysicalRange(start=start, size_bytes=size_bytes)
            start += size_bytes
        return ranges

    def _arrive(
        self, blocks: npt.NDArray[np.int64], failing: Collection[int], versions: npt.NDArray[np.int64]
    ) -> dict[int, CopyToken]:
        owned = self.plan.owned(self.member)

        def bring(layer: int) -> None:
            self.before_arrival()
            if layer in failing:
                raise OSError("the store is gone")
            for component in components(self.buffers.bundle(layer)):
                for block in blocks:
                    page_of(self.carrier.home(layer, component), block)[:] = self.shape.pattern(
                        layer, component, int(block), int(versions[block])
                    )

        lane = self.engine.lane("store")
        layers = [layer for layer in owned if len(blocks) or layer in failing]
        return {layer: lane.call(partial(bring, layer), name=f"rows of layer {layer}") for layer in layers}

    def _wrong_pages(
        self, layer: int, loaded: npt.NDArray[np.int64], versions: npt.NDArray[np.int64]
    ) -> list[str]:
        """Loaded pages that are not exactly their layer's, and, where only those move, others that are."""
        wrong = []
        is_passing = layer in self.plan.targets and (
            self.home_kind == "host" or self.plan.owner_of(layer) != self.member
        )
        expected = range(self.shape.num_blocks) if self.payload == "all" and len(loaded) else loaded
        for component in components(self.buffers.bundle(layer)):
            for block in range(self.shape.num_blocks):
                page = page_of(self.windows[layer, component], block)
                version = int(versions[block])
                if block in expected and version and layer in self.plan.targets:
                    if not (page == self.shape.pattern(layer, component, block, version)).all():
                        wrong.append(
                            f"layer {layer} {component.value} block {block} is not version {version}"
                        )
                elif is_passing and block not in expected:
                    known = [
                        self.shape.pattern(layer, component, block, past) for past in range(1, version + 1)
                    ]
                    if any((page == pattern).all() for pattern in known):
                        wrong.append(f"layer {layer} {component.value} block {block} was moved for nothing")
        return wrong

    def _poison_shared_windows(self) -> None:
        """What no forward may rely on: the windows of layers whose home is elsewhere."""
        for key in self.windows:
            if key[0] in self.plan.targets and self.windows[key] != self.homes.get(key):
                self._whole(key)[:] = POISON

    def _whole(self, key: tuple[int, Component]) -> npt.NDArray[np.uint8]:
        view = self.windows[key]
        offset = view.address - self.region.address
        return self._bytes[offset : offset + view.span_bytes]


def shm_carrier(rank: OwnerRank) -> Carrier:
    """Rows are copied out of the owner's memory."""
    return PeerMemoryCarrier(
        plan=rank.plan,
        member=rank.member,
        windows=rank.windows,
        homes=rank.homes,
        regions=rank.home_regions,
        exchange=rank.exchange,
        engine=rank.engine,
        allocator=rank.allocator,
        deadline_s=rank.deadline_s,
        payload=rank.payload,
    )


def _ids(blocks: Collection[int]) -> npt.NDArray[np.int64]:
    return np.array(sorted(set(blocks)), dtype=np.int64)
