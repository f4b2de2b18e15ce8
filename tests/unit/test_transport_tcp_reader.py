"""The tcp transport's reader: producers that lie, trickle or let it go, and where they may be."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from tcp_ends import HOST, LONG_S, SECRET, SIZE, exported_region, hold_table, poll, server_threads, soon

from kvstrata.errors import DeadlineExceeded, TransferFailed
from kvstrata.memory.region import HostRegion
from kvstrata.remote.holds import HoldTable
from kvstrata.remote.transports import tcp_wire
from kvstrata.remote.transports.channel import Channel
from kvstrata.remote.transports.tcp import TcpReader, TcpTransport
from kvstrata.remote.transports.testing import Memory, pattern, plan_of


@pytest.fixture
def region() -> Iterator[HostRegion]:
    with exported_region() as region:
        yield region


@pytest.fixture
def holds() -> Iterator[HoldTable]:
    with hold_table() as holds:
        yield holds


class FakeProducer:
    """Speaks the handshake, then plays `script` on the connection; a thread a connection."""

    def __init__(self, holds: HoldTable, region: HostRegion, script: Callable[[Channel], None]) -> None:
        self._real = TcpTransport().export([region], holds, host=HOST, secret=SECRET)
        self.ticket = self._real.ticket
        self._real.close()
        server = self._real._server
        self._listener = socket.create_server((HOST, server.port))
        self._export_id = server.export_id
        self._script = script
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join(LONG_S)
        self._listener.close()

    def _serve(self) -> None:
        while True:
            try:
                channel = Channel(self._listener.accept()[0])
            except OSError:
                return
            tcp_wire.accept_reader(channel, export_id=self._export_id, secret=SECRET, give_up_s=soon())
            with contextlib.suppress(TransferFailed):
                self._script(channel)
            channel.close()


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (b"x" * 12, "no reply"),
        (struct.pack("<4sII", b"kvrp", 9, 0), "no reply"),
        (struct.pack("<4sII", b"kvrp", 1, 0xFFFFFFFF), "no reply"),
        (struct.pack("<4sII", b"kvrp", 1, 3) + b"\xff\xfe!", "!"),
        (struct.pack("<4sII", b"kvrp", 0, 0) + b"half", "ended the connection"),
        (b"", "ended the connection"),
    ],
    ids=["garbage", "status", "huge reason", "reason that is no text", "half of the bytes", "nothing"],
)
def test_a_producer_that_lies_fails_the_read_only(
    region: HostRegion, holds: HoldTable, words: bytes, what: str
) -> None:
    def script(channel: Channel) -> None:
        tcp_wire.receive_request(channel, give_up_s=soon())
        channel.send(words, give_up_s=soon(), wait="")

    producer = FakeProducer(holds, region, script)
    memory = Memory(1000)
    reader = TcpTransport().connect(producer.ticket, [memory.destination], secret=SECRET, deadline_s=LONG_S)
    for _ in range(2):
        with pytest.raises(TransferFailed, match=what):
            reader.read(plan_of([(0, 0, memory.address, 100)]), holds.grant(), deadline_s=LONG_S)
    memory.check()
    reader.close()
    producer.close()


def test_a_producer_that_trickles_does_not_hold_a_read_beyond_its_deadline(
    region: HostRegion, holds: HoldTable
) -> None:
    def script(channel: Channel) -> None:
        tcp_wire.receive_request(channel, give_up_s=soon())
        channel.send(struct.pack("<4sII", b"kvrp", 0, 0), give_up_s=soon(), wait="")
        while True:
            channel.send(b"x", give_up_s=soon(), wait="")
            time.sleep(0.01)

    producer = FakeProducer(holds, region, script)
    memory = Memory(SIZE)
    reader = TcpTransport().connect(producer.ticket, [memory.destination], secret=SECRET, deadline_s=LONG_S)
    plan = plan_of([(0, at, memory.address + at, 3) for at in range(0, 1000, 4)])
    started_s = time.monotonic()
    with pytest.raises(DeadlineExceeded):
        reader.read(plan, holds.grant(), deadline_s=0.5)
    assert time.monotonic() - started_s < LONG_S / 4
    reader.close()
    producer.close()


def test_a_reader_connects_again_when_the_connection_was_let_go(region: HostRegion, holds: HoldTable) -> None:
    exporter = TcpTransport().export([region], holds, host=HOST, secret=SECRET)
    memory = Memory(1000)
    reader = TcpTransport().connect(exporter.ticket, [memory.destination], secret=SECRET, deadline_s=LONG_S)
    assert isinstance(reader, TcpReader)
    plan, hold = plan_of([(0, 0, memory.address, 1000)]), holds.grant()
    for _ in range(3):
        for channel in list(exporter._server._connections):
            channel.shutdown()
        poll(lambda: server_threads() == 1, "the end of the reader's thread")
        reader.read(plan, hold, deadline_s=LONG_S)
    assert reader.statistics().failed_reads == 0
    assert exporter.statistics().dropped_connections == 0
    reader.close()
    exporter.close()


def test_ipv6_works_where_there_is_any(region: HostRegion, holds: HoldTable) -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no IPv6")
    exporter = TcpTransport().export([region], holds, host="::1", secret=SECRET)
    memory = Memory(1000)
    reader = TcpTransport().connect(exporter.ticket, [memory.destination], secret=SECRET, deadline_s=LONG_S)
    reader.read(plan_of([(0, 0, memory.address, 1000)]), holds.grant(), deadline_s=LONG_S)
    assert (memory.bytes == pattern(0, 0, 1000, salt=1)).all()
    reader.close()
    exporter.close()


def test_regions_may_be_freed_while_they_are_still_exported(holds: HoldTable) -> None:
    region = HostRegion.create(4096, "freed", huge_pages=False)
    region.tensor()[:] = 7
    exporter = TcpTransport().export([region], holds, host=HOST, secret=SECRET)
    region.close()
    memory = Memory(4096)
    reader = TcpTransport().connect(exporter.ticket, [memory.destination], secret=SECRET, deadline_s=LONG_S)
    reader.read(plan_of([(0, 0, memory.address, 4096)]), holds.grant(), deadline_s=LONG_S)
    assert (memory.bytes == 7).all()
    reader.close()
    exporter.close()
