"""A library as a transport: exports through a process of its own, reads through `EngineReader`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from kvstrata.errors import TransferFailed
from kvstrata.memory.region import HostRegion
from kvstrata.remote.holds import HoldTable
from kvstrata.remote.transports.base import Destination
from kvstrata.remote.transports.engines.base import EngineLibrary
from kvstrata.remote.transports.engines.directory import look_up
from kvstrata.remote.transports.engines.export import EngineExporter
from kvstrata.remote.transports.engines.reader import EngineReader
from kvstrata.remote.transports.engines.ticket import EngineTicket
from kvstrata.remote.transports.tickets import MAX_REGIONS, read_unverified, verify


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
        find = partial(look_up, transport=self.name, secret=secret)
        reader = EngineReader(self._library, found, destinations, find=find)
        try:
            reader.connect(deadline_s=deadline_s)
        except BaseException:
            reader.close()
            raise
        return reader
