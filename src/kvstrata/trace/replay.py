"""Replay a trace through the residency table that serves decode: what is simulated is what is real."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from kvstrata.errors import ConfigurationError
from kvstrata.kernels.residency import ResidencyTable
from kvstrata.trace.events import Event, Rewritten, Selection, TraceSource
from kvstrata.trace.optimum import optimal_misses
from kvstrata.trace.recording import TraceSummary, summarise

OPTIMUM = "belady"
_NO_ROWS = np.empty(0, np.int64)


@dataclass(frozen=True, kw_only=True)
class MissCount:
    """Selected rows and those loaded from the host, of all share groups, after the warm-up."""

    selected: int
    misses: int

    @property
    def rate(self) -> float:
        """Misses by selected rows."""
        return self.misses / self.selected


@dataclass(frozen=True, kw_only=True)
class ReplayedTrace:
    """Misses of one trace by (policy, size in multiples of top-k); the policy `OPTIMUM` knows the future."""

    name: str
    summary: TraceSummary
    warm_up: int  # first selections of each share group that are not counted
    counts: dict[tuple[str, float], MissCount]

    def rates(self) -> dict[str, float]:
        """Return miss rates under keys such as `misses.calibrated.lru.2x`."""
        return {
            f"misses.{self.name}.{policy}.{size:g}x": count.rate
            for (policy, size), count in self.counts.items()
        }

    def as_json(self) -> dict[str, Any]:
        """Return everything but the rates, for the raw part of a result file."""
        return {
            **asdict(self.summary),
            "warm_up": self.warm_up,
            "counts": {f"{policy}.{size:g}x": asdict(count) for (policy, size), count in self.counts.items()},
        }


def replay(
    source: TraceSource,
    *,
    policies: Sequence[str],
    sizes: Sequence[float],  # hot rows in multiples of top-k, for each token of the largest selection
    warm_up: int,
    progress: Callable[[], None] = lambda: None,
) -> ReplayedTrace:
    """Replay `source` once for each policy and size, and find the optimum of each size.

    `progress` is called after each of them, `passes(...)` times in all. Memory is that of the tables; the
    optimum also holds the trace of one share group. Raises ConfigurationError if nothing is left to count.
    """
    summary = summarise(source.events())
    if warm_up * len(summary.layers) >= summary.selections:
        raise ConfigurationError(
            f"warm_up={warm_up}: the trace {source.name} has {summary.selections} selections of "
            f"{len(summary.layers)} share groups, so none would count; use a smaller warm-up"
        )
    capacities = {size: int(size * source.topk * summary.max_tokens) for size in sizes}
    counts: dict[tuple[str, float], MissCount] = {}
    for policy in policies:
        for size, capacity in capacities.items():
            tables = {
                layer: ResidencyTable(host_rows=source.host_rows, capacity=capacity, policy=policy)
                for layer in summary.layers
            }
            counts[policy, size] = count_misses(source, tables, warm_up=warm_up)
            progress()
    for size, capacity in capacities.items():
        counts[OPTIMUM, size] = _count_optimum(source, summary.layers, capacity, warm_up)
        progress()
    return ReplayedTrace(name=source.name, summary=summary, warm_up=warm_up, counts=counts)


def passes(policies: Sequence[str], sizes: Sequence[float]) -> int:
    """Return how often `replay` reports progress."""
    return (len(policies) + 1) * len(sizes)


def count_misses(source: TraceSource, tables: dict[int, ResidencyTable], *, warm_up: int) -> MissCount:
    """Send every event through the table of its share group, in the order in which it happened."""
    fresh = np.full(source.host_rows, -1, np.int32)
    seen: Counter[int] = Counter()
    selected = misses = 0
    for event in source.events():
        if isinstance(event, Rewritten):
            for layer, table in tables.items():
                if event.layer in (None, layer):
                    table.invalidate(event.rows)
            continue
        fresh[event.fresh_rows] = np.arange(len(event.fresh_rows), dtype=np.int32)
        near_rows = event.near_rows if len(event.near_rows) else None
        resolution = tables[event.layer].resolve(
            np.ascontiguousarray(event.rows), fresh if len(event.fresh_rows) else None, near_rows=near_rows
        )
        fresh[event.fresh_rows] = -1
        seen[event.layer] += 1
        if seen[event.layer] > warm_up:
            selected += resolution.selected
            misses += len(resolution.load_rows)
    return MissCount(selected=selected, misses=misses)


def _count_optimum(source: TraceSource, layers: Sequence[int], capacity: int, warm_up: int) -> MissCount:
    selected = misses = 0
    for layer in layers:
        events = list(_of_layer(source.events(), layer))
        counted = [event for event in events if isinstance(event, Selection)][warm_up:]
        selected += sum(int((event.rows >= 0).sum()) for event in counted)
        misses += sum(list(optimal_misses(events, capacity))[warm_up:])
    return MissCount(selected=selected, misses=misses)


def _of_layer(events: Iterator[Event], layer: int) -> Iterator[Event]:
    for event in events:
        if event.layer in (None, layer):
            yield replace(event, near_rows=_NO_ROWS) if isinstance(event, Selection) else event
