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

from kvstrata.vllm.engine_options import LayerwiseOptions, SparseOptions

__all__ = ["Answer", "Decoding", "Engine", "LayerwiseOptions", "SparseOptions", "open_engine"]

STATISTICS_RPC = "kvstrata_statistics"

# Read by vLLM when it is imported. Defaults only: what the user has set stays.
_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine core in this process: no child to lose
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


@dataclass(frozen=True, kw_only=True)
class Answer:
    """Greedy output of one request."""

    token_ids: tuple[int, ...]
    text: str
    seconds: float  # from submission to the last token


@dataclass(frozen=True, kw_only=True)
class Decoding:
    """Greedy outputs of several requests served at once, with the time of every token.

    `token_s[r][i]` is when token i of request r was there, in seconds after all were submitted.
    """

    token_ids: tuple[tuple[int, ...], ...]
    token_s: tuple[tuple[float, ...], ...]

    @property
    def num_tokens(self) -> int:
        """Generated tokens of all requests."""
        return sum(len(ids) for ids in self.token_ids)

    @property
    def seconds(self) -> float:
        """From submission to the last token of all."""
        return max(times[-1] for times in self.token_s)

    @property
    def s_per_token(self) -> float:
        """Time per output token while all requests decode together, prompts excluded.

        From the moment the last request has its first token until the first request has its last. Raises
        ValueError if there is no such time: the requests queued, or made too few tokens.
        """
        starts = max(times[0] for times in self.token_s)
        ends = min(times[-1] for times in self.token_s)
        steps = sum(starts < moment <= ends for moment in self.token_s[0])
        if steps < 1:
            raise ValueError("the requests never decode together; ask for more tokens or fewer requests")
        return (ends - starts) / steps


class Engine:
    """One running engine. Made by `open_engine`; unusable after its `with` block."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self._decodings = 0

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

    def decode(self, prompts: Sequence[Sequence[int]], *, new_tokens: int) -> Decoding:
        """Submit all prompts at once and decode exactly `new_tokens` tokens each, end token or not.

        vLLM queues what it cannot hold. Raises what vLLM raises.
        """
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
        engine = self._llm.llm_engine
        ids: dict[str, list[int]] = {}
        times: dict[str, list[float]] = {}
        started = time.perf_counter()
        for number, prompt in enumerate(prompts):
            self._decodings += 1
            name = f"decode-{self._decodings}-{number}"
            ids[name], times[name] = [], []
            engine.add_request(name, {"prompt_token_ids": list(prompt)}, sampling)
        while engine.has_unfinished_requests():
            outputs = engine.step()
            now = time.perf_counter() - started
            for output in outputs:
                made = list(output.outputs[0].token_ids)  # all of them so far
                times[output.request_id] += [now] * (len(made) - len(ids[output.request_id]))
                ids[output.request_id] = made
        return Decoding(
            token_ids=tuple(tuple(made) for made in ids.values()),
            token_s=tuple(tuple(moments) for moments in times.values()),
        )

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
    sparse: SparseOptions | None = None,
    max_model_len: int | None = None,
    max_batched_tokens: int = 512,
    max_num_seqs: int = 4,
    extra_arguments: Mapping[str, Any] | None = None,
) -> Iterator[Engine]:
    """Start an engine in this process, close it at the end of the block and give its memory back.

    Without `layerwise` and `sparse` it is plain vLLM on kvstrata's CPU attention backends; give one of them
    at most. `max_model_len=None` lets vLLM choose the longest that fits the budget. Prefix caching is off, so
    that a prompt served twice is computed twice. Raises what vLLM raises while it starts. One engine at a
    time in a process.
    """
    if layerwise is not None and sparse is not None:
        raise ValueError("give layerwise= or sparse=, not both")
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
        "max_num_seqs": max_num_seqs,
        "disable_log_stats": True,
        "seed": 0,
        **(layerwise.engine_arguments() if layerwise is not None else {}),
        **(sparse.engine_arguments() if sparse is not None else {}),
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
