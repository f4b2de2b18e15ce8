"""The simulated transport as the handshake sees it: a name to agree on. `sim.reads` moves the pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvstrata.errors import TransferFailed
from kvstrata.memory.region import HostRegion
from kvstrata.remote.holds import HoldTable
from kvstrata.remote.transports.base import Destination, Exporter, Reader


@dataclass(frozen=True)
class NamedTransport:
    """Agrees to everything, moves nothing."""

    name: str

    def usable(self) -> str | None:
        """Always."""
        return None

    def export(
        self, regions: Sequence[HostRegion], holds: HoldTable, *, host: str, secret: bytes
    ) -> Exporter:
        """Raises TransferFailed: there is no memory behind it."""
        raise TransferFailed(f"{self.name} exports no regions")

    def reaches(self, ticket: bytes) -> str | None:
        """From everywhere."""
        return None

    def connect(
        self, ticket: bytes, destinations: Sequence[Destination], *, secret: bytes, deadline_s: float
    ) -> Reader:
        """Raises TransferFailed: there is no memory behind it."""
        raise TransferFailed(f"{self.name} reads no regions")
