"""What a person sees of a launch: a live table at a terminal, a line a change otherwise."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.live import Live
from rich.table import Table

from kvstrata.serve_pd.supervisor import ChildStatistics, State

_COLOURS = {State.READY: "green", State.FAILED: "red", State.PAUSED: "yellow", State.STARTING: "cyan"}


class Show(Protocol):
    """Called with the present state, as often as you like."""

    def __call__(self, children: Sequence[ChildStatistics]) -> None:
        """Show it."""


@contextmanager
def shown(console: Console) -> Iterator[Show]:
    """Yield what shows a launch on the console while the block runs."""
    if console.is_terminal:
        with Live(console=console, refresh_per_second=4, transient=False) as live:
            yield lambda children: live.update(table(children))
    else:
        yield _Lines(console)


def table(children: Sequence[ChildStatistics]) -> Table:
    """Return one row a process."""
    made = Table()
    for column in ("process", "state", "for", "restarts", "URL", "log"):
        made.add_column(column, overflow="fold")
    for child in children:
        colour = _COLOURS.get(child.state, "dim")
        state = f"[{colour}]{child.state}[/]" + (f" ({child.why})" if child.why else "")
        launch = child.launch
        made.add_row(
            launch.name, state, _seconds(child.in_state_s), str(child.restarts), launch.url, str(launch.log)
        )
    return made


class _Lines:
    """A line for every change of a state."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._seen: dict[str, State] = {}

    def __call__(self, children: Sequence[ChildStatistics]) -> None:
        for child in children:
            name = child.launch.name
            if self._seen.get(name) != child.state:
                self._seen[name] = child.state
                why = f" ({child.why})" if child.why else ""
                where = (
                    f" {child.launch.url}, log {child.launch.log}" if child.state is State.STARTING else ""
                )
                line = f"{name}: {child.state}{why}{where}"
                self._console.print(line, soft_wrap=True, markup=False, highlight=False)


def _seconds(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
