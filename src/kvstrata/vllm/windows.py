"""Windows of whole layers in vLLM's terms: where they lie, what runs around them, what a step uses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from kvstrata.core.gate import PhysicalRange
from kvstrata.core.layers import Component
from kvstrata.memory.pages import PageView
from kvstrata.move.layerwise import LayerwisePipeline
from kvstrata.move.step import StepBlocks, step_blocks

from .layout import Layout

if TYPE_CHECKING:
    from .metadata import KVStrataMetadata


class PipelineHook:
    """A layer's hook on the layerwise pipeline."""

    def __init__(self, pipeline: LayerwisePipeline, layer: int) -> None:
        self._pipeline = pipeline
        self._layer = layer

    def acquire(self, metadata: KVStrataMetadata) -> None:
        """Wait until the layer's window is safe to write and holds the prefix."""
        self._pipeline.acquire(self._layer, blocks_of(metadata))

    def release(self, metadata: KVStrataMetadata) -> None:
        """Save the new rows and prefetch."""
        self._pipeline.release(self._layer, blocks_of(metadata))


def blocks_of(metadata: KVStrataMetadata) -> StepBlocks:
    """Return which blocks the forward reads and writes, worked out once for all layers."""
    if metadata.blocks is None:
        metadata.blocks = step_blocks(
            metadata.query_start_loc.numpy(),
            metadata.seq_lens.numpy(),
            metadata.block_table.numpy(),
            metadata.plan.block_tokens,
        )
    return metadata.blocks


def windows_of(
    layout: Layout, kv_caches: Mapping[str, torch.Tensor]
) -> dict[tuple[int, Component], PageView]:
    """Return each layer's pages in the caches that vLLM bound."""
    return {
        (layer.index, layer.component): PageView.of_tensor(kv_caches[name])
        for name, layer in layout.layer_of.items()
    }


def slot_ranges(
    layout: Layout, windows: Mapping[tuple[int, Component], PageView]
) -> dict[Any, PhysicalRange]:
    """A slot is the memory of its layers' main and indexer windows, which lie side by side.

    A slot that no layer of this rank passes through is left out.
    """
    ranges = {}
    for slot in layout.plan.slots:
        views: Sequence[PageView] = [view for (layer, _), view in windows.items() if layer in slot.layers]
        if not views:
            continue
        start = min(view.address for view in views)
        end = max(view.address + view.span_bytes for view in views)
        ranges[slot.id] = PhysicalRange(start=start, size_bytes=end - start)
    return ranges
