"""KVPP in one worker: its own layers, the scratch for those of the others, and the carrier between the ranks.

Source: seed, KVPP. With layer buffers beside it (`layerwise_num_shared_buffers`) the homes are the owners'
host pools instead of their device memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from vllm.logger import init_logger

from kvstrata.core.gate import SlotGate
from kvstrata.memory.allocator import SharedMemoryAllocator
from kvstrata.memory.host_pool import HostPool
from kvstrata.memory.region import HostRegion
from kvstrata.move import engine_for
from kvstrata.move.carrier import Carrier
from kvstrata.move.engine import CopyEngine, CopyToken
from kvstrata.move.faulty import IdleCarrier
from kvstrata.move.layerwise import LayerwisePipeline
from kvstrata.store.base import Store

from .data_path import DataPath, engine_options
from .kvpp_group import KvppGroup, OwnerCarrier
from .layout import Layout
from .settings import Settings
from .transfers import StepTransfers
from .windows import PipelineHook, blocks_of, slot_ranges, windows_of

logger = init_logger("vllm.kvstrata.kvpp")

BROADCAST_COUNTS = ("broadcasts", "broadcast_bytes", "broadcast_s", "broadcast_wait_s")

_PREFETCH_LAYERS = 1  # there are two scratch buffers: one computes, one arrives


class KvppPath(DataPath):
    """One rank of a KVPP group. All ranks make theirs at the same time."""

    def __init__(
        self,
        *,
        layout: Layout,
        group: KvppGroup,
        kv_caches: Mapping[str, torch.Tensor],
        regions: Sequence[HostRegion],
        settings: Settings,
        store: Store | None,
        namespace: str,
        rank: str,
    ) -> None:
        """`regions` is the shared memory that vLLM's caches lie in."""
        connector = settings.connector
        assert connector is not None, "the platform names kvstrata's connector with KVPP"
        assert layout.owners is not None
        windows = windows_of(layout, kv_caches)
        num_blocks = next(iter(windows.values())).num_blocks
        device = next(iter(kv_caches.values())).device
        engine: CopyEngine = engine_for(device.type, **engine_options(device.type))
        host = None
        if layout.own_hosted:
            limit_bytes = connector.layerwise.host_memory_bytes
            host = HostPool(
                layout.plan.bundles,
                num_blocks,
                SharedMemoryAllocator(limit_bytes=limit_bytes, prefault=True),
                layers=layout.own_hosted,
            )
        own_homes = {
            key: host.view(*key) if host is not None and key[0] in layout.own_hosted else view
            for key, view in windows.items()
        }
        self._carrier: OwnerCarrier = group.carrier(
            plan=layout.owners,
            windows=windows,
            homes=own_homes,
            regions=[*regions, *([host.region] if host is not None else [])],
            engine=engine,
        )
        carrier: Carrier = self._carrier
        if settings.additional.fault == "skip_loads":
            logger.warning("fault is 'skip_loads': answers of this engine are wrong on purpose")
            carrier = IdleCarrier(carrier)
        self._layers = LayerwisePipeline(
            plan=layout.plan,
            windows=windows,
            carrier=carrier,
            engine=engine,
            gate=SlotGate(slot_ranges(layout, windows)),
            prefetch_layers=_PREFETCH_LAYERS,
            deadline_s=self._carrier.load_deadline_s,
        )
        super().__init__(
            pipeline=self._layers,
            engine=engine,
            host=host,
            store=store,
            bundles=layout.stored_bundles,
            namespace=namespace,
            rank=rank,
            num_blocks=num_blocks,
            deadline_s=connector.deadline_s,
        )
        self._layout = layout
        logger.info(
            "rank %s: %d blocks; member %d of %d keeps layers %s in %s, the others' pass through %s; "
            "%s blocks travel, by %s; store %s",
            rank,
            num_blocks,
            layout.member,
            layout.owners.group_size,
            list(layout.owners.owned(layout.member)),
            "its host pool" if host is not None else "device memory",
            "the layer buffers" if layout.hosted else "two scratch buffers",
            settings.additional.kvpp.kvpp_broadcast,
            group.transport,
            "on" if store is not None else "off",
        )

    def hook(self, layer: int) -> PipelineHook:
        """Return the lifecycle hook of one layer."""
        return PipelineHook(self._layers, layer)

    def saved(self, layer: int) -> CopyToken | None:
        """Return the token after which this step's rows of the layer are home, wherever that is."""
        return self._layers.saved(layer) or self._carrier.homed(layer)

    @property
    def shared_regions(self) -> list[HostRegion]:
        """This rank's host pool and the memory of the other owners."""
        return [*super().shared_regions, *self._carrier.peer_regions]

    def begin_step(self, transfers: StepTransfers) -> None:
        """Start a forward; where it has history, the first layer's broadcast starts with it."""
        self._layers.end_step()  # a forward that broke off still saves to homes that fetches would write
        self._layers.begin_step(self._start_fetches(transfers))
        metadata = _forward_metadata()
        if metadata is not None:
            self._layers.start_forward(blocks_of(metadata))

    def counts(self) -> dict[str, float]:
        """Return totals since start under the keys of the metrics."""
        moved = vars(self._carrier.statistics())
        return super().counts() | {key: moved[key] for key in BROADCAST_COUNTS}

    def figures(self) -> dict[str, Any]:
        """Return this rank's figures for demo, bench and tests."""
        owners, member = self._layout.owners, self._layout.member
        assert owners is not None
        plan = self._layout.plan
        return {
            **super().figures(),
            "device_bytes": self._num_blocks * plan.physical_page_bytes,
            "logical_page_bytes": plan.logical_page_bytes,
            "physical_page_bytes": plan.physical_page_bytes,
            "owned_layers": list(owners.owned(member)),
            "plan": owners.describe(member),
        }

    def close(self) -> None:
        """Finish what is in flight, then let go of the other ranks' memory."""
        try:
            super().close()
        finally:
            self._carrier.close()


def _forward_metadata() -> Any:
    """Return the running forward's attention metadata, one for all layers; None for a step without one."""
    from vllm.forward_context import get_forward_context, is_forward_context_available

    from .metadata import KVStrataMetadata

    if not is_forward_context_available():
        return None
    metadata = get_forward_context().attn_metadata
    if not isinstance(metadata, dict):
        return None
    return next((found for found in metadata.values() if isinstance(found, KVStrataMetadata)), None)
