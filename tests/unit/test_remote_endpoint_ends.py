"""Both endpoints in one process: threads that die, waits, and the closing."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from remote_sides import (
    DEADLINE_S,
    SHAPE,
    Gate,
    Make,
    WrappedTransport,
    begin,
    check_nothing_is_left,
    maker,
)

from kvstrata.errors import DeadlineExceeded, TransferFailed
from kvstrata.remote.testing.sides import ConsumerSide, ProducerSide, poll_until, quick_options
from kvstrata.remote.transports.registry import transport_for


@pytest.fixture
def make() -> Iterator[Make]:
    with ExitStack() as stack:
        yield maker(stack)


def break_machine(endpoint: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> float:
        raise RuntimeError("a defect")

    monkeypatch.setattr(endpoint, "next_tick_s", broken)
    endpoint._loop.wake()
    endpoint._loop._thread.join(DEADLINE_S)


def test_a_dead_thread_of_prefill_is_an_error_and_its_holds_are_revoked(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    producer = make(ProducerSide, options=quick_options(open_wait_s=1.0))
    consumer = make(ConsumerSide, options=quick_options(wait_s=1.0))
    begin(producer, consumer, "t", [1])
    break_machine(producer.endpoint, monkeypatch)
    for call in (
        producer.endpoint.take_settled,
        producer.endpoint.check_integrity,
        lambda: producer.abort(transfer="t"),
        lambda: producer.publish(transfer="t"),
        lambda: producer.open(transfer="u", address=consumer.address(), blocks=[1]),
    ):
        with pytest.raises(TransferFailed, match="prefill endpoint thread died: RuntimeError"):
            call()
    assert producer.endpoint.statistics().holds.live == 0
    # Decode does not wait for ever either.
    assert consumer.wait_finished(transfers=["t"])["t"][0] in ("lapsed", "failed")


def test_a_dead_thread_of_decode_is_an_error_and_wakes_who_waits(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    producer, consumer = make(ProducerSide, options=quick_options(open_wait_s=1.0)), make(ConsumerSide)
    begin(producer, consumer, "t", [1])
    seen: list[BaseException] = []

    def wait() -> None:
        try:
            consumer.endpoint.wait_finished(DEADLINE_S)
        except TransferFailed as error:
            seen.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    break_machine(consumer.endpoint, monkeypatch)
    waiting.join(DEADLINE_S)
    assert "decode endpoint thread died" in str(seen[0])
    for call in (
        consumer.endpoint.take_finished,
        consumer.endpoint.check_integrity,
        lambda: consumer.abort(transfer="t"),
        lambda: consumer.expect(transfer="u", blocks=[1]),
    ):
        with pytest.raises(TransferFailed, match="decode endpoint thread died"):
            call()
    assert producer.wait_settled(transfers=["t"])["t"][0] in ("lapsed", "failed")


def test_waiting_for_nothing_ends_in_time(make: Make) -> None:
    consumer = make(ConsumerSide)
    assert not consumer.endpoint.wait_finished(0.01)
    consumer.expect(transfer="t", blocks=[1])
    consumer.abort(transfer="t")
    assert consumer.endpoint.wait_finished(DEADLINE_S)
    assert consumer.finished()["t"][0] == "aborted"


def test_closing_decode_tells_prefill(make: Make) -> None:
    producer, consumer = make(ProducerSide), make(ConsumerSide)
    begin(producer, consumer, "t", [1, 2])
    producer.publish(transfer="t", layers=[0])
    poll_until(lambda: consumer.endpoint.statistics().layers_read == 1, DEADLINE_S, "one layer")
    consumer.endpoint.close(deadline_s=DEADLINE_S)
    counts = consumer.endpoint.statistics()
    assert (counts.transfers_open, counts.quarantined_blocks, counts.reads.running) == (0, 0, 0)
    assert producer.wait_settled(transfers=["t"])["t"][0] in ("aborted", "lapsed")
    with pytest.raises(TransferFailed, match="was closed"):
        consumer.endpoint.take_finished()
    check_nothing_is_left(producer)


def test_closing_prefill_tells_decode(make: Make) -> None:
    producer, consumer = make(ProducerSide), make(ConsumerSide)
    begin(producer, consumer, "t", [1, 2])
    producer.publish(transfer="t", layers=[0])
    poll_until(lambda: consumer.endpoint.statistics().layers_read == 1, DEADLINE_S, "one layer")
    producer.endpoint.close(deadline_s=DEADLINE_S)
    counts = producer.endpoint.statistics()
    assert (counts.transfers_open, counts.holds.live) == (0, 0)
    assert consumer.wait_finished(transfers=["t"])["t"][0] in ("failed", "lapsed")
    check_nothing_is_left(consumer)


def test_a_read_that_cannot_be_ended_is_told_at_the_closing() -> None:
    gate = Gate()
    producer = ProducerSide(options=quick_options(), shape=SHAPE, transports=[transport_for("shm")])
    consumer = ConsumerSide(
        options=quick_options(),
        shape=SHAPE,
        transports=[WrappedTransport(transport_for("shm"), gate)],
    )
    begin(producer, consumer, "t", [1])
    producer.publish(transfer="t")
    assert gate.reached.wait(DEADLINE_S)
    with pytest.raises(DeadlineExceeded, match="ending the reads of the decode endpoint"):
        consumer.endpoint.close(deadline_s=0.1)
    gate.opened.set()
    producer.close()
