"""vLLM's CPU platform without its limits on MLA models.

Stock limits lifted here, for MLA and DSA models only (vLLM 0.32): head size 576 only, block size 16 only,
sparse attention refused, chunked prefill, prefix caching and asynchronous scheduling forced off. One stock
fault is worked round: ``ops.rotary_embedding`` mis-rotates a 3-D query when key and query differ in heads.

For every model with experts: expert parallelism (`cpu_experts`), data-parallel replicas (`cpu_communicator`).
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger
from vllm.platforms.cpu import CpuPlatform

from kvstrata.errors import UnsupportedError

from .halves import merge_halves
from .kvpp_checks import check_kvpp
from .packed_cache import check_main_cache, refuse_without_mla
from .remote_roles import check_remote
from .settings import Settings, add_connector, check_experts, index_topk, is_traced, uses_kvstrata_connector

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.attention.selector import AttentionSelectorConfig

logger = init_logger("vllm.kvstrata.platform")

DEFAULT_BLOCK_TOKENS = 64
_DENSE_BACKEND = "kvstrata.vllm.backend.KVStrataMLABackend"
_SPARSE_BACKEND = "kvstrata.vllm.backend.KVStrataSparseMLABackend"
_WORKER = "kvstrata.vllm.worker.KVStrataCPUWorker"
_COMMUNICATOR = "kvstrata.vllm.cpu_communicator.KVStrataCpuCommunicator"
_NATIVE_ROTARY = "-rotary_embedding"


class KVStrataCpuPlatform(CpuPlatform):
    """CPU platform that serves MLA models through kvstrata's backends and everything else as vLLM does."""

    @classmethod
    def get_attn_backend_cls(
        cls,
        selected_backend: Any,
        attn_selector_config: AttentionSelectorConfig,
        num_heads: int | None = None,
    ) -> str:
        """Return kvstrata's backend for MLA layers, vLLM's own choice for all others."""
        if attn_selector_config.use_mla:
            return _SPARSE_BACKEND if attn_selector_config.use_sparse else _DENSE_BACKEND
        return super().get_attn_backend_cls(selected_backend, attn_selector_config, num_heads)

    @classmethod
    def get_device_communicator_cls(cls) -> str:
        """Return vLLM's CPU communicator with what data-parallel replicas of MoE models need besides."""
        return _COMMUNICATOR

    @classmethod
    def check_and_update_config(cls, vllm_config: VllmConfig) -> None:
        """Apply vLLM's CPU rules, then restore for MLA models what only its own MLA kernel could not do."""
        if not serves_mla(vllm_config):
            super().check_and_update_config(vllm_config)
            settings = Settings.of(vllm_config)
            if uses_kvstrata_connector(vllm_config) or settings.is_sparse or settings.is_kvpp:
                settings.refuse_model(vllm_config, "it has no MLA layers")
            refuse_without_mla(vllm_config, settings)
            return
        merge_halves(vllm_config)
        scheduler, cache = vllm_config.scheduler_config, vllm_config.cache_config
        block_tokens = cache.block_size if cache.user_specified_block_size else DEFAULT_BLOCK_TOKENS
        kept = (
            scheduler.enable_chunked_prefill,
            scheduler.max_num_batched_tokens,
            scheduler.async_scheduling,
            cache.enable_prefix_caching,
        )
        super().check_and_update_config(vllm_config)
        (
            scheduler.enable_chunked_prefill,
            scheduler.max_num_batched_tokens,
            scheduler.async_scheduling,
            cache.enable_prefix_caching,
        ) = kept
        cache.block_size = block_tokens
        logger.info(
            "MLA on kvstrata's CPU backends, whatever vLLM says above: chunked prefill %s, prefix caching "
            "%s, block size %d",
            "on" if scheduler.enable_chunked_prefill else "off",
            "on" if cache.enable_prefix_caching else "off",
            block_tokens,
        )
        custom_ops = vllm_config.compilation_config.custom_ops
        if _NATIVE_ROTARY not in custom_ops and "none" not in custom_ops:
            custom_ops.append(_NATIVE_ROTARY)
        check_experts(vllm_config)
        if Settings.of(vllm_config).is_sparse:
            index_topk(vllm_config)  # refuses dense attention by name
        add_connector(vllm_config, Settings.of(vllm_config))
        settings = Settings.of(vllm_config)
        settings.check_combination(vllm_config)
        check_main_cache(vllm_config, settings)
        check_remote(vllm_config, settings)
        check_kvpp(vllm_config, settings)
        refuse_compiled_stages(vllm_config)
        parallel = vllm_config.parallel_config
        if parallel.worker_cls in ("auto", "vllm.v1.worker.cpu_worker.CPUWorker"):
            parallel.worker_cls = _WORKER

    @classmethod
    def register_triton_kernel_overrides(cls) -> None:
        """Let vLLM replace its Triton kernels although numba is loaded.

        Stock fault: vLLM looks into every object of every module, and llvmlite's library proxy answers any
        attribute name with a function, which stops that search. Its modules are out of sight meanwhile.
        """
        hidden = {name: module for name, module in sys.modules.items() if name.split(".")[0] == "llvmlite"}
        for name in hidden:
            del sys.modules[name]
        try:
            super().register_triton_kernel_overrides()
        finally:
            sys.modules.update(hidden)


def refuse_compiled_stages(vllm_config: VllmConfig) -> None:
    """Refuse pipeline stages of a traced model by name.

    Stock fault: vLLM 0.32's CPU runner passes traced stages no buffers for what the stage before computed,
    which ends in an assertion or in memory that is not theirs.
    """
    stages = vllm_config.parallel_config.pipeline_parallel_size
    if stages > 1 and is_traced(vllm_config):
        raise UnsupportedError(
            f"pipeline_parallel_size={stages} and enforce_eager=False: vLLM 0.32 runs no compiled pipeline "
            "stages on CPU; set enforce_eager to true"
        )


def serves_mla(vllm_config: VllmConfig) -> bool:
    """Tell whether the model's attention is MLA or DSA of the kind kvstrata's CPU backends serve.

    DeepSeek-V4 has backends of its own in vLLM and keeps them.
    """
    model = vllm_config.model_config
    if model is None or not model.use_mla:
        return False
    return getattr(model.hf_config, "model_type", None) != "deepseek_v4"
