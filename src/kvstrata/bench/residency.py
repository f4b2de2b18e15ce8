"""`kvstrata bench residency`: the time of a lookup, the row gather against memcpy, misses of every policy."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from kvstrata.bench.gather import GatherRuns, measure_gather
from kvstrata.bench.machine import describe_machine
from kvstrata.bench.trace_replay import ReplayOptions, miss_table, rates, replay_all
from kvstrata.core.eviction import DEFAULT_POLICY, POLICIES
from kvstrata.kernels.residency import ResidencyTable
from kvstrata.trace.replay import ReplayedTrace

AIMED_SIZE = 2.0


@dataclass(frozen=True, kw_only=True)
class ResidencyBenchOptions:
    """What is measured; all of it goes into the result file."""

    repeats: int = 9
    topk: int = 2048
    capacity_rows: int = 4096
    host_rows: int = 1 << 20
    context_tokens: int = 32768  # one request's, in blocks all over the host pool
    block_tokens: int = 64
    near_rows: int = 1024  # rows just below the cut, which the default policy reads too
    kept_share: float = 0.7  # of a step's selection in the next: 30 % misses
    steps_per_run: int = 256
    steps_per_block: int = 8  # timed together, and laid ready together
    warm_up_steps: int = 96
    seed: int = 5
    traces: tuple[str, ...] = ("calibrated", "harder")
    sizes: tuple[float, ...] = (1.0, 2.0, 4.0)


@dataclass(frozen=True, kw_only=True)
class LookupRuns:
    """Nanoseconds of every timed block of lookups, one policy's; policies took turns."""

    block_ns: tuple[int, ...]
    steps_per_block: int
    miss_share: float  # of the timed blocks, to check the 30 %

    @property
    def us_per_row_layer(self) -> float:
        """Microseconds of one decode token's lookup in one layer: the median of the blocks' means."""
        return 1e-3 * median(self.block_ns) / self.steps_per_block

    @property
    def least_us_per_row_layer(self) -> float:
        """The same of the fastest block: nobody else used the machine then."""
        return 1e-3 * min(self.block_ns) / self.steps_per_block


def bench_residency(
    options: ResidencyBenchOptions, *, json_file: Path | None, console: Console
) -> dict[str, Any]:
    """Run the benchmark for a person at a terminal; return and, if asked, write the result."""
    with console.status("lookups"):
        lookups = measure_lookups(options)
    with console.status("row gather, memcpy and index_select, by turns"):
        gather = measure_gather(repeats=options.repeats)
    replay_options = ReplayOptions(traces=options.traces, policies=tuple(POLICIES), sizes=options.sizes)
    traces = replay_all(replay_options, console)
    result = summarise(options, lookups, gather, traces)
    console.print(as_table(result))
    for trace in traces:
        aims = {(DEFAULT_POLICY, AIMED_SIZE): " (aim <= 11%)"} if trace.name == "calibrated" else {}
        console.print(miss_table(trace, aims=aims))
    if json_file is not None:
        json_file.parent.mkdir(parents=True, exist_ok=True)
        json_file.write_text(json.dumps(result, indent=1) + "\n")
        console.print(f"written: {json_file}")
    return result


def measure_lookups(options: ResidencyBenchOptions) -> dict[str, LookupRuns]:
    """Time `resolve` of one token with every policy, state carried on from step to step, on one thread.

    A block's selections are copied to the same place before the clock starts: in an engine they were made
    just before they are looked up, and do not come from memory.
    """
    block = options.steps_per_block
    blocks = options.repeats * options.steps_per_run // block
    rows, near_rows = make_selections(options, options.warm_up_steps + blocks * block)
    tables = {
        policy: ResidencyTable(host_rows=options.host_rows, capacity=options.capacity_rows, policy=policy)
        for policy in POLICIES
    }
    fresh = np.full(options.host_rows, -1, np.int32)
    for table in tables.values():
        for step in range(options.warm_up_steps):
            table.resolve(rows[step : step + 1], fresh, near_rows=near_rows[step : step + 1])
    ready_rows, ready_near = rows[:block].copy(), near_rows[:block].copy()
    ready = [(ready_rows[at : at + 1], ready_near[at : at + 1]) for at in range(block)]
    block_ns: dict[str, list[int]] = {policy: [] for policy in POLICIES}
    before = {policy: table.statistics().misses for policy, table in tables.items()}
    for first in range(options.warm_up_steps, len(rows), block):
        for policy, table in tables.items():
            ready_rows[:], ready_near[:] = rows[first : first + block], near_rows[first : first + block]
            resolve = table.resolve
            started_ns = time.perf_counter_ns()
            for selected, near in ready:
                resolve(selected, fresh, near_rows=near)
            block_ns[policy].append(time.perf_counter_ns() - started_ns)
    return {
        policy: LookupRuns(
            block_ns=tuple(block_ns[policy]),
            steps_per_block=block,
            miss_share=(table.statistics().misses - before[policy]) / (blocks * block * options.topk),
        )
        for policy, table in tables.items()
    }


def make_selections(
    options: ResidencyBenchOptions, steps: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return rows [steps, topk] and near rows [steps, near_rows], by ascending position in a step.

    A step keeps `kept_share` of the selection before it and takes the others from positions not selected for
    long, so that they miss with any policy. Near are the rows just dropped and some others.
    """
    rng = np.random.default_rng(options.seed)
    blocks = rng.permutation(options.host_rows // options.block_tokens)
    block_table = blocks[: options.context_tokens // options.block_tokens]
    num_new = round((1 - options.kept_share) * options.topk)
    waiting = rng.permutation(options.context_tokens)  # positions, longest unselected first

    def as_rows(positions: NDArray[np.int64]) -> NDArray[np.int64]:
        block, offset = np.divmod(np.sort(positions), options.block_tokens)
        return block_table[block] * options.block_tokens + offset

    rows = np.empty((steps, options.topk), np.int64)
    near_rows = np.empty((steps, options.near_rows), np.int64)
    selection, waiting = waiting[: options.topk], waiting[options.topk :]
    for step in range(steps):
        order = rng.permutation(options.topk)
        dropped, kept = selection[order[:num_new]], selection[order[num_new:]]
        selection = np.concatenate([kept, waiting[:num_new]])
        waiting = np.concatenate([waiting[num_new:], dropped])
        others = rng.choice(waiting[:-num_new], max(options.near_rows - num_new, 0), replace=False)
        rows[step] = as_rows(selection)
        near_rows[step] = as_rows(np.concatenate([dropped[: options.near_rows], others]))
    return rows, near_rows


def summarise(
    options: ResidencyBenchOptions,
    lookups: Mapping[str, LookupRuns],
    gather: GatherRuns,
    traces: list[ReplayedTrace],
) -> dict[str, Any]:
    """Return the result: medians, miss rates, and what they come from."""
    by_policy = {policy: runs.us_per_row_layer for policy, runs in lookups.items()}
    return {
        "kvstrata_bench_residency": 1,
        "machine": describe_machine(),
        "options": asdict(options),
        "default_policy": DEFAULT_POLICY,
        "us_per_row_layer": by_policy[DEFAULT_POLICY],
        "us_per_row_layer_by_policy": by_policy,
        "least_us_per_row_layer_by_policy": {
            policy: runs.least_us_per_row_layer for policy, runs in lookups.items()
        },
        "gather_over_memcpy": gather.gather_over_memcpy,
        "gather_over_index_select": gather.gather_over_index_select,
        **rates(traces),
        "runs": {
            "lookup": {policy: asdict(runs) for policy, runs in lookups.items()},
            "gather": asdict(gather),
        },
        "traces": {trace.name: trace.as_json() for trace in traces},
    }


def as_table(result: Mapping[str, Any]) -> Table:
    """Return times and ratios for people, each beside its aim."""
    options = result["options"]
    gather = result["runs"]["gather"]
    gathered_bytes = gather["rows"] * gather["row_bytes"]
    table = Table(title="Medians of runs or blocks, one thread; all of them are in the JSON")
    for column in ("what", "figure", "aim"):
        table.add_column(column)
    for policy, us in result["us_per_row_layer_by_policy"].items():
        default = policy == result["default_policy"]
        share = result["runs"]["lookup"][policy]["miss_share"]
        table.add_row(
            f"lookup of {options['topk']} rows in {options['capacity_rows']}, {share:.0%} misses, {policy}"
            f"{' (default)' if default else ''}",
            f"{us:.1f} us (least {result['least_us_per_row_layer_by_policy'][policy]:.1f})",
            "<= 10 us" if default else "",
        )
    rate = gathered_bytes / median(gather["gather_s"]) / 1e9
    table.add_row(
        f"gather of {gather['row_bytes']}-byte rows, over memcpy",
        f"{result['gather_over_memcpy']:.2f} ({rate:.1f} GB/s)",
        ">= 0.5",
    )
    table.add_row("gather, over index_select", f"{result['gather_over_index_select']:.2f}", ">= 1.6")
    return table
