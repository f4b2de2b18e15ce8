"""The producer's side of a library: a process that serves its memory, started again when it ends by itself.

| when | what |
|---|---|
| the process ends | reads fail; it is started again after `PAUSE_S`, twice that, ... |
| it serves again | a new identity, peer and addresses: the directory says so to who has an older ticket |
| `RESTARTS` starts in a row did not last `STEADY_S` | no more are tried; reads fail until the engine ends |

Holds and memory are the producer's and outlive the process, so a transfer goes on over the next life.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Sequence
from typing import Any

from kvstrata.memory.region import HostRegion
from kvstrata.remote.holds import HoldTable
from kvstrata.remote.transports.base import TransportStatistics
from kvstrata.remote.transports.engines.base import EngineLibrary
from kvstrata.remote.transports.engines.directory import Directory
from kvstrata.remote.transports.engines.guard import Board
from kvstrata.remote.transports.engines.owner import CLOSE_S, OwnerProcess
from kvstrata.remote.transports.engines.ticket import EngineTicket, maker_fields
from kvstrata.remote.transports.tickets import sign

logger = logging.getLogger(__name__)

RESTARTS = 5
PAUSE_S = 0.5
"""Before the first restart; each further one in a row waits twice as long."""
STEADY_S = 60.0
"""A process that served for so long begins a new row of restarts."""


class EngineExporter:
    """See `base.Exporter`. Its regions stay mapped until it is closed, whoever frees them."""

    def __init__(
        self,
        library: EngineLibrary,
        regions: Sequence[HostRegion],
        holds: HoldTable,
        *,
        host: str,
        secret: bytes,
    ) -> None:
        """Raises ConfigurationError if the library refuses, DeadlineExceeded if it does not answer."""
        self._library = library
        self._region_bytes = tuple(region.size_bytes for region in regions)
        self._host = host
        self._secret = secret
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._is_closed = False
        self._lives = 0
        self._ends = 0
        self._restarts = 0
        self._told_before = 0
        with contextlib.ExitStack() as undo:
            # Of its own: the next life maps them though the engine may have freed the regions.
            self._memory = [
                (os.dup(region.fileno()), region.size_bytes) for region in (holds.region, *regions)
            ]
            undo.callback(self._close_memory)
            self._directory = Directory(host=host, secret=secret)
            undo.callback(self._directory.close)
            self._board, self._owner = self._spawn()
            self.ticket = self._started()
            undo.pop_all()
        self._thread = threading.Thread(
            target=self._keep_serving, name=f"kvstrata-{library.name}-owner", daemon=True
        )
        self._thread.start()

    def statistics(self) -> TransportStatistics:
        """`reads` counts those that a reader told of; a library that cannot tell counts none."""
        with self._lock:
            return TransportStatistics(
                reads=self._told_before + self._owner.told(),
                owner_ends=self._ends,
                owner_restarts=self._restarts,
            )

    def check_integrity(self) -> None:
        with self._lock:
            self._board.check_integrity()
            assert self._ends - 1 <= self._restarts <= self._ends, (self._restarts, self._ends)
        if not self._is_closed:
            self._directory.check_integrity()

    def close(self) -> None:
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            self._closing.set()
            board, owner = self._board, self._owner
        board.close()
        owner.close()
        self._thread.join(CLOSE_S)
        self._directory.close()
        self._close_memory()

    def _spawn(self) -> tuple[Board, OwnerProcess]:
        """A new identity, and a process that will show it."""
        board = Board()
        try:
            memory = [(board.region.fileno(), board.region.size_bytes), *self._memory]
            return board, OwnerProcess(self._library, memory, host=self._host)
        except BaseException:
            board.close()
            raise

    def _started(self) -> bytes:
        """Wait until the process serves, and say so; its ticket. Raises why it does not, and it has ended."""
        try:
            self._owner.start()
        except BaseException:
            self._board.close()
            raise
        self._lives += 1
        board_address, holds_address, *addresses = self._owner.addresses
        who: dict[str, Any] = maker_fields()
        ticket = EngineTicket(
            **who,
            life=self._lives,
            peer=self._owner.peer,
            export_id=self._board.export_id,
            board_address=board_address,
            holds_address=holds_address,
            addresses=tuple(addresses),
            region_bytes=self._region_bytes,
            directory=self._directory.ticket,
            directory_slot=self._directory.hold.slot,
            directory_generation=self._directory.hold.generation,
        )
        signed = sign(ticket, transport=self._library.name, secret=self._secret)
        self._directory.show(signed)
        return signed

    def _keep_serving(self) -> None:
        in_a_row = 0
        while True:
            since_s = time.monotonic()
            how = self._owner.watch()
            with self._lock:
                if self._closing.is_set():
                    return
                self._ends += 1
            self._owner.close()
            self._board.close()
            if time.monotonic() - since_s >= STEADY_S:
                in_a_row = 0
            why = f"the process that serves reads over {self._library.name} ended with {how}"
            restarted = False
            while not restarted:
                if in_a_row == RESTARTS:
                    logger.error("%s: they fail until this engine is started again", why)
                    return
                pause_s = PAUSE_S * 2**in_a_row
                in_a_row += 1
                logger.error(
                    "%s: they fail meanwhile; start %d of %d follows in %g s",
                    why,
                    in_a_row,
                    RESTARTS,
                    pause_s,
                )
                if self._closing.wait(pause_s):
                    return
                try:
                    restarted = self._restart()
                except Exception as error:  # whatever it is, the next start may go well
                    why = f"the process that serves reads over {self._library.name} did not start ({error})"
                if self._closing.is_set():
                    return
            logger.warning("reads over %s are served again", self._library.name)

    def _restart(self) -> bool:
        with self._lock:
            if self._closing.is_set():
                return False
            board, owner = self._spawn()
            self._told_before += self._owner.told()
            self._board, self._owner = board, owner
        self._started()
        with self._lock:
            self._restarts += 1
        return True

    def _close_memory(self) -> None:
        for fd, _ in self._memory:
            os.close(fd)
