"""`kvstrata bench pd`: reads over shm and tcp against memcpy, time to first token against prefill alone."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from kvstrata.bench.machine import describe_machine
from kvstrata.bench.pd_runs import FirstTokenRuns, TimedDeployment, first_tokens
from kvstrata.demo.model import ModelShape, find_model
from kvstrata.demo.prompt import build_prompt, encoder, handbook
from kvstrata.terminal import Terminal, engine_noise_to

READS = ("shm_over_memcpy", "tcp_over_memcpy", "eight_peers_over_one")
OpenTimed = Callable[[], AbstractContextManager[TimedDeployment]]


@dataclass(frozen=True, kw_only=True)
class PdBenchOptions:
    """What is measured; all of it goes into the result file."""

    model: Path | None = None
    repeats: int = 7
    warm_ups: int = 2
    prompt_tokens: int = 2000
    device_kv_budget_bytes: int = 48 << 20  # of each engine; fits the prompt with room
    max_batched_tokens: int = 512  # four chunks: the first are read while the next are computed
    num_shared_buffers: int = 2
    prefetch_layers: int = 1
    hot_rows_per_topk: int = 2


def bench_pd(options: PdBenchOptions, *, json_file: Path | None, log: Path) -> dict[str, Any]:
    """Run the benchmark for a person at a terminal; return and, if asked, write the result.

    Raises KVStrataError if decode ever computed a prompt itself.
    """
    from kvstrata.bench.remote import measure_transports
    from kvstrata.demo.pd_servers import PdEngines, open_pd_servers

    model = find_model(options.model)
    engines = PdEngines(
        model=model,
        device_kv_budget_bytes=options.device_kv_budget_bytes,
        max_model_len=options.prompt_tokens + 1,
        max_batched_tokens=options.max_batched_tokens,
        max_num_seqs=1,
        num_shared_buffers=options.num_shared_buffers,
        prefetch_layers=options.prefetch_layers,
        topk_buffer_size=options.hot_rows_per_topk * ModelShape.of(model).index_topk,
        log_directory=log.with_suffix(""),
    )
    with engine_noise_to(log) as terminal:
        with terminal.step("reads over shm and tcp against memcpy, and eight peers against one"):
            reads = measure_transports(repeats=options.repeats)
        first = measure_first_tokens(options, model, lambda: open_pd_servers(engines), terminal)
        result = summarise(options, reads, first)
        terminal.console.print(as_table(result))
        if json_file is not None:
            json_file.parent.mkdir(parents=True, exist_ok=True)
            json_file.write_text(json.dumps(result, indent=1) + "\n")
            terminal.console.print(f"written: {json_file}")
    return result


def measure_first_tokens(
    options: PdBenchOptions, model: Path, open_deployment: OpenTimed, terminal: Terminal
) -> FirstTokenRuns:
    """Time the handbook's prompt in one deployment. Raises what starting it raises."""
    prompt = build_prompt(
        encoder(model),
        text=handbook() * (1 + options.prompt_tokens // 2000),
        prompt_tokens=options.prompt_tokens,
        pass_key="48213",
        depth=0.15,
    )
    with ExitStack() as running:
        with terminal.step("prefill engine, decode engine and proxy start"):
            deployment = running.enter_context(open_deployment())
        return first_tokens(
            deployment,
            prompt.token_ids,
            warm_ups=options.warm_ups,
            repeats=options.repeats,
            terminal=terminal,
        )


def summarise(options: PdBenchOptions, reads: Mapping[str, Any], first: FirstTokenRuns) -> dict[str, Any]:
    """Return the result: ratios as medians, and every run they come from.

    `reads` is what `kvstrata.bench.remote` measured of the transports: the names in `READS`, and the runs.
    """
    described = asdict(options)
    described.pop("model")
    return {
        "kvstrata_bench_pd": 1,
        "machine": describe_machine(),
        "options": described,
        **{key: reads[key] for key in READS},
        "ttft_ratio": first.ratio,
        "runs": {"reads": reads["runs"], "first_tokens": first.as_json()},
    }


def as_table(result: Mapping[str, Any]) -> Table:
    """Return the figures for people, each beside its aim."""
    table = Table(title=f"Medians of {result['options']['repeats']} runs; raw runs are in the JSON")
    for column in ("what", "against", "ratio", "spread", "aim"):
        table.add_column(column)
    rows = (
        ("read over shm, bytes/s", "memcpy", "shm_over_memcpy", ">= 0.8"),
        ("read over tcp, bytes/s", "memcpy", "tcp_over_memcpy", "-"),
        ("eight readers at once, bytes/s of all", "one reader", "eight_peers_over_one", "-"),
        ("time to first token, prefill and decode", "prefill alone", "ttft_ratio", "<= 1.1"),
    )
    runs = {**result["runs"]["reads"], **result["runs"]["first_tokens"]}
    for what, against, key, aim in rows:
        table.add_row(what, against, f"{result[key]:.2f}", _spread(runs.get(key)), aim)
    return table


def _spread(ratios: Sequence[float] | None) -> str:
    return f"{min(ratios):.2f} to {max(ratios):.2f}" if ratios else "-"
