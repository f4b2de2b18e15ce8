"""How every transport ends: producers that are killed or stopped, readers and exports that are closed."""

from __future__ import annotations

import os
import threading
import time

import numpy as np
import pytest
from transport_cases import (
    BIG_BYTES,
    BIG_PATTERN,
    LONG_S,
    MIB,
    SECRET,
    SHORT_S,
    Family,
    big_plan,
    in_thread,
    join,
    poll,
    start_big_read,
)

from kvstrata.errors import DeadlineExceeded, TransferFailed
from kvstrata.memory.region import HostRegion
from kvstrata.remote.holds import Hold, HoldTable
from kvstrata.remote.transports.base import Reader
from kvstrata.remote.transports.testing import CANARY, Memory, ProducerProcess, pattern, plan_of


def test_a_killed_producer_ends_reads_within_their_deadline(
    family: Family, own_producer: ProducerProcess
) -> None:
    memory = Memory(BIG_BYTES)
    reader = family.connect(own_producer.ticket, memory)
    hold = own_producer.grant()
    thread, errors = start_big_read(reader, hold, memory)
    own_producer.kill()
    own_producer.join()
    join(thread)
    # It may have been done already; then what it brought is right.
    assert all(isinstance(error, TransferFailed) for error in errors)
    assert errors or np.array_equal(memory.bytes, BIG_PATTERN)
    started_s = time.monotonic()
    with pytest.raises(TransferFailed):
        reader.read(big_plan(memory), hold, deadline_s=LONG_S)
    with pytest.raises(TransferFailed):
        family.connect(own_producer.ticket, memory)
    assert time.monotonic() - started_s < LONG_S / 4
    reader.close()


def test_a_stopped_producer_does_not_hold_a_read_beyond_its_deadline(
    family: Family, producer: ProducerProcess, reader: Reader, hold: Hold, memory: Memory
) -> None:
    plan = plan_of([(0, 0, memory.address, MIB)])
    producer.stop()
    try:
        started_s = time.monotonic()
        for _ in range(2):  # on the connection that was, and on a new one
            if family.asks_owner:
                with pytest.raises(DeadlineExceeded, match=r"tcp.*within 0\.\d+ s"):
                    reader.read(plan, hold, deadline_s=SHORT_S)
            else:
                reader.read(plan, hold, deadline_s=LONG_S)
        assert time.monotonic() - started_s < LONG_S / 4
        snapshot = memory.whole.copy()
    finally:
        producer.resume()
    reader.read(plan_of([(0, 0, memory.address, 1)]), hold, deadline_s=LONG_S)
    # The reads that were given up wrote nothing after they ended.
    snapshot[Memory.STRIP_BYTES] = memory.bytes[0]
    assert np.array_equal(memory.whole, snapshot)


def test_a_producer_that_is_stopped_during_a_read_does_not_hold_it(
    family: Family, producer: ProducerProcess, hold: Hold
) -> None:
    memory = Memory(BIG_BYTES)
    reader = family.connect(producer.ticket, memory)
    thread, errors = start_big_read(reader, hold, memory, deadline_s=2.0)
    producer.stop()
    try:
        join(thread)
    finally:
        producer.resume()
    assert all(isinstance(error, DeadlineExceeded) for error in errors)
    reader.read(big_plan(memory), hold, deadline_s=LONG_S)
    assert np.array_equal(memory.bytes, BIG_PATTERN)
    reader.close()


def test_a_reader_works_again_after_an_error(
    reader: Reader, producer: ProducerProcess, hold: Hold, memory: Memory
) -> None:
    plan = plan_of([(0, 5, memory.address, 70_000)])
    for _ in range(3):
        ended = producer.grant()
        producer.revoke(ended)
        with pytest.raises(TransferFailed):
            reader.read(plan, ended, deadline_s=LONG_S)
        memory.bytes[:] = CANARY
        reader.read(plan, hold, deadline_s=LONG_S)
        assert (memory.bytes[:70_000] == pattern(0, 5, 70_000, salt=1)).all()


def test_no_time_at_all_is_a_deadline_not_a_read(reader: Reader, hold: Hold, memory: Memory) -> None:
    plan = plan_of([(0, 0, memory.address, 4096)])
    with pytest.raises(DeadlineExceeded):
        reader.read(plan, hold, deadline_s=-1.0)
    reader.read(plan, hold, deadline_s=LONG_S)


def test_a_reader_that_is_closed_from_another_thread_ends_its_read(
    family: Family, producer: ProducerProcess, hold: Hold
) -> None:
    memory = Memory(BIG_BYTES)
    reader = family.connect(producer.ticket, memory)

    def read_on() -> None:
        while True:
            reader.read(big_plan(memory), hold, deadline_s=LONG_S)

    if family.asks_owner:
        producer.stop()  # so that it waits for bytes that do not come
    try:
        thread, errors = in_thread(read_on)
        poll(lambda: family.asks_owner or memory.bytes[0] != CANARY, "the first byte")
        started_s = time.monotonic()
        reader.close()
        join(thread)
        assert time.monotonic() - started_s < LONG_S / 4
    finally:
        producer.resume()
    assert [type(error) for error in errors] == [TransferFailed]
    assert "closed" in str(errors[0])
    with pytest.raises(TransferFailed, match="closed"):
        reader.read(big_plan(memory), hold, deadline_s=LONG_S)
    reader.close()


def test_a_closed_export_fails_reads_and_connections(family: Family, own_producer: ProducerProcess) -> None:
    memory = Memory(MIB)
    reader = family.connect(own_producer.ticket, memory)
    hold = own_producer.grant()
    plan = plan_of([(0, 0, memory.address, 4096)])
    reader.read(plan, hold, deadline_s=LONG_S)
    own_producer.close_export()
    own_producer.close_export()
    memory.bytes[:] = CANARY
    with pytest.raises(TransferFailed):
        reader.read(plan, hold, deadline_s=LONG_S)
    with pytest.raises(TransferFailed):
        family.connect(own_producer.ticket, memory)
    assert memory.is_untouched()
    reader.close()


def test_nothing_is_left_when_both_sides_are_closed(family: Family) -> None:
    def used() -> tuple[int, list[str], list[str]]:
        threads = sorted(t.name for t in threading.enumerate() if t.name.startswith("kvstrata"))
        with open("/proc/self/maps") as maps:
            mapped = sorted({line.split("memfd:")[1] for line in maps if "memfd:kvstrata" in line})
        return len(os.listdir("/proc/self/fd")), threads, mapped

    def use() -> None:
        region = HostRegion.create(4 * MIB, "left", huge_pages=False)
        region.tensor().numpy()[:] = pattern(0, 0, 4 * MIB, salt=1)
        holds = HoldTable()
        hold = holds.grant()
        memory = Memory(4 * MIB)
        exporter = family.transport.export([region], holds, host="127.0.0.1", secret=SECRET)
        readers = [family.connect(exporter.ticket, memory) for _ in range(5)]
        for reader in readers:
            reader.read(plan_of([(0, 0, memory.address, 4 * MIB)]), hold, deadline_s=LONG_S)
            with pytest.raises(TransferFailed):
                reader.read(plan_of([(9, 0, memory.address, 1)]), hold, deadline_s=LONG_S)
        assert np.array_equal(memory.bytes, pattern(0, 0, 4 * MIB, salt=1))
        exporter.check_integrity()
        for reader in readers[:3]:
            reader.close()
            reader.close()
        exporter.close()
        exporter.close()
        exporter.check_integrity()
        for reader in readers[3:]:
            reader.close()
        holds.close()
        region.close()

    use()  # what is made once, as a logger's or the compiler's files
    before = used()
    use()
    assert used() == before
