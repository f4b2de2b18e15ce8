"""What the two machines have counted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvstrata.remote.protocol.actions import Ending


@dataclass(frozen=True, kw_only=True)
class ProducerStatistics:
    """Counts since construction; `opened == opening + active + aborting + sum of settled`."""

    opened: int
    opening: int
    active: int
    aborting: int
    settled: Mapping[Ending, int]
    published_parts: int
    unanswered_parts: int
    resent: int  # messages said again for want of an answer, Hello included
    dropped: Mapping[str, int]  # messages of peers, by reason
    welcomed_sessions: int
    refused_sessions: int
    restarted_peers: int
    tombstones: int


@dataclass(frozen=True, kw_only=True)
class ConsumerStatistics:
    """Counts since construction.

    `expected == waiting + receiving + draining + sum of finished` and
    `reads == reading + landed_reads + failed_reads`.
    """

    expected: int
    waiting: int  # for the first member
    receiving: int
    draining: int
    finished: Mapping[Ending, int]
    reads: int
    reading: int
    landed_reads: int
    failed_reads: int
    retried_reads: int
    resent: int
    dropped: Mapping[str, int]  # messages of peers, by reason
    peers: int
    refused_hellos: int
    lost_peers: int
    tombstones: int
