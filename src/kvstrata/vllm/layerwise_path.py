"""Layerwise offload in one worker: windows, host pool and copy lanes, put together once caches are bound."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from vllm.logger import init_logger

from kvstrata.core.gate import SlotGate
from kvstrata.memory.allocator import SharedMemoryAllocator
from kvstrata.memory.host_pool import HostPool
from kvstrata.move import engine_for
from kvstrata.move.carrier import LOAD_LANE
from kvstrata.move.engine import CopyEngine, CopyToken
from kvstrata.move.faulty import DroppingEngine
from kvstrata.move.host_carrier import HostCarrier
from kvstrata.move.layerwise import LayerwisePipeline
from kvstrata.store.base import Store

from .data_path import DataPath, engine_options
from .layout import Layout
from .settings import Settings
from .transfers import StepTransfers
from .windows import PipelineHook, slot_ranges, windows_of

logger = init_logger("vllm.kvstrata.layerwise")


class LayerwisePath(DataPath):
    """Layerwise prefill offload of one worker: windows, host pool and copy lanes put together."""

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
        windows = windows_of(layout, kv_caches)
        num_blocks = next(iter(windows.values())).num_blocks
        device = next(iter(kv_caches.values())).device
        engine: CopyEngine = engine_for(device.type, **engine_options(device.type))
        moving = engine
        if settings.additional.fault == "skip_loads":
            logger.warning("fault is 'skip_loads': answers of this engine are wrong on purpose")
            moving = DroppingEngine(engine, lanes={LOAD_LANE})
        host = (
            HostPool(
                layout.plan.bundles,
                num_blocks,
                SharedMemoryAllocator(limit_bytes=connector.layerwise.host_memory_bytes, prefault=True),
                layers=layout.hosted,
            )
            if layout.hosted
            else None
        )
        self._layers = LayerwisePipeline(
            plan=layout.plan,
            windows=windows,
            carrier=HostCarrier(plan=layout.plan, windows=windows, host=host, engine=moving),
            engine=moving,
            gate=SlotGate(slot_ranges(layout, windows)),
            prefetch_layers=connector.layerwise.prefetch_layers,
            deadline_s=connector.deadline_s,
        )
        super().__init__(
            pipeline=self._layers,
            engine=engine,
            host=host,
            store=store,
            bundles=layout.plan.bundles,
            namespace=namespace,
            rank=rank,
            num_blocks=num_blocks,
            deadline_s=connector.deadline_s,
        )
        self._plan = layout.plan
        logger.info(
            "rank %s: %d blocks, %.1f MiB of layer buffers, %.1f MiB host pool, store %s",
            rank,
            num_blocks,
            num_blocks * layout.plan.physical_page_bytes / 2**20,
            host.size_bytes / 2**20 if host else 0.0,
            "on" if store is not None else "off",
        )

    def hook(self, layer: int) -> PipelineHook:
        """Return the lifecycle hook of one layer."""
        return PipelineHook(self._layers, layer)

    def saved(self, layer: int) -> CopyToken | None:
        """Return the token of the layer's save in this step."""
        return self._layers.saved(layer)

    def begin_step(self, transfers: StepTransfers) -> None:
        """Start a forward: settle the step before, start the store's fetches."""
        self._layers.end_step()  # a forward that broke off still saves to homes that fetches would write
        self._layers.begin_step(self._start_fetches(transfers))

    def figures(self) -> dict[str, Any]:
        """Return this rank's figures for demo, bench and tests."""
        return {
            **super().figures(),
            "device_bytes": self._num_blocks * self._plan.physical_page_bytes,
            "logical_page_bytes": self._plan.logical_page_bytes,
            "physical_page_bytes": self._plan.physical_page_bytes,
            "plan": self._plan.describe(),
        }
