"""The CPU worker: tells vLLM's planner what physical layout really costs, and allocates that layout.

vLLM plans with one full buffer a layer. The worker answers with the budget at which that plan gives exactly
the blocks that fit physically, then places the tensors of layers that share a buffer on the same bytes.
"""

from __future__ import annotations

import logging
import os
import time
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer import (
    ensure_kv_transfer_shutdown,
    get_kv_transfer_group,
    has_kv_transfer_group,
)
from vllm.logger import init_logger
from vllm.v1.worker.cpu_worker import CPUWorker

from kvstrata.core.budget import Budget, SparseBudget, check_allocation, layerwise_budget, owner_budget
from kvstrata.errors import KVStrataError, UnsupportedError
from kvstrata.kernels.base import kernels_for
from kvstrata.kernels.warmup import warm_up, warm_up_hot_rows
from kvstrata.memory.host_pool import host_page_bytes, host_pool_overhead_bytes

from .kvpp_checks import check_own_caches
from .layout import Layout, check_first_selection, place_tensors, plan_layout, specs_of
from .settings import Settings
from .sparse_plan import SparsePlan, budget_of, place_sparse_tensors, plan_sparse

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.worker.worker_base import CompilationTimes

    from .connector import KVStrataConnector

logger = init_logger("vllm.kvstrata.worker")


class KVStrataCPUWorker(CPUWorker):
    """vLLM's CPU worker with kvstrata's budget and physical layout where the launch asks for them."""

    _budget: Budget | None = None
    _sparse: SparsePlan | None = None

    def determine_available_memory(self) -> int:
        """Return the bytes to plan with; scaled up where layers share buffers."""
        available_bytes = int(super().determine_available_memory())
        settings = Settings.of(self.vllm_config)
        specs = self.get_kv_cache_spec()
        check_first_selection(specs, self.vllm_config)
        if settings.connector is None:
            return available_bytes
        layout = plan_layout(specs, self.vllm_config, settings)
        if settings.is_sparse:
            plan = plan_sparse(layout, specs, self.vllm_config, settings, device_bytes=available_bytes)
            budget = budget_of(plan, self.vllm_config, settings, device_bytes=available_bytes)
            self._sparse, self._budget = plan, budget
            logger.info("%s", budget.describe())
            return budget.reported_bytes
        self._budget = layer_budget(layout, settings, available_bytes=available_bytes)
        logger.info("%s", describe_budget(self._budget, layout))
        return self._budget.reported_bytes

    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        """Allocate the planned blocks in kvstrata's layout; fails where plan and allocation disagree (A3)."""
        settings = Settings.of(self.vllm_config)
        try:
            if settings.connector is not None:
                kv_cache_config = self._place(kv_cache_config, settings)
            super().initialize_from_config(kv_cache_config)
            if self._sparse is not None:
                assert isinstance(self._budget, SparseBudget)
                own_connector().open_sparse(self._sparse, self._budget)
        except BaseException:
            # vLLM keeps the connector of this process in a global: the next engine would be given this one.
            ensure_kv_transfer_shutdown()
            raise

    def _place(self, kv_cache_config: KVCacheConfig, settings: Settings) -> KVCacheConfig:
        """Return the configuration in kvstrata's layout, once planned and allocated bytes agree."""
        assert self._budget is not None, "vLLM asks for the budget before it plans"
        blocks = kv_cache_config.num_blocks
        if self._sparse is None:
            layout = plan_layout(specs_of(kv_cache_config), self.vllm_config, settings)
            placed = place_tensors(kv_cache_config, layout)
            check_allocation(blocks, placed.kv_cache_tensors[0].size, self._budget)
        else:
            placed = place_sparse_tensors(kv_cache_config, self._sparse)
            beside_bytes = self._sparse.bytes_beside_caches(blocks)
            check_allocation(blocks, placed.kv_cache_tensors[0].size + beside_bytes, self._budget)
        return placed

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load the model, then compile the CPU kernels: seconds on the first start of an installation."""
        super().load_model(*args, **kwargs)
        check_own_caches(self.vllm_config, Settings.of(self.vllm_config))
        begun = time.perf_counter()
        warm_up(kernels_for(self.device.type))
        if Settings.of(self.vllm_config).is_sparse:
            warm_up_hot_rows()
        logger.info("CPU kernels ready after %.1f s", time.perf_counter() - begun)

    def execute_model(self, *args: Any, **kwargs: Any) -> Any:
        """Run a step. A rank that vLLM does not listen to ends its process after an error of kvstrata's.

        vLLM reads the reply of one rank only, and that one may be waiting in a collective for this one: the
        engine would hang until its own time-out (300 s). A process that is gone it notices within seconds.
        """
        try:
            return super().execute_model(*args, **kwargs)
        except KVStrataError as error:
            self._end_if_unheard(error)
            raise

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        """Sample, and run drafts; errors as in `execute_model`."""
        try:
            return super().sample_tokens(*args, **kwargs)
        except KVStrataError as error:
            self._end_if_unheard(error)
            raise

    def _end_if_unheard(self, error: KVStrataError) -> None:
        parallel = self.parallel_config
        heard = parallel.world_size - (parallel.tensor_parallel_size * parallel.prefill_context_parallel_size)
        if parallel.distributed_executor_backend != "mp" or self.rank == heard:
            return  # other executors, and callers in this process, see the error themselves
        logger.critical(
            "rank %d failed and vLLM listens to rank %d only: ending this process, so that the engine stops "
            "now and not after a time-out",
            self.rank,
            heard,
            exc_info=error,
        )
        for handler in logging.getLogger("vllm").handlers:
            handler.flush()
        os._exit(1)

    def reload_weights(self, *args: Any, **kwargs: Any) -> None:
        """Refused where there is a store: its keys name the weights that the engine started with."""
        self._refuse_new_weights("reload_weights")
        super().reload_weights(*args, **kwargs)

    def start_weight_update(self) -> None:
        """Refused where there is a store, as :meth:`reload_weights`."""
        self._refuse_new_weights("start_weight_update")
        super().start_weight_update()

    def _refuse_new_weights(self, call: str) -> None:
        connector = Settings.of(self.vllm_config).connector
        if connector is not None and connector.store.backend != "none":
            raise UnsupportedError(
                f"{call}: rows of the new weights would be stored under the old weights' keys; "
                'set backend to "none", or start a new engine'
            )

    def compile_or_warm_up_model(self) -> CompilationTimes:
        """Work round a stock fault: eager pipeline stages need tensors that only a dummy run allocates."""
        runner = self.model_runner
        if (
            self.parallel_config.pipeline_parallel_size > 1
            and getattr(runner, "intermediate_tensors", self) is None
        ):
            runner._dummy_run(1)
        return super().compile_or_warm_up_model()

    def kvstrata_statistics(self) -> dict[str, Any]:
        """Return this rank's figures; empty without a kvstrata connector. For demo, bench and tests."""
        if not has_kv_transfer_group():
            return {}
        from .connector import find_connector

        connector = find_connector(get_kv_transfer_group())
        return connector.figures() if connector is not None else {}


def own_connector() -> KVStrataConnector:
    """Return kvstrata's connector of this worker; there is one wherever sparse offload is on."""
    from .connector import find_connector

    connector = find_connector(get_kv_transfer_group())
    assert connector is not None, "the platform names kvstrata's connector with sparse offload"
    return connector


def layer_budget(layout: Layout, settings: Settings, *, available_bytes: int) -> Budget:
    """Count the blocks of a rank whose layers pass through windows, from the host or from their owners."""
    if layout.owners is not None and not layout.hosted:
        return owner_budget(layout.owners, member=layout.member, available_bytes=available_bytes)
    assert settings.connector is not None
    bundles, hosted = layout.plan.bundles, layout.own_hosted
    return layerwise_budget(
        layout.plan,
        available_bytes=available_bytes,
        host_bytes=settings.connector.layerwise.host_memory_bytes,
        host_page_bytes=host_page_bytes(bundles, hosted),
        host_overhead_bytes=host_pool_overhead_bytes(bundles, hosted),
    )


def describe_budget(budget: Budget, layout: Layout) -> str:
    """Say what was decided: the plan and what it does to capacity."""
    owners = f"\n{layout.owners.describe(layout.member)}" if layout.owners and not layout.hosted else ""
    plain_blocks = budget.available_bytes // budget.logical_page_bytes
    return (
        f"layer buffers: {budget.available_bytes / 2**20:.1f} MiB of device KV memory hold "
        f"{budget.num_blocks} blocks ({budget.physical_page_bytes} bytes a block instead of "
        f"{budget.logical_page_bytes}; plain vLLM: {plain_blocks} blocks)\n{layout.plan.describe()}{owners}"
    )
