"""Engines in processes of their own: killed, stopped, restarted, cut off; over every transport.

Whatever happens to one side, the other one must be rid of it within the lease, and no page may ever hold
another request's rows. Leases are short here, so that they run out.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from remote_processes import (
    LEASE_S,
    SLACK_S,
    TRANSPORTS,
    Start,
    begin,
    check_nothing_is_left,
    check_whole_transfer,
    ended,
    over_one_transport,
    starter,
    usable_or_skip,
    wait_until_read,
)

from kvstrata.remote.testing.memory import Shape
from kvstrata.remote.testing.sides import ConsumerSide, ProducerSide
from kvstrata.remote.testing.wire import Wire


@pytest.fixture(params=TRANSPORTS)
def transport(request: pytest.FixtureRequest) -> str:
    return usable_or_skip(str(request.param))


@pytest.fixture
def start(transport: str) -> Iterator[Start]:
    """Starts sides in processes, and ends them."""
    with ExitStack() as stack:
        yield starter(stack, transport, lease_s=LEASE_S, open_wait_s=10.0, wait_s=6.0)


def test_a_prefill_that_is_killed_fails_its_requests_within_the_lease(start: Start) -> None:
    producer, consumer = start(ProducerSide), start(ConsumerSide)
    begin(producer, consumer, "t", [1, 2, 3])
    producer.ask("publish", transfer="t", layers=[0])
    wait_until_read(consumer, 1)
    killed_s = time.monotonic()
    producer.kill()
    assert ended(consumer, "wait_finished", "t")[0] in ("lapsed", "failed")
    assert time.monotonic() - killed_s < 2 * LEASE_S + SLACK_S
    check_nothing_is_left(consumer)
    assert consumer.ask("wrong_pages", transfer="t") == []
    check_whole_transfer(start(ProducerSide), consumer, "after")
    assert consumer.ask("wrong_pages", transfer="t") == []


def test_a_decode_that_is_killed_frees_prefills_blocks_within_the_lease(start: Start) -> None:
    producer, consumer = start(ProducerSide), start(ConsumerSide)
    port = consumer.ask("address")[1]
    begin(producer, consumer, "t", [1, 2, 3])
    producer.ask("publish", transfer="t", layers=[0])
    wait_until_read(consumer, 1)
    consumer.kill()
    producer.ask("publish", transfer="t", layers=[1])
    assert ended(producer, "wait_settled", "t")[0] in ("lapsed", "failed")
    check_nothing_is_left(producer)
    # The same port, a new epoch: prefill finds out by itself.
    check_whole_transfer(producer, start(ConsumerSide, port=port), "after")


@over_one_transport
def test_a_decode_restarted_at_once_does_not_take_over_its_earlier_lifes_transfers(
    start: Start,
) -> None:
    producer, consumer = start(ProducerSide), start(ConsumerSide)
    port = consumer.ask("address")[1]
    begin(producer, consumer, "t", [1, 2, 3])
    producer.ask("publish", transfer="t", layers=[0])
    wait_until_read(consumer, 1)
    consumer.kill()
    restarted = start(ConsumerSide, port=port)
    begin(producer, restarted, "other", [7, 8])
    producer.ask("publish", transfer="other")
    assert ended(producer, "wait_settled", "t")[0] in ("lapsed", "failed")
    assert ended(restarted, "wait_finished", "other") == ["done", ""]
    assert restarted.ask("wrong_pages", transfer="other") == []
    assert ended(producer, "wait_settled", "other") == ["done", ""]
    check_nothing_is_left(producer, restarted)


def test_a_decode_stopped_for_longer_than_the_lease_takes_no_foreign_rows(start: Start) -> None:
    producer, consumer = start(ProducerSide), start(ConsumerSide)
    begin(producer, consumer, "t", [1, 2, 3])
    producer.ask("publish", transfer="t", layers=[0])
    wait_until_read(consumer, 1)
    consumer.pause()
    producer.ask("publish", transfer="t", layers=[1, 2])
    # Prefill gives the blocks to somebody else while decode sleeps.
    assert ended(producer, "wait_settled", "t")[0] == "lapsed"
    consumer.resume()
    assert ended(consumer, "wait_finished", "t")[0] in ("failed", "lapsed")
    assert consumer.ask("wrong_pages", transfer="t") == []
    check_nothing_is_left(producer, consumer)
    check_whole_transfer(producer, consumer, "after")
    assert consumer.ask("summary")["late_rounds"] >= 1


def test_a_decode_stopped_in_the_middle_of_a_read_takes_no_foreign_rows(start: Start) -> None:
    large = Shape(layers=2, num_blocks=24, main_bytes=2 << 20, indexer_bytes=1 << 18)
    producer, consumer = start(ProducerSide, shape=large), start(ConsumerSide, shape=large)
    begin(producer, consumer, "t", range(20))
    producer.ask("publish", transfer="t")
    consumer.pause()  # some tens of milliseconds of copying were before it
    ended(producer, "wait_settled", "t")
    consumer.resume()
    ending, reason = ended(consumer, "wait_finished", "t")
    assert consumer.ask("wrong_pages", transfer="t") == [], (ending, reason)
    check_nothing_is_left(producer, consumer)


def test_a_prefill_stopped_for_longer_than_the_lease_is_given_up_and_comes_back(start: Start) -> None:
    producer, consumer = start(ProducerSide), start(ConsumerSide)
    begin(producer, consumer, "t", [1, 2, 3])
    producer.ask("publish", transfer="t", layers=[0, 1])
    wait_until_read(consumer, 2)
    producer.pause()
    assert ended(consumer, "wait_finished", "t")[0] == "lapsed"
    producer.resume()
    assert ended(producer, "wait_settled", "t")[0] in ("failed", "aborted", "lapsed")
    check_nothing_is_left(producer, consumer)
    check_whole_transfer(producer, consumer, "after")
    assert consumer.ask("wrong_pages", transfer="t") == []


@over_one_transport
def test_a_connection_lost_for_good_ends_both_sides(start: Start) -> None:
    producer, consumer = start(ProducerSide), start(ConsumerSide)
    with Wire(consumer.ask("address")) as wire:
        consumer.ask("expect", transfer="t", blocks=[8, 9])
        producer.ask("open", transfer="t", address=wire.address, blocks=[1, 2])
        producer.ask("publish", transfer="t", layers=[0])
        wait_until_read(consumer, 1)
        wire.close()
        producer.ask("publish", transfer="t", layers=[1])
        assert ended(producer, "wait_settled", "t")[0] == "lapsed"
        assert ended(consumer, "wait_finished", "t")[0] == "lapsed"
    check_nothing_is_left(producer, consumer)
    check_whole_transfer(producer, consumer, "after")


@over_one_transport
def test_one_killed_member_of_two_fails_the_request_and_frees_the_other(start: Start) -> None:
    producers = [start(ProducerSide, rank=rank, tp_size=2) for rank in range(2)]
    consumer = start(ConsumerSide)
    consumer.ask("expect", transfer="t", blocks=[1, 2, 3])
    for member, producer in enumerate(producers):
        producer.ask(
            "open",
            transfer="t",
            address=consumer.ask("address"),
            blocks=[5, 6, 7],
            member=member,
            members=2,
        )
        producer.ask("publish", transfer="t", layers=[0])
    wait_until_read(consumer, 2)
    producers[0].ask("publish", transfer="t", layers=[1, 2])
    producers[1].kill()
    ending, reason = ended(consumer, "wait_finished", "t")
    assert ending in ("lapsed", "failed"), reason
    # The first one has said all it had: it is told nevertheless, or was done before.
    assert ended(producers[0], "wait_settled", "t")[0] in ("done", "failed", "aborted")
    check_nothing_is_left(producers[0], consumer)
    assert consumer.ask("wrong_pages", transfer="t") == []
