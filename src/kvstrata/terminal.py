"""What a person sees while a command works: one line a step, and engine noise kept in a log file."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console


class Terminal:
    """Prints results and the progress of long steps. Hold one for the length of a command."""

    def __init__(self, console: Console) -> None:
        self.console = console

    @contextmanager
    def step(self, title: str) -> Iterator[None]:
        """Show `title` while the block runs, then leave it with a tick, or a cross if the block raised."""
        if not self.console.is_terminal:
            self.console.print(f"... {title}")
        try:
            with self.console.status(title):
                yield
        except BaseException:
            self.console.print(f"[red]x[/] {title}")
            raise
        self.console.print(f"[green]ok[/] {title}")


@contextmanager
def engine_noise_to(log: Path) -> Iterator[Terminal]:
    """Send everything that this process writes to stdout and stderr to `log`, and yield the terminal instead.

    Works on file descriptors, because engines also write from C++ and from child processes. The log is
    written anew. Not reentrant; call it from a command, never from a library.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    saved = os.dup(1), os.dup(2)
    sink = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as visible:
        os.dup2(sink, 1)
        os.dup2(sink, 2)
        os.close(sink)
        try:
            yield Terminal(Console(file=visible))
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            for original, descriptor in zip(saved, (1, 2), strict=True):
                os.dup2(original, descriptor)
                os.close(original)
