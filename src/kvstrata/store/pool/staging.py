"""The memory between callers and a pool's library: registered once, handed out in rooms.

Callers' memory never goes to a library. So a call that was given up can do no harm: the room it may still
read or write is not handed out again before it returns (M3).
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

from kvstrata.errors import StoreFormatError
from kvstrata.store.extents import round_up


@dataclass(frozen=True, kw_only=True, slots=True)
class Room:
    """Part of the staging memory, for one caller."""

    address: int
    size_bytes: int


class Staging:
    """Thread-safe. First fit over a short list: a process has a handful of rooms at a time."""

    def __init__(self, address: int, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self._address = address
        self._changed = threading.Condition()
        self._taken: dict[int, int] = {}  # offset -> bytes
        self._late: set[int] = set()  # offsets of rooms that a call given up may still use

    def take(self, size_bytes: int, *, timeout_s: float = 0.0) -> Room | None:
        """A room of at least `size_bytes`; None if there is none within `timeout_s`."""
        wanted = round_up(max(size_bytes, 1))
        with self._changed:
            offset = self._changed.wait_for(lambda: self._gap(wanted) is not None, timeout_s) and self._gap(
                wanted
            )
            if offset is False or offset is None:
                return None
            self._taken[offset] = wanted
            return Room(address=self._address + offset, size_bytes=wanted)

    def give_back(self, room: Room) -> None:
        """End a room; nothing reads or writes it any more."""
        with self._changed:
            offset = room.address - self._address
            del self._taken[offset]
            self._late.discard(offset)
            self._changed.notify_all()

    def quarantine(self, room: Room) -> None:
        """Say that a call which was given up may still use the room; `give_back` ends that, too."""
        with self._changed:
            if room.address - self._address in self._taken:  # the call may have returned meanwhile
                self._late.add(room.address - self._address)

    def usage(self) -> tuple[int, int]:
        """Bytes handed out, and of these the quarantined ones."""
        with self._changed:
            return sum(self._taken.values()), sum(self._taken[offset] for offset in self._late)

    def check_integrity(self) -> None:
        """Raise `StoreFormatError` if two rooms overlap or one leaves the memory."""
        with self._changed:
            end = 0
            for offset, size_bytes in sorted(self._taken.items()):
                if offset < end or offset + size_bytes > self.size_bytes:
                    raise StoreFormatError(f"the staging room at {offset} has bytes of another, or of none")
                end = offset + size_bytes

    def _gap(self, wanted: int) -> int | None:
        end = 0
        for offset, size_bytes in sorted(self._taken.items()):
            if offset - end >= wanted:
                return end
            end = offset + size_bytes
        return end if self.size_bytes - end >= wanted else None
