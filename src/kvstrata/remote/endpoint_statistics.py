"""What the endpoints of remote read count."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvstrata.remote.consumer.machine import ConsumerStatistics
from kvstrata.remote.consumer.read_pool import ReadPoolStatistics
from kvstrata.remote.holds import HoldStatistics
from kvstrata.remote.producer.machine import ProducerStatistics
from kvstrata.remote.protocol.codec import CodecStatistics
from kvstrata.remote.timeline import TimelineSums
from kvstrata.remote.transports.base import TransportStatistics


@dataclass(frozen=True, kw_only=True)
class ProducerEndpointStatistics:
    """Counts since construction; `opened == transfers_open + sum(settled.values())`."""

    transfers_open: int
    opened: int
    settled: Mapping[str, int]  # by ending
    published_parts: int
    unpublished_parts: int  # their transfer had ended, or their save failed
    holds: HoldStatistics
    machine: ProducerStatistics
    codec: CodecStatistics
    undelivered: Mapping[str, int]  # messages dropped by the socket, by reason
    transports: Mapping[str, TransportStatistics]
    waits_s: Mapping[str, float]  # by name
    timeline: TimelineSums
    late_rounds: int  # after the process had been stopped or starved


@dataclass(frozen=True, kw_only=True)
class ConsumerEndpointStatistics:
    """Counts since construction; `expected == transfers_open + sum(finished.values())`."""

    transfers_open: int
    expected: int
    finished: Mapping[str, int]  # by ending
    quarantined_blocks: int  # of transfers that ended, but are still being written to
    reads: ReadPoolStatistics
    read_bytes: int
    read_s: float
    layers_read: int  # parts of layers, empty ones included
    machine: ConsumerStatistics
    codec: CodecStatistics
    undelivered: Mapping[str, int]  # messages dropped by the socket, by reason
    waits_s: Mapping[str, float]  # by name
    timeline: TimelineSums
    late_rounds: int  # after the process had been stopped or starved
