"""Print the measured tables of docs/data_plane.md from bench/results: `python tests/data_plane_tables.py`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[1] / "bench" / "results"
TRANSPORTS = RESULTS / "transport-2core-cpu.json"
KINDS = ("put", "get")
PROMPTS = ("saved", "found")
STORES = RESULTS / "store-2core-cpu.json"


def transport_table(result: Mapping[str, Any]) -> str:
    """A row for each size of range, a column for each transport; bytes/s over memcpy's."""
    seconds = result["runs"]["seconds"]
    names = [name for name in next(iter(seconds.values())) if name != "memcpy"]
    rows = [(shape, *(f"{result[f'transport.{name}.{shape}']:.3f}" for name in names)) for shape in seconds]
    return _table(("ranges of", *(f"`{name}`" for name in names)), rows)


def store_table(result: Mapping[str, Any]) -> str:
    """A row for each store and size; bytes/s over memcpy's."""
    rows = [
        (f"`{name}`", size, *(f"{result[f'store.{name}.{size}.{kind}']:.3f}" for kind in KINDS))
        for name, sizes in result["runs"].items()
        for size in sizes
    ]
    return _table(("store", "objects of", *KINDS), rows)


def prefill_table(result: Mapping[str, Any]) -> str:
    """A row for each store; the time of a prefill over plain vLLM's."""
    rows = [
        (f"`{name}`", *(f"{result[f'prefill.{name}.{what}']:.2f}" for what in PROMPTS))
        for name in result["prefills"]
    ]
    return _table(("store", "prompt computed and saved", "prompt found"), rows)


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [f"| {' | '.join(cells)} |" for cells in (head, *rows)]
    return "\n".join([lines[0], "|---" * len(head) + "|", *lines[1:], ""])


if __name__ == "__main__":
    for table, file in ((transport_table, TRANSPORTS), (store_table, STORES), (prefill_table, STORES)):
        print(table(json.loads(file.read_text())))
