"""Reads through a buffer of their own, for libraries whose calls can be neither bounded nor cancelled.

A thread makes the calls, the reader waits for it as long as it may, then copies. A call that is given up
keeps its buffer, its connection and its thread until it returns: what lands late lands in the buffer, never
in the request's memory. The buffer is also all that strangers on the library's network can reach of a reader.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvstrata.errors import TransferFailed
from kvstrata.remote.transports.base import Destination, Int64Array, ReadPlan
from kvstrata.remote.transports.checks import cut
from kvstrata.remote.transports.engines.base import Patience
from kvstrata.remote.transports.loops import copy_piece, new_progress

logger = logging.getLogger(__name__)

STAGING_BYTES = 8 << 20
CALL_RANGES = 256
"""Mooncake takes a connection for every range of a call that is under way."""
MAX_GIVEN_UP = 8
"""Calls that were given up and have not returned, of one process; each keeps STAGING_BYTES."""
LOOK_S = 0.02
"""How soon a reader notices, while it waits, that it was closed or that the producer has ended."""
TELL_S = 1.0
"""How long closing waits for a notification that is under way."""
CLOSE_S = 5.0


class BlockingCalls(Protocol):
    """A library's connection to one owner. One thread makes, uses and closes it."""

    def read(self, local: Sequence[int], remote: Sequence[int], size: Sequence[int]) -> None:
        """Return when all ranges have landed in the buffer; raises TransferFailed."""

    def tell(self) -> None:
        """Notify the owner that a read is over, if the library can. It may take as long as a read."""

    def close(self) -> None:
        """When it returns nothing writes to the buffer any more."""


class GivenUp:
    """Counts the calls that were given up and have not returned."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0

    def add(self, change: int) -> None:
        """One more, or one less."""
        with self._lock:
            self._count += change

    def check(self, wait: str) -> None:
        """Raise TransferFailed if there are too many to begin another."""
        if self._count >= MAX_GIVEN_UP:
            raise TransferFailed(
                f"{wait}: {self._count} earlier reads were given up and have not returned; "
                "no more are begun until they have"
            )


class StagedEngine:
    """See `base.Engine`."""

    def __init__(
        self,
        name: str,
        open_calls: Callable[[Destination], BlockingCalls],
        given_up: GivenUp,
        patience: Patience,
        *,
        staging_bytes: int = STAGING_BYTES,
    ) -> None:
        """`open_calls` gets the buffer and may raise TransferFailed; it runs in the thread, too."""
        given_up.check(patience.wait)
        self._given_up = given_up
        self._staging: npt.NDArray[np.uint8] = np.empty(staging_bytes, dtype=np.uint8)
        self._base = np.array([self._staging.ctypes.data], dtype=np.int64)
        self._open_calls = open_calls
        self._calls: BlockingCalls | None = None
        self._changed = threading.Condition()
        self._job: Callable[[], None] | None = self._open
        self._error: BaseException | None = None
        self._is_telling = False
        self._is_over = False
        self._thread = threading.Thread(target=self._serve, name=f"kvstrata-{name}-calls", daemon=True)
        self._thread.start()
        try:
            self._finish_job(patience)
        except BaseException:
            self.close()
            raise

    def read(self, local: Int64Array, remote: Int64Array, size: Int64Array, patience: Patience) -> None:
        nothing = np.zeros_like(size)
        plan = ReadPlan(region=nothing, offset=remote, dst=local, size=size)
        room = len(self._staging)
        for _, source, dst, count in cut(plan, max_bytes=room, max_ranges=CALL_RANGES):
            place = np.cumsum(count) - count  # one after the other in the buffer
            patience.check()
            self._call(*_merged(source, place + self._base[0], count), patience)
            copy_piece(nothing[: len(count)], place, dst, count, self._base, new_progress(), room)

    def tell(self) -> None:
        assert self._calls is not None
        self._begin_job(self._calls.tell, is_telling=True)

    def close(self) -> None:
        """A call that runs is left to its thread: it can only reach the buffer."""
        with self._changed:
            if self._is_over:
                return
            if self._is_telling:
                self._changed.wait_for(lambda: self._job is None, TELL_S)
            self._is_over = True
            is_running = self._job is not None
            if is_running:
                self._given_up.add(1)
            self._changed.notify_all()
        if not is_running:
            self._thread.join(CLOSE_S)

    def _call(self, remote: Int64Array, local: Int64Array, size: Int64Array, patience: Patience) -> None:
        assert self._calls is not None
        calls, ranges = self._calls, (local.tolist(), remote.tolist(), size.tolist())
        if self._is_telling:
            self._finish_job(patience)
        self._begin_job(lambda: calls.read(*ranges))
        self._finish_job(patience)

    def _begin_job(self, job: Callable[[], None], *, is_telling: bool = False) -> None:
        with self._changed:
            assert self._job is None, "a call runs already"
            self._job, self._is_telling = job, is_telling
            self._changed.notify_all()

    def _finish_job(self, patience: Patience) -> None:
        with self._changed:
            while self._job is not None:
                self._changed.wait(min(LOOK_S, patience.left_s))
                if self._job is not None:
                    patience.check()
            error, self._error = self._error, None
            was_telling, self._is_telling = self._is_telling, False
        if error is not None and not was_telling:
            raise TransferFailed(f"{patience.wait}: {error}") from error

    def _open(self) -> None:
        at = Destination(address=int(self._base[0]), size_bytes=len(self._staging))
        self._calls = self._open_calls(at)

    def _serve(self) -> None:
        while True:
            with self._changed:
                while self._job is None and not self._is_over:
                    self._changed.wait()
                job = self._job
            if job is None:
                break
            error: BaseException | None = None
            try:
                job()
            except BaseException as cause:  # even SystemExit: the reader waits for it
                error = cause
            with self._changed:
                self._error, self._job = error, None
                self._changed.notify_all()
                if self._is_over:  # given up meanwhile
                    self._given_up.add(-1)
                    break
        if self._calls is not None:
            try:
                self._calls.close()
            except Exception:
                logger.exception("closing a library's connection failed")
            self._calls = None


def _merged(
    source: Int64Array, place: Int64Array, size: Int64Array
) -> tuple[Int64Array, Int64Array, Int64Array]:
    """Ranges that follow each other at the owner become one: in the buffer they follow each other anyway."""
    is_start = np.ones(len(size), dtype=np.bool_)
    is_start[1:] = source[1:] != source[:-1] + size[:-1]
    starts = np.flatnonzero(is_start)
    return source[starts], place[starts], np.add.reduceat(size, starts)
