"""The shm transport: what it looks at between the pieces of a copy, and which producers it reaches."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np
import pytest

from kvstrata.errors import DeadlineExceeded, TransferFailed
from kvstrata.memory.region import HostRegion
from kvstrata.remote.holds import Hold, HoldTable
from kvstrata.remote.transports.loops import copy_piece
from kvstrata.remote.transports.shm import NAME, ShmExporter, ShmReader, ShmTransport
from kvstrata.remote.transports.shm_memory import ShmTicket
from kvstrata.remote.transports.testing import CANARY, Memory, pattern, plan_of
from kvstrata.remote.transports.tickets import read_unverified, sign

SECRET = b"of both sides"
PIECES = 4
PIECE_BYTES = 100_000
SIZE = PIECES * PIECE_BYTES
LONG_S = 60.0


class Setting:
    """A producer and a reader in this process; `between` runs after each piece of a copy."""

    def __init__(self) -> None:
        self.region = HostRegion.create(SIZE, "shm-test", huge_pages=False)
        self.holds = HoldTable()
        self.hold = self.holds.grant()
        self.memory = Memory(SIZE)
        self.now_s = 0.0
        self.between: Callable[[int], None] = lambda piece: None
        self.pieces = 0
        self.transport = ShmTransport(
            piece_bytes=PIECE_BYTES, copy_piece=self._copy, clock=lambda: self.now_s
        )
        self.exporter: ShmExporter = self.transport.export([self.region], self.holds, host="", secret=SECRET)
        self.reader = self.connect()

    def connect(self, ticket: bytes | None = None) -> ShmReader:
        return self.transport.connect(
            self.exporter.ticket if ticket is None else ticket,
            [self.memory.destination],
            secret=SECRET,
            deadline_s=LONG_S,
        )

    def read(self) -> None:
        plan = plan_of([(0, 0, self.memory.address, SIZE)])
        self.reader.read(plan, self.hold, deadline_s=LONG_S)

    def ticket_with(self, **changes: object) -> bytes:
        ticket = read_unverified(self.exporter.ticket, ShmTicket, transport=NAME)
        return sign(msgspec.structs.replace(ticket, **changes), transport=NAME, secret=SECRET)

    def close(self) -> None:
        self.reader.close()
        self.exporter.close()
        self.holds.close()
        self.region.close()
        self.memory.check()

    def _copy(self, *arguments: Any) -> bool:
        is_done = copy_piece(*arguments)
        self.pieces += 1
        self.between(self.pieces)
        return is_done


@pytest.fixture
def setting() -> Iterator[Setting]:
    setting = Setting()
    yield setting
    setting.close()


def test_a_large_range_is_copied_in_pieces(setting: Setting) -> None:
    setting.region.tensor().numpy()[:] = pattern(0, 0, SIZE, salt=3)
    setting.read()
    assert setting.pieces == PIECES
    assert np.array_equal(setting.memory.bytes, pattern(0, 0, SIZE, salt=3))


def test_a_hold_that_ends_between_two_pieces_stops_the_copy(setting: Setting) -> None:
    setting.between = lambda piece: setting.holds.revoke(setting.hold) if piece == 2 else None
    with pytest.raises(TransferFailed, match="ended Hold"):
        setting.read()
    assert setting.pieces == 2
    assert (setting.memory.bytes[2 * PIECE_BYTES :] == CANARY).all()


def test_a_hold_that_ends_during_the_last_piece_fails_the_read(setting: Setting) -> None:
    def reuse(piece: int) -> None:
        if piece == PIECES:
            setting.holds.revoke(setting.hold)
            assert setting.holds.grant().slot == setting.hold.slot  # the next request has the slot already

    setting.between = reuse
    with pytest.raises(TransferFailed, match="ended Hold"):
        setting.read()


def test_a_deadline_that_passes_stops_the_copy(setting: Setting) -> None:
    def late(piece: int) -> None:
        setting.now_s += LONG_S / 2 + 1

    setting.between = late
    with pytest.raises(DeadlineExceeded, match="remote read over shm"):
        setting.read()
    assert setting.pieces == 2
    setting.between = lambda piece: None
    setting.read()


def test_a_reader_that_is_closed_during_a_copy_ends_it_and_unmaps_afterwards(setting: Setting) -> None:
    mapped_during: list[int] = []

    def close(piece: int) -> None:
        setting.reader.close()
        mapped_during.append(mappings())

    before = mappings()
    setting.between = close
    with pytest.raises(TransferFailed, match="closed meanwhile"):
        setting.read()
    assert (setting.pieces, mapped_during) == (1, [before])
    assert mappings() == before - 3  # the region, the holds and the flag


def mappings() -> int:
    with open("/proc/self/maps") as maps:
        return sum("memfd:kvstrata" in line for line in maps)


def test_an_export_that_is_closed_during_a_copy_stops_it(setting: Setting) -> None:
    setting.between = lambda piece: setting.exporter.close()
    with pytest.raises(TransferFailed, match="closed its export"):
        setting.read()
    assert setting.pieces == 1


def test_a_table_of_holds_that_is_closed_during_a_copy_stops_it(setting: Setting) -> None:
    setting.between = lambda piece: setting.holds.close()
    with pytest.raises(TransferFailed, match="ended Hold"):
        setting.read()
    assert setting.pieces == 1


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"boot_id": "another"}, "another host"),
        ({"pid_namespace": 1}, "another process namespace"),
        ({"user": os.geteuid() + 1}, "as user"),
        ({"start_ticks": 1}, "has ended"),
    ],
    ids=["host", "container", "user", "another process of the same number"],
)
def test_a_producer_that_cannot_be_mapped_is_not_reached(
    setting: Setting, changes: dict[str, object], reason: str
) -> None:
    ticket = setting.ticket_with(**changes)
    assert reason in (setting.transport.reaches(ticket) or "")
    with pytest.raises(TransferFailed, match=reason):
        setting.connect(ticket)


def test_a_region_that_was_freed_before_is_not_mapped(setting: Setting) -> None:
    setting.region.close()
    before = mappings()
    with pytest.raises(TransferFailed, match="cannot be mapped"):
        setting.connect()
    assert mappings() == before  # what had been mapped by then was given up


def test_a_region_that_is_freed_afterwards_can_still_be_read(setting: Setting) -> None:
    setting.region.tensor().numpy()[:] = pattern(0, 0, SIZE, salt=4)
    setting.region.close()
    setting.read()
    assert np.array_equal(setting.memory.bytes, pattern(0, 0, SIZE, salt=4))


def test_a_ticket_of_another_transport_is_refused_in_spite_of_its_signature(setting: Setting) -> None:
    ticket = read_unverified(setting.exporter.ticket, ShmTicket, transport=NAME)
    foreign = sign(ticket, transport="tcp", secret=SECRET)
    with pytest.raises(TransferFailed, match="secret"):
        setting.connect(foreign)


def test_a_hold_of_another_table_is_none_here(setting: Setting) -> None:
    other = HoldTable()
    for _ in range(5):
        other.grant()
    foreign = Hold(slot=3, generation=4)
    assert other.is_valid(foreign)
    plan = plan_of([(0, 0, setting.memory.address, 10)])
    with pytest.raises(TransferFailed, match="ended Hold"):
        setting.reader.read(plan, foreign, deadline_s=LONG_S)
    other.close()


def test_the_exporter_counts_nothing_for_nothing_passes_through_it(setting: Setting) -> None:
    setting.read()
    assert setting.exporter.statistics().reads == 0
    assert setting.reader.statistics().read_bytes == SIZE
    setting.exporter.check_integrity()
