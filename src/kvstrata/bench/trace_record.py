"""`kvstrata trace record`: serve a text with sparse decode offload, keep the rows that decoding selects."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from kvstrata.bench.decode import spread_prompts
from kvstrata.demo.model import find_model
from kvstrata.demo.prompt import encoder, handbook
from kvstrata.errors import ConfigurationError, KVStrataError
from kvstrata.terminal import engine_noise_to
from kvstrata.trace.recording import TopkTrace, TraceSummary, rank_path, summarise


@dataclass(frozen=True, kw_only=True)
class RecordOptions:
    """What is served while the trace is written."""

    model: Path | None = None
    out: Path
    requests: int = 1
    prompt_tokens: int = 1500
    new_tokens: int = 128
    device_kv_budget_bytes: int = 64 << 20


class DecodingEngine(Protocol):
    """The part of an engine that recording needs."""

    def decode(self, prompts: Any, *, new_tokens: int) -> object:
        """Decode `new_tokens` tokens of every prompt."""
        ...


OpenEngine = Callable[[Path, RecordOptions], AbstractContextManager[DecodingEngine]]


def record(options: RecordOptions, *, log: Path, open_engine: OpenEngine | None = None) -> TraceSummary:
    """Serve the shipped handbook, and return what the trace of rank 0 holds.

    Interrupted, it leaves a trace that is readable up to its last whole record. Raises ConfigurationError for
    a model or a prompt that is not there, KVStrataError if nothing was recorded, and what the engine raises.
    """
    model = find_model(options.model)
    text = encoder(model)(handbook())
    if options.prompt_tokens > len(text):
        raise ConfigurationError(
            f"--prompt-tokens={options.prompt_tokens}: the text has {len(text)} tokens; ask for fewer"
        )
    length = options.prompt_tokens
    prompts = spread_prompts(text, options.requests, shortest_tokens=length, longest_tokens=length)
    path = rank_path(options.out, 0)
    path.unlink(missing_ok=True)  # an older trace must not pass for this one
    with engine_noise_to(log) as terminal:
        with ExitStack() as running:
            with terminal.step("the engine starts"):
                engine = running.enter_context((open_engine or _open_engine)(model, options))
            with terminal.step(f"{len(prompts)} x {options.new_tokens} tokens"):
                engine.decode(prompts, new_tokens=options.new_tokens)
        if not path.exists():
            raise KVStrataError(f"the engine wrote no {path}; its output is in {log}")
        summary = summarise(TopkTrace(path).events())
        if not summary.selections:
            raise KVStrataError(
                f"{path} holds no selection: --new-tokens={options.new_tokens} must be 2 or more, "
                f"and --model={model} a DSA model"
            )
        terminal.console.print(
            f"written: {path}: {summary.selections} selections of {len(summary.layers)} share groups in "
            f"{summary.steps} steps, up to {summary.max_tokens} tokens at once"
        )
    return summary


def _open_engine(model: Path, options: RecordOptions) -> AbstractContextManager[DecodingEngine]:
    from kvstrata.vllm.engines import SparseOptions, open_engine

    return open_engine(
        model,
        device_kv_budget_bytes=options.device_kv_budget_bytes,
        max_model_len=options.prompt_tokens + options.new_tokens,
        max_num_seqs=options.requests,
        sparse=SparseOptions(topk_trace_path=options.out.resolve()),
    )
