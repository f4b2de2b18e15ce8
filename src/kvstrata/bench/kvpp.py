"""`kvstrata bench kvpp`: KVPP on two ranks against plain vLLM, its carriers, growth with allocated blocks."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from kvstrata.bench.engine_process import EngineProcess
from kvstrata.bench.kvpp_carriers import CarrierRuns, measure_carriers
from kvstrata.bench.kvpp_engines import EngineKind, KvppRuns, OpenEngine, Work, measure_engines
from kvstrata.bench.machine import describe_machine
from kvstrata.demo.model import find_model
from kvstrata.demo.prompt import build_prompt, encoder, handbook
from kvstrata.demo.two_ranks import TwoRanks, two_rank_arguments
from kvstrata.errors import KVStrataError
from kvstrata.terminal import Terminal, engine_noise_to


@dataclass(frozen=True, kw_only=True)
class KvppBenchOptions:
    """What is measured; all of it goes into the result file."""

    model: Path | None = None
    repeats: int = 7
    warm_ups: int = 1
    prompt_tokens: int = 2000
    new_tokens: int = 32
    device_kv_budget_bytes: int = 48 << 20  # of each rank; fits the prompt with and without KVPP
    max_batched_tokens: int = 512  # chunks: all but the first have history, so that layers travel
    growth: int = 4  # times that budget, the prompt unchanged


def bench_kvpp(options: KvppBenchOptions, *, json_file: Path | None, log: Path) -> dict[str, Any]:
    """Run the benchmark for a person at a terminal; return and, if asked, write the result.

    Raises KVStrataError if two engines answer differently or the machine has one CPU.
    """
    two_ranks = TwoRanks.here()
    if two_ranks.skip_reason is not None:
        raise KVStrataError(f"nothing to measure: {two_ranks.skip_reason}")
    model = find_model(options.model)
    prompt = build_prompt(
        encoder(model),
        text=handbook() * (1 + options.prompt_tokens // 2000),
        prompt_tokens=options.prompt_tokens,
        pass_key="48213",
        depth=0.15,
    )
    work = Work(
        prompt=prompt.token_ids,
        new_tokens=options.new_tokens,
        warm_ups=options.warm_ups,
        repeats=options.repeats,
    )
    with engine_noise_to(log) as terminal:
        with terminal.step("layers between two processes, by shared memory and by broadcast"):
            carriers = measure_carriers(repeats=max(options.repeats, 5))
        engines = measure_engines(
            work,
            _opener(options, model, two_ranks, terminal),
            terminal,
            rank_bytes=options.device_kv_budget_bytes,
            growth=options.growth,
        )
        result = summarise(options, carriers, engines)
        terminal.console.print(as_table(result))
        if json_file is not None:
            json_file.parent.mkdir(parents=True, exist_ok=True)
            json_file.write_text(json.dumps(result, indent=1) + "\n")
            terminal.console.print(f"written: {json_file}")
    return result


def summarise(options: KvppBenchOptions, carriers: CarrierRuns, engines: KvppRuns) -> dict[str, Any]:
    """Return the result: ratios as medians, and every run they come from."""
    described = asdict(options)
    described.pop("model")
    many = f"{options.growth}x_blocks"
    return {
        "kvstrata_bench_kvpp": 1,
        "machine": describe_machine(),
        "options": described,
        "prefill_ratio.referenced": engines.prefill["referenced"].ratio,
        "prefill_ratio.all": engines.prefill["all"].ratio,
        "decode_ratio.referenced": engines.decode.ratio,
        "shm_over_collective": carriers.ratio,  # bytes a second of the move alone
        "growth_with_allocated_blocks": engines.growth["referenced"].ratio,  # seconds a decoded token
        "growth_with_allocated_blocks.all": engines.growth["all"].ratio,
        "capacity_ratio": engines.max_tokens["kvpp"] / engines.max_tokens["plain"],
        "runs": {
            **{
                f"prefill_ratio.{broadcast}": turns.as_json(base="plain", other="kvpp")
                for broadcast, turns in engines.prefill.items()
            },
            "decode_ratio.referenced": engines.decode.as_json(base="plain_per_token", other="kvpp_per_token"),
            "shm_over_collective": carriers.as_json(),
            **{
                _growth_key(broadcast): {
                    **turns.as_json(base="per_token_1x_blocks", other=f"per_token_{many}"),
                    "max_tokens": list(engines.growth_tokens[broadcast]),
                }
                for broadcast, turns in engines.growth.items()
            },
        },
        "tokens": dict(engines.max_tokens),
        "ranks": [dict(rank) for rank in engines.ranks],
    }


def as_table(result: Mapping[str, Any]) -> Table:
    """Return the figures for people, each beside its aim."""
    options = result["options"]
    table = Table(title=f"Medians of {options['repeats']} runs; raw runs are in the JSON")
    for column in ("what", "against", "ratio", "spread", "aim"):
        table.add_column(column)
    few = f"{options['growth']} times fewer blocks"
    rows = (
        (
            "prefill time, referenced blocks travel",
            "plain vLLM, 2 ranks",
            "prefill_ratio.referenced",
            "<= 1.02",
        ),
        ("prefill time, all blocks travel", "plain vLLM, 2 ranks", "prefill_ratio.all", "-"),
        ("decode time per token, referenced", "plain vLLM, 2 ranks", "decode_ratio.referenced", "<= 1.02"),
        ("layers by shared memory, bytes/s", "by broadcast", "shm_over_collective", "-"),
        ("decode time per token, referenced", few, "growth_with_allocated_blocks", "flat: 1.0"),
        ("decode time per token, all", few, "growth_with_allocated_blocks.all", "-"),
    )
    for what, against, key, aim in rows:
        table.add_row(what, against, f"{result[key]:.3f}", _spread(ratios_of(result, key)), aim)
    table.add_row("tokens that fit", "plain vLLM, 2 ranks", f"{result['capacity_ratio']:.3f}", "-", "formula")
    return table


def ratios_of(result: Mapping[str, Any], key: str) -> Sequence[float]:
    """Return the ratios of the turns that the figure `key` of a result file is the median of."""
    runs = result["runs"][key]
    ratios: Sequence[float] = runs["shm_over_collective" if key == "shm_over_collective" else "ratio"]
    return ratios


def _growth_key(broadcast: str) -> str:
    return "growth_with_allocated_blocks" + ("" if broadcast == "referenced" else f".{broadcast}")


def _spread(ratios: Sequence[float]) -> str:
    return f"{min(ratios):.2f} to {max(ratios):.2f}"


def _opener(options: KvppBenchOptions, model: Path, two_ranks: TwoRanks, terminal: Terminal) -> OpenEngine:
    @contextmanager
    def open_engine(kind: EngineKind) -> Iterator[EngineProcess]:
        kvpp = None if kind.broadcast is None else {"kvpp_broadcast": kind.broadcast}
        arguments = {
            "model": str(model),
            "device_kv_budget_bytes": kind.rank_bytes,
            "max_model_len": options.prompt_tokens + options.new_tokens,
            "max_batched_tokens": options.max_batched_tokens,
            "max_num_seqs": 1,
            "extra_arguments": two_rank_arguments(kvpp=kvpp),
        }
        name = f"{kind.name} {kind.rank_bytes >> 20} MiB"
        with EngineProcess(name, arguments, environment=two_ranks.environment) as engine:
            with terminal.step(f"an engine of two ranks starts: {name} each"):
                engine.wait_until_ready()
            yield engine

    return open_engine
