"""What the owner's ticket says, and whether the process that made it still lives."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from kvstrata.memory.processes import Holder, boot_id, current_holder
from kvstrata.remote.holds import HOLD_SLOTS
from kvstrata.remote.transports.engines.guard import ID_BYTES
from kvstrata.remote.transports.shm_memory import Count, Watch
from kvstrata.remote.transports.tickets import MAX_REGIONS

MAX_PEER_BYTES = 256 << 10
MAX_DIRECTORY_BYTES = 4096
Address = Annotated[int, Meta(gt=0, lt=1 << 62)]


class EngineTicket(msgspec.Struct, frozen=True, kw_only=True):
    """Whose memory it is, where in the serving process, and what the library needs to get there."""

    boot_id: Annotated[str, Meta(max_length=64)]
    pid: Count
    start_ticks: Count
    pid_namespace: Count
    peer: Annotated[bytes, Meta(max_length=MAX_PEER_BYTES)]
    export_id: Annotated[bytes, Meta(min_length=ID_BYTES, max_length=ID_BYTES)]
    board_address: Address
    holds_address: Address
    addresses: Annotated[tuple[Address, ...], Meta(max_length=MAX_REGIONS)]
    region_bytes: Annotated[tuple[Annotated[int, Meta(ge=0, lt=1 << 62)], ...], Meta(max_length=MAX_REGIONS)]
    life: Count  # how often a process was started to serve the export
    directory: Annotated[bytes, Meta(max_length=MAX_DIRECTORY_BYTES)]  # where a later life is told of
    directory_slot: Annotated[int, Meta(ge=0, lt=HOLD_SLOTS)]
    directory_generation: Annotated[int, Meta(ge=1, lt=1 << 62)]

    def __post_init__(self) -> None:
        if len(self.addresses) != len(self.region_bytes):
            raise ValueError(f"{len(self.addresses)} addresses of {len(self.region_bytes)} regions")

    def is_later_life_of(self, other: EngineTicket) -> bool:
        """Whether it is of the same memory of the same producer, served by a process that came after."""
        return self.life > other.life and self._memory() == other._memory()

    def _memory(self) -> tuple[object, ...]:
        return self.boot_id, self.pid_namespace, self.pid, self.start_ticks, self.directory, self.region_bytes


class MakerWatch:
    """Tells at once that the producer has ended, where it is on this host; elsewhere the library has to."""

    def __init__(self, ticket: EngineTicket) -> None:
        """Raises TransferFailed if it has ended already."""
        here = current_holder()
        self._watch: Watch | None = None
        if ticket.boot_id == boot_id() and ticket.pid_namespace == here.pid_namespace:
            self._watch = Watch(
                Holder(pid=ticket.pid, start_ticks=ticket.start_ticks, pid_namespace=ticket.pid_namespace)
            )

    def has_ended(self) -> bool:
        """False also where nobody can tell."""
        return self._watch is not None and self._watch.has_ended()

    def close(self) -> None:
        """Give the process descriptor up."""
        if self._watch is not None:
            self._watch.close()
            self._watch = None


def maker_fields() -> dict[str, int | str]:
    """This process, as the fields of a ticket."""
    here = current_holder()
    return {
        "boot_id": boot_id(),
        "pid": here.pid,
        "start_ticks": here.start_ticks,
        "pid_namespace": here.pid_namespace,
    }
