"""Both endpoints in one process: reads, saves that fail, aborts, and what is quarantined meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from remote_sides import (
    DEADLINE_S,
    SHAPE,
    Gate,
    Make,
    WrappedTransport,
    begin,
    check_nothing_is_left,
    end_well,
    maker,
)

from kvstrata.errors import TransferFailed
from kvstrata.move.ledger import AlreadyDone, Failure, LaneLedger, Ticket
from kvstrata.remote.testing.sides import ConsumerSide, ProducerSide, poll_until, quick_options
from kvstrata.remote.transports.registry import transport_for


@pytest.fixture
def make() -> Iterator[Make]:
    with ExitStack() as stack:
        yield maker(stack)


def test_a_read_that_fails_is_tried_again(make: Make) -> None:
    attempts: list[int] = []

    def fail_at_first() -> None:
        attempts.append(1)
        if len(attempts) <= 2:
            raise TransferFailed("a bad moment")

    producer = make(ProducerSide)
    consumer = make(ConsumerSide, transports=[WrappedTransport(transport_for("shm"), fail_at_first)])
    begin(producer, consumer, "t", [1, 2])
    producer.publish(transfer="t")
    end_well([producer], [consumer], "t")


def test_a_read_that_fails_for_good_fails_its_request_on_both_sides(make: Make) -> None:
    def fail() -> None:
        raise TransferFailed("broken for good")

    producer = make(ProducerSide)
    consumer = make(ConsumerSide, transports=[WrappedTransport(transport_for("shm"), fail)])
    begin(producer, consumer, "t", [1, 2])
    producer.publish(transfer="t")
    ending, reason = consumer.wait_finished(transfers=["t"])["t"]
    assert (ending, "broken for good" in reason) == ("failed", True), reason
    ending, reason = producer.wait_settled(transfers=["t"])["t"]
    assert (ending, "broken for good" in reason) == ("failed", True), reason
    check_nothing_is_left(producer, consumer)


@pytest.mark.parametrize("name", ["shm", "tcp"])
def test_a_read_of_blocks_that_were_given_away_is_tried_once(make: Make, name: str) -> None:
    attempts: list[int] = []

    def give_away() -> None:
        attempts.append(1)
        producer.endpoint.revoke("t")

    producer = make(ProducerSide, transports=[transport_for(name)])
    consumer = make(ConsumerSide, transports=[WrappedTransport(transport_for(name), give_away)])
    begin(producer, consumer, "t", [1, 2])
    producer.publish(transfer="t", layers=[0])
    ending, reason = consumer.wait_finished(transfers=["t"])["t"]
    assert (ending, "its memory may be reused" in reason) == ("failed", True), reason
    assert len(attempts) == 1
    assert consumer.endpoint.statistics().machine.retried_reads == 0
    assert producer.wait_settled(transfers=["t"])["t"][0] == "failed"
    check_nothing_is_left(producer, consumer)


def test_blocks_are_published_only_when_their_save_is_done(make: Make) -> None:
    producer, consumer = make(ProducerSide), make(ConsumerSide)
    saved = threading.Event()
    ticket = Ticket(name="save", lane="out", wait_until_settled=lambda ticket, s: saved.wait(s) and None)
    begin(producer, consumer, "t", [1, 2])
    producer.publish(transfer="t", layers=[1, 2])
    producer.endpoint.publish(
        "t", layer=0, first_block=0, end_block=2, blocks=[1, 2], is_last=True, after=ticket
    )
    poll_until(lambda: consumer.endpoint.statistics().layers_read == 2, DEADLINE_S, "two layers")
    assert producer.endpoint.statistics().published_parts == 2
    producer.memory.write("t", 0, [1, 2], [0])
    ticket.settle()
    saved.set()
    end_well([producer], [consumer], "t")


class NeverDone:
    name = "a save"

    def done(self) -> bool:
        return False

    def wait(self, *, deadline_s: float, what: str) -> None:
        raise AssertionError("a device's wait says nothing to the host")


def test_a_save_that_fails_ends_its_transfer_and_stays_untold(make: Make) -> None:
    producer, consumer = make(ProducerSide), make(ConsumerSide)
    ledger = LaneLedger("out")
    failure = Failure("save of layer 0", RuntimeError("disk"), ledger)
    ticket = Ticket(name="save", lane="out", wait_until_settled=lambda ticket, s: None)
    ticket.settle(failure)
    begin(producer, consumer, "t", [1, 2])
    poll_until(lambda: producer.endpoint.statistics().machine.active == 1, DEADLINE_S, "it to be accepted")
    producer.endpoint.publish(
        "t", layer=0, first_block=0, end_block=2, blocks=[1, 2], is_last=True, after=ticket
    )
    ending, reason = producer.wait_settled(transfers=["t"])["t"]
    assert ending == "aborted"
    assert "layer 0 was not saved: save of layer 0 failed: disk" in reason
    ending, reason = consumer.wait_finished(transfers=["t"])["t"]
    assert ending == "failed"
    assert "disk" in reason
    assert not failure.told
    check_nothing_is_left(producer, consumer)


def test_a_save_that_never_ends_ends_its_transfer(make: Make) -> None:
    producer = make(ProducerSide, options=quick_options(read_deadline_s=0.2))
    consumer = make(ConsumerSide)
    begin(producer, consumer, "t", [1, 2])
    producer.endpoint.publish(
        "t", layer=0, first_block=0, end_block=2, blocks=[1, 2], is_last=True, after=NeverDone()
    )
    ending, reason = producer.wait_settled(transfers=["t"])["t"]
    assert ending == "aborted"
    assert "waiting for 'a save' before publishing" in reason
    assert consumer.wait_finished(transfers=["t"])["t"][0] != "done"
    begin(producer, consumer, "after", [1, 2])
    producer.memory.write("after", 0, [1, 2], [0, 1, 2])
    for layer in range(SHAPE.layers):
        producer.endpoint.publish(
            "after",
            layer=layer,
            first_block=0,
            end_block=2,
            blocks=[1, 2],
            is_last=True,
            after=AlreadyDone("save"),
        )
    end_well([producer], [consumer], "after")


def test_an_abort_by_prefill_reaches_decode(make: Make) -> None:
    producer, consumer = make(ProducerSide), make(ConsumerSide)
    begin(producer, consumer, "t", [1, 2])
    producer.publish(transfer="t", layers=[0])
    poll_until(lambda: consumer.endpoint.statistics().layers_read == 1, DEADLINE_S, "one layer")
    producer.abort(transfer="t", reason="the client is gone")
    assert producer.wait_settled(transfers=["t"])["t"] == ["aborted", "the client is gone"]
    ending, reason = consumer.wait_finished(transfers=["t"])["t"]
    assert ending == "failed"
    assert "the client is gone" in reason
    check_nothing_is_left(producer, consumer)
    assert consumer.wrong_pages(transfer="t") == []


def test_an_abort_by_decode_reaches_prefill(make: Make) -> None:
    producer, consumer = make(ProducerSide), make(ConsumerSide)
    begin(producer, consumer, "t", [1, 2])
    producer.publish(transfer="t", layers=[0])
    poll_until(lambda: consumer.endpoint.statistics().layers_read == 1, DEADLINE_S, "one layer")
    consumer.abort(transfer="t", reason="the client is gone")
    assert consumer.wait_finished(transfers=["t"])["t"] == ["aborted", "the client is gone"]
    ending, reason = producer.wait_settled(transfers=["t"])["t"]
    assert ending == "aborted"
    assert "the client is gone" in reason
    check_nothing_is_left(producer, consumer)


def test_a_destination_stays_quarantined_while_it_is_being_written(make: Make) -> None:
    gate = Gate()
    producer = make(ProducerSide)
    consumer = make(ConsumerSide, transports=[WrappedTransport(transport_for("shm"), gate)])
    begin(producer, consumer, "t", [1, 2])
    producer.publish(transfer="t")
    assert gate.reached.wait(DEADLINE_S)
    consumer.abort(transfer="t")
    poll_until(
        lambda: consumer.summary()["quarantined_blocks"] == 2, DEADLINE_S, "the blocks to be quarantined"
    )
    assert not consumer.endpoint.wait_finished(0.0)
    assert consumer.finished() == {}
    gate.opened.set()
    assert consumer.wait_finished(transfers=["t"])["t"][0] == "aborted"
    producer.wait_settled(transfers=["t"])
    check_nothing_is_left(producer, consumer)
    assert consumer.wrong_pages(transfer="t") == []


def test_aborts_of_unknown_and_ended_transfers_are_harmless(make: Make) -> None:
    producer, consumer = make(ProducerSide), make(ConsumerSide)
    producer.abort(transfer="never")
    consumer.abort(transfer="never")
    begin(producer, consumer, "t", [1])
    producer.publish(transfer="t")
    end_well([producer], [consumer], "t")
    producer.abort(transfer="t")
    consumer.abort(transfer="t")
    producer.publish(transfer="t", layers=[0])
    poll_until(lambda: producer.summary()["unpublished_parts"] == 1, DEADLINE_S, "the part to be dropped")
    check_nothing_is_left(producer, consumer)
