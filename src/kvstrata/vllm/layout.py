"""From vLLM's cache specs to kvstrata's buffer plan, and from the plan to vLLM's tensor placement.

The only place that knows both vocabularies. Planning happens once on the specs a worker reports, and again on
the configuration it is given back: both must give the same plan (A3).
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.v1.kv_cache_interface import (
    KVCacheTensor,
    MLAAttentionSpec,
    SparseCacheRole,
    UniformTypeKVCacheSpecs,
)

from kvstrata.core.buffers import BufferPlan, plan_buffers
from kvstrata.core.bundle import ComponentSpec, build_bundles
from kvstrata.core.layers import Component, LayerId, resolve_layers
from kvstrata.errors import UnsupportedError

from .settings import Settings

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A worker's layers, how they share physical buffers, and what vLLM calls each of their caches."""

    plan: BufferPlan
    layer_of: Mapping[str, LayerId]  # vLLM's cache name -> layer and component


def plan_layout(specs: Mapping[str, KVCacheSpec], vllm_config: VllmConfig, settings: Settings) -> Layout:
    """Plan one worker's buffers from the specs of its caches.

    Raises UnsupportedError for caches that are not MLA (hybrid layouts are refused by name), LayoutError for
    layers that cannot share a buffer.
    """
    components = {name: _component(name, spec) for name, spec in specs.items()}
    layer_of = resolve_layers(components, num_base_layers=num_base_layers(vllm_config))
    bundles = build_bundles(_component_spec(name, spec, layer_of[name]) for name, spec in specs.items())
    connector = settings.connector
    shared = connector.layerwise.layerwise_num_shared_buffers if connector is not None else None
    independent = connector.layerwise.layerwise_independent_layers if connector is not None else "all"
    plan = plan_buffers(bundles, num_shared_buffers=shared, independent_layers=independent)
    return Layout(plan=plan, layer_of=layer_of)


def num_base_layers(vllm_config: VllmConfig) -> int:
    """Return how many layers the target model has; layers from that index on are draft layers."""
    return int(vllm_config.model_config.hf_text_config.num_hidden_layers)


def specs_of(kv_cache_config: KVCacheConfig) -> dict[str, KVCacheSpec]:
    """Return each cache's own spec from a planned configuration; a second group is a hybrid layout."""
    groups = kv_cache_config.kv_cache_groups
    if len(groups) > 1:
        kinds = sorted({type(group.kv_cache_spec).__name__ for group in groups})
        raise UnsupportedError(
            f"hybrid KV cache layout ({len(groups)} cache groups: {', '.join(kinds)}) is not supported by "
            "kvstrata's connector; serve a model with MLA layers only, or remove kv_connector"
        )
    specs: dict[str, KVCacheSpec] = {}
    for group in groups:
        spec = group.kv_cache_spec
        for name in group.layer_names:
            specs[name] = spec.kv_cache_specs[name] if isinstance(spec, UniformTypeKVCacheSpecs) else spec
    return specs


def place_tensors(kv_cache_config: KVCacheConfig, layout: Layout) -> KVCacheConfig:
    """Return a copy of ``kv_cache_config`` whose tensors are placed by slot: layers of a slot share bytes.

    Within a slot the main pages come first, then the indexer pages; every region holds all blocks.
    """
    blocks = kv_cache_config.num_blocks
    offset_bytes = 0
    offsets: dict[tuple[int, Component], int] = {}
    for slot in layout.plan.slots:
        offsets[slot.id, Component.MAIN] = offset_bytes
        offset_bytes += slot.main_page_bytes * blocks
        if slot.indexer_page_bytes:
            offsets[slot.id, Component.INDEXER] = offset_bytes
            offset_bytes += slot.indexer_page_bytes * blocks
    specs = specs_of(kv_cache_config)
    tensors = []
    for name, layer in layout.layer_of.items():
        page_bytes = specs[name].page_size_bytes
        tensors.append(
            KVCacheTensor(
                size=offset_bytes,
                layers=[name],
                layer_stride=page_bytes * blocks,
                block_stride=page_bytes,
                offset=offsets[layout.plan.slot_of(layer.index), layer.component],
            )
        )
    placed = copy.copy(kv_cache_config)
    placed.kv_cache_tensors = tensors
    return placed


def _component(name: str, spec: Any) -> Component:
    if not isinstance(spec, MLAAttentionSpec):
        raise UnsupportedError(
            f"cache {name!r} is a {type(spec).__name__}, not MLA: hybrid KV cache layouts are not supported "
            "by kvstrata's connector; serve a model with MLA layers only, or remove kv_connector"
        )
    return Component.INDEXER if spec.cache_role is SparseCacheRole.INDEXER else Component.MAIN


def _component_spec(name: str, spec: Any, layer: LayerId) -> ComponentSpec:
    return ComponentSpec(
        name=name,
        layer=layer,
        page_bytes=int(spec.page_size_bytes),
        block_tokens=int(spec.block_size),
        layout=f"{spec.dtype} x {spec.head_size} ({spec.cache_dtype_str or 'auto'})",
    )
