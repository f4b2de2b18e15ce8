"""The consumer's side over any engine: refusals, guard, pieces, deadlines, and fencing after an error."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from kvstrata.errors import DeadlineExceeded, TransferFailed
from kvstrata.remote.holds import Hold, HoldRevoked
from kvstrata.remote.transports.base import Destination, ReadPlan, TransportStatistics
from kvstrata.remote.transports.checks import Counts, Destinations, check_plan, cut
from kvstrata.remote.transports.engines.base import Engine, EngineLibrary, Patience
from kvstrata.remote.transports.engines.guard import Guard
from kvstrata.remote.transports.engines.ticket import EngineTicket, MakerWatch

PIECE_BYTES = 16 << 20
"""Between pieces a reader notices `close`, its deadline and the end of the hold."""
PIECE_RANGES = 8192
FIND_S = 2.0
"""How long a reader asks the producer for a later life of its export."""


class FindLaterLife(Protocol):
    def __call__(self, known: EngineTicket, *, deadline_s: float) -> EngineTicket | None:
        """See `directory.look_up`."""


class EngineReader:
    """See `base.Reader`. Any error but an ended hold costs the engine; the next read opens a new one.

    Before that it asks where the export is now: the process that serves it may have been started again.
    """

    def __init__(
        self,
        library: EngineLibrary,
        ticket: EngineTicket,
        destinations: Sequence[Destination],
        *,
        find: FindLaterLife,
    ) -> None:
        self._wait = f"remote read over {library.name}"
        self._library = library
        self._find = find
        self._region_bytes = np.array(ticket.region_bytes, dtype=np.int64)
        self._destinations = Destinations(destinations)
        self._to_write = tuple(destinations)
        self._is_doubtful = False  # whether the export is still where the ticket says
        self._use(ticket)
        self._counts = Counts()
        self._lock = threading.Lock()
        self._busy = False
        self._closed = False
        self._engine: Engine | None = None
        self._maker = MakerWatch(ticket)

    def connect(self, *, deadline_s: float) -> None:
        """Open the engine and see that the export is there, or in which later life."""
        patience = self._begin(deadline_s)
        try:
            try:
                self._guard.check(self._opened(patience), None, patience)
            except TransferFailed:
                self._fence()
                if not self._find_again(patience):
                    raise
                self._guard.check(self._opened(patience), None, patience)
        except BaseException as error:
            self._fence()
            if isinstance(error, DeadlineExceeded):
                raise DeadlineExceeded(f"{error.wait}, connecting", deadline_s) from error
            raise
        finally:
            self._end()

    def read(self, plan: ReadPlan, hold: Hold, *, deadline_s: float) -> None:
        patience = self._begin(deadline_s)
        try:
            check_plan(plan, self._region_bytes, self._destinations, self._counts)
            patience.check()
            try:
                self._pull(self._opened(patience), plan, hold, patience)
            except HoldRevoked:
                raise
            except BaseException:
                self._fence()
                raise
        except BaseException as error:
            self._counts.add(failed_reads=1)
            if isinstance(error, DeadlineExceeded):
                raise DeadlineExceeded(error.wait, deadline_s) from error
            raise
        finally:
            self._end()
        self._counts.add(reads=1, read_bytes=plan.total_bytes)

    def statistics(self) -> TransportStatistics:
        return self._counts.statistics()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            is_busy = self._busy
        if not is_busy:  # else the thread that reads notices, and gives everything up
            self._give_up()

    def _pull(self, engine: Engine, plan: ReadPlan, hold: Hold, patience: Patience) -> None:
        self._guard.check(engine, hold, patience)
        for region, offset, dst, size in cut(plan, max_bytes=PIECE_BYTES, max_ranges=PIECE_RANGES):
            engine.read(dst, self._addresses[region] + offset, size, patience)
            self._guard.check(engine, hold, patience)
        if self._maker.has_ended():  # it could revoke nothing any more
            raise TransferFailed(f"{self._wait}: the producer has ended")
        engine.tell()

    def _useless(self) -> str | None:
        if self._closed:
            return "the reader was closed meanwhile"
        return "the producer has ended" if self._maker.has_ended() else None

    def _opened(self, patience: Patience) -> Engine:
        if self._engine is None:
            if self._is_doubtful:
                self._find_again(patience)
            patience.check()
            self._engine = self._library.open(self._ticket.peer, self._writable, patience)
        return self._engine

    def _find_again(self, patience: Patience) -> bool:
        """Whether a later life was found; it is read from now on. No engine is open."""
        patience.check()
        later = self._find(self._ticket, deadline_s=min(FIND_S, patience.left_s))
        self._is_doubtful = False
        if later is not None:
            self._use(later)
        return later is not None

    def _use(self, ticket: EngineTicket) -> None:
        self._ticket = ticket
        self._addresses = np.array(ticket.addresses, dtype=np.int64)
        self._guard = Guard(
            export_id=ticket.export_id,
            board_address=ticket.board_address,
            holds_address=ticket.holds_address,
            wait=self._wait,
        )
        self._writable = [*self._to_write, self._guard.destination]

    def _fence(self) -> None:
        self._is_doubtful = True
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.close()

    def _give_up(self) -> None:
        self._fence()
        self._maker.close()

    def _begin(self, deadline_s: float) -> Patience:
        give_up_s = time.monotonic() + deadline_s
        with self._lock:
            if self._closed:
                raise TransferFailed(f"{self._wait}: the reader was closed")
            assert not self._busy, "one thread at a time may read"
            self._busy = True
        return Patience(self._wait, give_up_s, self._useless)

    def _end(self) -> None:
        with self._lock:
            self._busy = False
            is_closed = self._closed
        if is_closed:
            self._give_up()
