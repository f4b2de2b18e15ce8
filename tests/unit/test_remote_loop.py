"""The loop of an endpoint hears before it ticks, bounds what it hears, and tells everyone when it dies."""

from __future__ import annotations

import logging
import threading
from collections import Counter, deque
from collections.abc import Iterator

import pytest

from kvstrata.errors import TransferFailed
from kvstrata.remote import loop as loop_module
from kvstrata.remote.channels import ConnectingChannel, ListeningChannel
from kvstrata.remote.loop import EndpointLoop, Outcomes
from kvstrata.remote.protocol.codec import Codec
from kvstrata.remote.protocol.messages import MAX_FRAME_BYTES, AnyMessage, Beat, Ready
from kvstrata.remote.testing.sides import poll_until
from kvstrata.store.testing import ManualClock

DEADLINE_S = 20.0
LATE_S = 1.0
SILENT_S = 3.0
SECRET = b"secret of the tests"
BEAT = Beat(epoch="e", transfers=("t",))


class FakeChannel:
    """Has at each wait what `arrivals` says next, and nothing once they are used up."""

    def __init__(self, arrivals: list[list[list[bytes]]]) -> None:
        self.counts: Counter[str] = Counter()
        self.arrivals = deque(arrivals)
        self.sent: list[tuple[str, list[bytes]]] = []
        self.is_closed = False
        self._there: deque[list[bytes]] = deque()
        self.waits = 0

    def wait(self, timeout_s: float | None, wake_fd: int) -> bool:
        self.waits += 1
        self._there += self.arrivals.popleft() if self.arrivals else []
        return bool(self._there)

    def receive(self) -> tuple[str, list[bytes]] | None:
        return ("peer", self._there.popleft()) if self._there else None

    def send(self, peer: str, frames: list[bytes]) -> None:
        self.sent.append((peer, frames))

    def flush(self) -> None: ...

    def forget(self, peer: str) -> None: ...

    def close(self) -> None:
        self.is_closed = True


class FakeDriver:
    """Writes down what it is asked; ends the loop's work by `done` after a tick."""

    def __init__(self, due_s: float | None) -> None:
        self.due_s = due_s
        self.log: list[str] = []
        self.ticked = threading.Event()
        self.fails_with: BaseException | None = None

    def receive(self, peer: str, message: AnyMessage) -> None:
        self.log.append("receive")

    def tick(self) -> None:
        self.log.append("tick")
        self.due_s = None
        self.ticked.set()

    def next_tick_s(self) -> float | None:
        return self.due_s

    def perform(self) -> None:
        if self.fails_with is not None:
            raise self.fails_with

    def died(self) -> None:
        self.log.append("died")


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


def loop_of(driver: FakeDriver, channel: FakeChannel, clock: ManualClock) -> EndpointLoop:
    return EndpointLoop(
        name="test", driver=driver, channel=channel, codec=Codec(SECRET), clock=clock, late_s=LATE_S
    )


def encoded(count: int) -> list[list[bytes]]:
    codec = Codec(SECRET)
    return [codec.encode(BEAT) for _ in range(count)]


def test_a_loop_that_was_stopped_hears_what_came_meanwhile_before_it_ticks(clock: ManualClock) -> None:
    # Nothing in the socket when the process goes on: its own thread for it was stopped too.
    driver = FakeDriver(clock.now_s - 2 * LATE_S)
    loop = loop_of(driver, FakeChannel([[], encoded(2), encoded(1)]), clock)
    loop.start()
    assert driver.ticked.wait(DEADLINE_S)
    loop.stop(deadline_s=DEADLINE_S)
    assert driver.log[:4] == ["receive", "receive", "receive", "tick"]
    assert loop.counts["late_rounds"] == 1


def test_a_loop_in_time_does_not_wait_for_more(clock: ManualClock) -> None:
    driver = FakeDriver(clock.now_s - LATE_S / 2)
    loop = loop_of(driver, FakeChannel([encoded(1)]), clock)
    loop.start()
    assert driver.ticked.wait(DEADLINE_S)
    loop.stop(deadline_s=DEADLINE_S)
    assert driver.log[:2] == ["receive", "tick"]
    assert loop.counts["late_rounds"] == 0


def test_a_flood_does_not_keep_the_machine_from_its_deadlines(
    clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop_module, "MAX_HEARD", 10)
    driver = FakeDriver(clock.now_s)
    loop = loop_of(driver, FakeChannel([encoded(1000)]), clock)
    loop.start()
    assert driver.ticked.wait(DEADLINE_S)
    loop.stop(deadline_s=DEADLINE_S)
    assert driver.log.index("tick") == 10


def test_the_first_dropped_message_of_a_kind_is_logged(
    clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    driver = FakeDriver(clock.now_s)
    strangers = [Codec(b"another secret").encode(BEAT) for _ in range(3)]
    loop = loop_of(driver, FakeChannel([strangers]), clock)
    loop.start()
    assert driver.ticked.wait(DEADLINE_S)
    loop.stop(deadline_s=DEADLINE_S)
    assert "receive" not in driver.log
    assert loop.counts["secret"] == 3
    assert [record.getMessage().startswith("test endpoint: dropped") for record in caplog.records] == [True]


def test_a_message_that_cannot_be_sent_is_counted(
    clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    channel = FakeChannel([])
    loop = loop_of(FakeDriver(None), channel, clock)
    too_long = Ready(
        epoch="e",
        transfer="t",
        member=0,
        generation=1,
        layer=0,
        part=0,
        first_block=0,
        end_block=MAX_FRAME_BYTES,
        blocks=(1,) * MAX_FRAME_BYTES,
        is_last=True,
    )
    with caplog.at_level(logging.ERROR):
        loop.send("peer", too_long)
    loop.send("peer", BEAT)
    assert loop.counts["unsendable"] == 1
    assert [peer for peer, _ in channel.sent] == ["peer"]


def test_a_loop_dies_aloud(clock: ManualClock) -> None:
    driver, channel = FakeDriver(None), FakeChannel([])
    loop = loop_of(driver, channel, clock)
    loop.start()
    driver.fails_with = RuntimeError("a defect")
    loop.wake()
    poll_until(lambda: loop.is_over, DEADLINE_S, "the loop to die")
    for enter in (loop.check_alive, lambda: loop.entered().__enter__()):
        with pytest.raises(TransferFailed, match=r"test endpoint thread died: RuntimeError\('a defect'\)"):
            enter()
    assert driver.log == ["died"]
    with loop.looking():
        pass
    loop.stop(deadline_s=DEADLINE_S)
    assert channel.is_closed


def test_a_defect_in_another_thread_ends_the_loop(clock: ManualClock) -> None:
    driver = FakeDriver(None)
    loop = loop_of(driver, FakeChannel([]), clock)
    loop.start()
    loop.die(AssertionError("read 7 was reported twice"))
    poll_until(lambda: loop.is_over, DEADLINE_S, "the loop to die")
    with pytest.raises(TransferFailed, match="read 7 was reported twice"):
        loop.check_alive()


def test_a_stopped_loop_says_that_it_was_closed(clock: ManualClock) -> None:
    loop = loop_of(FakeDriver(None), FakeChannel([]), clock)
    loop.start()
    loop.stop(deadline_s=DEADLINE_S)
    loop.stop(deadline_s=DEADLINE_S)
    loop.wake()
    with pytest.raises(TransferFailed, match="test endpoint was closed"):
        loop.check_alive()


def test_outcomes_are_taken_once_and_in_order() -> None:
    outcomes: Outcomes[int] = Outcomes()
    assert not outcomes.wait(lambda: False, 0.0)
    outcomes.add(1)
    outcomes.add(2)
    assert outcomes.wait(lambda: False, 0.0)
    assert outcomes.take() == [1, 2]
    assert outcomes.take() == []
    assert outcomes.wait(lambda: True, 0.0)


@pytest.fixture
def listening() -> Iterator[ListeningChannel]:
    channel = ListeningChannel(host="127.0.0.1", port=0)
    yield channel
    channel.close()


@pytest.fixture
def connecting(clock: ManualClock) -> Iterator[ConnectingChannel]:
    channel = ConnectingChannel(keep_s=1.0, clock=clock)
    yield channel
    channel.close()


def receive(
    channel: ListeningChannel | ConnectingChannel, other: ConnectingChannel
) -> tuple[str, list[bytes]]:
    found: list[tuple[str, list[bytes]]] = []

    def look() -> bool:
        other.flush()
        channel.wait(0.01, 0)
        received = channel.receive()
        if received is not None:
            found.append(received)
        return bool(found)

    poll_until(look, DEADLINE_S, "a message")
    return found[0]


def test_messages_go_both_ways(listening: ListeningChannel, connecting: ConnectingChannel) -> None:
    peer = f"127.0.0.1:{listening.address[1]}"
    connecting.send(peer, [b"mac", b"payload"])
    identity, frames = receive(listening, connecting)
    assert frames == [b"mac", b"payload"]
    listening.send(identity, [b"a", b"b"])
    assert receive(connecting, connecting) == (peer, [b"a", b"b"])


def test_a_peer_that_is_gone_is_counted(listening: ListeningChannel) -> None:
    listening.send("ab" * 8, [b"a", b"b"])
    assert listening.counts == {"peer is gone": 1}


def test_what_waits_for_a_connection_is_dropped_when_it_is_old(
    connecting: ConnectingChannel, clock: ManualClock, listening: ListeningChannel
) -> None:
    nowhere = "127.0.0.1:1"
    connecting.send(nowhere, [b"old"])
    connecting.flush()
    assert connecting.counts == {}
    clock.now_s += 1.5
    connecting.flush()
    assert connecting.counts == {"peer has no connection": 1}


def tell(connecting: ConnectingChannel, listening: ListeningChannel, count: int) -> list[str]:
    """Send that many messages; returns under which identity each came."""
    identities = []
    for _ in range(count):
        connecting.send(f"127.0.0.1:{listening.address[1]}", [b"word"])
        identities.append(receive(listening, connecting)[0])
    return identities


def test_a_doubted_peer_is_connected_to_anew(
    connecting: ConnectingChannel, clock: ManualClock, listening: ListeningChannel
) -> None:
    peer = f"127.0.0.1:{listening.address[1]}"
    first, again = tell(connecting, listening, 2)
    clock.now_s += SILENT_S
    connecting.doubt(peer, SILENT_S)
    second, third = tell(connecting, listening, 2)
    assert first == again != second == third
    assert connecting.counts == {"peer was silent": 1}
    listening.send(second, [b"answer"])
    assert receive(connecting, connecting)[1] == [b"answer"]


def test_a_doubt_that_is_wrong_changes_nothing(
    connecting: ConnectingChannel, clock: ManualClock, listening: ListeningChannel
) -> None:
    peer = f"127.0.0.1:{listening.address[1]}"
    connecting.doubt(peer, SILENT_S)  # nothing was ever said
    (first,) = tell(connecting, listening, 1)
    connecting.doubt(peer, SILENT_S)  # not long ago
    assert tell(connecting, listening, 1) == [first]
    clock.now_s += SILENT_S
    connecting.doubt(peer, SILENT_S)
    listening.send(first, [b"answer"])  # it was only slow
    receive(connecting, connecting)
    assert tell(connecting, listening, 1) == [first]
    assert connecting.counts == {}


def test_connections_are_bounded_and_the_quietest_goes_first(
    connecting: ConnectingChannel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstrata.remote.channels.MAX_PEERS", 2)
    for port in (1, 2, 1, 3):
        connecting.send(f"127.0.0.1:{port}", [b"x"])
    assert list(connecting._sockets) == ["127.0.0.1:1", "127.0.0.1:3"]


def test_one_that_floods_does_not_keep_another_from_being_heard(
    connecting: ConnectingChannel, listening: ListeningChannel
) -> None:
    quiet = ListeningChannel(host="127.0.0.1", port=0)
    try:
        identities = []
        for server in (listening, quiet):
            connecting.send(f"127.0.0.1:{server.address[1]}", [b"hello"])
            identities.append(receive(server, connecting)[0])
        for _ in range(100):
            listening.send(identities[0], [b"flood"])
        quiet.send(identities[1], [b"quiet"])
        heard: list[bytes] = []

        def look() -> bool:
            connecting.wait(0.01, 0)
            while (received := connecting.receive()) is not None:
                heard.append(received[1][0])
            return len(heard) == 101

        poll_until(look, DEADLINE_S, "all messages")
        assert b"quiet" in heard
    finally:
        quiet.close()
