"""Open a real vLLM engine, ask it prompts, and close it so that the next one starts clean in this process."""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from models import EXAMPLE_MODELS, Model

MIB = 1 << 20
ROOMY_BYTES = 64 * MIB  # device budget that holds every prompt of the suite at once, unshared
BLOCK_SIZE = 16
STATISTICS = "kvstrata_statistics"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What an engine answered to one batch of prompts, in prompt order."""

    tokens: list[list[int]]
    logprobs: list[list[float]]  # of the chosen tokens; empty lists where they were not asked for
    cached_tokens: list[int]  # prompt tokens vLLM did not compute, from its own cache or from a connector


def layerwise(
    *,
    shared: int | None = 2,
    independent: list[int] | str | None = None,
    prefetch: int | None = None,
    backend: str = "none",
    store_path: str | None = None,
    **more: Any,
) -> dict[str, Any]:
    """Engine arguments that switch layerwise prefill offload on; None leaves a key out."""
    extra: dict[str, Any] = {
        "use_layerwise": True,
        "layerwise_num_shared_buffers": shared,
        "layerwise_independent_layers": independent,
        "layerwise_prefetch_layers": prefetch,
        "backend": backend,
        "store_path": store_path,
        "store_size_GB": 0.2 if backend == "local" else None,
        **more,
    }
    return {
        "kv_transfer_config": {
            "kv_connector": "KVStrataConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {key: value for key, value in extra.items() if value is not None},
        }
    }


def sparse(
    *,
    buffer: int | None = None,
    dram_gb: float | None = None,
    keeps_device_cache: bool | None = None,
    backend: str | None = None,
    store_path: str | None = None,
    **own: Any,
) -> dict[str, Any]:
    """Engine arguments that switch sparse decode offload on; None leaves a key out.

    `buffer` is topk_buffer_size; `own` goes to kvstrata's part. The connector is named only for a store.
    """
    knobs: dict[str, Any] = {
        "enabled": True,
        "topk_buffer_size": buffer,
        "dram_size_per_dp_GB": dram_gb,
        "keep_device_kv_cache": keeps_device_cache,
    }
    given = {key: value for key, value in knobs.items() if value is not None}
    arguments: dict[str, Any] = {"additional_config": {"sparse_kv_offload_config": given, "kvstrata": own}}
    if backend is None:
        return arguments
    store = layerwise(shared=None, use_layerwise=None, backend=backend, store_path=store_path)
    return {**arguments, **store}


def kvpp(**own: Any) -> dict[str, Any]:
    """Engine arguments that switch KVPP on for two ranks; `own` goes to kvstrata's part."""
    return {"tensor_parallel_size": 2, "additional_config": {"enable_kvpp": True, "kvstrata": own}}


def kvstrata_config(**knobs: Any) -> dict[str, Any]:
    """Engine arguments that carry kvstrata's own additional configuration."""
    return {"additional_config": {"kvstrata": knobs}}


SKIP_LOADS = kvstrata_config(fault="skip_loads")
INT8_INDEXER = kvstrata_config(indexer_cache_dtype="int8")


def engine_arguments(model: Model, **overrides: Any) -> dict[str, Any]:
    """Arguments of `vllm.LLM` for this suite; an override of None removes the argument."""
    arguments: dict[str, Any] = {
        "model": str(model.path),
        # Prompts and answers are token ids; the tokenizer only keeps vLLM content.
        "tokenizer": str(EXAMPLE_MODELS / "tiny-dsv32"),
        "dtype": "float32",
        "enforce_eager": True,
        "block_size": BLOCK_SIZE,
        "max_model_len": model.max_model_len,
        "kv_cache_memory_bytes": ROOMY_BYTES,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 1024,
        "enable_prefix_caching": False,
        "async_scheduling": False,
        "disable_log_stats": False,
        "seed": 0,
        **overrides,
    }
    return {key: value for key, value in arguments.items() if value is not None}


class Engine:
    """One running `vllm.LLM` in this process."""

    def __init__(self, llm: Any) -> None:
        self.llm = llm
        self._requests = 0

    def ask(self, prompts: Sequence[Sequence[int]], new_tokens: int, *, logprobs: bool = True) -> Outcome:
        """Greedy answers of exactly `new_tokens` tokens to all prompts in one batch."""
        outputs = self.llm.generate(
            [{"prompt_token_ids": list(prompt)} for prompt in prompts],
            self._sampling(new_tokens, logprobs=logprobs),
            use_tqdm=False,
        )
        return Outcome(
            tokens=[list(output.outputs[0].token_ids) for output in outputs],
            logprobs=[_chosen_logprobs(output.outputs[0]) for output in outputs],
            cached_tokens=[output.num_cached_tokens or 0 for output in outputs],
        )

    def abandon(self, prompts: Sequence[Sequence[int]], *, after_steps: int) -> None:
        """Start the prompts, run `after_steps` engine steps, then abort them all in mid-flight."""
        engine = self.llm.llm_engine
        ids = []
        for prompt in prompts:
            self._requests += 1
            ids.append(f"abandoned-{self._requests}")
            engine.add_request(
                ids[-1], {"prompt_token_ids": list(prompt)}, self._sampling(64, logprobs=False)
            )
        for _ in range(after_steps):
            engine.step()
        unfinished = engine.get_num_unfinished_requests()
        assert unfinished == len(ids), f"{len(ids) - unfinished} requests ended before the abort"
        engine.abort_request(ids)
        while engine.has_unfinished_requests():
            engine.step()

    def statistics(self) -> dict[str, Any]:
        """The statistics of the only worker."""
        (statistics,) = self.llm.collective_rpc(STATISTICS)
        return dict(statistics)

    def check_integrity(self) -> None:
        """Let every part of the only worker's data path check itself."""
        from kvstrata.vllm.worker import own_connector

        path = own_connector()._data_path
        assert path is not None
        path.check_integrity()

    def num_blocks(self) -> int:
        """The block count vLLM itself plans with."""
        return int(self.llm.llm_engine.vllm_config.cache_config.num_gpu_blocks)

    def counter(self, name: str) -> float:
        """Value of one of vLLM's counters, such as `vllm:num_preemptions`."""
        return float(sum(metric.value for metric in self.llm.get_metrics() if metric.name == name))

    def forget_prefixes(self) -> None:
        """Empty vLLM's own prefix cache, and nothing else."""
        assert self.llm.reset_prefix_cache(), "the prefix cache was not reset: blocks are still in use"

    @staticmethod
    def _sampling(new_tokens: int, *, logprobs: bool) -> Any:
        from vllm import SamplingParams

        return SamplingParams(
            temperature=0.0,
            max_tokens=new_tokens,
            ignore_eos=True,
            detokenize=False,
            logprobs=0 if logprobs else None,
        )


def _chosen_logprobs(completion: Any) -> list[float]:
    if completion.logprobs is None:
        return []
    return [
        step[token].logprob for step, token in zip(completion.logprobs, completion.token_ids, strict=True)
    ]


@contextlib.contextmanager
def open_engine(model: Model, **overrides: Any) -> Iterator[Engine]:
    """Run the block with an engine; afterwards its memory, threads and process groups are gone.

    One at a time: two engines in one process share vLLM's globals.
    """
    from vllm import LLM
    from vllm.distributed.parallel_state import model_parallel_is_initialized

    assert not model_parallel_is_initialized(), "another engine is open in this process"
    gc.freeze()  # vLLM collects garbage nine times an engine: not each time through all imported modules
    engine: Engine | None = Engine(LLM(**engine_arguments(model, **overrides)))
    try:
        yield engine  # type: ignore[misc]
    finally:
        assert engine is not None
        engine.llm.llm_engine.engine_core.shutdown()
        engine.llm = None
        engine = None
        clean_up()


def clean_up() -> None:
    """Drop what an engine, or one that failed to start, left behind: connector, process groups, memory.

    vLLM keeps the worker's connector in a global; an engine that fails to start ends with its process, so
    nobody resets it there.
    """
    from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    ensure_kv_transfer_shutdown()
    cleanup_dist_env_and_memory()
    gc.collect()


def shared_memory() -> set[str]:
    """What stands in /dev/shm under our name, and what this process holds open there or in memory files."""
    named = {name for name in os.listdir("/dev/shm") if "kvstrata" in name}
    held = set()
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            held.add(os.readlink(f"/proc/self/fd/{descriptor}"))
    return named | {link for link in held if link.startswith("/dev/shm/") or "kvstrata" in link}
