"""Write a trace while an engine runs, and open it afterwards."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from kvstrata.trace.events import Event, Rewritten, Selection
from kvstrata.trace.format import TraceHeader, encode, encode_header, read_events, read_header

_NO_ROWS = np.empty(0, np.int64)


def rank_path(path: Path, rank: int) -> Path:
    """Return the file of one rank: `run.trace` is `run.rank0.trace` for rank 0."""
    return path.with_name(f"{path.stem}.rank{rank}{path.suffix}")


class TopkTraceWriter:
    """Appends events to `rank_path(path, rank)`; the file is made anew, its folder too.

    Every record reaches the operating system before the call returns, so memory use is that of one record and
    a killed process loses at most the record at hand. For one thread. Raises OSError, as on a full disk, and
    is closed then: what was written before stays readable.
    """

    def __init__(self, path: Path, *, topk: int, block_tokens: int, host_rows: int, rank: int = 0) -> None:
        self.path = rank_path(path, rank)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self.path.open("wb")
        header = TraceHeader(topk=topk, block_tokens=block_tokens, host_rows=host_rows, rank=rank)
        self._write(encode_header(header))

    def append(
        self,
        *,
        layer: int,
        step: int,
        rows: NDArray[np.int64],  # [T, K]
        fresh_rows: NDArray[np.int64] = _NO_ROWS,  # [n]
        near_rows: NDArray[np.int64] = _NO_ROWS,  # any shape, as the residency table takes them
        request_ids: Sequence[str] | None = None,  # [T]
    ) -> None:
        """Record one call of a residency table; `layer` is the first of its share group (see `Selection`).

        Raises ValueError, and writes nothing, if the arrays do not fit one another.
        """
        ids = None if request_ids is None else tuple(request_ids)
        event = Selection(
            layer=layer,
            step=step,
            rows=rows,
            fresh_rows=fresh_rows,
            near_rows=near_rows.reshape(-1),
            request_ids=ids,
        )
        self._write(encode(event))

    def rewritten(self, *, step: int, rows: NDArray[np.int64], layer: int | None = None) -> None:
        """Record that host rows [n] got other bytes, before the selections that follow; None: all layers."""
        self._write(encode(Rewritten(step=step, rows=rows, layer=layer)))

    def close(self) -> None:
        """End the file. Any number of times."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _write(self, record: bytes) -> None:
        try:
            self._file.write(record)
            self._file.flush()
        except OSError:
            self._file.close()
            raise


@dataclass(frozen=True, kw_only=True)
class TraceSummary:
    """What a whole pass over a trace finds."""

    selections: int
    layers: tuple[int, ...]  # first layers of the share groups, ascending
    steps: int  # different steps with a selection
    max_tokens: int  # largest T of a selection
    selected_rows: int


class TopkTrace:
    """A recorded file, as a `TraceSource`. Raises TraceFormatError if it is none, OSError if it is not there.

    For one reader at a time or many: every pass opens the file anew.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        with path.open("rb") as file:
            self.header = read_header(file, path)

    @property
    def name(self) -> str:
        """The file's name, without dots, which separate the parts of a key."""
        return self._path.name.replace(".", "-")

    @property
    def topk(self) -> int:
        """Entries of a token's selection."""
        return self.header.topk

    @property
    def host_rows(self) -> int:
        """Rows of the host pool that the trace was recorded with."""
        return self.header.host_rows

    def events(self) -> Iterator[Event]:
        """Yield the events up to the last whole record; their arrays are read-only."""
        with self._path.open("rb") as file:
            read_header(file, self._path)
            yield from read_events(file, self._path)


def summarise(events: Iterator[Event]) -> TraceSummary:
    """Count what is in a trace, holding one event at a time."""
    layers: set[int] = set()
    steps: set[int] = set()
    selections = max_tokens = selected_rows = 0
    for event in events:
        if isinstance(event, Selection):
            layers.add(event.layer)
            steps.add(event.step)
            selections += 1
            max_tokens = max(max_tokens, len(event.rows))
            selected_rows += int((event.rows >= 0).sum())
    return TraceSummary(
        selections=selections,
        layers=tuple(sorted(layers)),
        steps=len(steps),
        max_tokens=max_tokens,
        selected_rows=selected_rows,
    )
