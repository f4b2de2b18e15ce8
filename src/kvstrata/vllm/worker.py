"""The CPU worker: tells vLLM's planner what physical layout really costs, and allocates that layout.

vLLM plans with one full buffer a layer. The worker answers with the budget at which that plan gives exactly
the blocks that fit physically, then places the tensors of layers that share a buffer on the same bytes.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer import (
    ensure_kv_transfer_shutdown,
    get_kv_transfer_group,
    has_kv_transfer_group,
)
from vllm.logger import init_logger
from vllm.v1.worker.cpu_worker import CPUWorker

from kvstrata.core.budget import Budget, check_allocation, layerwise_budget
from kvstrata.errors import UnsupportedError
from kvstrata.kernels.base import kernels_for
from kvstrata.kernels.warmup import warm_up
from kvstrata.memory.host_pool import host_page_bytes, host_pool_overhead_bytes
from kvstrata.move.layerwise import hosted_layers

from .layout import Layout, place_tensors, plan_layout, specs_of
from .settings import Settings

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.worker.worker_base import CompilationTimes

logger = init_logger("vllm.kvstrata.worker")


class KVStrataCPUWorker(CPUWorker):
    """vLLM's CPU worker with kvstrata's budget and physical layout where the launch asks for them."""

    _budget: Budget | None = None

    def determine_available_memory(self) -> int:
        """Return the bytes to plan with; scaled up where layers share buffers."""
        available_bytes = int(super().determine_available_memory())
        settings = Settings.of(self.vllm_config)
        if settings.connector is None:
            return available_bytes
        layout = plan_layout(self.get_kv_cache_spec(), self.vllm_config, settings)
        bundles, hosted = layout.plan.bundles, hosted_layers(layout.plan)
        self._budget = layerwise_budget(
            layout.plan,
            available_bytes=available_bytes,
            host_bytes=settings.connector.layerwise.host_memory_bytes,
            host_page_bytes=host_page_bytes(bundles, hosted),
            host_overhead_bytes=host_pool_overhead_bytes(bundles, hosted),
        )
        logger.info("%s", describe_budget(self._budget, layout))
        return self._budget.reported_bytes

    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        """Allocate the planned blocks in kvstrata's layout; fails where plan and allocation disagree (A3)."""
        settings = Settings.of(self.vllm_config)
        if settings.connector is not None:
            layout = plan_layout(specs_of(kv_cache_config), self.vllm_config, settings)
            kv_cache_config = place_tensors(kv_cache_config, layout)
            assert self._budget is not None, "vLLM asks for the budget before it plans"
            check_allocation(
                kv_cache_config.num_blocks, kv_cache_config.kv_cache_tensors[0].size, self._budget
            )
        try:
            super().initialize_from_config(kv_cache_config)
        except BaseException:
            # vLLM keeps the connector of this process in a global: the next engine would be given this one.
            ensure_kv_transfer_shutdown()
            raise

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load the model, then compile the CPU kernels: seconds on the first start of an installation."""
        super().load_model(*args, **kwargs)
        begun = time.perf_counter()
        warm_up(kernels_for(self.device.type))
        logger.info("CPU kernels ready after %.1f s", time.perf_counter() - begun)

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


def describe_budget(budget: Budget, layout: Layout) -> str:
    """Say what was decided: the plan and what it does to capacity."""
    plain_blocks = budget.available_bytes // budget.logical_page_bytes
    return (
        f"layer buffers: {budget.available_bytes / 2**20:.1f} MiB of device KV memory hold "
        f"{budget.num_blocks} blocks ({budget.physical_page_bytes} bytes a block instead of "
        f"{budget.logical_page_bytes}; plain vLLM: {plain_blocks} blocks)\n{layout.plan.describe()}"
    )
