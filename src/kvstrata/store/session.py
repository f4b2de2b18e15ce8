"""One `LocalStore`'s way to its files: calls that keep them open, transactions, and what is not saved yet."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from kvstrata.errors import DeadlineExceeded, StoreError
from kvstrata.store.attachment import Attachment
from kvstrata.store.base import Status
from kvstrata.store.eviction import free_reservation
from kvstrata.store.index import IndexTransaction

logger = logging.getLogger(__name__)

FAULTS = (StoreError, DeadlineExceeded)
"""What a call on the data path answers with BACKEND_DOWN."""

_MOST_UNSAVED_MISSES = 64
"""Misses that a process may count before it writes them down, if nothing else makes it write."""


@dataclass(frozen=True, kw_only=True)
class Taken:
    """Unsaved numbers on their way into a transaction."""

    misses: int = 0
    stale_reads: int = 0
    given_up: tuple[int, ...] = ()  # generations of reservations whose room should go back


class _Unsaved:
    """Goes into the index with the next write, so that a miss and a read need no write of their own."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._now = Taken()

    def add(self, more: Taken) -> Taken:
        """Everything so far."""
        with self._lock:
            self._now = Taken(
                misses=self._now.misses + more.misses,
                stale_reads=self._now.stale_reads + more.stale_reads,
                given_up=self._now.given_up + more.given_up,
            )
            return self._now

    def peek(self) -> Taken:
        with self._lock:
            return self._now

    @contextmanager
    def taken(self) -> Iterator[Taken]:
        """Everything so far; it comes back if the block raises."""
        with self._lock:
            taken, self._now = self._now, Taken()
        try:
            yield taken
        except BaseException:
            self.add(taken)
            raise


class Session:
    """The way of one `LocalStore` to its files; the files may be shared with others of the process."""

    def __init__(self, attachment: Attachment, path: Path, clock: Callable[[], float]) -> None:
        self.path = path
        self.files = attachment.files
        self.holder = attachment.holder
        self._attachment = attachment
        self._clock = clock
        self._unsaved = _Unsaved()
        self._closing = threading.Lock()
        self._is_closed = False

    def now_us(self) -> int:
        return to_us(self._clock())

    def call(self) -> AbstractContextManager[None]:
        """The frame of every public call: not closed, not forked, files kept open until it ends."""
        if self._is_closed:
            raise StoreError(f"the store in {self.path} was closed")
        return self._attachment.call()

    def read(self) -> AbstractContextManager[IndexTransaction]:
        return self.files.index.read()

    @contextmanager
    def write(self, waiting_to: str) -> Iterator[IndexTransaction]:
        """A write transaction that also brings in what this process has not saved yet."""
        with self._unsaved.taken() as taken, self.files.index.write(waiting_to) as changes:
            changes.counters.misses += taken.misses
            changes.counters.stale_reads += taken.stale_reads
            for generation in taken.given_up:
                reservation = changes.reservation(generation)
                if reservation is not None:
                    free_reservation(changes, generation, reservation)
                    changes.counters.abandoned += 1
            yield changes

    def unsaved(self) -> Taken:
        return self._unsaved.peek()

    def count_misses(self, count: int) -> None:
        if self._unsaved.add(Taken(misses=count)).misses >= _MOST_UNSAVED_MISSES:
            self._save()

    def count_stale_reads(self, count: int) -> None:
        if count:
            self._unsaved.add(Taken(stale_reads=count))

    def give_up(self, generations: Sequence[int]) -> None:
        """Give back the room of reservations on which nobody writes any more: now, or with the next write."""
        if generations:
            self._unsaved.add(Taken(given_up=tuple(generations)))
            self._save()

    def down(self, call: str, error: Exception) -> Status:
        """The answer of a call that met one of FAULTS."""
        logger.warning("the store in %s does not answer to %s: %s", self.path, call, error)
        return Status.BACKEND_DOWN

    def close(self, abandon: Callable[[], list[int]]) -> None:
        """Detach, once; `abandon` ends what is open and tells whose room goes back."""
        with self._closing:
            if self._is_closed:
                return
            self._is_closed = True
        self._attachment.check_process()
        try:
            self.give_up(abandon())
            if self.unsaved() != Taken():
                self._save()
        finally:
            self._attachment.leave()

    def _save(self) -> None:
        try:
            with self.write("save counters and give back room"):
                pass
        except FAULTS as error:
            self.down("save", error)  # kept, and tried again with the next write


def to_us(seconds: float) -> int:
    return int(seconds * 1e6)
