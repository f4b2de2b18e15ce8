"""Open and close vLLM engines inside this process, for the demonstration and the benchmark.

Serving does not come this way: a server is started with vLLM's own command and never imports this module.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

STATISTICS_RPC = "kvstrata_statistics"

# Read by vLLM when it is imported. Defaults only: what the user has set stays.
_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine core in this process: no child to lose
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


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
class Answer:
    """Greedy output of one request."""

    token_ids: tuple[int, ...]
    text: str
    seconds: float  # from submission to the last token


class Engine:
    """One running engine. Made by `open_engine`; unusable after its `with` block."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm

    def close(self) -> None:
        """Stop the engine and let go of it, so that its memory can be freed while this object lives on."""
        self._llm.llm_engine.engine_core.shutdown()
        self._llm = None

    @property
    def max_tokens(self) -> int:
        """Tokens that vLLM itself says fit its KV cache: blocks times block size."""
        cache = self._llm.llm_engine.vllm_config.cache_config
        return int(cache.num_gpu_blocks) * int(cache.block_size)

    @property
    def max_model_len(self) -> int:
        """Longest prompt and answer together that this engine accepts, in tokens."""
        return int(self._llm.llm_engine.vllm_config.model_config.max_model_len)

    def answer(self, prompt: Sequence[int], *, max_new_tokens: int) -> Answer:
        """Decode greedily until the end token or `max_new_tokens`; raises what vLLM raises."""
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=0, max_tokens=max_new_tokens)
        started = time.perf_counter()
        (output,) = self._llm.generate([{"prompt_token_ids": list(prompt)}], sampling, use_tqdm=False)
        seconds = time.perf_counter() - started
        completion = output.outputs[0]
        return Answer(token_ids=tuple(completion.token_ids), text=completion.text, seconds=seconds)

    def refusal(self, prompt: Sequence[int]) -> str | None:
        """Return vLLM's own words if it does not take this prompt, None if it does (and has then run it)."""
        from vllm.exceptions import VLLMValidationError

        try:
            self.answer(prompt, max_new_tokens=1)
        except VLLMValidationError as error:
            return str(error)
        return None

    def prefill_s(self, prompt: Sequence[int]) -> float:
        """Time one prefill of the prompt: a request for a single token, wall clock."""
        return self.answer(prompt, max_new_tokens=1).seconds

    def worker_statistics(self) -> list[dict[str, Any]]:
        """Return kvstrata's statistics of every rank; only with kvstrata's connector."""
        return list(self._llm.collective_rpc(STATISTICS_RPC))


@contextmanager
def open_engine(
    model: str | Path,
    *,
    device_kv_budget_bytes: int,
    layerwise: LayerwiseOptions | None = None,
    max_model_len: int | None = None,
    max_batched_tokens: int = 512,
    extra_arguments: Mapping[str, Any] | None = None,
) -> Iterator[Engine]:
    """Start an engine in this process, close it at the end of the block and give its memory back.

    `layerwise=None` is plain vLLM on kvstrata's CPU attention backends. `max_model_len=None` lets vLLM choose
    the longest that fits the budget. Prefix caching is off, so that a prompt served twice is computed twice.
    Raises what vLLM raises while it starts. One engine at a time in a process.
    """
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    from vllm import LLM

    arguments: dict[str, Any] = {
        "model": str(model),
        "dtype": "float32",
        "enforce_eager": True,
        "block_size": 16,
        "kv_cache_memory_bytes": device_kv_budget_bytes,
        "max_model_len": -1 if max_model_len is None else max_model_len,
        "max_num_batched_tokens": max_batched_tokens,
        "enable_chunked_prefill": True,
        "enable_prefix_caching": False,
        "max_num_seqs": 4,
        "disable_log_stats": True,
        "seed": 0,
        **(layerwise.engine_arguments() if layerwise is not None else {}),
        **(extra_arguments or {}),
    }
    engine = None
    try:
        engine = Engine(LLM(**arguments))
        yield engine
    finally:
        if engine is not None:
            engine.close()
        _clean_up()


def _clean_up() -> None:
    """Drop what an engine leaves behind in its process: process groups, cached memory, reference cycles."""
    from vllm.distributed import cleanup_dist_env_and_memory

    gc.collect()
    cleanup_dist_env_and_memory()
    gc.collect()
