"""The write handles that are open in this process: what is written, and who is still writing.

| state | write | publish | abandon |
|---|---|---|---|
| open | allowed | ends the handle if all bytes are written and no write is in progress | ends the handle |
| abandoned with writes in progress | refused | refused | nothing; the last write to end gives the room back |
| ended | refused | refused | nothing |
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from kvstrata.errors import StoreError
from kvstrata.store.base import Status, WriteHandle

_Room = TypeVar("_Room")


@dataclass(kw_only=True, slots=True)
class _OpenWrite(Generic[_Room]):
    room: _Room
    written: list[tuple[int, int]] = field(default_factory=list)  # sorted, disjoint, not touching
    in_progress: int = 0
    is_abandoned: bool = False


class OpenWrites(Generic[_Room]):
    """Thread-safe. Decides when a reservation's room, whatever it is, may be given back (M3)."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[int, _OpenWrite[_Room]] = {}  # by generation

    def add(self, handle: WriteHandle, room: _Room) -> None:
        with self._lock:
            assert handle.generation not in self._open
            self._open[handle.generation] = _OpenWrite(room=room)

    def begin(self, handle: WriteHandle) -> _Room | None:
        """Where to write; None when the handle is not open here. `end` has to follow."""
        with self._lock:
            found = self._open.get(handle.generation)
            if found is None or found.is_abandoned:
                return None
            found.in_progress += 1
            return found.room

    def end(self, handle: WriteHandle, offset: int, size_bytes: int) -> bool:
        """Record what was written; True when the handle was abandoned and its room may go back now."""
        with self._lock:
            found = self._open[handle.generation]
            found.in_progress -= 1
            _add(found.written, offset, offset + size_bytes)
            if found.is_abandoned and found.in_progress == 0:
                del self._open[handle.generation]
                return True
            return False

    def finish(self, handle: WriteHandle) -> Status:
        """End a handle that is about to be published: OK, or MISSING if it is not open here.

        Raises `StoreError`, leaving the handle open, when its object is not complete.
        """
        with self._lock:
            found = self._open.get(handle.generation)
            if found is None or found.is_abandoned:
                return Status.MISSING
            if found.in_progress > 0:
                raise StoreError(f"publish of {handle.key} while {found.in_progress} writes are in progress")
            if found.written != [(0, handle.size_bytes)]:
                raise StoreError(
                    f"publish of {handle.key} with bytes never written: has {found.written} of "
                    f"[0, {handle.size_bytes})"
                )
            del self._open[handle.generation]
            return Status.OK

    def abandon(self, generation: int) -> bool:
        """End a handle; True when its room may go back now."""
        with self._lock:
            found = self._open.get(generation)
            if found is None or found.is_abandoned:
                return False
            if found.in_progress > 0:
                found.is_abandoned = True
                return False
            del self._open[generation]
            return True

    def abandon_all(self) -> list[int]:
        """End every handle; the generations whose room may go back now."""
        with self._lock:
            generations = list(self._open)
        return [generation for generation in generations if self.abandon(generation)]


def _add(intervals: list[tuple[int, int]], start: int, end: int) -> None:
    """Merge [start, end) into sorted disjoint intervals."""
    if start == end:
        return
    merged = []
    for low, high in intervals:
        if high < start or low > end:
            merged.append((low, high))
        else:
            start, end = min(start, low), max(end, high)
    merged.append((start, end))
    intervals[:] = sorted(merged)
