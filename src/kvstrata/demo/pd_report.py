"""The third part's result as a table for people and as JSON for programs."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from kvstrata.demo.pd import PdResult
from kvstrata.demo.serving import mib


def pd_lines(result: PdResult) -> list[RenderableType]:
    """Return the table, a row a request, and what was moved in one line each."""
    table = Table(
        title=f"{len(result.asked)} prompts at once, {mib(result.device_kv_budget_bytes)} each: "
        "prefill engine, decode engine"
    )
    for column in ("prompt tokens", "answer", "exact"):
        table.add_column(column)
    for asked, answer, exact in zip(result.asked, result.answers, result.is_exact, strict=True):
        table.add_row(f"{len(asked.prompt.token_ids):,}", answer.text, "yes" if exact else "NO")
    counters = result.counters
    other = "other tokens, as it must be" if result.negative_control_diverges else "THE SAME TOKENS"
    return [
        table,
        Text(
            f"decode read {mib(counters.bytes_pulled)} in {counters.parts_pulled} parts, a layer of a chunk "
            f"each, for {counters.pulls_done} prompts; leases open at the end: {result.at_end.leases_open}",
            style="bold",
        ),
        Text(
            "negative control, KV of a prompt with another pass key: "
            f"{other} ({' '.join(result.control.text.split())!r}, not "
            f"{result.control_reference.prompt.expected_answer!r})"
        ),
    ]


def pd_json(result: PdResult) -> dict[str, Any]:
    """Return the machine-readable result; `layers_pulled` counts a layer once a chunk of a prompt."""
    return {
        "device_kv_budget_bytes": result.device_kv_budget_bytes,
        "exact": result.exact,
        "requests": len(result.asked),
        "requests_pulled": result.counters.pulls_done,
        "layers_pulled": result.counters.parts_pulled,
        "bytes_pulled": result.counters.bytes_pulled,
        "leases_open_at_end": result.at_end.leases_open,
        "negative_control_diverges": result.negative_control_diverges,
        "answers": [
            {
                "prompt_tokens": len(asked.prompt.token_ids),
                "expected_answer": asked.prompt.expected_answer,
                "answer": answer.text,
                "token_ids": list(answer.token_ids),
                "plain_token_ids": list(asked.token_ids),
                "exact": exact,
            }
            for asked, answer, exact in zip(result.asked, result.answers, result.is_exact, strict=True)
        ],
        "negative_control": {
            "answer": result.control.text,
            "token_ids": list(result.control.token_ids),
            "plain_token_ids": list(result.control_reference.token_ids),
        },
        "counters_at_end": asdict(result.at_end),
        "problems": result.problems,
    }
