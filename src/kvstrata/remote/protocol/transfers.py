"""The transfers of one machine: those that are open, and for a while those that have ended."""

from __future__ import annotations

from typing import Generic, Protocol, TypeVar

from kvstrata.errors import TransferFailed
from kvstrata.remote.protocol.moves import NEVER_S
from kvstrata.remote.protocol.tombstones import Tombstones


class Transfer(Protocol):
    """What both sides' transfers have in common."""

    transfer: str

    @property
    def is_ended(self) -> bool: ...

    def tick(self, now_s: float) -> int:
        """Do what is due; return how many messages were said again."""

    def next_tick_s(self) -> float:
        """When `tick` has something to do; of one that has ended: while its end is not acknowledged."""


T = TypeVar("T", bound=Transfer)


class Transfers(Generic[T]):
    """By id. A machine adds to `open`, says which have ended by `end`, and has them moved by `bury`."""

    def __init__(self, keep_s: float) -> None:
        """Ended ones are remembered for `keep_s`."""
        self.open: dict[str, T] = {}
        self.ended = Tombstones[T](keep_s)
        self._repeating: dict[str, T] = {}  # ended, and that is not acknowledged
        self._just_ended: list[str] = []

    def get(self, transfer: str) -> T | None:
        """Return the one that is open, or ended lately, under this id."""
        return self.open.get(transfer) or self.ended.get(transfer)

    def pending(self) -> list[T]:
        """Those for which time matters: not the many that have ended and have nothing more to say."""
        return [*self.open.values(), *self._repeating.values()]

    def check_unused(self, transfer: str) -> None:
        """Raise TransferFailed if the id is in use or was lately."""
        if self.get(transfer) is not None:
            raise TransferFailed(f"transfer id {transfer!r} is in use, or was lately; ids must be unique")

    def end(self, transfer: str) -> None:
        """It has just ended; it counts as open until `bury`, as whoever looks at all of them may be at it."""
        self._just_ended.append(transfer)

    def bury(self, now_s: float) -> None:
        """Move those that have ended."""
        for name in self._just_ended:
            ended = self.open.pop(name)
            self.ended.add(name, ended, now_s)
            if ended.next_tick_s() < NEVER_S:
                self._repeating[name] = ended
        self._just_ended.clear()

    def tick(self, now_s: float) -> int:
        """Tick each and forget what is old enough; return how many messages were said again."""
        repeated = sum(transfer.tick(now_s) for transfer in self.pending())
        self.bury(now_s)
        for name in [name for name, ended in self._repeating.items() if ended.next_tick_s() == NEVER_S]:
            del self._repeating[name]
        self.ended.expire(now_s)
        return repeated

    def next_tick_s(self) -> float:
        """When `tick` has something to do."""
        return min([self.ended.next_tick_s(), *(transfer.next_tick_s() for transfer in self.pending())])

    def check_integrity(self) -> None:
        """Assert that each is where it belongs."""
        assert not self._just_ended, self._just_ended
        assert all(name == begun.transfer and not begun.is_ended for name, begun in self.open.items())
        assert all(ended.is_ended for ended in self.ended)
        assert all(ended.is_ended for ended in self._repeating.values())
