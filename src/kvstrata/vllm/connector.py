"""kvstrata's KV connector: the face vLLM's scheduler and workers see.

``KVStrataConnector`` does what the configuration asks for. ``AscendStoreConnector`` and
``SfaRemoteD2HConnector`` are the seeds' names for its store half and its remote half.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.logger import init_logger

from kvstrata.core.budget import SparseBudget
from kvstrata.errors import UnsupportedError
from kvstrata.memory.allocator import SharedMemoryAllocator
from kvstrata.memory.window_memory import MIN_BYTES, SharedWindowMemory

from .data_path import DataPath
from .layout import specs_of
from .namespace import all_rank_keys, store_namespace
from .open_path import BoundCaches, OpenPath, open_kvpp, open_layerwise, open_sparse
from .remote_roles import roles_of
from .scheduler_side import StoreScheduler
from .settings import Settings
from .sparse_plan import SparsePlan
from .stats import KVStrataPromMetrics, KVStrataStats
from .stores import open_configured_store
from .transfers import StepDone, StepTransfers

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    import torch
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from .remote_scheduler import RemoteScheduler
    from .remote_worker import RemoteWorker

logger = init_logger("vllm.kvstrata.connector")


class KVStrataConnector(KVConnectorBase_V1, SupportsHMA):
    """Layerwise prefill offload, the KV store and remote read between engines, in one connector.

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
        self._bound: BoundCaches | None = None
        self._namespace = store_namespace(vllm_config)
        self._remote_scheduler: RemoteScheduler | None = None
        self._remote: RemoteWorker | None = None
        self._window_memory: SharedWindowMemory | None = None
        roles = roles_of(vllm_config, self._settings)
        is_read_by_others = "producer" in roles or self._settings.is_kvpp
        if role is KVConnectorRole.WORKER and is_read_by_others:
            # KVPP cannot do without, however little it is.
            least = 1 if self._settings.is_kvpp else MIN_BYTES
            self._window_memory = SharedWindowMemory(SharedMemoryAllocator(), min_bytes=least)
        if role is KVConnectorRole.SCHEDULER and roles:
            from .remote_open import open_remote_scheduler

            self._remote_scheduler = open_remote_scheduler(vllm_config, self._settings)
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

    def get_mem_pool_context(self) -> AbstractContextManager[Any] | None:
        """Where vLLM allocates its caches: in memory that other engines can read, if they shall."""
        return self._window_memory or super().get_mem_pool_context()

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Put the data path together and hook it into the layers; called once caches are bound.

        Sparse offload waits for the worker's plan: see `open_sparse`.
        """
        self._bound = BoundCaches(
            vllm_config=self._vllm_config,
            kv_config=self._kv_config,
            kv_caches=kv_caches,
            settings=self._settings,
            namespace=self._namespace,
            window_regions=self._window_memory.regions if self._window_memory is not None else (),
        )
        if self._settings.is_kvpp:
            self._use(open_kvpp(self._bound))
        elif not self._settings.is_sparse:
            self._use(open_layerwise(self._bound))

    def open_sparse(self, plan: SparsePlan, budget: SparseBudget) -> None:
        """Put sparse offload's data path together; called by the worker once caches are registered."""
        assert self._bound is not None, "vLLM registers caches before the worker goes on"
        self._use(open_sparse(self._bound, plan, budget))

    def _use(self, opened: OpenPath) -> None:
        self._data_path, self._remote = opened.path, opened.remote

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """A step begins: vLLM binds before every forward, whether or not it calls ``start_load_kv`` first."""
        super().bind_connector_metadata(connector_metadata)
        if self._data_path is not None:
            assert isinstance(connector_metadata, StepTransfers)
            if self._remote is not None:
                # First: it ends what others may read of blocks that this step gives to other requests.
                self._remote.begin_step(connector_metadata)
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
        if self._remote is not None:
            self._remote.end_step()

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Requests whose prompts were sent to or received from another engine; each is named once."""
        if self._remote is None:
            return KVConnectorTransferResults()
        results = self._remote.results(finished_req_ids)
        return KVConnectorTransferResults(
            finished_sending=results.sent, finished_recving=results.received, failed_recving=results.failed
        )

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
        """Finish what is in flight and let go of memory, store and other engines."""
        if self._remote is not None:
            self._remote.close()
            self._remote = None
        if self._remote_scheduler is not None:
            self._remote_scheduler.close()
            self._remote_scheduler = None
        if self._data_path is not None:
            self._data_path.close()
            self._data_path = None
        if self._scheduler is not None:
            self._scheduler.close()
            self._scheduler = None

    # Scheduler side.

    def on_new_request(self, request: Request) -> None:
        """A request has come; another engine may wait for its prompt."""
        if self._remote_scheduler is not None:
            self._remote_scheduler.on_new_request(request)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int, bool]:
        """Report what another engine will supply, before the request runs; else the store's prefix hit.

        The store's rows are loaded in the request's own step, layer by layer.
        """
        if self._remote_scheduler is not None:
            pulled = self._remote_scheduler.matched_tokens(request, num_computed_tokens)
            if pulled:
                return pulled, True
        if self._scheduler is None:
            return 0, False
        return self._scheduler.matched_tokens(request, num_computed_tokens), False

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """Note which blocks the prompt or the hit is to be put into."""
        block_ids = blocks.get_block_ids()[0]
        if self._remote_scheduler is not None and self._remote_scheduler.allocated(
            request, block_ids, num_external_tokens
        ):
            num_external_tokens = 0  # nothing of it comes from the store
        if self._scheduler is not None:
            self._scheduler.allocated(request, block_ids, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """Tell the workers what to fetch, what to offer, and what goes to or comes from other engines."""
        transfers = StepTransfers() if self._scheduler is None else self._scheduler.step(scheduler_output)
        transfers.has_forward = scheduler_output.total_num_scheduled_tokens > 0
        if self._remote_scheduler is not None:
            transfers.remote = self._remote_scheduler.step(
                scheduler_output, number=transfers.number, is_unsure=bool(transfers.fetches)
            )
        return transfers

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """The workers finished a step: its leases may end; what came of a lost block is nobody's prefix."""
        done = connector_output.kv_connector_worker_meta
        if self._remote_scheduler is not None:
            self._remote_scheduler.received(connector_output.finished_recving or ())
            if isinstance(done, StepDone):
                is_sound = not connector_output.invalid_block_ids
                self._remote_scheduler.step_done(done.number, is_sound=is_sound)
        if self._scheduler is None or not isinstance(done, StepDone):
            return
        lost = self._scheduler.step_done(done.number, connector_output.invalid_block_ids)
        if lost:
            # vLLM keeps them in its prefix cache for the request that computes them again; were that one
            # aborted before, the next to hit them would read rows that were never there.
            self._kv_cache_manager.evict_blocks(lost)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Blocks may be freed at once, unless another engine reads them: a step waits for all its puts."""
        if self._scheduler is not None:
            self._scheduler.finished(request.request_id)
        is_read = self._remote_scheduler is not None and self._remote_scheduler.finished(request)
        return is_read, None

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


def find_connector(group: Any) -> KVStrataConnector | None:
    """Return kvstrata's connector from vLLM's transfer group, alone or inside a MultiConnector."""
    if isinstance(group, KVStrataConnector):
        return group
    for child in getattr(group, "_connectors", ()):
        if isinstance(child, KVStrataConnector):
            return child
    return None
