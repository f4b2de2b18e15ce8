"""`kvstrata bench layerwise`: prefill time against plain vLLM, copies against memcpy, capacity."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from rich.table import Table

from kvstrata.bench.copies import CopyRuns, measure_copies
from kvstrata.bench.engine_process import EngineProcess
from kvstrata.bench.machine import describe_machine
from kvstrata.demo.model import find_model
from kvstrata.demo.prompt import build_prompt, encoder, handbook
from kvstrata.errors import KVStrataError
from kvstrata.terminal import Terminal, engine_noise_to

# After a run, OpenMP threads spin for a moment; the other engine's turn starts when they sleep.
QUIET_S = 0.4


@dataclass(frozen=True, kw_only=True)
class LayerwiseBenchOptions:
    """What is measured; all of it goes into the result file."""

    model: Path | None = None
    prompt_tokens: int = 2000
    repeats: int = 7
    warm_ups: int = 2
    device_kv_budget_bytes: int = 48 << 20  # fits the prompt with and without kvstrata
    max_batched_tokens: int = 512  # chunks: all but the first have a prefix to load
    num_shared_buffers: int = 2
    prefetch_layers: int = 1


@dataclass(frozen=True, kw_only=True)
class PrefillRuns:
    """Seconds of every timed prefill; the two sides took turns, plain first."""

    plain_s: tuple[float, ...]
    kvstrata_s: tuple[float, ...]
    plain_max_tokens: int
    kvstrata_max_tokens: int
    worker: Mapping[str, Any]


def bench_layerwise(options: LayerwiseBenchOptions, *, json_file: Path | None, log: Path) -> dict[str, Any]:
    """Run the benchmark for a person at a terminal; return and, if asked, write the result.

    Raises KVStrataError if the two engines answer differently: their times could not be compared.
    """
    with engine_noise_to(log) as terminal:
        with terminal.step("copies of one layer against memcpy"):
            copies = measure_copies(repeats=max(options.repeats, 5))
        prefill = measure_prefill(options, terminal)
        result = summarise(options, copies, prefill)
        terminal.console.print(_table(result))
        if json_file is not None:
            json_file.parent.mkdir(parents=True, exist_ok=True)
            json_file.write_text(json.dumps(result, indent=1) + "\n")
            terminal.console.print(f"written: {json_file}")
    return result


def measure_prefill(options: LayerwiseBenchOptions, terminal: Terminal) -> PrefillRuns:
    """Time the same prompt in plain vLLM and in kvstrata, by turns."""
    from kvstrata.vllm.engines import LayerwiseOptions

    model = find_model(options.model)
    # The handbook repeated: the benchmark needs length, not a question with an answer.
    text = handbook() * (1 + options.prompt_tokens // 2000)
    prompt = build_prompt(
        encoder(model), text=text, prompt_tokens=options.prompt_tokens, pass_key="48213", depth=0.15
    ).token_ids
    shared = {
        "model": str(model),
        "device_kv_budget_bytes": options.device_kv_budget_bytes,
        "max_batched_tokens": options.max_batched_tokens,
    }
    layerwise = LayerwiseOptions(
        num_shared_buffers=options.num_shared_buffers, prefetch_layers=options.prefetch_layers
    )
    with (
        EngineProcess("plain", {**shared, "layerwise": None}) as plain,
        EngineProcess("kvstrata", {**shared, "layerwise": layerwise}) as ours,
    ):
        with terminal.step("two engines start"):
            plain.wait_until_ready()
            ours.wait_until_ready()
        with terminal.step("warm-up, and do both do the same work?"):
            if plain.answer_ids(prompt) != ours.answer_ids(prompt):
                raise KVStrataError("the two engines answer differently; run `kvstrata demo`")
            for _ in range(options.warm_ups):
                plain.prefill_s(prompt)
                ours.prefill_s(prompt)
        plain_s: list[float] = []
        ours_s: list[float] = []
        with terminal.step(f"{options.repeats} prefills of {len(prompt)} tokens each, by turns"):
            for _ in range(options.repeats):
                for engine, runs in ((plain, plain_s), (ours, ours_s)):
                    time.sleep(QUIET_S)
                    runs.append(engine.prefill_s(prompt))
        return PrefillRuns(
            plain_s=tuple(plain_s),
            kvstrata_s=tuple(ours_s),
            plain_max_tokens=plain.max_tokens(),
            kvstrata_max_tokens=ours.max_tokens(),
            worker=ours.worker_statistics()[0],
        )


def summarise(options: LayerwiseBenchOptions, copies: CopyRuns, prefill: PrefillRuns) -> dict[str, Any]:
    """Return the result: ratios as medians, and every run they come from."""
    described = asdict(options)
    described.pop("model")
    return {
        "kvstrata_bench_layerwise": 1,
        "machine": describe_machine(),
        "options": described,
        "prefill_time_ratio": median(_ratios(prefill.kvstrata_s, prefill.plain_s)),
        "load_over_memcpy": median(_ratios(copies.memcpy_s, copies.load_s)),
        "save_over_memcpy": median(_ratios(copies.memcpy_s, copies.save_s)),
        "capacity_ratio": prefill.kvstrata_max_tokens / prefill.plain_max_tokens,
        "runs": {
            "plain_prefill_s": list(prefill.plain_s),
            "kvstrata_prefill_s": list(prefill.kvstrata_s),
            "prefill_time_ratio": _ratios(prefill.kvstrata_s, prefill.plain_s),
            "copied_bytes": copies.layer_bytes,
            "copied_ranges": copies.ranges,
            "memcpy_s": list(copies.memcpy_s),
            "load_s": list(copies.load_s),
            "save_s": list(copies.save_s),
            "load_over_memcpy": _ratios(copies.memcpy_s, copies.load_s),
            "save_over_memcpy": _ratios(copies.memcpy_s, copies.save_s),
        },
        "tokens": {"plain": prefill.plain_max_tokens, "kvstrata": prefill.kvstrata_max_tokens},
        "worker": dict(prefill.worker),
    }


def _ratios(numerators: Sequence[float], denominators: Sequence[float]) -> list[float]:
    """Divide runs that followed each other: what slowed the machine at that moment slowed both."""
    return [a / b for a, b in zip(numerators, denominators, strict=True)]


def _table(result: Mapping[str, Any]) -> Table:
    runs = result["runs"]
    table = Table(title=f"Medians of {len(runs['plain_prefill_s'])} runs; raw runs are in the JSON")
    for column in ("what", "against", "ratio", "spread", "aim"):
        table.add_column(column)
    rows = (
        ("prefill time, prefix present", "plain vLLM", "prefill_time_ratio", "<= 1.05"),
        ("load of a layer", "memcpy", "load_over_memcpy", ">= 0.9"),
        ("save of a layer", "memcpy", "save_over_memcpy", ">= 0.9"),
    )
    for what, against, key, aim in rows:
        spread = f"{min(runs[key]):.2f} to {max(runs[key]):.2f}"
        table.add_row(what, against, f"{result[key]:.3f}", spread, aim)
    table.add_row("tokens that fit", "plain vLLM", f"{result['capacity_ratio']:.3f}", "-", "formula")
    return table
