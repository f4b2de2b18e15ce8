"""kvstrata's KV connector: the face vLLM's scheduler and workers see.

``KVStrataConnector`` does what the configuration asks for. ``AscendStoreConnector`` is the seeds' name for
its store half; ``SfaRemoteD2HConnector`` names the remote half, which this version does not have.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.logger import init_logger

from kvstrata.errors import UnsupportedError

from .data_path import DataPath
from .layout import plan_layout, specs_of
from .namespace import all_rank_keys, rank_identity, store_namespace
from .scheduler_side import StoreScheduler
from .settings import Settings
from .stats import KVStrataPromMetrics, KVStrataStats
from .stores import open_configured_store
from .transfers import StepDone, StepTransfers

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = init_logger("vllm.kvstrata.connector")


class KVStrataConnector(KVConnectorBase_V1, SupportsHMA):
    """Layerwise prefill offload and the KV store, in one connector.

    vLLM makes one object in the scheduler's process and one in every worker; each drives its own half.
    """

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        self._settings = Settings.of(vllm_config)
        if self._settings.connector is None:
            raise UnsupportedError("kvstrata's connector was made without an entry in kv_transfer_config")
        self._kv_config = kv_cache_config
        self._scheduler: StoreScheduler | None = None
        self._data_path: DataPath | None = None
        self._namespace = store_namespace(vllm_config)
        if role is KVConnectorRole.SCHEDULER:
            specs_of(kv_cache_config)  # refuses a hybrid layout by name
            store = open_configured_store(self._settings.connector.store)
            if store is not None:
                self._scheduler = StoreScheduler(
                    store=store,
                    namespace=self._namespace,
                    ranks=all_rank_keys(vllm_config),
                    block_tokens=vllm_config.cache_config.block_size,
                    lease_s=self._settings.connector.store.store_lease_s,
                    offers=self._kv_transfer_config.is_kv_producer,
                )

    @property
    def requires_kv_delivery(self) -> bool:
        """A save that is lost is a future miss, nothing else."""
        return False

    # Worker side.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Put the data path together and hook it into the layers; called once caches are bound."""
        from vllm.distributed import get_pp_group, get_tp_group

        assert self._settings.connector is not None
        layout = plan_layout(specs_of(self._kv_config), self._vllm_config, self._settings)
        identity = rank_identity(
            self._vllm_config, tp_rank=get_tp_group().rank_in_group, pp_rank=get_pp_group().rank_in_group
        )
        store = open_configured_store(
            self._settings.connector.store, object_bytes=layout.plan.logical_page_bytes
        )
        try:
            self._data_path = DataPath(
                layout=layout,
                kv_caches=kv_caches,
                settings=self._settings,
                store=store,
                namespace=self._namespace,
                rank=identity.key(),
            )
        except BaseException:
            if store is not None:
                store.close()
            raise
        layers = self._vllm_config.compilation_config.static_forward_context
        for name, layer in layout.layer_of.items():
            module = layers[name]
            bindable = module if hasattr(module, "bind") else module.impl
            bindable.bind(name, self._data_path.hook(layer.index))

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """A step begins: vLLM binds before every forward, whether or not it calls ``start_load_kv`` first."""
        super().bind_connector_metadata(connector_metadata)
        if self._data_path is not None:
            assert isinstance(connector_metadata, StepTransfers)
            self._data_path.begin_step(connector_metadata)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Loads start when the step begins, and layer by layer from kvstrata's own hooks."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Too late for shared buffers, where rows are written first; see :mod:`kvstrata.vllm.hooks`."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Saves start from kvstrata's own hooks, which see the indexer cache too."""

    def wait_for_save(self) -> None:
        """The step's forwards are over, drafts included."""
        if self._data_path is not None:
            self._data_path.end_step()

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks the store lost between lookup and read; vLLM computes them again."""
        return set(self._data_path.failed_blocks()) if self._data_path is not None else set()

    def build_connector_worker_meta(self) -> StepDone | None:
        """Answer the step, so that the scheduler's side can tell which one it was."""
        return StepDone(self._data_path.step_number) if self._data_path is not None else None

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """Counts since the last call."""
        if self._data_path is None:
            return None
        counts = self._data_path.take_counts()
        return KVStrataStats(data=counts) if counts else None

    def figures(self) -> dict[str, Any]:
        """This rank's figures; empty before caches are bound."""
        return self._data_path.figures() if self._data_path is not None else {}

    def shutdown(self) -> None:
        """Finish what is in flight and let go of memory and store."""
        if self._data_path is not None:
            self._data_path.close()
            self._data_path = None
        if self._scheduler is not None:
            self._scheduler.close()
            self._scheduler = None

    # Scheduler side.

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int, bool]:
        """Report the store's prefix hit; its rows are loaded in the request's own step, layer by layer."""
        if self._scheduler is None:
            return 0, False
        return self._scheduler.matched_tokens(request, num_computed_tokens), False

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """Note which blocks the hit is to be loaded into."""
        if self._scheduler is not None:
            self._scheduler.allocated(request, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """Tell the workers what to fetch and what to offer."""
        if self._scheduler is None:
            return StepTransfers()
        return self._scheduler.step(scheduler_output)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """The workers finished a step: its leases may end; what came of a lost block is nobody's prefix."""
        done = connector_output.kv_connector_worker_meta
        if self._scheduler is None or not isinstance(done, StepDone):
            return
        lost = self._scheduler.step_done(done.number, connector_output.invalid_block_ids)
        if lost:
            # vLLM keeps them in its prefix cache for the request that computes them again; were that one
            # aborted before, the next to hit them would read rows that were never there.
            self._kv_cache_manager.evict_blocks(lost)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Blocks may be freed at once: nothing reads them between steps but puts, which a step waits for."""
        if self._scheduler is not None:
            self._scheduler.finished(request.request_id)
        return False, None

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """As :meth:`request_finished`; there is one group."""
        return self.request_finished(request, block_ids[0] if block_ids else [])

    def reset_cache(self) -> bool | None:
        """Drop the store's objects that nobody reads."""
        if self._scheduler is not None:
            return self._scheduler.clear()
        return True

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats | None:
        """Rebuild a report on the logger's side."""
        return KVStrataStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVStrataPromMetrics:
        """Register kvstrata's counters on ``/metrics``."""
        return KVStrataPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)


class RemoteConnector(KVStrataConnector):
    """The seeds' remote half; refused by name until it exists."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        raise UnsupportedError(
            "SfaRemoteD2HConnector: remote read between prefill and decode engines is not in this version; "
            "use KVStrataConnector or AscendStoreConnector for layerwise prefill offload and the store"
        )


def find_connector(group: Any) -> KVStrataConnector | None:
    """Return kvstrata's connector from vLLM's transfer group, alone or inside a MultiConnector."""
    if isinstance(group, KVStrataConnector):
        return group
    for child in getattr(group, "_connectors", ()):
        if isinstance(child, KVStrataConnector):
            return child
    return None
