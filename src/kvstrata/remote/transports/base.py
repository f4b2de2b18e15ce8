"""What every transport offers: a producer exports regions of its memory, a consumer reads ranges of them.

Members: `shm` (same host, mapped memory), `tcp` (plain sockets), `nixl`, `mooncake`, `memfabric` (libraries,
`engines/`), `faulty` (breaks another one on purpose). All but `memfabric`, which needs an NPU, pass
`tests/conformance/test_transports.py`. Source: seed, System Overview (remote pull) and Validation and Failure
Handling.

A consumer's read is one-sided: the producer's memory stays valid only while its *hold* does
(`remote.holds`). Every read names the hold, and fails if it was not valid from before its first byte to after
its last: so memory that was reused under a slow reader is never taken for the request's rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:  # the processes that serve memory for a library do without torch
    from kvstrata.memory.region import HostRegion
    from kvstrata.remote.holds import Hold, HoldTable

Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, eq=False)
class ReadPlan:
    """Byte ranges of one read; neighbours are merged before. Arrays `[ranges]`, contiguous int64.

    `region[i]` is the index of an exported region, `offset[i]` counts from its first byte, `dst[i]` is an
    address of this process, inside a registered destination; `size[i]` is positive.
    """

    region: Int64Array
    offset: Int64Array
    dst: Int64Array
    size: Int64Array

    @property
    def total_bytes(self) -> int:
        """Bytes that the read moves."""
        return int(self.size.sum())

    def __len__(self) -> int:
        return len(self.size)


@dataclass(frozen=True, kw_only=True)
class Destination:
    """Memory of this process that reads may write: `[address, address + size_bytes)`."""

    address: int
    size_bytes: int


@dataclass(frozen=True, kw_only=True)
class TransportStatistics:
    """Counts since the object was made."""

    reads: int = 0
    failed_reads: int = 0
    read_bytes: int = 0
    refused_ranges: int = 0  # outside a region or a destination; nothing was moved
    dropped_connections: int = 0  # a stranger, a wrong secret, a broken frame
    owner_ends: int = 0  # the process that serves for a library ended by itself
    owner_restarts: int = 0  # and serves again; while they are fewer than the ends, nothing is served


class Exporter(Protocol):
    """The producer's side: lets consumers read its regions until it is closed."""

    @property
    def ticket(self) -> bytes:
        """What `connect` needs on the other side; opaque, at most 1 MiB, contains no secret."""

    def statistics(self) -> TransportStatistics: ...

    def check_integrity(self) -> None: ...

    def close(self) -> None:
        """Stop serving. Consumers' reads fail from then on; harmless to repeat."""


class Reader(Protocol):
    """The consumer's side of one producer. One thread at a time calls `read`; `close` may come from any."""

    def read(self, plan: ReadPlan, hold: Hold, *, deadline_s: float) -> None:
        """Return once every byte of the plan has landed and the hold was valid throughout.

        Raises HoldRevoked if it was not, TransferFailed if a range leaves its region or every destination
        (before any byte moves) or if the peer is gone, or DeadlineExceeded after `deadline_s`. In every case
        nothing writes to the destination any more when it returns: the transport fences itself, if need be by
        giving up the connection, and a later `read` connects anew or fails.
        """

    def statistics(self) -> TransportStatistics: ...

    def close(self) -> None:
        """End the connection; a read in another thread fails soon, and is fenced when it returns."""


class Transport(Protocol):
    """One way to move bytes between two processes."""

    @property
    def name(self) -> str: ...

    def usable(self) -> str | None:
        """None if this process can use it, else why not; for `auto` and for `kvstrata doctor`."""

    def export(
        self, regions: Sequence[HostRegion], holds: HoldTable, *, host: str, secret: bytes
    ) -> Exporter:
        """Offer `regions` for reading while `holds` says so. `host` is the address to bind to and to name."""

    def reaches(self, ticket: bytes) -> str | None:
        """None if a reader with this ticket could work from here, else why not (another host, for `shm`)."""

    def connect(
        self, ticket: bytes, destinations: Sequence[Destination], *, secret: bytes, deadline_s: float
    ) -> Reader:
        """Open the way to a producer. Raises TransferFailed, naming what is wrong with the ticket."""
