"""`kvstrata bench decode`: sparse decode offload against plain vLLM, memory ample or scarce."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from rich.table import Table

from kvstrata.bench.decode_runs import Decoder, Pair, PairRuns, by_turns, ceiling_by_turns, table_rows
from kvstrata.bench.engine_process import EngineProcess
from kvstrata.bench.machine import describe_machine
from kvstrata.demo.model import ModelShape, find_model
from kvstrata.demo.prompt import encoder, handbook
from kvstrata.errors import KVStrataError
from kvstrata.terminal import Terminal, engine_noise_to

# Opens both engines with these arguments of `open_engine`, kvstrata's with sparse offload too.
OpenPair = Callable[[dict[str, Any]], AbstractContextManager[Pair]]
# Opens plain vLLM twice, with memory budgets of so many bytes.
OpenPlain = Callable[[dict[str, Any], tuple[int, int]], AbstractContextManager[tuple[Decoder, Decoder]]]
Prompt = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class DecodeBenchOptions:
    """What is measured; all of it goes into the result file."""

    model: Path | None = None
    repeats: int = 5
    warm_ups: int = 1
    batches: tuple[int, ...] = (1, 4, 8)
    shortest_prompt_tokens: int = 400
    longest_prompt_tokens: int = 900
    new_tokens: int = 64
    hot_rows_per_topk: int = 2  # hot rows of a request, in top-k sizes
    max_batched_tokens: int = 512
    roomy_kv_budget_bytes: int = 144 << 20  # eight of the longest requests fit plain vLLM
    # The budget where plain vLLM must queue: it holds one of these requests, kvstrata all six. If a
    # second prompt fitted, plain vLLM would start it and preempt it later, which is worse than queueing.
    constrained_kv_budget_bytes: int = 37 << 20
    constrained_requests: int = 6
    constrained_prompt_tokens: int = 1150
    constrained_new_tokens: int = 256


def bench_decode(options: DecodeBenchOptions, *, json_file: Path | None, log: Path) -> dict[str, Any]:
    """Run the benchmark for a person at a terminal; return and, if asked, write the result.

    Raises KVStrataError if the two engines answer differently: their times could not be compared.
    """
    model = find_model(options.model)
    topk = ModelShape.of(model).index_topk
    text = encoder(model)(handbook())
    with engine_noise_to(log) as terminal:
        open_pair = engine_pairs(model, options, topk, terminal)
        batches = measure_batches(options, open_pair, text, terminal)
        constrained = measure_constrained(options, open_pair, text, terminal)
        ceiling = measure_ceiling(options, plain_engines(model, options, terminal), text, terminal)
        result = summarise(options, batches, constrained, ceiling)
        terminal.console.print(as_table(result))
        if json_file is not None:
            json_file.parent.mkdir(parents=True, exist_ok=True)
            json_file.write_text(json.dumps(result, indent=1) + "\n")
            terminal.console.print(f"written: {json_file}")
    return result


def engine_pairs(model: Path, options: DecodeBenchOptions, topk: int, terminal: Terminal) -> OpenPair:
    """Return the opener of real engines, each in a process of its own."""
    from kvstrata.vllm.engines import SparseOptions

    shared = {"model": str(model), "max_batched_tokens": options.max_batched_tokens}
    sparse = SparseOptions(topk_buffer_size=options.hot_rows_per_topk * topk)

    @contextmanager
    def open_pair(both: dict[str, Any]) -> Iterator[Pair]:
        arguments = {**shared, **both}
        with (
            EngineProcess("plain", arguments) as plain,
            EngineProcess("kvstrata", {**arguments, "sparse": sparse}) as ours,
        ):
            with terminal.step("two engines start"):
                plain.wait_until_ready()
                ours.wait_until_ready()
            yield Pair(plain=plain, kvstrata=ours)

    return open_pair


def plain_engines(model: Path, options: DecodeBenchOptions, terminal: Terminal) -> OpenPlain:
    """Return the opener of plain vLLM with two budgets, each in a process of its own."""

    @contextmanager
    def open_plain(both: dict[str, Any], budgets: tuple[int, int]) -> Iterator[tuple[Decoder, Decoder]]:
        shared = {"model": str(model), "max_batched_tokens": options.max_batched_tokens, **both}
        scarce, ample = ({**shared, "device_kv_budget_bytes": budget} for budget in budgets)
        with EngineProcess("queueing", scarce) as queueing, EngineProcess("roomy", ample) as roomy:
            with terminal.step("two plain engines start"):
                queueing.wait_until_ready()
                roomy.wait_until_ready()
            yield queueing, roomy

    return open_plain


def measure_batches(
    options: DecodeBenchOptions,
    open_pair: OpenPair,
    text: list[int],
    terminal: Terminal,
    *,
    pause: Callable[[float], None] = time.sleep,
) -> dict[int, PairRuns]:
    """Time decoding at every batch size, in a budget that fits both engines.

    A pair of engines a batch size: hot rows are set aside for the sequences that may run, and one pair for
    all would give the small batches more of them than they are due.
    """
    runs = {}
    for batch in options.batches:
        prompts = spread_prompts(
            text,
            batch,
            shortest_tokens=options.shortest_prompt_tokens,
            longest_tokens=options.longest_prompt_tokens,
        )
        both = {
            "device_kv_budget_bytes": options.roomy_kv_budget_bytes,
            "max_num_seqs": batch,
            "max_model_len": options.longest_prompt_tokens + options.new_tokens,
        }
        with open_pair(both) as pair:
            runs[batch] = by_turns(
                pair,
                prompts,
                new_tokens=options.new_tokens,
                warm_ups=options.warm_ups,
                repeats=options.repeats,
                terminal=terminal,
                title=f"{options.repeats} times {batch} x {options.new_tokens} tokens, by turns",
                pause=pause,
            )
    return runs


def measure_constrained(
    options: DecodeBenchOptions,
    open_pair: OpenPair,
    text: list[int],
    terminal: Terminal,
    *,
    pause: Callable[[float], None] = time.sleep,
) -> PairRuns:
    """Time more requests than plain vLLM can hold at once, prompts included; vLLM itself queues them.

    Both may run all of them at once: only memory decides who waits.

    Raises KVStrataError if the budget does not make that difference, or would make plain vLLM preempt, which
    is worse than queueing.
    """
    prompts = _constrained_prompts(options, text)
    both = {
        "device_kv_budget_bytes": options.constrained_kv_budget_bytes,
        "max_num_seqs": options.constrained_requests,
        "max_model_len": _request_tokens(options),
    }
    with open_pair(both) as pair:
        check_pressure(
            options, plain_tokens=pair.plain.max_tokens(), kvstrata_tokens=pair.kvstrata.max_tokens()
        )
        return by_turns(
            pair,
            prompts,
            new_tokens=options.constrained_new_tokens,
            warm_ups=options.warm_ups,
            repeats=options.repeats,
            terminal=terminal,
            title=f"{options.repeats} times {len(prompts)} requests where plain vLLM must queue, by turns",
            pause=pause,
        )


def measure_ceiling(
    options: DecodeBenchOptions,
    open_plain: OpenPlain,
    text: list[int],
    terminal: Terminal,
    *,
    pause: Callable[[float], None] = time.sleep,
) -> list[float]:
    """Time the same requests by plain vLLM that must queue and by plain vLLM with memory for all of them.

    Raises KVStrataError if the roomy budget does not hold them.
    """
    prompts = _constrained_prompts(options, text)
    both = {"max_num_seqs": options.constrained_requests, "max_model_len": _request_tokens(options)}
    budgets = options.constrained_kv_budget_bytes, options.roomy_kv_budget_bytes
    with open_plain(both, budgets) as (scarce, ample):
        holds = ample.max_tokens() // _request_tokens(options)
        if holds < options.constrained_requests:
            raise KVStrataError(
                f"roomy_kv_budget_bytes={options.roomy_kv_budget_bytes}: plain vLLM holds {holds} of the "
                f"{options.constrained_requests} constrained requests; raise it"
            )
        return ceiling_by_turns(
            scarce,
            ample,
            prompts,
            new_tokens=options.constrained_new_tokens,
            warm_ups=options.warm_ups,
            repeats=options.repeats,
            terminal=terminal,
            title=f"{options.repeats} times the same by plain vLLM with and without memory, by turns",
            pause=pause,
        )


def check_pressure(options: DecodeBenchOptions, *, plain_tokens: int, kvstrata_tokens: int) -> None:
    """Raise KVStrataError unless plain vLLM queues without preempting and kvstrata runs all at once."""
    prompt, request = options.constrained_prompt_tokens, _request_tokens(options)
    budget = f"constrained_kv_budget_bytes={options.constrained_kv_budget_bytes}"
    holds = plain_tokens // request
    if not 1 <= holds < options.constrained_requests:
        raise KVStrataError(f"{budget}: plain vLLM holds {holds} requests, so it would not queue; change it")
    if plain_tokens // prompt > holds:
        raise KVStrataError(
            f"{budget}: plain vLLM would start {plain_tokens // prompt} prompts, finish {holds} and preempt "
            "the others, which is not queueing; change it"
        )
    if kvstrata_tokens // request < options.constrained_requests:
        raise KVStrataError(
            f"{budget}: kvstrata holds {kvstrata_tokens // request} of the {options.constrained_requests} "
            "requests; raise it"
        )


def spread_prompts(text: list[int], count: int, *, shortest_tokens: int, longest_tokens: int) -> list[Prompt]:
    """Return `count` prompts cut from different places of the text, from the longest to the shortest."""
    prompts = []
    for number in range(count):
        share = number / max(count - 1, 1)
        length = round(longest_tokens - share * (longest_tokens - shortest_tokens))
        start = number * (len(text) - longest_tokens) // max(count, 1)
        assert start + length <= len(text), f"the text has only {len(text)} tokens"
        prompts.append(tuple(text[start : start + length]))
    return prompts


def summarise(
    options: DecodeBenchOptions,
    batches: Mapping[int, PairRuns],
    constrained: PairRuns,
    ceiling: Sequence[float],
) -> dict[str, Any]:
    """Return the result: ratios as medians, and every run they come from."""
    described = asdict(options)
    described.pop("model")
    request = _request_tokens(options)
    result: dict[str, Any] = {
        "kvstrata_bench_decode": 1,
        "machine": describe_machine(),
        "options": described,
        **{f"tpot_ratio.{batch}": runs.tpot_ratio for batch, runs in batches.items()},
        **{f"hit_rate.{batch}": runs.hit_rate for batch, runs in batches.items()},
        "throughput_ratio_constrained": constrained.throughput_ratio,
        "throughput_ceiling_constrained": median(ceiling),
        "hit_rate_constrained": constrained.hit_rate,
        "capacity_ratio_constrained": constrained.kvstrata_max_tokens / constrained.plain_max_tokens,
        "requests_held_constrained": {
            "plain": constrained.plain_max_tokens // request,
            "kvstrata": min(constrained.kvstrata_max_tokens // request, options.constrained_requests),
        },
        "runs": {
            **{f"batch.{batch}": runs.as_json() for batch, runs in batches.items()},
            "constrained": constrained.as_json(),
            "ceiling": list(ceiling),
        },
    }
    return result


def as_table(result: Mapping[str, Any]) -> Table:
    """Return the figures for people, each beside its aim."""
    repeats = result["options"]["repeats"]
    table = Table(title=f"Medians of {repeats} runs; raw runs are in the JSON")
    for column in ("what", "kvstrata over plain vLLM", "spread", "hit rate", "aim"):
        table.add_column(column)
    for row in table_rows(result):
        table.add_row(*row)
    held = result["requests_held_constrained"]
    table.caption = (
        f"where plain vLLM must queue: {result['options']['constrained_kv_budget_bytes'] >> 20} MiB hold "
        f"{held['plain']} requests of plain vLLM's and {held['kvstrata']} of kvstrata's"
    )
    return table


def _constrained_prompts(options: DecodeBenchOptions, text: list[int]) -> list[Prompt]:
    length = options.constrained_prompt_tokens
    return spread_prompts(text, options.constrained_requests, shortest_tokens=length, longest_tokens=length)


def _request_tokens(options: DecodeBenchOptions) -> int:
    return options.constrained_prompt_tokens + options.constrained_new_tokens
