"""Put a worker's data path together once vLLM's caches are bound, and attach it to the layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from kvstrata.core.budget import SparseBudget
from kvstrata.core.eviction import LRU, near_rows_per_token
from kvstrata.core.layers import Component
from kvstrata.memory.region import HostRegion
from kvstrata.store.base import Store

from .data_path import DataPath
from .hooks import LayerHook
from .kvpp_checks import check_stored_layers, check_transport
from .kvpp_group import KvppGroup
from .kvpp_path import KvppPath
from .layerwise_path import LayerwisePath
from .layout import Layout, plan_layout, specs_of
from .namespace import rank_identity
from .remote_roles import roles_of
from .settings import Settings
from .shared_home import open_shared_home
from .sparse_path import SparsePath
from .sparse_plan import SparsePlan
from .stores import open_configured_store
from .topk_recorder import TopkRecorder

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from .remote_worker import RemoteWorker


@dataclass(frozen=True, kw_only=True)
class BoundCaches:
    """What the connector knows when caches are bound."""

    vllm_config: VllmConfig
    kv_config: KVCacheConfig
    kv_caches: Mapping[str, torch.Tensor]
    settings: Settings
    namespace: str
    window_regions: Sequence[HostRegion] = ()  # shared memory that vLLM's caches lie in


@dataclass(frozen=True, kw_only=True)
class OpenPath:
    """A worker's data path, hooked into the layers, and its share of remote read if it has one."""

    path: DataPath
    remote: RemoteWorker | None


def open_layerwise(bound: BoundCaches) -> OpenPath:
    """Open the path on which whole layers move, if any do, and hook it into the layers."""
    layout = plan_layout(specs_of(bound.kv_config), bound.vllm_config, bound.settings)

    def make(store: Store | None, rank: str) -> DataPath:
        return LayerwisePath(
            layout=layout,
            kv_caches=bound.kv_caches,
            settings=bound.settings,
            store=store,
            namespace=bound.namespace,
            rank=rank,
        )

    return _open(bound, layout, make)


def open_kvpp(bound: BoundCaches) -> OpenPath:
    """Open the path on which layers come from the ranks that own them, on all ranks of a group at once."""
    connector = bound.settings.connector
    assert connector is not None, "the platform names kvstrata's connector with KVPP"
    layout = plan_layout(specs_of(bound.kv_config), bound.vllm_config, bound.settings)
    assert layout.owners is not None
    check_stored_layers(layout.owners, connector.store.backend)
    group = KvppGroup.of_worker(bound.settings, deadline_s=connector.deadline_s)
    check_transport(group.transport, roles_of(bound.vllm_config, bound.settings))

    def make(store: Store | None, rank: str) -> DataPath:
        return KvppPath(
            layout=layout,
            group=group,
            kv_caches=bound.kv_caches,
            regions=bound.window_regions,
            settings=bound.settings,
            store=store,
            namespace=bound.namespace,
            rank=rank,
        )

    with group.telling_of_failure():
        return _open(bound, layout, make)


def open_sparse(bound: BoundCaches, plan: SparsePlan, budget: SparseBudget) -> OpenPath:
    """Open the path on which rows move and hook it into the layers, on all ranks of a pool at once."""
    from vllm.distributed import get_tp_group

    connector = bound.settings.connector
    assert connector is not None, "the platform names kvstrata's connector with sparse offload"
    num_blocks = bound.kv_config.num_blocks
    home = open_shared_home(
        plan,
        num_blocks,
        tp_group=get_tp_group(),
        limit_bytes=budget.host_bytes,
        deadline_s=connector.deadline_s,
    )
    trace_path = bound.settings.additional.topk_trace_path
    recorder: TopkRecorder | None = None

    def make(store: Store | None, rank: str) -> DataPath:
        return SparsePath(
            plan=plan,
            budget=budget,
            num_blocks=num_blocks,
            kv_caches=bound.kv_caches,
            near=near_positions(bound.vllm_config, plan),
            home=home,
            settings=bound.settings,
            store=store,
            namespace=bound.namespace,
            rank=rank,
            observer=recorder,
        )

    try:
        if trace_path is not None:
            rank = bound.vllm_config.parallel_config.rank
            recorder = TopkRecorder(Path(trace_path), plan, num_blocks, rank=rank)
        return _open(bound, plan.layout, make)
    except BaseException:
        if recorder is not None:
            recorder.close()
        home.close()
        raise


def _open(bound: BoundCaches, layout: Layout, make: Callable[[Store | None, str], DataPath]) -> OpenPath:
    from vllm.distributed import get_pp_group, get_tp_group

    assert bound.settings.connector is not None
    identity = rank_identity(
        bound.vllm_config, tp_rank=get_tp_group().rank_in_group, pp_rank=get_pp_group().rank_in_group
    )
    object_bytes = sum(bundle.page_bytes for bundle in layout.stored_bundles)
    store = open_configured_store(bound.settings.connector.store, object_bytes=object_bytes)
    try:
        path = make(store, identity.key())
    except BaseException:
        if store is not None:
            store.close()
        raise
    remote = _open_remote(bound, layout, path)
    if remote is not None:
        path.count_also(remote.counts)
    layers = bound.vllm_config.compilation_config.static_forward_context
    for name, layer in layout.layer_of.items():
        hook: LayerHook = path.hook(layer.index)
        if layer.component is Component.INDEXER:
            layers[name].bind(name, hook, path.near)
            continue
        if remote is not None:
            hook = remote.hook(hook, layer.index)
        layers[name].impl.bind(name, hook, path.window(layer.index))
    return OpenPath(path=path, remote=remote)


def _open_remote(bound: BoundCaches, layout: Layout, path: DataPath) -> RemoteWorker | None:
    from vllm.distributed import get_tp_group

    if not roles_of(bound.vllm_config, bound.settings):
        return None
    from .remote_open import open_remote_worker

    try:
        return open_remote_worker(
            path,
            layout.plan.bundles,
            vllm_config=bound.vllm_config,
            settings=bound.settings,
            tp_rank=get_tp_group().rank_in_group,
            regions=[*bound.window_regions, *path.shared_regions],
        )
    except BaseException:
        path.close()
        raise


def near_positions(vllm_config: VllmConfig, plan: SparsePlan) -> torch.Tensor | None:
    """Return room for the positions that indexers nearly select, [max tokens, W]; None: nobody asks."""
    if plan.policy == LRU:
        return None
    tokens = int(vllm_config.scheduler_config.max_num_batched_tokens)
    return torch.full((tokens, near_rows_per_token(plan.limits.topk)), -1, dtype=torch.int32)
