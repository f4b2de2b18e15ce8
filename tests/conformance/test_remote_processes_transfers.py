"""Engines in processes of their own that live: transfers, aborts, strangers, ranks; over every transport."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from remote_processes import (
    LONG_S,
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

from kvstrata.core.shares import Topology
from kvstrata.remote.testing.memory import Shape
from kvstrata.remote.testing.sides import ConsumerSide, ProducerSide, poll_until
from kvstrata.remote.testing.wire import Wire


@pytest.fixture(params=TRANSPORTS)
def transport(request: pytest.FixtureRequest) -> str:
    return usable_or_skip(str(request.param))


@pytest.fixture
def start(transport: str) -> Iterator[Start]:
    """Starts sides in processes, and ends them; their leases outlive the test."""
    with ExitStack() as stack:
        yield starter(
            stack, transport, lease_s=LONG_S, open_wait_s=LONG_S, wait_s=LONG_S, read_deadline_s=LONG_S
        )


@pytest.mark.parametrize("first_block", [0, 5])
def test_a_prompt_travels_in_chunks(start: Start, first_block: int) -> None:
    producer, consumer = start(ProducerSide), start(ConsumerSide)
    blocks = [9, 10, 11, 30, 29]
    consumer.ask("expect", transfer="t", blocks=[1, 2, 3, 20, 4], first_block=first_block)
    producer.ask(
        "open", transfer="t", address=consumer.ask("address"), blocks=blocks, first_block=first_block
    )
    producer.ask("publish", transfer="t", end=2)
    producer.ask("publish", transfer="t", first=2)
    assert ended(consumer, "wait_finished", "t") == ["done", ""]
    assert consumer.ask("wrong_pages", transfer="t") == []
    assert ended(producer, "wait_settled", "t") == ["done", ""]
    check_nothing_is_left(producer, consumer)


def test_thirty_two_transfers_at_once(start: Start) -> None:
    shape = Shape(num_blocks=160)
    producer, consumer = start(ProducerSide, shape=shape), start(ConsumerSide, shape=shape)
    names = [f"t{n}" for n in range(32)]
    for n, name in enumerate(names):
        begin(producer, consumer, name, range(4 * n, 4 * n + 4))
    for layer in range(shape.layers):
        for name in names:
            producer.ask("publish", transfer=name, layers=[layer])
    assert set(map(tuple, consumer.ask("wait_finished", transfers=names).values())) == {("done", "")}
    assert [page for name in names for page in consumer.ask("wrong_pages", transfer=name)] == []
    assert set(map(tuple, producer.ask("wait_settled", transfers=names).values())) == {("done", "")}
    check_nothing_is_left(producer, consumer)


@over_one_transport
def test_a_stopped_decode_does_not_keep_another_one_waiting(start: Start) -> None:
    producer, slow, fast = start(ProducerSide), start(ConsumerSide), start(ConsumerSide)
    begin(producer, slow, "slow", [1, 2])
    producer.ask("publish", transfer="slow", layers=[0])
    wait_until_read(slow, 1)
    slow.pause()
    producer.ask("publish", transfer="slow", layers=[1, 2])
    for n in range(5):
        name = f"fast{n}"
        begin(producer, fast, name, [5, 6])
        producer.ask("publish", transfer=name)
        assert ended(fast, "wait_finished", name) == ["done", ""]
        assert fast.ask("wrong_pages", transfer=name) == []
        assert ended(producer, "wait_settled", name) == ["done", ""]
    slow.resume()
    assert ended(slow, "wait_finished", "slow")[0] in ("done", "failed", "lapsed")
    assert slow.ask("wrong_pages", transfer="slow") == []
    ended(producer, "wait_settled", "slow")
    check_nothing_is_left(producer, slow, fast)


STAGES = ["before decode expects it", "accepted", "one layer read", "all but one part read", "done"]


@over_one_transport
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("who", ["prefill", "decode"])
def test_an_abort_at_any_stage_ends_both_sides(start: Start, stage: str, who: str) -> None:
    producer, consumer = start(ProducerSide), start(ConsumerSide)
    address = consumer.ask("address")
    at = STAGES.index(stage)
    producer.ask("open", transfer="t", address=address, blocks=[1, 2])
    if at >= 1 or who == "decode":
        consumer.ask("expect", transfer="t", blocks=[8, 9])
    if at >= 1:
        poll_until(lambda: producer.ask("summary")["machine"]["active"] == 1, SLACK_S, "it to be accepted")
    if at >= 2:
        producer.ask("publish", transfer="t", layers=[0] if at == 2 else [0, 1])
        wait_until_read(consumer, min(at - 1, 2))
    if at == 4:
        producer.ask("publish", transfer="t", layers=[2])
        ended(consumer, "wait_finished", "t")
        ended(producer, "wait_settled", "t")
    (producer if who == "prefill" else consumer).ask("abort", transfer="t", reason="the client is gone")
    if at == 0 and who == "prefill":
        consumer.ask("expect", transfer="t", blocks=[8, 9])
    prefill, decode = ended(producer, "wait_settled", "t"), ended(consumer, "wait_finished", "t")
    if at == 4:
        assert prefill == decode == ["done", ""]
    else:
        assert "done" not in (prefill[0], decode[0])
        assert "the client is gone" in (prefill if who == "prefill" else decode)[1]
    assert consumer.ask("wrong_pages", transfer="t") == []
    check_nothing_is_left(producer, consumer)
    check_whole_transfer(producer, consumer, "after")


@over_one_transport
def test_a_lost_connection_is_made_again_and_the_transfer_goes_on(start: Start) -> None:
    producer, consumer = start(ProducerSide), start(ConsumerSide)
    with Wire(consumer.ask("address")) as wire:
        consumer.ask("expect", transfer="t", blocks=[8, 9])
        producer.ask("open", transfer="t", address=wire.address, blocks=[1, 2])
        producer.ask("publish", transfer="t", layers=[0])
        wait_until_read(consumer, 1)
        wire.cut()
        producer.ask("publish", transfer="t", layers=[1, 2])
        assert ended(consumer, "wait_finished", "t") == ["done", ""]
        assert ended(producer, "wait_settled", "t") == ["done", ""]
        assert wire.connections >= 2
    assert consumer.ask("wrong_pages", transfer="t") == []
    check_nothing_is_left(producer, consumer)


@over_one_transport
def test_a_wrong_secret_is_counted_and_moves_nothing(start: Start) -> None:
    stranger, producer = start(ProducerSide, secret=b"another one"), start(ProducerSide)
    consumer = start(ConsumerSide)
    begin(stranger, consumer, "t", [1])
    stranger.ask("publish", transfer="t")
    poll_until(lambda: consumer.ask("summary")["codec"]["dropped"]["secret"] >= 2, SLACK_S, "two Hellos")
    stranger.ask("abort", transfer="t")
    consumer.ask("abort", transfer="t")
    ended(stranger, "wait_settled", "t")
    ended(consumer, "wait_finished", "t")
    assert consumer.ask("summary")["read_bytes"] == 0
    check_nothing_is_left(stranger, consumer)
    check_whole_transfer(producer, consumer, "after")


@over_one_transport
@pytest.mark.parametrize(
    ("theirs", "here", "there"),
    [
        (Shape(gap_bytes=48, main_bytes=2080), "1040", "2080"),
        (Shape(gap_bytes=48, indexer_bytes=0), "indexer", "only at decode"),
        (Shape(gap_bytes=48, block_tokens=32), "16", "32"),
        (Shape(gap_bytes=48, layout="float8"), "bytes", "float8"),
        (Shape(gap_bytes=48, layers=2), "layer 2", "only at decode"),
    ],
    ids=["page bytes", "no indexer", "block tokens", "layout", "layers"],
)
def test_a_layout_that_differs_is_refused_with_both_values(
    start: Start, theirs: Shape, here: str, there: str
) -> None:
    producer, consumer = start(ProducerSide, shape=theirs), start(ConsumerSide)
    begin(producer, consumer, "t", [1])
    ending, reason = ended(producer, "wait_settled", "t")
    assert ending == "failed"
    assert here in reason
    assert there in reason
    consumer.ask("abort", transfer="t")
    ended(consumer, "wait_finished", "t")
    assert consumer.ask("summary")["read_bytes"] == 0
    check_nothing_is_left(producer, consumer)


@pytest.mark.parametrize(("p_tp", "d_tp"), [(2, 1), (4, 2), (2, 2)])
def test_ranks_of_unequal_engines(start: Start, p_tp: int, d_tp: int) -> None:
    topology = Topology(p_tp, d_tp)
    producers = [start(ProducerSide, rank=rank, tp_size=p_tp) for rank in range(p_tp)]
    consumers = [start(ConsumerSide, tp_rank=rank, tp_size=d_tp) for rank in range(d_tp)]
    # One block: of two contributors, one has an empty share of every indexer.
    for name, blocks in (("many", list(range(3, 12))), ("one", [30])):
        for consumer in consumers:
            consumer.ask("expect", transfer=name, blocks=[block + 1 for block in blocks])
        for rank, producer in enumerate(producers):
            producer.ask(
                "open",
                transfer=name,
                address=consumers[topology.consumer_of(rank)].ask("address"),
                blocks=blocks,
                member=topology.member_of(rank),
                members=topology.ratio,
            )
            producer.ask("publish", transfer=name, end=len(blocks) // 2)
            producer.ask("publish", transfer=name, first=len(blocks) // 2)
    for name in ("many", "one"):
        for consumer in consumers:
            assert ended(consumer, "wait_finished", name) == ["done", ""]
            assert consumer.ask("wrong_pages", transfer=name) == []
        for producer in producers:
            assert ended(producer, "wait_settled", name) == ["done", ""]
    check_nothing_is_left(*producers, *consumers)
