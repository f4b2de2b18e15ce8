"""One worker's data path: windows, host pool, copy lanes and store, put together once caches are bound."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch
from vllm.logger import init_logger

from kvstrata.core.gate import PhysicalRange, SlotGate
from kvstrata.core.layers import Component
from kvstrata.kernels.parallel import pool_cpus
from kvstrata.memory.allocator import SharedMemoryAllocator
from kvstrata.memory.host_pool import HostPool
from kvstrata.memory.pages import PageView
from kvstrata.move import engine_for
from kvstrata.move.engine import CopyEngine
from kvstrata.move.faulty import DroppingEngine
from kvstrata.move.layerwise import LOAD_LANE, LayerwisePipeline, hosted_layers
from kvstrata.move.step import StepBlocks, step_blocks
from kvstrata.move.store_io import StoreIO
from kvstrata.store.base import Store

from .layout import Layout
from .settings import Settings
from .stats import METRICS
from .transfers import StepTransfers

if TYPE_CHECKING:
    from .metadata import KVStrataMetadata

logger = init_logger("vllm.kvstrata.data_path")


class DataPath:
    """Owns everything that moves KV in this worker; the connector drives steps, the layers drive hooks."""

    def __init__(
        self,
        *,
        layout: Layout,
        kv_caches: Mapping[str, torch.Tensor],
        settings: Settings,
        store: Store | None,
        namespace: str,
        rank: str,
    ) -> None:
        connector = settings.connector
        assert connector is not None
        windows = _windows(layout, kv_caches)
        num_blocks = next(iter(windows.values())).num_blocks
        device = next(iter(kv_caches.values())).device
        hosted = hosted_layers(layout.plan)
        self._plan = layout.plan
        self._num_blocks = num_blocks
        self._rank = rank
        self._engine: CopyEngine = engine_for(device.type, **_engine_options(device.type))
        moving = self._engine
        if settings.additional.fault == "skip_loads":
            logger.warning("fault is 'skip_loads': answers of this engine are wrong on purpose")
            moving = DroppingEngine(self._engine, lanes={LOAD_LANE})
        self._host = (
            HostPool(
                layout.plan.bundles,
                num_blocks,
                SharedMemoryAllocator(limit_bytes=connector.layerwise.host_memory_bytes, prefault=True),
                layers=hosted,
            )
            if hosted
            else None
        )
        self._pipeline = LayerwisePipeline(
            plan=layout.plan,
            windows=windows,
            host=self._host,
            engine=moving,
            gate=SlotGate(_slot_ranges(layout, windows)),
            prefetch_layers=connector.layerwise.prefetch_layers,
            deadline_s=connector.deadline_s,
        )
        self._store = store
        self._io = (
            StoreIO(
                store=store,
                bundles=layout.plan.bundles,
                home=self._pipeline.home,
                engine=self._engine,
                namespace=namespace,
                rank=rank,
                deadline_s=connector.deadline_s,
            )
            if store is not None
            else None
        )
        self._transfers = StepTransfers()
        self._deadline_s = connector.deadline_s
        self._reported: dict[str, float] = {}
        logger.info(
            "rank %s: %d blocks, %.1f MiB of layer buffers, %.1f MiB host pool, store %s",
            rank,
            num_blocks,
            num_blocks * layout.plan.physical_page_bytes / 2**20,
            self._host.size_bytes / 2**20 if self._host else 0.0,
            "on" if store is not None else "off",
        )

    def hook(self, layer: int) -> PipelineHook:
        """Return the lifecycle hook of one layer."""
        return PipelineHook(self._pipeline, layer)

    def begin_step(self, transfers: StepTransfers) -> None:
        """Start a forward: settle the step before, start the store's fetches."""
        self._pipeline.end_step()  # a forward that broke off still saves to homes that fetches would write
        self._transfers = transfers
        arrivals = None
        if self._io is not None:
            arrivals = self._io.begin_step(
                [(fetch.block_id, fetch.leases.get(self._rank)) for fetch in transfers.fetches]
            )
        self._pipeline.begin_step(arrivals)

    def end_step(self) -> None:
        """Drain the forward's saves, then offer finished blocks to the store."""
        self._pipeline.end_step()
        if self._io is None:
            return
        self._io.end_step()
        # Any request of this step may share a failed block and have computed from it; and vLLM ends the step
        # of a forward that raised, too.
        if self.failed_blocks() or not self._pipeline.ran_all_target_layers():
            return
        self._io.put([(put.block_id, put.block_hash) for put in self._transfers.puts])

    @property
    def step_number(self) -> int:
        """The scheduler's number of the step that was begun last; 0 where there is no store."""
        return self._transfers.number

    def failed_blocks(self) -> frozenset[int]:
        """Return the blocks of this step whose rows did not arrive: vLLM recomputes them."""
        return self._io.failed_blocks() if self._io is not None else frozenset()

    def counts(self) -> dict[str, float]:
        """Return totals since start under the keys of the metrics."""
        totals = asdict(self._pipeline.statistics())
        if self._io is not None:
            totals |= asdict(self._io.statistics())
        return {metric.key: totals.get(metric.key, 0) for metric in METRICS}

    def take_counts(self) -> dict[str, float]:
        """Return what was counted since the last call."""
        totals = self.counts()
        new = {key: value - self._reported.get(key, 0) for key, value in totals.items()}
        self._reported = totals
        return {key: value for key, value in new.items() if value}

    def figures(self) -> dict[str, Any]:
        """Return this rank's figures for demo, bench and tests."""
        return {
            "rank": self._rank,
            "num_blocks": self._num_blocks,
            "device_bytes": self._num_blocks * self._plan.physical_page_bytes,
            "logical_page_bytes": self._plan.logical_page_bytes,
            "physical_page_bytes": self._plan.physical_page_bytes,
            "host_pool_bytes": self._host.size_bytes if self._host is not None else 0,
            "plan": self._plan.describe(),
            **self.counts(),
        }

    def check_integrity(self) -> None:
        """Check every part that holds state."""
        self._pipeline.check_integrity()
        self._engine.check_integrity()
        if self._store is not None:
            self._store.check_integrity()

    def close(self) -> None:
        """Finish what is in flight and let go of memory and store."""
        if self._io is not None:
            self._io.settle_puts()
        self._engine.close(self._deadline_s)
        if self._host is not None:
            self._host.close()
        if self._store is not None:
            self._store.close()


class PipelineHook:
    """A layer's hook on the layerwise pipeline."""

    def __init__(self, pipeline: LayerwisePipeline, layer: int) -> None:
        self._pipeline = pipeline
        self._layer = layer

    def acquire(self, metadata: KVStrataMetadata) -> None:
        """Wait until the layer's window is safe to write and holds the prefix."""
        self._pipeline.acquire(self._layer, _blocks(metadata))

    def release(self, metadata: KVStrataMetadata) -> None:
        """Save the new rows and prefetch."""
        self._pipeline.release(self._layer, _blocks(metadata))


def _blocks(metadata: KVStrataMetadata) -> StepBlocks:
    if metadata.blocks is None:
        metadata.blocks = step_blocks(
            metadata.query_start_loc.numpy(),
            metadata.seq_lens.numpy(),
            metadata.block_table.numpy(),
            metadata.plan.block_tokens,
        )
    return metadata.blocks


def _engine_options(device_type: str) -> dict[str, Any]:
    """On CPU the copy threads run where the rank computes, not on the one CPU of their maker."""
    return {"cpu_ids": sorted(pool_cpus()) or None} if device_type == "cpu" else {}


def _windows(layout: Layout, kv_caches: Mapping[str, torch.Tensor]) -> dict[tuple[int, Component], PageView]:
    return {
        (layer.index, layer.component): PageView.of_tensor(kv_caches[name])
        for name, layer in layout.layer_of.items()
    }


def _slot_ranges(
    layout: Layout, windows: Mapping[tuple[int, Component], PageView]
) -> dict[Any, PhysicalRange]:
    """A slot is the memory of its layers' main and indexer windows, which lie side by side."""
    ranges = {}
    for slot in layout.plan.slots:
        views: Sequence[PageView] = [view for (layer, _), view in windows.items() if layer in slot.layers]
        start = min(view.address for view in views)
        end = max(view.address + view.span_bytes for view in views)
        ranges[slot.id] = PhysicalRange(start=start, size_bytes=end - start)
    return ranges
