"""What the machines remember of transfers that have ended, so that late messages are answered rightly."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, TypeVar

from kvstrata.remote.protocol.moves import NEVER_S

T = TypeVar("T")

TOMBSTONE_LEASES = 4
"""How long an ended transfer is remembered, at the least."""


class Tombstones(Generic[T]):
    """Ended transfers by id, each kept for `keep_s`. The clock of the calls must not go back."""

    def __init__(self, keep_s: float) -> None:
        self._keep_s = keep_s
        self._by_id: dict[str, tuple[float, T]] = {}  # in order of the first: when it is forgotten

    def __contains__(self, transfer: str) -> bool:
        return transfer in self._by_id

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[T]:
        return (ended for _, ended in self._by_id.values())

    def add(self, transfer: str, ended: T, now_s: float) -> None:
        """Remember a transfer that ends now."""
        self._by_id[transfer] = (now_s + self._keep_s, ended)

    def get(self, transfer: str) -> T | None:
        """Return what ended under this id."""
        entry = self._by_id.get(transfer)
        return None if entry is None else entry[1]

    def expire(self, now_s: float) -> None:
        """Forget what is old enough."""
        while self.next_tick_s() <= now_s:
            del self._by_id[next(iter(self._by_id))]

    def next_tick_s(self) -> float:
        """When `expire` has something to do."""
        return next(iter(self._by_id.values()))[0] if self._by_id else NEVER_S
