"""What every transport must do (`kvstrata.remote.transports.base`): exact bytes, holds, several readers.

Producers are processes of their own. What is refused, and how things end, is in the files beside this one.
"""

from __future__ import annotations

import time

import numpy as np
import pytest
from transport_cases import (
    BIG,
    BIG_BYTES,
    BIG_PATTERN,
    FAR,
    FAR_BYTES,
    KIB,
    LONG_S,
    MIB,
    REGIONS,
    Family,
    big_plan,
    in_thread,
    join,
    poll,
    start_big_read,
)

from kvstrata.errors import TransferFailed
from kvstrata.remote.holds import Hold, HoldRevoked
from kvstrata.remote.transports.base import Reader
from kvstrata.remote.transports.testing import CANARY, Memory, ProducerProcess, pattern, plan_of

# Exactness


def test_one_range_lands_where_it_should_and_nowhere_else(reader: Reader, hold: Hold, memory: Memory) -> None:
    reader.read(plan_of([(1, 77, memory.address + 5, 100_001)]), hold, deadline_s=LONG_S)
    assert (memory.bytes[5 : 5 + 100_001] == pattern(1, 77, 100_001, salt=1)).all()
    assert (memory.bytes[:5] == CANARY).all()
    assert (memory.bytes[5 + 100_001 :] == CANARY).all()


@pytest.mark.parametrize(("count", "size"), [(3000, 7), (700, 1153), (40, 40_000), (1, 2 * MIB)])
def test_many_ranges_from_several_regions_keep_their_places(
    reader: Reader, hold: Hold, memory: Memory, count: int, size: int
) -> None:
    generator = np.random.default_rng(count)
    places = generator.permutation(len(memory.bytes) // (size + 1))[:count] * (size + 1)
    ranges = []
    for place in places:
        region = int(generator.integers(2)) if size <= MIB else 0
        offset = int(generator.integers(REGIONS[region] - size + 1))
        ranges.append((region, offset, memory.address + int(place), size))
    reader.read(plan_of(ranges), hold, deadline_s=LONG_S)
    expected = np.full_like(memory.bytes, CANARY)
    for region, offset, dst, size_bytes in ranges:
        at = dst - memory.address
        expected[at : at + size_bytes] = pattern(region, offset, size_bytes, salt=1)
    assert np.array_equal(memory.bytes, expected)


def test_ranges_far_beyond_four_gibibytes_are_not_cut_to_32_bits(
    reader: Reader, hold: Hold, memory: Memory
) -> None:
    ranges = [
        (2, FAR, memory.address, 100_000),
        (2, FAR + FAR_BYTES - 9, memory.address + 200_000, 9),
        (2, REGIONS[2] - 4096, memory.address + 300_000, 4096),  # its very end, never written
    ]
    reader.read(plan_of(ranges), hold, deadline_s=LONG_S)
    assert (memory.bytes[:100_000] == pattern(2, FAR, 100_000, salt=1)).all()
    assert (memory.bytes[200_000:200_009] == pattern(2, FAR + FAR_BYTES - 9, 9, salt=1)).all()
    assert not memory.bytes[300_000 : 300_000 + 4096].any()


def test_a_read_of_nothing_still_looks_at_the_hold(
    reader: Reader, producer: ProducerProcess, memory: Memory
) -> None:
    hold = producer.grant()
    reader.read(plan_of([]), hold, deadline_s=LONG_S)
    producer.revoke(hold)
    with pytest.raises(TransferFailed):
        reader.read(plan_of([]), hold, deadline_s=LONG_S)
    assert memory.is_untouched()


def test_what_the_producer_writes_later_is_read_later(
    reader: Reader, producer: ProducerProcess, hold: Hold, memory: Memory
) -> None:
    for salt in (2, 3, 1):
        producer.fill(1, 0, 1000, salt=salt)
        reader.read(plan_of([(1, 0, memory.address, 1000)]), hold, deadline_s=LONG_S)
        assert (memory.bytes[:1000] == pattern(1, 0, 1000, salt=salt)).all()


def test_reads_are_counted(reader: Reader, hold: Hold, memory: Memory) -> None:
    reader.read(plan_of([(0, 0, memory.address, 4096), (0, 9, memory.address, 1)]), hold, deadline_s=LONG_S)
    with pytest.raises(TransferFailed):
        reader.read(plan_of([(7, 0, memory.address, 1)]), hold, deadline_s=LONG_S)
    counts = reader.statistics()
    assert (counts.reads, counts.read_bytes, counts.failed_reads, counts.refused_ranges) == (1, 4097, 1, 1)


def test_the_owner_hears_of_reads_that_succeeded(family: Family, own_producer: ProducerProcess) -> None:
    memory = Memory(MIB)
    reader = family.connect(own_producer.ticket, memory)
    hold, ended = own_producer.grant(), own_producer.grant()
    own_producer.revoke(ended)
    plan = plan_of([(0, 0, memory.address, 4096)])
    with pytest.raises(TransferFailed):
        reader.read(plan, ended, deadline_s=LONG_S)
    for _ in range(3):
        reader.read(plan, hold, deadline_s=LONG_S)
    told = 3 if family.tells_owner else 0
    poll(lambda: own_producer.statistics().reads >= told, "the owner's count")
    reader.close()
    assert own_producer.statistics().reads == told


# Holds


def test_a_hold_that_ended_or_never_was_fails_a_read(
    reader: Reader, producer: ProducerProcess, hold: Hold, memory: Memory
) -> None:
    ended = producer.grant()
    producer.revoke(ended)
    plan = plan_of([(0, 0, memory.address, 1000)])
    for wrong in (ended, Hold(slot=hold.slot, generation=hold.generation + 1), Hold(slot=4000, generation=1)):
        with pytest.raises(TransferFailed, match="ended"):
            reader.read(plan, wrong, deadline_s=LONG_S)
    assert memory.is_untouched()
    reader.read(plan, hold, deadline_s=LONG_S)
    assert reader.statistics().failed_reads == 3


def test_a_hold_that_ends_during_a_read_fails_it(family: Family, producer: ProducerProcess) -> None:
    memory = Memory(BIG_BYTES)
    assert CANARY not in BIG_PATTERN[[0, -1]]
    reader = family.connect(producer.ticket, memory)
    for _ in range(200):
        memory.bytes[:] = CANARY
        hold = producer.grant()
        thread, errors = start_big_read(reader, hold, memory)
        producer.revoke(hold)
        was_unfinished = memory.bytes[-1] == CANARY
        join(thread)
        if was_unfinished:
            assert [type(error) for error in errors] == [HoldRevoked]
            break
    else:
        pytest.fail("the read was always done before the hold could be ended")
    hold = producer.grant()
    reader.read(big_plan(memory), hold, deadline_s=LONG_S)
    assert np.array_equal(memory.bytes, BIG_PATTERN)
    producer.revoke(hold)
    reader.close()


def test_a_read_that_succeeds_never_holds_a_byte_of_the_next_owner(
    family: Family, producer: ProducerProcess
) -> None:
    """The producer reuses the memory while it is read, at ever other moments (M1, M3)."""
    size = 4 * MIB
    memory = Memory(size)
    reader = family.connect(producer.ticket, memory)
    plan = plan_of([(BIG, at, memory.address + at, 64 * KIB) for at in range(0, size, 64 * KIB)])
    expected = {salt: pattern(BIG, 0, size, salt=salt) for salt in (1, 2)}
    for turn in range(40):
        before, after = (1, 2) if turn % 2 == 0 else (2, 1)
        hold = producer.grant()
        # Reads are repeated until one fails, so that the end of the hold falls into one of them or between.
        producer.revoke_then_fill(hold, BIG, 0, size, salt=after)
        give_up_s = time.monotonic() + LONG_S
        while time.monotonic() < give_up_s:
            try:
                reader.read(plan, hold, deadline_s=LONG_S)
            except TransferFailed:
                break
            assert np.array_equal(memory.bytes, expected[before])
        else:
            pytest.fail("reads of a hold that ended go on")
        producer.answer()
    reader.close()


# Several at once


def test_several_readers_at_once_each_get_their_own_bytes(family: Family, producer: ProducerProcess) -> None:
    size = 16_000

    def work(number: int) -> None:
        memory = Memory(MIB)
        reader = family.connect(producer.ticket, memory)
        hold = producer_hold[number]
        for turn in range(30):
            offset = (number * 31 + turn * 7919) % (REGIONS[0] - 40 * size)
            ranges = [(0, offset + i * size, memory.address + i * (size + 3), size) for i in range(40)]
            reader.read(plan_of(ranges), hold, deadline_s=LONG_S)
            for _, at, dst, _ in ranges:
                place = dst - memory.address
                assert np.array_equal(memory.bytes[place : place + size], pattern(0, at, size, salt=1))
        memory.check()
        reader.close()

    producer_hold = [producer.grant() for _ in range(8)]
    running = [in_thread(lambda n=number: work(n)) for number in range(8)]
    for thread, errors in running:
        join(thread)
        assert errors == []
    for hold in producer_hold:
        producer.revoke(hold)


def test_a_reader_that_fails_does_not_disturb_another(
    family: Family, producer: ProducerProcess, hold: Hold, memory: Memory
) -> None:
    good, bad = (family.connect(producer.ticket, memory) for _ in range(2))
    ended = producer.grant()
    producer.revoke(ended)
    plan = plan_of([(0, 0, memory.address, 10_000)])
    for _ in range(5):
        with pytest.raises(TransferFailed):
            bad.read(plan, ended, deadline_s=LONG_S)
        good.read(plan, hold, deadline_s=LONG_S)
    bad.close()
    good.read(plan, hold, deadline_s=LONG_S)
    good.close()
