"""A producer's memory seen from another process of its host: what the ticket says, and what is mapped."""

from __future__ import annotations

import contextlib
import os
import select
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta

from kvstrata.errors import KVStrataError, TransferFailed
from kvstrata.memory.processes import Holder, boot_id, current_holder, may_be_alive
from kvstrata.memory.region import HostRegion, RegionHandle, open_region
from kvstrata.remote.holds import Hold, HoldRevoked, HoldView
from kvstrata.remote.transports.tickets import MAX_REGIONS

Count = Annotated[int, Meta(ge=0, lt=1 << 62)]


class ShmHandle(msgspec.Struct, frozen=True, kw_only=True):
    """A RegionHandle on its way."""

    pid: Count
    fd: Count
    size_bytes: Count
    label: Annotated[str, Meta(max_length=256)]

    @classmethod
    def of(cls, handle: RegionHandle) -> ShmHandle:
        """Pack a handle."""
        return cls(pid=handle.pid, fd=handle.fd, size_bytes=handle.size_bytes, label=handle.label)

    def plain(self) -> RegionHandle:
        """Return what `open_region` takes."""
        return RegionHandle(pid=self.pid, fd=self.fd, size_bytes=self.size_bytes, label=self.label)


class ShmTicket(msgspec.Struct, frozen=True, kw_only=True):
    """Whose memory it is, and where."""

    boot_id: Annotated[str, Meta(max_length=64)]
    user: Count
    pid: Count
    start_ticks: Count
    pid_namespace: Count
    regions: Annotated[tuple[ShmHandle, ...], Meta(max_length=MAX_REGIONS)]
    holds: ShmHandle
    serving: ShmHandle  # its first byte is 1 until the exporter is closed

    @property
    def maker(self) -> Holder:
        """The process that exports."""
        return Holder(pid=self.pid, start_ticks=self.start_ticks, pid_namespace=self.pid_namespace)


class Watch:
    """Tells whether a process has ended, by one cheap call where the system has process descriptors."""

    def __init__(self, process: Holder) -> None:
        """Raises TransferFailed if it has ended already."""
        self._process = process
        self._fd: int | None = None
        with contextlib.suppress(OSError):
            self._fd = os.pidfd_open(process.pid)
        self._poll = select.poll()
        if self._fd is not None:
            self._poll.register(self._fd, select.POLLIN)
        # Looked up second: if it is the right one now, it was when the descriptor was made.
        if not may_be_alive(process):
            self.close()
            raise TransferFailed(f"{self} has ended")

    def has_ended(self) -> bool:
        """True once the process can no longer touch memory."""
        return bool(self._poll.poll(0)) if self._fd is not None else not may_be_alive(self._process)

    def close(self) -> None:
        """Give the descriptor up."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def __str__(self) -> str:
        return f"process {self._process.pid}"


class MappedProducer:
    """Its regions, its table of holds, and whether it still lives. `open` makes one."""

    def __init__(self, maker: Watch, regions: list[HostRegion], holds: HoldView, serving: HostRegion) -> None:
        self._maker = maker
        self._regions = regions
        self._holds = holds
        self._serving = serving
        self._flag = serving.tensor().numpy()
        self.addresses = np.array([region.address for region in regions], dtype=np.int64)
        self.region_bytes = np.array([region.size_bytes for region in regions], dtype=np.int64)

    @classmethod
    def open(cls, ticket: ShmTicket) -> MappedProducer:
        """Raises TransferFailed if anything of it is gone."""
        with contextlib.ExitStack() as opened:
            try:
                regions = []
                for handle in ticket.regions:
                    regions.append(open_region(handle.plain()))
                    opened.callback(regions[-1].close)
                holds = HoldView.open(ticket.holds.plain())
                opened.callback(holds.close)
                serving = open_region(ticket.serving.plain(), huge_pages=False)
                opened.callback(serving.close)
                mapped = cls(Watch(ticket.maker), regions, holds, serving)
            except (KVStrataError, OSError, ValueError) as error:
                raise TransferFailed(f"shm: the producer's memory cannot be mapped: {error}") from error
            opened.pop_all()
        return mapped

    def check(self, hold: Hold) -> None:
        """Raise TransferFailed if the producer exports no more, HoldRevoked if the hold is not valid."""
        if self._flag[0] != 1:
            raise TransferFailed("remote read over shm: the producer closed its export")
        if not self._holds.is_valid(hold):
            raise HoldRevoked(f"remote read over shm: the producer ended {hold}; its memory may be reused")

    def check_maker(self) -> None:
        """Raise TransferFailed if the producer's process has ended: it cannot revoke any more."""
        if self._maker.has_ended():
            raise TransferFailed(f"remote read over shm: the producer, {self._maker}, has ended")

    def close(self) -> None:
        """Unmap everything."""
        self._maker.close()
        self._flag = np.zeros(1, dtype=np.uint8)
        for region in (*self._regions, self._serving):
            region.close()
        self._holds.close()


def unreachable(ticket: ShmTicket) -> str | None:
    """Why this process cannot map the producer's memory, None if it can."""
    here = current_holder()
    if ticket.boot_id != boot_id():
        return "shm: the producer runs on another host, or this host was restarted since"
    if ticket.pid_namespace != here.pid_namespace:
        return "shm: the producer runs in another process namespace (container) of this host"
    if ticket.user != os.geteuid():
        return f"shm: the producer runs as user {ticket.user}, this process as user {os.geteuid()}"
    if not may_be_alive(ticket.maker):
        return f"shm: the producer, process {ticket.pid}, has ended"
    return None
