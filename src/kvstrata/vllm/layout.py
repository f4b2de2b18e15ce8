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
from kvstrata.core.bundle import Bundle, ComponentSpec, build_bundles
from kvstrata.core.layers import Component, LayerId, resolve_layers
from kvstrata.core.owners import OwnerPlan, owner_groups, plan_owners
from kvstrata.errors import UnsupportedError
from kvstrata.move.host_carrier import hosted_layers

from .settings import Settings

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A worker's layers, how they share physical buffers, and what vLLM calls each of their caches."""

    plan: BufferPlan
    layer_of: Mapping[str, LayerId]  # vLLM's cache name -> layer and component
    hosted: frozenset[int] = frozenset()  # layers that persist in a host pool: this rank's or their owner's
    owners: OwnerPlan | None = None  # with KVPP
    member: int = 0  # this rank's index in its KVPP group

    @property
    def stored_bundles(self) -> tuple[Bundle, ...]:
        """What this rank saves in a store: all it has, with KVPP its own layers and its drafts."""
        if self.owners is None:
            return self.plan.bundles
        own = self.owners.owned(self.member)
        return tuple(bundle for bundle in self.plan.bundles if bundle.is_draft or bundle.index in own)

    @property
    def own_hosted(self) -> frozenset[int]:
        """The layers whose home is this rank's host pool."""
        return (
            self.hosted if self.owners is None else self.hosted.intersection(self.owners.owned(self.member))
        )


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
    if not settings.is_kvpp:
        plan = plan_buffers(bundles, num_shared_buffers=shared, independent_layers=independent)
        return Layout(plan=plan, layer_of=layer_of, hosted=hosted_layers(plan))
    member, group_size = kvpp_member(vllm_config)
    owners = plan_owners(bundles, group_size=group_size)
    if independent != "all":
        # Nobody owns a draft layer, so nobody could bring its rows back: it has a buffer of its own.
        drafts = (at for at, bundle in enumerate(owners.bundles) if bundle.is_draft)
        independent = (*independent, *drafts)
    plan = plan_buffers(bundles, num_shared_buffers=shared, independent_layers=independent)
    hosted = hosted_layers(plan)
    if not hosted:
        plan = owners.buffer_plan(member)
    return Layout(plan=plan, layer_of=layer_of, hosted=hosted, owners=owners, member=member)


def kvpp_member(vllm_config: VllmConfig) -> tuple[int, int]:
    """Return this worker's index in its KVPP group, `pcp_rank * tp + tp_rank`, and the size of the group."""
    parallel = vllm_config.parallel_config
    tp, pcp = parallel.tensor_parallel_size, parallel.prefill_context_parallel_size
    groups = owner_groups(tp * pcp * parallel.pipeline_parallel_size, tp=tp, pcp=pcp)
    group = next(group for group in groups if parallel.rank in group)
    return group.index(parallel.rank), len(group)


def check_first_selection(specs: Mapping[str, KVCacheSpec], vllm_config: VllmConfig) -> None:
    """Refuse a pipeline stage that begins with a layer without an indexer, in a model with sparse attention.

    Such a layer attends to the rows that the layer before it selected, and vLLM passes no selection from
    stage to stage: it would read uninitialised memory. Raises UnsupportedError with the way out.
    """
    if getattr(vllm_config.model_config.hf_text_config, "index_topk", None) is None:
        return
    components = {name: _component(name, spec) for name, spec in specs.items()}
    layer_of = resolve_layers(components, num_base_layers=num_base_layers(vllm_config))
    own = [layer for layer in layer_of.values() if not layer.is_draft]
    leaders = {layer.index for layer in own if layer.component is Component.INDEXER}
    first = min((layer.index for layer in own), default=None)
    if first is None or first in leaders:
        return
    later = f", such as layer {min(leaders)}" if leaders else ""
    raise UnsupportedError(
        f"a pipeline stage begins with layer {first}, which has no indexer and attends to the rows that the "
        "layer before it selected: vLLM passes no selection from stage to stage; set VLLM_PP_LAYER_PARTITION "
        f"so that every stage begins with a layer that has an indexer{later}"
    )


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

    In its slot a layer's main pages come first, then its indexer pages, with nothing in between: the bundle
    is one piece. Each holds all blocks.
    """
    blocks = kv_cache_config.num_blocks
    plan, specs = layout.plan, specs_of(kv_cache_config)
    tensors = []
    for name, layer in layout.layer_of.items():
        page_bytes = specs[name].page_size_bytes
        tensors.append(
            KVCacheTensor(
                size=plan.physical_page_bytes * blocks,
                layers=[name],
                layer_stride=page_bytes * blocks,
                block_stride=page_bytes,
                offset=plan.offset_bytes(layer.index, layer.component, blocks),
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
