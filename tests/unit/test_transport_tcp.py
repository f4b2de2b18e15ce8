"""The tcp transport's server against strangers, broken peers and frames that lie."""

from __future__ import annotations

import contextlib
import random
import socket
import struct
import time
from collections.abc import Iterator

import numpy as np
import pytest
from tcp_ends import HOST, LONG_S, SECRET, SIZE, exported_region, hold_table, poll, server_threads, soon

from kvstrata.errors import ConfigurationError, TransferFailed
from kvstrata.memory.region import HostRegion
from kvstrata.remote.holds import HOLD_SLOTS, Hold, HoldTable
from kvstrata.remote.transports import tcp_wire
from kvstrata.remote.transports.channel import Channel, PeerGone
from kvstrata.remote.transports.tcp import TcpTransport
from kvstrata.remote.transports.tcp_server import TcpServer
from kvstrata.remote.transports.tcp_wire import Kind, greet_exporter, pack_request, receive_reply
from kvstrata.remote.transports.testing import Memory, pattern


@pytest.fixture
def region() -> Iterator[HostRegion]:
    with exported_region() as region:
        yield region


@pytest.fixture
def holds() -> Iterator[HoldTable]:
    with hold_table() as holds:
        yield holds


@pytest.fixture
def server(region: HostRegion, holds: HoldTable) -> Iterator[TcpServer]:
    yield from serving(
        TcpServer([region], holds, host=HOST, secret=SECRET, max_connections=4, handshake_s=LONG_S)
    )


@pytest.fixture
def impatient(region: HostRegion, holds: HoldTable) -> Iterator[TcpServer]:
    """Lets go whoever is slow to speak, on a slow machine its friends as well."""
    yield from serving(
        TcpServer([region], holds, host=HOST, secret=SECRET, max_connections=4, handshake_s=0.5)
    )


def serving(server: TcpServer) -> Iterator[TcpServer]:
    yield server
    server.check_integrity()
    server.close()
    assert server_threads() == 0


def dial(server: TcpServer) -> Channel:
    return Channel(socket.create_connection((HOST, server.port), timeout=LONG_S))


def known(server: TcpServer, secret: bytes = SECRET) -> Channel:
    channel = dial(server)
    greet_exporter(channel, export_id=server.export_id, secret=secret, give_up_s=soon())
    return channel


def assert_let_go(channel: Channel) -> None:
    """The server ends the connection, without an answer after the greeting."""
    with pytest.raises(PeerGone):
        channel.receive(1 << 20, give_up_s=soon(), wait="the end")
    channel.close()


def assert_serves(server: TcpServer, hold: Hold) -> None:
    memory = Memory(1000)
    channel = known(server)
    ranges = np.array([[0], [5], [1000]], dtype=np.int64)
    channel.send(pack_request(Kind.READ, hold, timeout_s=LONG_S, ranges=ranges), give_up_s=soon(), wait="")
    receive_reply(channel, give_up_s=soon(), wait="")
    assert channel.receive(1000, give_up_s=soon(), wait="") == pattern(0, 5, 1000, salt=1).tobytes()
    channel.send(pack_request(Kind.CHECK, hold, timeout_s=LONG_S), give_up_s=soon(), wait="")
    receive_reply(channel, give_up_s=soon(), wait="")
    channel.close()
    memory.check()


def frame(
    kind: int, count: int, slot: int, generation: int, body: bytes = b"", magic: bytes = b"kvrq"
) -> bytes:
    return struct.pack("<4sIIIQI", magic, kind, count, slot, generation, 10_000) + body


# Strangers


@pytest.mark.parametrize(
    "words",
    [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 10, bytes(200), b"\xff" * 5000, b"kvstrata" * 20],
    ids=["http", "zeros", "ones", "our name"],
)
def test_a_stranger_is_counted_and_let_go(server: TcpServer, holds: HoldTable, words: bytes) -> None:
    channel = dial(server)
    channel.send(words, give_up_s=soon(), wait="")
    assert_let_go(channel)
    poll(lambda: server.statistics().dropped_connections == 1, "the count")
    assert_serves(server, holds.grant())


def test_a_stranger_learns_nothing_but_a_greeting(server: TcpServer) -> None:
    channel = dial(server)
    greeting = channel.receive(44, give_up_s=soon(), wait="")
    assert greeting[:8] == b"kvstrata"
    answer = struct.pack("<8sI32s32s", b"kvstrata", tcp_wire.VERSION, bytes(32), bytes(32))
    channel.send(answer, give_up_s=soon(), wait="")
    with pytest.raises(PeerGone):
        channel.receive(1, give_up_s=soon(), wait="")
    channel.close()


def test_a_silent_stranger_is_let_go_in_time(impatient: TcpServer) -> None:
    silent = [dial(impatient) for _ in range(3)]
    for channel in silent:
        assert_let_go(channel)
    poll(lambda: impatient.statistics().dropped_connections == 3, "the count")
    poll(lambda: server_threads() == 1, "the end of their threads")


def test_no_more_connections_than_are_allowed(server: TcpServer, holds: HoldTable) -> None:
    readers = [known(server) for _ in range(4)]
    with pytest.raises(PeerGone):
        known(server)
    poll(lambda: server.statistics().dropped_connections == 1, "the count")
    for channel in readers:
        channel.close()
    poll(lambda: server_threads() == 1, "the end of the readers' threads")
    assert_serves(server, holds.grant())


def test_another_secret_or_another_export_is_refused_to_both(server: TcpServer) -> None:
    for export_id, secret in ((server.export_id, b"another"), (bytes(16), SECRET)):
        channel = dial(server)
        with pytest.raises(TransferFailed, match="secret"):
            greet_exporter(channel, export_id=export_id, secret=secret, give_up_s=soon())
        channel.close()
    poll(lambda: server.statistics().dropped_connections == 2, "the count")


def test_a_proof_that_was_overheard_is_of_no_use(server: TcpServer) -> None:
    heard = Overheard(server)
    greet_exporter(heard, export_id=server.export_id, secret=SECRET, give_up_s=soon())
    heard.close()
    channel = dial(server)
    channel.send(heard.sent, give_up_s=soon(), wait="")
    channel.receive(44, give_up_s=soon(), wait="")
    with pytest.raises(PeerGone):
        channel.receive(1, give_up_s=soon(), wait="")
    channel.close()


class Overheard(Channel):
    """Remembers what was sent through it."""

    def __init__(self, server: TcpServer) -> None:
        super().__init__(socket.create_connection((HOST, server.port)))
        self.sent = b""

    def send(self, data: bytes, *, give_up_s: float, wait: str) -> None:
        self.sent += data
        super().send(data, give_up_s=give_up_s, wait=wait)


# Frames that lie


@pytest.mark.parametrize(
    "words",
    [
        frame(1, 1, 0, 1, bytes(24), magic=b"nope"),
        frame(0, 0, 0, 1),
        frame(3, 0, 0, 1),
        frame(1, 0, 0, 1),
        frame(1, tcp_wire.MAX_REQUEST_RANGES + 1, 0, 1),
        frame(1, 0xFFFFFFFF, 0, 1),
        frame(2, 1, 0, 1, bytes(24)),
        frame(1, 1, HOLD_SLOTS, 1, struct.pack("<qqq", 0, 0, 1)),
        frame(1, 1, 0, 0, struct.pack("<qqq", 0, 0, 1)),
        frame(1, 3, 0, 1, np.array([[0] * 3, [0] * 3, [SIZE] * 3], dtype="<i8").tobytes()),
    ],
    ids=[
        "magic",
        "kind 0",
        "kind 3",
        "no ranges",
        "too many ranges",
        "very many ranges",
        "check with ranges",
        "slot",
        "generation",
        "too many bytes",
    ],
)
def test_a_frame_that_lies_is_counted_and_ends_the_connection(
    server: TcpServer, holds: HoldTable, words: bytes
) -> None:
    hold = holds.grant()
    assert (hold.slot, hold.generation) == (0, 1)
    channel = known(server)
    channel.send(words, give_up_s=soon(), wait="")
    assert_let_go(channel)
    poll(lambda: server.statistics().dropped_connections == 1, "the count")
    assert_serves(server, hold)


@pytest.mark.parametrize("offset", [SIZE - 4, -1, 1 << 62, (1 << 63) - 1])
def test_ranges_outside_a_region_are_refused_by_the_server_too(
    server: TcpServer, holds: HoldTable, offset: int
) -> None:
    hold = holds.grant()
    channel = known(server)
    ranges = np.array([[0, 0], [0, offset], [5, 5]], dtype=np.int64)
    request = pack_request(Kind.READ, hold, timeout_s=LONG_S, ranges=ranges)
    channel.send(request, give_up_s=soon(), wait="")
    with pytest.raises(TransferFailed, match="outside their region"):
        receive_reply(channel, give_up_s=soon(), wait="")
    assert server.statistics().refused_ranges == 1
    channel.send(pack_request(Kind.CHECK, hold, timeout_s=LONG_S), give_up_s=soon(), wait="")
    receive_reply(channel, give_up_s=soon(), wait="")  # it is a refusal, not a broken stream
    channel.close()


def test_random_bytes_at_any_stage_do_no_harm(server: TcpServer, holds: HoldTable) -> None:
    generator = random.Random(7)
    good = pack_request(
        Kind.READ, Hold(slot=0, generation=1), timeout_s=1, ranges=np.ones((3, 2), dtype=np.int64)
    )
    for turn in range(60):
        channel = known(server) if turn % 3 else dial(server)
        words = bytearray(good if turn % 2 else generator.randbytes(generator.randrange(1, 300)))
        words[generator.randrange(len(words))] ^= 1 << generator.randrange(8)
        with contextlib.suppress(PeerGone):
            channel.send(bytes(words[: generator.randrange(1, len(words) + 1)]), give_up_s=soon(), wait="")
        channel.close()
        poll(lambda: server_threads() == 1, "the end of the reader's thread")
    server.check_integrity()
    assert_serves(server, holds.grant())


def test_half_a_frame_does_not_hold_a_thread_for_long(impatient: TcpServer) -> None:
    channel = known_at_last(impatient)
    with contextlib.suppress(PeerGone):  # by now it may have been let go
        channel.send(frame(1, 100, 0, 1), give_up_s=soon(), wait="")
    poll(lambda: server_threads() == 1, "the end of the reader's thread")
    channel.close()


def known_at_last(server: TcpServer) -> Channel:
    """A connection to a server that may have been too impatient for the first ones."""
    made: list[Channel] = []

    def try_once() -> bool:
        with contextlib.suppress(TransferFailed):
            made.append(known(server))
        return bool(made)

    poll(try_once, "a greeting in time")
    return made[0]


def test_a_reader_that_takes_nothing_does_not_hold_a_thread_for_long(
    server: TcpServer, holds: HoldTable
) -> None:
    channel = known(server)
    ranges = np.array([[0], [0], [SIZE]], dtype=np.int64)
    request = pack_request(Kind.READ, holds.grant(), timeout_s=0.3, ranges=ranges)
    channel.send(4 * request, give_up_s=soon(), wait="")  # more than the buffers of both sockets hold
    poll(lambda: server_threads() == 1, "the end of the reader's thread")
    channel.close()


def test_a_server_closes_while_a_reader_takes_nothing(region: HostRegion, holds: HoldTable) -> None:
    server = TcpServer([region], holds, host=HOST, secret=SECRET)
    channel = known(server)
    ranges = np.array([[0], [0], [SIZE]], dtype=np.int64)
    request = pack_request(Kind.READ, holds.grant(), timeout_s=LONG_S, ranges=ranges)
    for _ in range(4):
        channel.send(request, give_up_s=soon(), wait="")
    silent = dial(server)
    started_s = time.monotonic()
    server.close()
    assert time.monotonic() - started_s < LONG_S / 4
    assert server_threads() == 0
    for one in (channel, silent):
        one.close()


# Addresses


@pytest.mark.parametrize("host", ["", "0.0.0.0", "::", "203.0.113.7", "no such name"])
def test_an_address_that_cannot_be_named_or_bound_is_refused(holds: HoldTable, host: str) -> None:
    with pytest.raises(ConfigurationError, match="host"):
        TcpTransport().export([], holds, host=host, secret=SECRET)


def test_only_the_given_address_listens(server: TcpServer) -> None:
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.2", server.port), timeout=LONG_S)
