"""What every transport refuses, before any byte moves: ranges, destinations, secrets, tickets."""

from __future__ import annotations

import pytest
from transport_cases import (
    LONG_S,
    MIB,
    REGIONS,
    SECRET,
    Family,
)

from kvstrata.errors import TransferFailed
from kvstrata.remote.holds import Hold
from kvstrata.remote.transports.base import Reader
from kvstrata.remote.transports.testing import Memory, ProducerProcess, plan_of


@pytest.mark.parametrize(
    ("region", "offset", "size"),
    [
        (0, 0, REGIONS[0] + 1),
        (0, REGIONS[0] - 10, 11),
        (0, -1, 10),
        (0, 1 << 62, 1 << 62),
        (0, (1 << 63) - 1, 2),
        (0, 0, 0),
        (0, 0, -5),
        (len(REGIONS), 0, 1),
        (-1, 0, 1),
    ],
)
def test_a_range_outside_its_region_is_refused_before_any_byte_moves(
    reader: Reader, hold: Hold, memory: Memory, region: int, offset: int, size: int
) -> None:
    good = (0, 0, memory.address, 64)
    with pytest.raises(TransferFailed, match="outside their region"):
        reader.read(plan_of([good, (region, offset, memory.address, size)]), hold, deadline_s=LONG_S)
    assert memory.is_untouched()
    reader.read(plan_of([good]), hold, deadline_s=LONG_S)


@pytest.mark.parametrize(
    ("place", "size"), [(-1, 10), (4 * MIB - 9, 10), (4 * MIB, 1), (-(1 << 20), 64), (1 << 40, 64)]
)
def test_a_destination_that_is_not_registered_or_too_small_is_refused_before_any_byte_moves(
    reader: Reader, hold: Hold, memory: Memory, place: int, size: int
) -> None:
    good = (0, 0, memory.address, 64)
    with pytest.raises(TransferFailed, match="no registered destination"):
        reader.read(plan_of([good, (0, 0, memory.address + place, size)]), hold, deadline_s=LONG_S)
    assert memory.is_untouched()


def test_a_reader_without_destinations_reads_nothing(
    family: Family, producer: ProducerProcess, hold: Hold, memory: Memory
) -> None:
    reader = family.transport.connect(producer.ticket, [], secret=SECRET, deadline_s=LONG_S)
    with pytest.raises(TransferFailed, match="no registered destination"):
        reader.read(plan_of([(0, 0, memory.address, 1)]), hold, deadline_s=LONG_S)
    reader.close()


def test_a_wrong_secret_is_refused(family: Family, producer: ProducerProcess, memory: Memory) -> None:
    with pytest.raises(TransferFailed, match="secret"):
        family.connect(producer.ticket, memory, secret=b"another")


def test_a_ticket_that_was_tampered_with_is_refused(
    family: Family, producer: ProducerProcess, memory: Memory
) -> None:
    ticket = producer.ticket
    for changed in (b"", b"x", ticket[:-1], ticket[:40], ticket + b"\0", bytes(len(ticket)), bytes(2 << 20)):
        assert changed != ticket
        with pytest.raises(TransferFailed):
            family.connect(changed, memory)
    for place in range(0, len(ticket), 7):
        flipped = bytearray(ticket)
        flipped[place] ^= 0x10
        with pytest.raises(TransferFailed):
            family.connect(bytes(flipped), memory)
        family.transport.reaches(bytes(flipped))  # answers, whatever it answers


def test_a_ticket_of_this_host_is_reached_and_contains_no_secret(
    family: Family, producer: ProducerProcess
) -> None:
    assert family.transport.usable() is None
    assert family.transport.reaches(producer.ticket) is None
    assert family.transport.reaches(b"not a ticket") is not None
    assert SECRET not in producer.ticket
