"""What to ask of kvstrata when an engine is opened in this process, and how vLLM is told."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True)
class LayerwiseOptions:
    """What to ask `KVStrataConnector` for; the field names drop the seeds' prefix `layerwise_`."""

    num_shared_buffers: int = 2
    prefetch_layers: int = 1
    backend: str = "none"  # no store across requests: every byte moved is moved for the prompt at hand
    fault: str | None = None  # "skip_loads" breaks the data path on purpose, for negative controls

    def engine_arguments(self) -> dict[str, Any]:
        """Return the keyword arguments that `vllm.LLM` needs for these options."""
        extra = {
            "use_layerwise": True,
            "layerwise_num_shared_buffers": self.num_shared_buffers,
            "layerwise_prefetch_layers": self.prefetch_layers,
            "backend": self.backend,
        }
        transfer = {
            "kv_connector": "KVStrataConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": extra,
        }
        arguments: dict[str, Any] = {"kv_transfer_config": transfer}
        if self.fault is not None:
            arguments["additional_config"] = {"kvstrata": {"fault": self.fault}}
        return arguments


@dataclass(frozen=True, kw_only=True)
class SparseOptions:
    """What to ask of sparse decode offload. None leaves a knob at its default.

    The connector needs no mention: kvstrata adds its own.
    """

    topk_buffer_size: int | None = None
    dram_size_per_dp_GB: float | None = None  # noqa: N815 (the seed's own key)
    keep_device_kv_cache: bool | None = None
    hot_row_policy: str | None = None
    prompt_window_tokens: int | None = None
    topk_trace_path: str | Path | None = None
    indexer_cache_dtype: str | None = None
    fault: str | None = None  # "stale_rows" or "skip_loads", for negative controls

    def engine_arguments(self) -> dict[str, Any]:
        """Return the keyword arguments that `vllm.LLM` needs for these options."""
        sparse = {
            "enabled": True,
            "topk_buffer_size": self.topk_buffer_size,
            "dram_size_per_dp_GB": self.dram_size_per_dp_GB,
            "keep_device_kv_cache": self.keep_device_kv_cache,
        }
        own = {
            "hot_row_policy": self.hot_row_policy,
            "prompt_window_tokens": self.prompt_window_tokens,
            "topk_trace_path": None if self.topk_trace_path is None else str(self.topk_trace_path),
            "indexer_cache_dtype": self.indexer_cache_dtype,
            "fault": self.fault,
        }
        additional: dict[str, Any] = {"sparse_kv_offload_config": _set_only(sparse)}
        if _set_only(own):
            additional["kvstrata"] = _set_only(own)
        return {"additional_config": additional}


def _set_only(knobs: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in knobs.items() if value is not None}
