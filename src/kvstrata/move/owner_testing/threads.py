"""For tests of KVPP: the ranks of a group in threads, where one process can hold and inspect them all."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from kvstrata.move.owner_testing.rank import Outcome, OwnerRank

WAIT_S = 120.0


class OwnerThreads:
    """A group whose ranks are made and driven side by side; `settings` go to each, `per_rank` to some."""

    def __init__(
        self, size: int, *, per_rank: Mapping[int, Mapping[str, Any]] | None = None, **settings: Any
    ) -> None:
        self.size = size
        self._pool = ThreadPoolExecutor(size)
        self._barrier = threading.Barrier(size)
        self._table: list[object] = [None] * size
        own = per_rank or {}
        self._made = [
            self._pool.submit(self._make, member, {**settings, **own.get(member, {})})
            for member in range(size)
        ]

    @property
    def ranks(self) -> list[OwnerRank]:
        """Raises what the making of a rank raised."""
        return [made.result(WAIT_S) for made in self._made]

    def start_errors(self) -> list[BaseException | None]:
        """What the making of each rank raised."""
        return [made.exception(WAIT_S) for made in self._made]

    def start(self, member: int, *args: Any, **more: Any) -> Future[Outcome]:
        """Begin a forward on one rank."""
        return self._pool.submit(self.ranks[member].forward, *args, **more)

    def forward(self, *args: Any, **more: Any) -> list[Outcome]:
        """One forward on all ranks."""
        started = [self.start(member, *args, **more) for member in range(self.size)]
        return [outcome.result(WAIT_S) for outcome in started]

    def exact(self, *args: Any, **more: Any) -> None:
        """A forward that goes well on all ranks. Raises AssertionError for any other."""
        for outcome in self.forward(*args, **more):
            assert outcome.error is None, outcome
            assert outcome.wrong == (), outcome

    def close(self) -> None:
        """Close the ranks that were made."""
        for made in self._made:
            if made.exception(WAIT_S) is None:
                made.result().close()
        self._pool.shutdown()

    def _make(self, member: int, settings: Mapping[str, Any]) -> OwnerRank:
        return OwnerRank(
            member=member,
            group_size=self.size,
            exchange=lambda value: self._exchange(member, value),
            **settings,
        )

    def _exchange(self, member: int, value: object) -> Sequence[Any]:
        self._table[member] = value
        self._barrier.wait(WAIT_S)
        found = list(self._table)
        self._barrier.wait(WAIT_S)
        return found
