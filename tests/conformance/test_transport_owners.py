"""The processes that serve memory for a library: stopped, killed, abandoned by readers, left by their parent.

Whatever happens to such a process, the engine that started it lives on, and its readers end in time.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import psutil
import pytest
from transport_cases import (
    BIG,
    BIG_BYTES,
    BIG_PATTERN,
    FAMILIES,
    KIB,
    LONG_S,
    MIB,
    SECRET,
    SHORT_S,
    Family,
    big_plan,
    environment_of,
    join,
    poll,
    start_big_read,
)

from kvstrata.errors import DeadlineExceeded, TransferFailed
from kvstrata.remote.holds import Hold, HoldRevoked
from kvstrata.remote.transports.base import Reader
from kvstrata.remote.transports.engines.libraries import LIBRARIES
from kvstrata.remote.transports.engines.ticket import EngineTicket
from kvstrata.remote.transports.registry import transport_for
from kvstrata.remote.transports.testing import CANARY, Memory, ProducerProcess, pattern, plan_of
from kvstrata.remote.transports.tickets import verify

SERVED = [member for member in FAMILIES if member.startswith(LIBRARIES)]


@pytest.fixture(params=SERVED)
def family(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Family]:
    with environment_of(request.param, tmp_path):
        family = FAMILIES[request.param]()
        reason = family.transport.usable()
        if reason is not None:
            pytest.skip(reason)
        yield family


@pytest.fixture
def producer(own_producer: ProducerProcess) -> ProducerProcess:
    return own_producer


def owner_of(producer: ProducerProcess) -> psutil.Process:
    """The process that serves its memory."""
    (owner,) = [
        child
        for child in psutil.Process(producer.pid).children()
        if "kvstrata.remote.transports.engines.serve" in child.cmdline()
    ]
    return owner


def is_gone(process: psutil.Process) -> bool:
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_a_stopped_owner_does_not_hold_a_read_and_writes_nothing_later(
    family: Family, producer: ProducerProcess
) -> None:
    memory = Memory(BIG_BYTES)
    reader = family.connect(producer.ticket, memory)
    hold = producer.grant()
    reader.read(plan_of([(BIG, 0, memory.address, 4 * KIB)]), hold, deadline_s=LONG_S)
    owner = owner_of(producer)
    owner.suspend()
    memory.bytes[:] = CANARY
    started_s = time.monotonic()
    for _ in range(2):  # on the connection that was, and on a new one
        try:
            reader.read(big_plan(memory), hold, deadline_s=SHORT_S)
        except DeadlineExceeded:
            continue
        # The system read its memory: it has no part in that.
        assert np.array_equal(memory.bytes, BIG_PATTERN)
    assert time.monotonic() - started_s < LONG_S / 4
    before = memory.whole.copy()
    owner.resume()
    try:
        other = Memory(BIG_BYTES)
        second = family.connect(producer.ticket, other)
        second.read(big_plan(other), hold, deadline_s=LONG_S)
        assert np.array_equal(other.bytes, BIG_PATTERN)
        second.close()
    except TransferFailed:
        # Some libraries abort in this state; then only the serving process is lost.
        assert is_gone(owner)
    assert np.array_equal(memory.whole, before), "a read that was given up wrote after it ended"
    assert producer.revoke(hold)  # the producer lives
    reader.close()


def read_or_miss(reader: Reader, hold: Hold, memory: Memory) -> bool:
    """Whether everything was read; else a named error, and nobody believes what landed."""
    memory.bytes[:] = CANARY
    try:
        reader.read(big_plan(memory), hold, deadline_s=LONG_S)
    except TransferFailed:
        return False
    assert np.array_equal(memory.bytes, BIG_PATTERN)
    return True


def test_a_killed_owner_fails_reads_and_is_started_again_under_the_same_holds(
    family: Family, producer: ProducerProcess
) -> None:
    memory = Memory(BIG_BYTES)
    reader = family.connect(producer.ticket, memory)
    hold, ended = producer.grant(), producer.grant()
    for lives in (1, 2):
        memory.bytes[:] = CANARY
        thread, errors = start_big_read(reader, hold, memory)
        owner = owner_of(producer)
        owner.kill()
        join(thread)
        assert all(isinstance(error, TransferFailed) for error in errors)
        assert errors or np.array_equal(memory.bytes, BIG_PATTERN)
        poll(lambda owner=owner: is_gone(owner), "the owner's end")
        started_s = time.monotonic()
        read_or_miss(reader, hold, memory)
        assert time.monotonic() - started_s < LONG_S / 4
        poll(lambda lives=lives: producer.statistics().owner_restarts == lives, "the next life")
        assert read_or_miss(reader, hold, memory), "a reader of the earlier life finds the next one"
        assert owner_of(producer).pid != owner.pid
    # Who comes later with the first ticket, too; and what the producer ended stays ended.
    other = family.connect(producer.ticket, memory)
    assert read_or_miss(other, hold, memory)
    assert producer.revoke(ended)
    with pytest.raises(HoldRevoked):
        other.read(big_plan(memory), ended, deadline_s=LONG_S)
    assert producer.statistics().owner_ends == 2
    for one in (other, reader):
        one.close()
    owner = owner_of(producer)
    producer.close_export()
    poll(lambda: is_gone(owner), "the owner's end")
    assert producer.statistics().owner_ends == 2, "an end that was asked for is none of these"


def test_an_owner_ends_with_the_producer(family: Family, producer: ProducerProcess) -> None:
    owner = owner_of(producer)
    producer.kill()
    producer.join()
    owner.wait(LONG_S)  # not this process's child: it polls
    with pytest.raises(TransferFailed):
        family.connect(producer.ticket, Memory(MIB))


def test_a_producer_that_was_restarted_is_not_taken_for_its_earlier_life(
    family: Family, producer: ProducerProcess
) -> None:
    memory = Memory(BIG_BYTES)
    reader = family.connect(producer.ticket, memory)
    hold = producer.grant()
    thread, errors = start_big_read(reader, hold, memory)
    producer.kill()
    producer.join()
    with ProducerProcess(family.inner, (*[4 * KIB] * BIG, BIG_BYTES), secret=SECRET) as restarted:
        restarted.fill(BIG, 0, BIG_BYTES, salt=2)
        new_hold = restarted.grant()
        assert new_hold == hold, "the same words, as far as the table of holds can tell"
        join(thread)
        assert errors or np.array_equal(memory.bytes, BIG_PATTERN)
        with pytest.raises(TransferFailed):
            reader.read(big_plan(memory), hold, deadline_s=LONG_S)
        with pytest.raises(TransferFailed):
            family.connect(producer.ticket, memory)
        again = family.connect(restarted.ticket, memory)
        again.read(plan_of([(BIG, 0, memory.address, MIB)]), new_hold, deadline_s=LONG_S)
        assert not np.array_equal(memory.bytes[:MIB], BIG_PATTERN[:MIB])
        again.close()
    reader.close()


def _read_on(pipe: Connection, name: str, ticket: bytes, hold: Hold) -> None:
    memory = Memory(BIG_BYTES)
    reader = transport_for(name).connect(ticket, [memory.destination], secret=SECRET, deadline_s=LONG_S)
    pipe.send("reads")
    while True:
        reader.read(big_plan(memory), hold, deadline_s=LONG_S)


def test_readers_that_are_killed_in_mid_read_do_not_end_the_owner(
    family: Family, producer: ProducerProcess
) -> None:
    hold = producer.grant()
    context = multiprocessing.get_context("spawn")
    for _ in range(3):
        ours, theirs = context.Pipe()
        process = context.Process(
            target=_read_on, args=(theirs, family.inner, producer.ticket, hold), daemon=True
        )
        process.start()
        assert ours.poll(LONG_S), "the reader never began"
        process.kill()
        process.join(LONG_S)
        ours.close()
        theirs.close()
    memory = Memory(BIG_BYTES)
    reader = family.connect(producer.ticket, memory)
    reader.read(big_plan(memory), hold, deadline_s=LONG_S)
    assert np.array_equal(memory.bytes, BIG_PATTERN)
    reader.close()
    assert owner_of(producer).is_running()


def test_an_owner_on_loopback_listens_there_only_unless_its_library_cannot(
    family: Family, producer: ProducerProcess
) -> None:
    found = [one for one in owner_of(producer).net_connections("inet") if one.status == psutil.CONN_LISTEN]
    everywhere = {one.laddr.ip for one in found} - {"127.0.0.1", "::1"}
    # docs/data_plane.md tells how to fence Mooncake's.
    assert everywhere == ({"0.0.0.0", "::"} if family.inner == "mooncake" else set())


def test_a_stranger_cannot_write_to_what_mooncake_serves(tmp_path: Path) -> None:
    with environment_of("mooncake", tmp_path):
        family = FAMILIES["mooncake"]()
        reason = family.transport.usable()
        if reason is not None:
            pytest.skip(reason)
        from mooncake.engine import TransferEngine

        with ProducerProcess("mooncake", (MIB,), secret=SECRET) as producer:
            producer.fill(0, 0, MIB, salt=1)
            ticket = verify(producer.ticket, EngineTicket, transport="mooncake", secret=SECRET)
            stranger, garbage = TransferEngine(), np.full(4 * KIB, 0xEE, dtype=np.uint8)
            assert stranger.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
            assert stranger.register_memory(garbage.ctypes.data, garbage.nbytes) == 0
            where, length = ([garbage.ctypes.data], [ticket.addresses[0]]), [garbage.nbytes]
            # Reads are not kept from strangers ...
            assert stranger.batch_transfer_sync_read(ticket.peer.decode(), *where, length) == 0
            assert np.array_equal(garbage, pattern(0, 0, 4 * KIB, salt=1))
            garbage[:] = 0xEE
            stranger.batch_transfer_sync_write(ticket.peer.decode(), *where, length)
            # ... but what they write stays outside: the memory is mapped for reading.
            memory = Memory(MIB)
            reader = family.connect(producer.ticket, memory)
            reader.read(plan_of([(0, 0, memory.address, MIB)]), producer.grant(), deadline_s=LONG_S)
            assert np.array_equal(memory.bytes, pattern(0, 0, MIB, salt=1))
            reader.close()
