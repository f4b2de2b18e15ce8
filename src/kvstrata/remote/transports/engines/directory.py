"""Where a library's export is now: a small page of the producer's own, read with the secret.

A library names its owner by an address that dies with the owner's process. When that process is started again
(`engines.export`), readers that hold the first ticket find the next one here, over `tcp`: it does not need
the library, and believes nobody without the secret. A record is a signed ticket, so a torn one is no ticket.
"""

from __future__ import annotations

import numpy as np

from kvstrata.errors import DeadlineExceeded, TransferFailed
from kvstrata.memory.region import HostRegion
from kvstrata.remote.holds import Hold, HoldTable
from kvstrata.remote.transports.base import Destination, ReadPlan
from kvstrata.remote.transports.engines.ticket import EngineTicket
from kvstrata.remote.transports.tcp import TcpTransport
from kvstrata.remote.transports.tickets import MAX_TICKET_BYTES, verify

_LENGTH_BYTES = 8
_RECORD_BYTES = _LENGTH_BYTES + MAX_TICKET_BYTES


class Directory:
    """The producer's side. One thread shows; readers may come at any time."""

    def __init__(self, *, host: str, secret: bytes) -> None:
        """Listen on a free port of `host`. Raises ConfigurationError."""
        self._region = HostRegion.create(_RECORD_BYTES, "remote-directory", huge_pages=False)
        self._holds = HoldTable()
        try:
            self._exporter = TcpTransport().export([self._region], self._holds, host=host, secret=secret)
        except BaseException:
            self._holds.close()
            self._region.close()
            raise
        self.hold = self._holds.grant()
        self.ticket = self._exporter.ticket

    def show(self, ticket: bytes) -> None:
        """Tell whoever looks from now on that this is the export's ticket."""
        page = self._region.tensor().numpy()
        page[:_LENGTH_BYTES] = np.frombuffer(len(ticket).to_bytes(_LENGTH_BYTES, "little"), dtype=np.uint8)
        page[_LENGTH_BYTES : _LENGTH_BYTES + len(ticket)] = np.frombuffer(ticket, dtype=np.uint8)

    def check_integrity(self) -> None:
        """Check that it can be read."""
        self._exporter.check_integrity()
        self._holds.check_integrity()

    def close(self) -> None:
        """Stop listening."""
        self._exporter.close()
        self._holds.close()
        self._region.close()


def look_up(known: EngineTicket, *, transport: str, secret: bytes, deadline_s: float) -> EngineTicket | None:
    """Return the ticket of a later life of this export; None if there is none, or nobody who says so."""
    try:
        found = verify(
            _record(known, secret=secret, deadline_s=deadline_s),
            EngineTicket,
            transport=transport,
            secret=secret,
        )
    except (TransferFailed, DeadlineExceeded):  # the producer is gone or busy, or was writing just now
        return None
    return found if found.is_later_life_of(known) else None


def _record(known: EngineTicket, *, secret: bytes, deadline_s: float) -> bytes:
    landing = np.zeros(_RECORD_BYTES, dtype=np.uint8)
    address = landing.ctypes.data
    hold = Hold(slot=known.directory_slot, generation=known.directory_generation)
    reader = TcpTransport().connect(
        known.directory,
        [Destination(address=address, size_bytes=len(landing))],
        secret=secret,
        deadline_s=deadline_s,
    )
    try:
        reader.read(_range(0, address, _LENGTH_BYTES), hold, deadline_s=deadline_s)
        length = int.from_bytes(landing[:_LENGTH_BYTES].tobytes(), "little")
        if not 0 < length <= MAX_TICKET_BYTES:
            raise TransferFailed(f"a ticket of {length} bytes")
        reader.read(_range(_LENGTH_BYTES, address + _LENGTH_BYTES, length), hold, deadline_s=deadline_s)
    finally:
        reader.close()
    return landing[_LENGTH_BYTES : _LENGTH_BYTES + length].tobytes()


def _range(offset: int, address: int, size_bytes: int) -> ReadPlan:
    region, *rest = (np.array([number], dtype=np.int64) for number in (0, offset, address, size_bytes))
    return ReadPlan(region=region, offset=rest[0], dst=rest[1], size=rest[2])
