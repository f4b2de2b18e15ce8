"""What a trace is made of: selections of rows, and rows that were written anew between them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, kw_only=True, eq=False)
class Selection:
    """One call of the residency table: what the decode tokens of a step select in one share group."""

    layer: int  # the first layer of the share group
    step: int
    rows: NDArray[np.int64]  # host rows [T, K], -1 where a token selects fewer than K
    fresh_rows: NDArray[np.int64]  # [n] written in this very step, so that no host bytes move for them
    near_rows: NDArray[np.int64]  # [m] rows that were almost selected, for policies that want them
    request_ids: tuple[str, ...] | None = None  # [T] the request of each token


@dataclass(frozen=True, kw_only=True, eq=False)
class Rewritten:
    """Host rows that got other bytes: whatever a hot slot held of them is void from here on."""

    step: int
    rows: NDArray[np.int64]  # [n]
    layer: int | None = None  # one share group; None: all of them


Event = Selection | Rewritten


class TraceSource(Protocol):
    """A trace that can be read more than once: a recorded file, or a generator with a seed."""

    @property
    def name(self) -> str:
        """Short name for tables and keys."""
        ...

    @property
    def topk(self) -> int:
        """Entries of a token's selection, K."""
        ...

    @property
    def host_rows(self) -> int:
        """All rows are below this."""
        ...

    def events(self) -> Iterator[Event]:
        """Yield the trace from its start, in the order in which it happened."""
        ...
