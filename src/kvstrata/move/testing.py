"""For tests of the layerwise pipeline: a forward over real memory, rows compared with a plain full cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvstrata.core.buffers import BufferPlan, SlotId, plan_buffers
from kvstrata.core.bundle import ComponentSpec, build_bundles
from kvstrata.core.gate import PhysicalRange, SlotGate
from kvstrata.core.layers import Component, LayerId
from kvstrata.memory.allocator import SharedMemoryAllocator
from kvstrata.memory.host_pool import HostPool
from kvstrata.memory.pages import PageView
from kvstrata.move.engine import CopyEngine
from kvstrata.move.host_carrier import HostCarrier, hosted_layers
from kvstrata.move.layerwise import LayerwisePipeline
from kvstrata.move.step import StepBlocks, step_blocks

WORDS = {Component.MAIN: 2, Component.INDEXER: 1}
"""Words of 8 bytes in a row."""
POISON = np.uint64(0xDEADBEEFDEADBEEF)

Rows = npt.NDArray[np.uint64]  # [blocks, tokens of a block, words]


@dataclass(kw_only=True)
class Request:
    """`computed` rows are final; `blocks` has room for more."""

    serial: int
    blocks: list[int] = field(default_factory=list)
    computed: int = 0


def make_plan(
    *,
    layers: int,
    drafts: int,
    indexers: Sequence[int],
    shared: int | None,
    independent: Sequence[int],
    tokens: int,
) -> BufferPlan:
    """Plan `layers` target layers and then `drafts`; those among `indexers` have an indexer cache."""
    specs = []
    for index in range(layers + drafts):
        for component in (Component.MAIN, Component.INDEXER):
            if component is Component.MAIN or index in indexers:
                specs.append(
                    ComponentSpec(
                        name=f"layers.{index}.{component.value}",
                        layer=LayerId(index, component, index >= layers),
                        page_bytes=tokens * WORDS[component] * 8,
                        block_tokens=tokens,
                        layout=component.value,
                    )
                )
    count = layers + drafts
    return plan_buffers(
        build_bundles(specs),
        num_shared_buffers=shared,
        independent_layers=tuple(at for at in independent if -count <= at < count),
    )


class Memory:
    """Windows, host pool, and the oracle: a full cache of every layer. Windows are poisoned at first.

    Windows lie as the worker places them: layers of a slot on the same bytes, indexer pages after main pages.
    """

    def __init__(self, plan: BufferPlan, *, blocks: int, tokens: int, gap_bytes: int = 0) -> None:
        self.plan, self.blocks, self.tokens = plan, blocks, tokens
        self.components = {
            (bundle.index, component)
            for bundle in plan.bundles
            for component in (Component.MAIN, Component.INDEXER)
            if component is Component.MAIN or bundle.indexer is not None
        }
        self.hosted = hosted_layers(plan)
        self.windows: dict[tuple[int, Component], PageView] = {}
        self.window_rows: dict[tuple[int, Component], Rows] = {}
        self.slot_ranges: dict[SlotId, PhysicalRange] = {}
        self._place(gap_bytes)
        self.host = (
            HostPool(plan.bundles, blocks, SharedMemoryAllocator(), layers=self.hosted)
            if self.hosted
            else None
        )
        self.oracle = {
            key: np.full((blocks, tokens, WORDS[key[1]]), POISON, dtype=np.uint64) for key in self.components
        }
        self.is_written = {key: np.zeros((blocks, tokens), dtype=bool) for key in self.components}

    def _place(self, gap_bytes: int) -> None:
        strides = {component: self.tokens * WORDS[component] * 8 + gap_bytes for component in Component}
        regions: dict[tuple[SlotId, Component], int] = {}
        size = 0
        for slot in self.plan.slots:
            begin = size
            for component, page_bytes in (
                (Component.MAIN, slot.main_page_bytes),
                (Component.INDEXER, slot.indexer_page_bytes),
            ):
                if page_bytes:
                    regions[slot.id, component] = size
                    size += self.blocks * strides[component]
            self.slot_ranges[slot.id] = PhysicalRange(start=begin, size_bytes=size - begin)
        self._arena = np.full(size // 8, POISON, dtype=np.uint64)
        for layer, component in self.components:
            offset = regions[self.plan.slot_of(layer), component]
            self.windows[layer, component] = PageView(
                address=self._arena.ctypes.data + offset,
                block_stride_bytes=strides[component],
                page_bytes=self.tokens * WORDS[component] * 8,
                num_blocks=self.blocks,
            )
            self.window_rows[layer, component] = np.ndarray(
                (self.blocks, self.tokens, WORDS[component]),
                dtype=np.uint64,
                buffer=self._arena.data,
                offset=offset,
                strides=(strides[component], WORDS[component] * 8, 8),
            )

    def poison_shared_windows(self) -> None:
        """Overwrite what no step may rely on: the windows of layers whose home is the host."""
        for (layer, _), rows in self.window_rows.items():
            if layer in self.hosted:
                rows[:] = POISON

    def forget_block(self, block: int) -> None:
        """A block gets a new owner: nothing in it is anybody's any more."""
        for key in self.components:
            self.is_written[key][block] = False
            if key[0] not in self.hosted:
                self.window_rows[key][block] = POISON

    def forget_rows(self, request: Request) -> None:
        """Rows behind the computed ones are drafts': never read before they are written again.

        Where no draft runs in the step that would rewrite them, plain vLLM is left with what was rejected.
        """
        for at in range(request.computed, len(request.blocks) * self.tokens):
            for key in self.components:
                self.is_written[key][request.blocks[at // self.tokens], at % self.tokens] = False

    def close(self) -> None:
        if self.host is not None:
            self.host.close()


@dataclass(frozen=True, kw_only=True)
class Batch:
    """What one pass of a model computes: for each request its blocks and the positions of its new rows."""

    serials: tuple[int, ...]
    tables: tuple[tuple[int, ...], ...]
    begins: tuple[int, ...]
    ends: tuple[int, ...]

    @classmethod
    def of(cls, requests: Sequence[tuple[Request, int, int]]) -> Batch:
        return cls(
            serials=tuple(request.serial for request, _, _ in requests),
            tables=tuple(tuple(request.blocks) for request, _, _ in requests),
            begins=tuple(begin for _, begin, _ in requests),
            ends=tuple(end for _, _, end in requests),
        )

    def step_blocks(self, tokens: int) -> StepBlocks:
        """As vLLM's metadata gives it, with one request of padding behind the others."""
        width = max(len(table) for table in self.tables) + 1
        table = np.full((len(self.tables) + 1, width), -1, dtype=np.int32)
        for at, blocks in enumerate(self.tables):
            table[at, : len(blocks)] = blocks
        counts = [end - begin for begin, end in zip(self.begins, self.ends, strict=True)]
        starts = np.cumsum([0, *counts, 0]).astype(np.int32)
        return step_blocks(starts, np.array([*self.ends, 0], dtype=np.int32), table, tokens)


class Forward:
    """Runs layers over `Memory` and checks every row that attention would read (M4)."""

    def __init__(self, memory: Memory, pipeline: LayerwisePipeline) -> None:
        self.memory, self.pipeline = memory, pipeline
        self.generation = 0
        self.compared_rows = 0

    def layer(self, layer: int, batch: Batch, *, acquires: int = 1, stop: str = "") -> None:
        """One layer's turn; `stop` ends it after "acquire" or "write", as an exception there would."""
        blocks = batch.step_blocks(self.memory.tokens)
        for _ in range(acquires):
            self.pipeline.acquire(layer, blocks)
        if stop == "acquire":
            return
        keys = sorted(key for key in self.memory.components if key[0] == layer)
        for key in keys:
            self._write(key, batch)
        if stop == "write":
            return
        for key in keys:
            self._compare(key, batch)
        self.pipeline.release(layer, blocks)

    def _places(
        self, table: Sequence[int], begin: int, end: int
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        positions = np.arange(begin, end)
        return np.array(table, dtype=np.int64)[
            positions // self.memory.tokens
        ], positions % self.memory.tokens

    def _write(self, key: tuple[int, Component], batch: Batch) -> None:
        layer, component = key
        for serial, table, begin, end in zip(
            batch.serials, batch.tables, batch.begins, batch.ends, strict=True
        ):
            blocks, offsets = self._places(table, begin, end)
            self.generation += 1
            first = (serial << 48) | (layer << 41) | ((component is Component.INDEXER) << 40)
            rows = np.empty((end - begin, WORDS[component]), dtype=np.uint64)
            rows[:] = (first | (self.generation << 16)) + np.arange(begin, end, dtype=np.uint64)[:, None]
            self.memory.window_rows[key][blocks, offsets] = rows
            self.memory.oracle[key][blocks, offsets] = rows
            self.memory.is_written[key][blocks, offsets] = True

    def _compare(self, key: tuple[int, Component], batch: Batch) -> None:
        for serial, table, end in zip(batch.serials, batch.tables, batch.ends, strict=True):
            blocks, offsets = self._places(table, 0, end)
            known = self.memory.is_written[key][blocks, offsets]
            seen = self.memory.window_rows[key][blocks, offsets]
            wanted = self.memory.oracle[key][blocks, offsets]
            self.compared_rows += int(known.sum())
            wrong = np.flatnonzero(known & (seen != wanted).any(axis=1))
            assert not len(wrong), (
                f"M4: layer {key[0]} {key[1].value}, request {serial}, position {wrong[0]}: attention reads "
                f"{seen[wrong[0]]}, plain vLLM {wanted[wrong[0]]}"
            )


def make_carrier(memory: Memory, engine: CopyEngine) -> HostCarrier:
    return HostCarrier(plan=memory.plan, windows=memory.windows, host=memory.host, engine=engine)


def make_pipeline(
    memory: Memory,
    engine: CopyEngine,
    *,
    prefetch_layers: int,
    deadline_s: float = 30.0,
    gate_class: type[SlotGate] = SlotGate,
    pipeline_class: type[LayerwisePipeline] = LayerwisePipeline,
) -> LayerwisePipeline:
    return pipeline_class(
        plan=memory.plan,
        windows=memory.windows,
        carrier=make_carrier(memory, engine),
        engine=engine,
        gate=gate_class(memory.slot_ranges),
        prefetch_layers=prefetch_layers,
        deadline_s=deadline_s,
    )
