"""Both endpoints in one process: peers that do not fit, strangers, addresses and ids that cannot be."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
import zmq
from remote_sides import (
    DEADLINE_S,
    Make,
    begin,
    check_nothing_is_left,
    end_well,
    maker,
)

from kvstrata.errors import TransferFailed
from kvstrata.remote.testing.memory import Shape
from kvstrata.remote.testing.sides import ConsumerSide, ProducerSide, poll_until, quick_options


@pytest.fixture
def make() -> Iterator[Make]:
    with ExitStack() as stack:
        yield maker(stack)


def test_a_mismatch_is_refused_with_both_sides_values(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    producer = make(ProducerSide)
    consumer = make(ConsumerSide, shape=Shape(main_bytes=2080), options=quick_options(wait_s=600.0))
    begin(producer, consumer, "t", [1])
    ending, reason = producer.wait_settled(transfers=["t"])["t"]
    assert ending == "failed"
    assert "1040" in reason
    assert "2080" in reason
    assert "prefill rank 0 was refused" in caplog.text
    ending, reason = consumer.wait_finished(transfers=["t"])["t"]
    assert ending == "failed"
    assert "1040" in reason
    assert "2080" in reason
    check_nothing_is_left(producer, consumer)


def test_who_has_another_secret_is_not_heard(make: Make) -> None:
    producer = make(ProducerSide, options=quick_options(b"something else", open_wait_s=0.5))
    consumer = make(ConsumerSide, options=quick_options(wait_s=0.5))
    begin(producer, consumer, "t", [1])
    assert producer.wait_settled(transfers=["t"])["t"][0] == "lapsed"
    assert consumer.wait_finished(transfers=["t"])["t"][0] == "lapsed"
    dropped = consumer.summary()["codec"]["dropped"]
    assert sum(dropped.values()) > 0
    assert consumer.summary()["codec"]["decoded"] == 0
    check_nothing_is_left(producer, consumer)


def test_a_decode_that_answered_nothing_is_connected_to_anew(make: Make) -> None:
    options = quick_options(b"something else", open_wait_s=1.0)
    producer = make(ProducerSide, options=options)
    consumer = make(ConsumerSide, options=quick_options(wait_s=1.0))
    for transfer, renewed in (("t", {}), ("next", {"peer was silent": 1})):
        begin(producer, consumer, transfer, [1])
        assert producer.wait_settled(transfers=[transfer])[transfer][0] == "lapsed"
        assert producer.endpoint.statistics().undelivered == renewed
        consumer.wait_finished(transfers=[transfer])
    check_nothing_is_left(producer, consumer)


def test_rubbish_is_counted_and_nothing_dies(make: Make) -> None:
    producer, consumer = make(ProducerSide), make(ConsumerSide)
    host, port = consumer.address()
    context = zmq.Context()
    stranger = context.socket(zmq.DEALER)
    stranger.connect(f"tcp://{host}:{port}")
    for frames in ([b""], [b"x" * 32, b"y"], [b"a"] * 40, [b"a" * 100_000, b"b" * 100_000]):
        stranger.send_multipart(frames)

    def heard() -> bool:
        counts = consumer.endpoint.statistics()
        return sum(counts.codec.dropped.values()) == 3 and counts.undelivered == {"too many frames": 1}

    poll_until(heard, DEADLINE_S, "four pieces of rubbish")
    context.destroy(linger=0)
    begin(producer, consumer, "t", [1])
    producer.publish(transfer="t")
    end_well([producer], [consumer], "t")


@pytest.mark.parametrize("host", ["not an address", "a\0b", ""])
def test_an_address_that_cannot_be_one_lapses_its_transfer_only(make: Make, host: str) -> None:
    producer = make(ProducerSide, options=quick_options(open_wait_s=0.5))
    consumer = make(ConsumerSide)
    producer.open(transfer="lost", address=(host, 1), blocks=[5])
    begin(producer, consumer, "t", [1])
    producer.publish(transfer="t")
    assert producer.wait_settled(transfers=["lost"])["lost"][0] == "lapsed"
    end_well([producer], [consumer], "t")


def test_an_id_that_is_in_use_is_refused_and_gives_its_hold_back(make: Make) -> None:
    producer, consumer = make(ProducerSide), make(ConsumerSide)
    begin(producer, consumer, "t", [1])
    with pytest.raises(TransferFailed, match="in use"):
        producer.endpoint.open("t", host="127.0.0.1", port=1, member=0, members=1, first_block=0, end_block=1)
    with pytest.raises(TransferFailed, match="in use"):
        consumer.endpoint.expect("t", first_block=0, end_block=1, blocks=[9])
    assert producer.summary()["holds"]["live"] == 1
    producer.publish(transfer="t")
    end_well([producer], [consumer], "t")
