"""kvstrata's KV connectors (filled in below)."""

from __future__ import annotations


def register_connectors() -> None:
    """Register kvstrata's connector names with vLLM; safe to call again."""
