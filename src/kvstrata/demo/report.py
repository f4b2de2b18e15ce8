"""The demonstration's result as tables for people and as JSON for programs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvstrata.demo.baseline import Baseline
from kvstrata.demo.kvpp_report import kvpp_json, kvpp_lines
from kvstrata.demo.layerwise import LayerwiseResult
from kvstrata.demo.pd_report import pd_json, pd_lines
from kvstrata.demo.run import DemoResult
from kvstrata.demo.served_report import served_json, short, verdict
from kvstrata.demo.serving import Served, mib
from kvstrata.demo.sparse import SparseResult


def as_table(result: DemoResult) -> RenderableType:
    """Return the comparisons: a column a serving, the verdict in one line each; then the failures."""
    plain = result.baseline.plain
    lines: list[RenderableType] = [
        *_layerwise(result.layerwise),
        Text(""),
        *_sparse(result.sparse),
        Text(""),
        *pd_lines(result.pd),
        Text(""),
        *kvpp_lines(result.kvpp),
        Text(""),
        Text("plain vLLM: without kvstrata's offload, on its CPU backends (stock vLLM has none here)"),
        Text(f"plain vLLM in {mib(plain.device_kv_budget_bytes)} says: {short(plain.refusal)}"),
    ]
    lines += [Text(f"FAILED: {problem}", style="bold red") for problem in result.problems]
    return Group(*lines)


def as_json(result: DemoResult, machine: Mapping[str, Any]) -> dict[str, Any]:
    """Return the machine-readable result; every figure of the tables is in it, with the raw runs."""
    layerwise, sparse = result.layerwise, result.sparse
    return {
        "kvstrata_demo": 1,
        "machine": dict(machine),
        "layerwise": {
            **_servings(layerwise),
            "capacity_ratio": layerwise.capacity_ratio,
            "capacity_ratio_formula": layerwise.capacity_ratio_formula,
            "exact": layerwise.exact,
            "negative_control_diverges": layerwise.negative_control_diverges,
            "prefill_time_ratio": layerwise.prefill_time_ratio,
            "problems": layerwise.problems,
        },
        "sparse": {
            **_servings(sparse),
            "capacity_ratio": sparse.capacity_ratio,
            "capacity_ratio_formula": sparse.capacity_ratio_formula,
            "exact": sparse.exact,
            "negative_control_diverges": sparse.negative_control_diverges,
            "hit_rate": sparse.hit_rate,
            "problems": sparse.problems,
        },
        "pd": pd_json(result.pd),
        "kvpp": kvpp_json(result.kvpp),
    }


def _layerwise(result: LayerwiseResult) -> list[RenderableType]:
    baseline = result.baseline
    table, served = _table(baseline, result.kvstrata, "layerwise prefill offload")
    table.add_row("prefill time (median)", *(_seconds(s.median_prefill_s) for s in served))
    table.add_row("loaded / saved", *(_moved(s) for s in served))
    table.add_row("answer", *(s.answer or "-" for s in served))
    table.add_row("exact", "-", "yes" if result.exact else "NO", "(the reference)")
    ratio = "unknown" if result.prefill_time_ratio is None else f"{result.prefill_time_ratio:.2f}"
    return [
        table,
        Text(f"kvstrata's answer: {short(result.kvstrata.answer)}", style="bold"),
        Text(
            f"capacity: {result.capacity_ratio:.2f} x plain vLLM "
            f"(formula N/(I+min(B,R)): {result.capacity_ratio_formula:.2f}); "
            f"prefill time: {ratio} x plain vLLM with enough memory"
        ),
        Text(
            "negative control, loads skipped: "
            f"{verdict(result.negative_control_diverges)} ({short(result.control.answer)!r})"
        ),
    ]


def _sparse(result: SparseResult) -> list[RenderableType]:
    table, served = _table(result.baseline, result.kvstrata, "sparse decode offload")
    decoded = [s.decoded for s in served]
    table.add_row("tokens decoded", *("-" if d is None else f"{len(d.token_ids)}" for d in decoded))
    table.add_row(
        "time per token", *("refused" if d is None else f"{d.s_per_token * 1000:.0f} ms" for d in decoded)
    )
    table.add_row("rows selected / from host", *(_rows(s) for s in served))
    table.add_row("answer", *(s.answer or "-" for s in served))
    table.add_row("exact", "-", "yes" if result.exact else "NO", "(the reference)")
    return [
        table,
        Text(
            f"hit rate: {result.hit_rate:.1%} of the selected rows were in the hot buffers already",
            style="bold",
        ),
        Text(
            f"capacity: {result.capacity_ratio:.2f} x plain vLLM "
            f"(formula (main+indexer)/indexer after the hot rows: {result.capacity_ratio_formula:.2f})"
        ),
        Text(
            "negative control, stale rows served: "
            f"{verdict(result.negative_control_diverges)} ({short(result.control.answer)!r})"
        ),
    ]


def _table(baseline: Baseline, kvstrata: Served, feature: str) -> tuple[Table, tuple[Served, Served, Served]]:
    """Return a table with the rows that every part has, and the servings in the order of its columns."""
    table = Table(title=f"One prompt of {len(baseline.prompt.token_ids)} tokens, float32, greedy: {feature}")
    table.add_column("")
    for column in ("plain vLLM", "kvstrata", "plain vLLM, enough memory"):
        table.add_column(column)
    served = (baseline.plain, kvstrata, baseline.roomy)
    table.add_row("device KV budget", *(mib(s.device_kv_budget_bytes) for s in served))
    table.add_row("tokens that fit", *(f"{s.max_tokens:,}" for s in served))
    return table, served


def _servings(result: LayerwiseResult | SparseResult) -> dict[str, Any]:
    baseline = result.baseline
    return {
        "device_kv_budget_bytes": baseline.plain.device_kv_budget_bytes,
        "prompt_tokens": len(baseline.prompt.token_ids),
        "expected_answer": baseline.prompt.expected_answer,
        "plain": served_json(baseline.plain),
        "kvstrata": served_json(result.kvstrata),
        "plain_enough_memory": served_json(baseline.roomy),
        "negative_control": served_json(result.control),
    }


def _seconds(median: float | None) -> str:
    return "refused" if median is None else f"{median:.2f} s"


def _moved(served: Served) -> str:
    if not served.worker:
        return "-"
    return f"{mib(served.loaded_bytes)} / {mib(served.saved_bytes)}"


def _rows(served: Served) -> str:
    if served.decoded is None or not served.worker:
        return "-"
    counters = served.decoded.counters
    return f"{counters.get('selected_rows', 0):,.0f} / {counters.get('missed_rows', 0):,.0f}"
