"""A serving as JSON, and the words that the tables of several parts share."""

from __future__ import annotations

from typing import Any

from kvstrata.demo.serving import Served


def served_json(served: Served) -> dict[str, Any]:
    """Return every figure of a serving, with the raw runs."""
    described: dict[str, Any] = {
        "device_kv_budget_bytes": served.device_kv_budget_bytes,
        "max_tokens": served.max_tokens,
        "refusal": served.refusal,
        "answer": served.answer,
        "token_ids": list(served.token_ids),
        "prefill_s": served.median_prefill_s,
        "prefill_s_runs": list(served.prefill_s),
        "loaded_bytes": served.loaded_bytes,
        "saved_bytes": served.saved_bytes,
        "worker": dict(served.worker),
    }
    if served.decoded is not None:
        described["decoded"] = {
            "token_ids": list(served.decoded.token_ids),
            "s_per_token": served.decoded.s_per_token,
            "counters": dict(served.decoded.counters),
        }
    return described


def verdict(diverges: bool) -> str:
    """Say whether a negative control went wrong, as it must."""
    return "other tokens, as it must be" if diverges else "THE SAME TOKENS"


def short(text: str | None, limit: int = 240) -> str:
    """Return the text in one line of at most `limit` characters."""
    line = " ".join((text or "").split())
    return line if len(line) <= limit else line[: limit - 3] + "..."
