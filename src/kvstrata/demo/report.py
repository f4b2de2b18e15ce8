"""The demonstration's result as a table for people and as JSON for programs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvstrata.demo.run import DemoResult, Served, mib


def as_table(result: DemoResult) -> RenderableType:
    """Return the comparison: one column a serving, then the verdict in one line each."""
    table = Table(title=f"One prompt of {len(result.prompt.token_ids)} tokens, float32, greedy")
    table.add_column("")
    for column in ("plain vLLM", "kvstrata", "plain vLLM, enough memory"):
        table.add_column(column)
    served = (result.plain, result.kvstrata, result.roomy)
    table.add_row("device KV budget", *(mib(s.device_kv_budget_bytes) for s in served))
    table.add_row("tokens that fit", *(f"{s.max_tokens:,}" for s in served))
    table.add_row("prefill time (median)", *(_seconds(s) for s in served))
    table.add_row("loaded / saved", *(_moved(s) for s in served))
    table.add_row("answer", *(s.answer or "-" for s in served))
    table.add_row("exact", "-", "yes" if result.exact else "NO", "(the reference)")
    lines: list[RenderableType] = [
        table,
        Text(f"kvstrata's answer: {_short(result.kvstrata.answer)}", style="bold"),
        Text("plain vLLM: without kvstrata's connector, on its CPU backends (stock vLLM has none here)"),
        Text(
            f"plain vLLM in {mib(result.plain.device_kv_budget_bytes)} says: {_short(result.plain.refusal)}"
        ),
        Text(
            f"capacity: {result.capacity_ratio:.2f} x plain vLLM "
            f"(formula N/(I+min(B,R)): {result.capacity_ratio_formula:.2f}); "
            f"prefill time: {_ratio(result)} x plain vLLM with enough memory"
        ),
        Text(
            "negative control, loads skipped: "
            f"{'other tokens, as it must be' if result.negative_control_diverges else 'THE SAME TOKENS'} "
            f"({_short(result.control.answer)!r})"
        ),
    ]
    lines += [Text(f"FAILED: {problem}", style="bold red") for problem in result.problems]
    return Group(*lines)


def as_json(result: DemoResult, machine: Mapping[str, Any]) -> dict[str, Any]:
    """Return the machine-readable result; every figure of the table is in it, with the raw runs."""
    return {
        "kvstrata_demo": 1,
        "machine": dict(machine),
        "layerwise": {
            "device_kv_budget_bytes": result.plain.device_kv_budget_bytes,
            "prompt_tokens": len(result.prompt.token_ids),
            "expected_answer": result.prompt.expected_answer,
            "plain": _served(result.plain),
            "kvstrata": _served(result.kvstrata),
            "plain_enough_memory": _served(result.roomy),
            "negative_control": _served(result.control),
            "capacity_ratio": result.capacity_ratio,
            "capacity_ratio_formula": result.capacity_ratio_formula,
            "exact": result.exact,
            "negative_control_diverges": result.negative_control_diverges,
            "prefill_time_ratio": result.prefill_time_ratio,
            "problems": result.problems,
        },
    }


def _served(served: Served) -> dict[str, Any]:
    return {
        "device_kv_budget_bytes": served.device_kv_budget_bytes,
        "max_tokens": served.max_tokens,
        "refusal": served.refusal,
        "answer": served.answer,
        "token_ids": list(served.token_ids),
        "prefill_s": served.median_prefill_s,
        "prefill_s_runs": list(served.prefill_s),
        "loaded_bytes": served.loaded_bytes,
        "saved_bytes": served.saved_bytes,
        "worker": served.worker,
    }


def _seconds(served: Served) -> str:
    median = served.median_prefill_s
    return "refused" if median is None else f"{median:.2f} s"


def _moved(served: Served) -> str:
    if not served.worker:
        return "-"
    return f"{mib(served.loaded_bytes)} / {mib(served.saved_bytes)}"


def _ratio(result: DemoResult) -> str:
    return "unknown" if result.prefill_time_ratio is None else f"{result.prefill_time_ratio:.2f}"


def _short(text: str | None, limit: int = 240) -> str:
    line = " ".join((text or "").split())
    return line if len(line) <= limit else line[: limit - 3] + "..."
