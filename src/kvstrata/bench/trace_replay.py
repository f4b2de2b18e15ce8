"""`kvstrata trace replay`: traces through hot rows of several sizes and policies."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from kvstrata.bench.machine import describe_machine
from kvstrata.bench.trace_sources import open_source
from kvstrata.trace.replay import OPTIMUM, ReplayedTrace, passes, replay


@dataclass(frozen=True, kw_only=True)
class ReplayOptions:
    """What is replayed; all of it goes into the result file."""

    traces: tuple[str, ...] = ("calibrated", "harder")  # profiles or files
    policies: tuple[str, ...]
    sizes: tuple[float, ...] = (1, 2, 4)  # in multiples of top-k
    warm_up: int | None = None  # None: that of the trace, see `open_source`


def replay_traces(options: ReplayOptions, *, json_file: Path | None, console: Console) -> dict[str, Any]:
    """Replay for a person at a terminal: show tables and, if asked, write `json_file`.

    Raises what `open_source` and `replay` raise.
    """
    traces = replay_all(options, console)
    result = {
        "kvstrata_trace_replay": 1,
        "machine": describe_machine(),
        "options": {**asdict(options), "traces": [trace.name for trace in traces]},
        **rates(traces),
        "traces": {trace.name: trace.as_json() for trace in traces},
    }
    for trace in traces:
        console.print(miss_table(trace))
    if json_file is not None:
        json_file.parent.mkdir(parents=True, exist_ok=True)
        json_file.write_text(json.dumps(result, indent=1) + "\n")
        console.print(f"written: {json_file}")
    return result


def replay_all(options: ReplayOptions, console: Console) -> list[ReplayedTrace]:
    """Replay every trace with a bar for the whole."""
    sources = [open_source(name) for name in options.traces]
    with Progress(console=console, transient=True) as bar:
        total = len(sources) * passes(options.policies, options.sizes)
        task = bar.add_task("replaying", total=total)
        replayed = []
        for source, warm_up in sources:
            bar.update(task, description=f"replaying {source.name}")
            replayed.append(
                replay(
                    source,
                    policies=options.policies,
                    sizes=options.sizes,
                    warm_up=warm_up if options.warm_up is None else options.warm_up,
                    progress=lambda: bar.advance(task),
                )
            )
    return replayed


def rates(traces: Iterable[ReplayedTrace]) -> dict[str, float]:
    """Return the miss rates of all traces under their flat keys."""
    return {key: rate for trace in traces for key, rate in trace.rates().items()}


def miss_table(trace: ReplayedTrace, *, aims: Mapping[tuple[str, float], str] | None = None) -> Table:
    """Return misses in per cent, a row a policy, a column a size; `aims` are shown beside a figure."""
    sizes: Sequence[float] = sorted({size for _, size in trace.counts})
    summary = trace.summary
    table = Table(
        title=f"Misses of {trace.name}: {summary.selections} selections, "
        f"the first {trace.warm_up} of a share group not counted"
    )
    table.add_column("policy")
    for size in sizes:
        table.add_column(f"{size:g} x top-k", justify="right")
    for policy in dict.fromkeys(policy for policy, _ in trace.counts):
        cells = [
            f"{trace.counts[policy, size].rate:.1%}{(aims or {}).get((policy, size), '')}" for size in sizes
        ]
        table.add_row(f"{policy} (knows the future)" if policy == OPTIMUM else policy, *cells)
    return table
