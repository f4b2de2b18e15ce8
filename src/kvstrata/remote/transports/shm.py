"""Reads on the same host: the producer's memory is mapped and copied from, it takes no part.

The ticket names the producer's regions, its table of holds and a page that says whether it still exports. All
three are checked before the first piece and after the last; between pieces a reader notices `close`, its
deadline and the end of the hold. A producer that was killed can revoke nothing, so its process is looked up
after the copy too. Access is what the system gives: same user, same process namespace.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Sequence

from kvstrata.errors import DeadlineExceeded, TransferFailed
from kvstrata.memory.processes import boot_id, current_holder
from kvstrata.memory.region import HostRegion
from kvstrata.remote.holds import Hold, HoldTable
from kvstrata.remote.transports.base import Destination, ReadPlan, TransportStatistics
from kvstrata.remote.transports.checks import Counts, Destinations, check_plan
from kvstrata.remote.transports.loops import copy_piece, new_progress, prepare
from kvstrata.remote.transports.shm_memory import MappedProducer, ShmHandle, ShmTicket, unreachable
from kvstrata.remote.transports.tickets import MAX_REGIONS, read_unverified, sign, verify

NAME = "shm"
PIECE_BYTES = 32 << 20
"""A copy that has begun cannot be stopped; this much takes a few milliseconds."""

CopyPiece = Callable[..., bool]  # as loops.copy_piece


class ShmTransport:
    """See `base.Transport`."""

    name = NAME

    def __init__(
        self,
        *,
        piece_bytes: int = PIECE_BYTES,
        copy_piece: CopyPiece = copy_piece,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """All of them are passed in by tests."""
        self._piece_bytes = piece_bytes
        self._copy_piece = copy_piece
        self._clock = clock

    def usable(self) -> str | None:
        if not sys.platform.startswith("linux") or not hasattr(os, "memfd_create"):
            return "shm needs Linux: anonymous shared memory that another process opens through /proc"
        if not os.path.isdir("/proc/self/fd"):
            return "shm needs /proc, which is not mounted here"
        return None

    def export(
        self, regions: Sequence[HostRegion], holds: HoldTable, *, host: str, secret: bytes
    ) -> ShmExporter:
        """`host` is not needed here."""
        return ShmExporter(regions, holds, secret=secret)

    def reaches(self, ticket: bytes) -> str | None:
        try:
            return unreachable(read_unverified(ticket, ShmTicket, transport=NAME))
        except TransferFailed as error:
            return str(error)

    def connect(
        self, ticket: bytes, destinations: Sequence[Destination], *, secret: bytes, deadline_s: float
    ) -> ShmReader:
        """Map the producer's regions; nothing here can take long, so the deadline never passes."""
        found = verify(ticket, ShmTicket, transport=NAME, secret=secret)
        reason = unreachable(found)
        if reason is not None:
            raise TransferFailed(reason)
        prepare()
        return ShmReader(
            MappedProducer.open(found),
            Destinations(destinations),
            piece_bytes=self._piece_bytes,
            copy_piece=self._copy_piece,
            clock=self._clock,
        )


class ShmExporter:
    """See `base.Exporter`: it only says where the memory is, and until when."""

    def __init__(self, regions: Sequence[HostRegion], holds: HoldTable, *, secret: bytes) -> None:
        if len(regions) > MAX_REGIONS:
            raise ValueError(f"{len(regions)} regions to export; at most {MAX_REGIONS}")
        self._serving: HostRegion | None = HostRegion.create(
            os.sysconf("SC_PAGESIZE"), "remote-serving", huge_pages=False
        )
        self._serving.tensor()[0] = 1
        maker = current_holder()
        self._lock = threading.Lock()
        self.ticket = sign(
            ShmTicket(
                boot_id=boot_id(),
                user=os.geteuid(),
                pid=maker.pid,
                start_ticks=maker.start_ticks,
                pid_namespace=maker.pid_namespace,
                regions=tuple(ShmHandle.of(region.handle) for region in regions),
                holds=ShmHandle.of(holds.handle),
                serving=ShmHandle.of(self._serving.handle),
            ),
            transport=NAME,
            secret=secret,
        )

    def statistics(self) -> TransportStatistics:
        """All zero: the exporter is not asked when it is read."""
        return TransportStatistics()

    def check_integrity(self) -> None:
        with self._lock:
            assert self._serving is None or int(self._serving.tensor()[0]) == 1

    def close(self) -> None:
        with self._lock:
            serving, self._serving = self._serving, None
        if serving is not None:
            serving.tensor()[0] = 0
            serving.close()


class ShmReader:
    """See `base.Reader`."""

    def __init__(
        self,
        mapped: MappedProducer,
        destinations: Destinations,
        *,
        piece_bytes: int,
        copy_piece: CopyPiece,
        clock: Callable[[], float],
    ) -> None:
        self._mapped: MappedProducer | None = mapped
        self._destinations = destinations
        self._piece_bytes = piece_bytes
        self._copy_piece = copy_piece
        self._clock = clock
        self._counts = Counts()
        self._lock = threading.Lock()
        self._reading = False
        self._closed = False

    def read(self, plan: ReadPlan, hold: Hold, *, deadline_s: float) -> None:
        give_up_s = self._clock() + deadline_s
        mapped = self._begin()
        try:
            check_plan(plan, mapped.region_bytes, self._destinations, self._counts)
            mapped.check(hold)
            progress, is_done = new_progress(), len(plan) == 0
            while not is_done:
                if self._closed:
                    raise TransferFailed("remote read over shm: the reader was closed meanwhile")
                if self._clock() > give_up_s:
                    raise DeadlineExceeded("remote read over shm", deadline_s)
                is_done = self._copy_piece(
                    plan.region,
                    plan.offset,
                    plan.dst,
                    plan.size,
                    mapped.addresses,
                    progress,
                    self._piece_bytes,
                )
                mapped.check(hold)
            mapped.check_maker()
        except BaseException:
            self._counts.add(failed_reads=1)
            raise
        finally:
            self._end()
        self._counts.add(reads=1, read_bytes=plan.total_bytes)

    def statistics(self) -> TransportStatistics:
        return self._counts.statistics()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            # A copy that runs still needs the mappings: whoever runs it gives them up.
            mapped = None if self._reading else self._take()
        if mapped is not None:
            mapped.close()

    def _begin(self) -> MappedProducer:
        with self._lock:
            if self._closed or self._mapped is None:
                raise TransferFailed("remote read over shm: the reader was closed")
            assert not self._reading, "one thread at a time may read"
            self._reading = True
            return self._mapped

    def _end(self) -> None:
        with self._lock:
            self._reading = False
            mapped = self._take() if self._closed else None
        if mapped is not None:
            mapped.close()

    def _take(self) -> MappedProducer | None:
        mapped, self._mapped = self._mapped, None
        return mapped
