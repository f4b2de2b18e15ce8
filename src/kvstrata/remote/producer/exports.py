"""A producer's memory, offered over every transport it has, and the holds that say until when."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvstrata.errors import ConfigurationError
from kvstrata.memory.region import HostRegion
from kvstrata.remote.holds import Hold, HoldTable
from kvstrata.remote.options import EndpointOptions
from kvstrata.remote.protocol.messages import (
    PROTOCOL_VERSION,
    ComponentLayout,
    Hello,
    Place,
    TransportOffer,
)
from kvstrata.remote.timeline import Timeline
from kvstrata.remote.transports.base import Exporter, Transport, TransportStatistics


@dataclass(frozen=True)
class Offer:
    """What the endpoint keeps of a transfer: whose it is, the hold that guards its blocks, and its times."""

    peer: str
    hold: Hold
    timeline: Timeline


class Exports:
    """The exporters of one endpoint and their table of holds. Stop serving before the holds are given up."""

    def __init__(
        self, transports: Sequence[Transport], regions: Sequence[HostRegion], options: EndpointOptions
    ) -> None:
        """Raises ConfigurationError without a transport, and whatever an export raises."""
        if not transports:
            raise ConfigurationError("remote read needs at least one transport, none is usable here")
        self.holds = HoldTable()
        self._options = options
        self._exporters: dict[str, Exporter] = {}
        try:
            for transport in transports:
                self._exporters[transport.name] = transport.export(
                    regions, self.holds, host=options.host, secret=options.secret
                )
        except BaseException:
            self.close()
            self.holds.close()
            raise

    def hello(
        self,
        *,
        epoch: str,
        rank: int,
        tp_size: int,
        components: Sequence[ComponentLayout],
        places: Sequence[Place],
    ) -> Hello:
        """Return what this rank says of itself and its memory; component i has its pages at `places[i]`."""
        assert len(components) == len(places), (len(components), len(places))
        return Hello(
            epoch=epoch,
            version=PROTOCOL_VERSION,
            rank=rank,
            tp_size=tp_size,
            components=tuple(components),
            places=tuple(places),
            offers=tuple(
                TransportOffer(name=name, ticket=exporter.ticket)
                for name, exporter in self._exporters.items()
            ),
            memfabric_protocol=self._options.memfabric_protocol,
            lease_s=self._options.lease_s,
            model=self._options.model,
        )

    def statistics(self) -> Mapping[str, TransportStatistics]:
        """Return each one's counts, by name."""
        return {name: exporter.statistics() for name, exporter in self._exporters.items()}

    def check_integrity(self) -> None:
        """Check each, and the holds."""
        for exporter in self._exporters.values():
            exporter.check_integrity()
        self.holds.check_integrity()

    def close(self) -> None:
        """Stop serving, on every transport."""
        for exporter in self._exporters.values():
            exporter.close()
