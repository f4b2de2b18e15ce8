"""A library as a transport: exports through a process of its own, reads through `EngineReader`."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from kvstrata.errors import TransferFailed
from kvstrata.memory.region import HostRegion
from kvstrata.remote.holds import HoldTable
from kvstrata.remote.transports.base import Destination, TransportStatistics
from kvstrata.remote.transports.engines.base import EngineLibrary
from kvstrata.remote.transports.engines.guard import Board
from kvstrata.remote.transports.engines.owner import OwnerProcess
from kvstrata.remote.transports.engines.reader import EngineReader
from kvstrata.remote.transports.engines.ticket import EngineTicket, maker_fields
from kvstrata.remote.transports.tickets import MAX_REGIONS, read_unverified, sign, verify


class EngineTransport:
    """See `base.Transport`."""

    def __init__(self, library: EngineLibrary) -> None:
        self._library = library

    @property
    def name(self) -> str:
        return self._library.name

    def usable(self) -> str | None:
        """Imports the library."""
        return self._library.unusable()

    def export(
        self, regions: Sequence[HostRegion], holds: HoldTable, *, host: str, secret: bytes
    ) -> EngineExporter:
        """Serve from a new process. Raises ConfigurationError if the library refuses."""
        if len(regions) > MAX_REGIONS:
            raise ValueError(f"{len(regions)} regions to export; at most {MAX_REGIONS}")
        return EngineExporter(self._library, regions, holds, host=host, secret=secret)

    def reaches(self, ticket: bytes) -> str | None:
        """Whether the ticket can be read; only `connect` finds out about the network."""
        try:
            read_unverified(ticket, EngineTicket, transport=self.name)
        except TransferFailed as error:
            return str(error)
        return None

    def connect(
        self, ticket: bytes, destinations: Sequence[Destination], *, secret: bytes, deadline_s: float
    ) -> EngineReader:
        """Open the way and find the export. The secret guards the ticket, not the bytes: see the docs."""
        found = verify(ticket, EngineTicket, transport=self.name, secret=secret)
        reader = EngineReader(self._library, found, destinations)
        try:
            reader.connect(deadline_s=deadline_s)
        except BaseException:
            reader.close()
            raise
        return reader


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
        self._lock = threading.Lock()
        self._is_closed = False
        self._board = Board()
        try:
            served = [self._board.region, holds.region, *regions]
            self._owner = OwnerProcess(library, served, host=host)
        except BaseException:
            self._board.close()
            raise
        board_address, holds_address, *addresses = self._owner.addresses
        who: dict[str, Any] = maker_fields()
        ticket = EngineTicket(
            **who,
            peer=self._owner.peer,
            export_id=self._board.export_id,
            board_address=board_address,
            holds_address=holds_address,
            addresses=tuple(addresses),
            region_bytes=tuple(region.size_bytes for region in regions),
        )
        self.ticket = sign(ticket, transport=library.name, secret=secret)

    def statistics(self) -> TransportStatistics:
        """`reads` counts those that a reader told of; a library that cannot tell counts none."""
        return TransportStatistics(reads=self._owner.told())

    def check_integrity(self) -> None:
        self._board.check_integrity()

    def close(self) -> None:
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        self._board.close()
        self._owner.close()
