"""The fourth part's result as a table for people and as JSON for programs."""

from __future__ import annotations

from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from kvstrata.demo.kvpp import KvppPart, KvppResult, KvppSkipped
from kvstrata.demo.served_report import served_json, short, verdict
from kvstrata.demo.serving import mib
from kvstrata.demo.two_ranks import RANKS


def kvpp_lines(part: KvppPart) -> list[RenderableType]:
    """Return the table and the verdicts in one line each, or why there are none."""
    if isinstance(part, KvppSkipped):
        return [Text(f"KVPP on two ranks was skipped: {part.reason}", style="bold yellow")]
    baseline, served = part.baseline, (part.plain, part.kvstrata)
    table = Table(
        title=f"One prompt of {len(baseline.prompt.token_ids)} tokens, float32, greedy: KVPP on two ranks"
    )
    for column in ("", "plain vLLM, two ranks", "kvstrata, two ranks", "plain vLLM, enough memory"):
        table.add_column(column)
    roomy = baseline.roomy
    table.add_row(
        "device KV budget",
        *(f"{mib(s.device_kv_budget_bytes)} a rank" for s in served),
        mib(roomy.device_kv_budget_bytes),
    )
    table.add_row("tokens that fit", *(f"{s.max_tokens:,}" for s in (*served, roomy)))
    table.add_row("answer", *(s.answer or "-" for s in (*served, roomy)))
    table.add_row("exact", "-", "yes" if part.exact else "NO", "(the reference)")
    return [
        table,
        Text(
            f"capacity: {part.capacity_ratio:.2f} x plain vLLM on two ranks "
            f"(formula N/(ceil(N/R)+2): {part.capacity_ratio_formula:.2f}); "
            f"KV on the ranks: {', '.join(mib(size) for size in part.bytes_per_rank)}; "
            f"passed on by the owners: {mib(part.broadcast_bytes)}",
            style="bold",
        ),
        Text(
            "negative control, nothing passed from rank to rank: "
            f"{verdict(part.negative_control_diverges)} ({short(part.control.answer)!r})"
        ),
    ]


def kvpp_json(part: KvppPart) -> dict[str, Any]:
    """Return the machine-readable result; `skipped` says why there is none, and is null where there is."""
    if isinstance(part, KvppSkipped):
        return {"skipped": part.reason, "problems": part.problems}
    return {"skipped": None, **_measured(part)}


def _measured(result: KvppResult) -> dict[str, Any]:
    baseline = result.baseline
    return {
        "ranks": RANKS,
        "device_kv_budget_bytes_per_rank": result.plain.device_kv_budget_bytes,
        "prompt_tokens": len(baseline.prompt.token_ids),
        "expected_answer": baseline.prompt.expected_answer,
        "plain": served_json(result.plain),
        "kvstrata": served_json(result.kvstrata),
        "plain_token_ids": list(baseline.roomy.token_ids),
        "negative_control": served_json(result.control),
        "capacity_ratio": result.capacity_ratio,
        "capacity_ratio_formula": result.capacity_ratio_formula,
        "exact": result.exact,
        "negative_control_diverges": result.negative_control_diverges,
        "bytes_per_rank": list(result.bytes_per_rank),
        "broadcast_bytes": result.broadcast_bytes,
        "problems": result.problems,
    }
