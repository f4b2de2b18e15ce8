"""Render the state tables into docs/protocol.md: `python -m kvstrata.remote.tables docs/protocol.md`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from kvstrata.remote.consumer.moves import BREAKS, CONSUMER_MOVES
from kvstrata.remote.consumer.peers import PEER_MOVES
from kvstrata.remote.producer.moves import PRODUCER_MOVES
from kvstrata.remote.producer.session import SESSION_MOVES
from kvstrata.remote.protocol.moves import Moves

BEGIN = "<!-- State tables: rendered by `python -m kvstrata.remote.tables`; change the machines instead. -->"
END = "<!-- End of the state tables. -->"


def render() -> str:
    """Return the tables of all machines as Markdown."""
    sections = [
        _section("A transfer at prefill", PRODUCER_MOVES),
        _section("A transfer at decode", CONSUMER_MOVES),
        _breaks(),
        _section("The session at prefill, one for each decode rank", SESSION_MOVES),
        _section("The session at decode, one for each prefill rank", PEER_MOVES),
    ]
    return "\n\n".join(sections)


def update(page: str) -> str:
    """Return the page with the tables between the markers as they are now. ValueError without markers."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page lacks a line {BEGIN!r} or {END!r}")
    return f"{before}{BEGIN}\n\n{render()}\n\n{END}{after}"


def _section(title: str, moves: Moves[Any, Any]) -> str:
    rows = [
        f"| {state.value} | {event.value} | {move.to.value} | {move.effect} |"
        for (state, event), move in moves.rows.items()
    ]
    head = ["| state | what happens | next | what is done |", "|---|---|---|---|"]
    return "\n".join([f"### {title}", "", *head, *rows])


def _breaks() -> str:
    rows = [f"| {what} | {ending.value} |" for what, ending in BREAKS]
    return "\n".join(["It cannot go on after:", "", "| what happens | ends as |", "|---|---|", *rows])


def main(path: Path) -> None:
    """Rewrite the tables of the page."""
    path.write_text(update(path.read_text()))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
