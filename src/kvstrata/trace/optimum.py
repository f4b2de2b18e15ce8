"""The fewest misses any policy could have: evict what is needed last, knowing the future (Belady 1966)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from kvstrata.trace.events import Event, Rewritten, Selection

_NEVER = np.iinfo(np.int64).max


def optimal_misses(events: Sequence[Event], capacity: int) -> Iterator[int]:
    """Yield the misses of each selection in `events`, which are those of ONE share group.

    All rows of a selection are resident together, so among the rows outside it the one needed last goes. A
    row is not needed again if it is written before its next use: what the slot holds is void then. Rows that
    are fresh cost nothing, as in the residency table. Raises ValueError if a selection exceeds `capacity`.

    Memory: 16 bytes an entry and 24 a different row.
    """
    compact = _compact(events)
    num_rows = 1 + max((int(rows.max()) for rows, _ in compact if len(rows)), default=-1)
    next_uses = _next_uses(events, compact, num_rows)
    resident = np.zeros(num_rows, np.bool_)
    needed_at = np.full(num_rows, _NEVER)  # by row: the next selection that needs what a slot holds of it
    occupied = 0
    for event, (rows, fresh), next_use in zip(events, compact, next_uses, strict=True):
        if isinstance(event, Rewritten):
            occupied -= int(resident[rows].sum())
            resident[rows] = False
            continue
        if len(rows) > capacity:
            raise ValueError(f"{len(rows)} different rows selected at once, room for {capacity}")
        absent = ~resident[rows]
        resident[rows] = True
        needed_at[rows] = next_use
        occupied += int(absent.sum())
        if occupied > capacity:
            resident[rows] = False  # for a moment: they are no candidates
            candidates = np.flatnonzero(resident)
            resident[rows] = True
            evicted = occupied - capacity
            order = np.argpartition(needed_at[candidates], len(candidates) - evicted)
            resident[candidates[order[len(candidates) - evicted :]]] = False
            occupied = capacity
        yield int((absent & ~fresh).sum())


_Rows = tuple[NDArray[np.int64], NDArray[np.bool_]]


def _compact(events: Sequence[Event]) -> list[_Rows]:
    """Return the different rows of each event, numbered without gaps, and which of them are fresh."""
    different = [np.unique(event.rows[event.rows >= 0]) for event in events]
    known = np.unique(np.concatenate([*different, np.empty(0, np.int64)]))
    return [
        (
            np.searchsorted(known, rows),
            np.isin(rows, event.fresh_rows if isinstance(event, Selection) else ()),
        )
        for event, rows in zip(events, different, strict=True)
    ]


def _next_uses(events: Sequence[Event], compact: Sequence[_Rows], num_rows: int) -> list[NDArray[np.int64]]:
    """Return, for each event's rows, the index of the next selection of the row as it is now."""
    coming = np.full(num_rows, _NEVER)
    uses = []
    for index in range(len(events) - 1, -1, -1):
        rows, _ = compact[index]
        uses.append(coming[rows])
        coming[rows] = _NEVER if isinstance(events[index], Rewritten) else index
    return uses[::-1]
