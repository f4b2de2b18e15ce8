"""Both endpoints in one process, over real sockets and real transports: what arrives, and from whom."""

from __future__ import annotations

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
    end_well,
    maker,
)

from kvstrata.core.shares import Topology
from kvstrata.remote.testing.sides import ConsumerSide, ProducerSide, poll_until
from kvstrata.remote.transports.base import Transport
from kvstrata.remote.transports.registry import transport_for


@pytest.fixture(params=["shm", "tcp"])
def transport(request: pytest.FixtureRequest) -> Transport:
    return transport_for(request.param)


@pytest.fixture
def make() -> Iterator[Make]:
    with ExitStack() as stack:
        yield maker(stack)


def test_every_page_of_every_layer_arrives(make: Make, transport: Transport) -> None:
    producer = make(ProducerSide, transports=[transport])
    consumer = make(ConsumerSide, transports=[transport])
    begin(producer, consumer, "t", [3, 4, 9, 8, 20])
    producer.publish(transfer="t")
    end_well([producer], [consumer], "t")
    counts = consumer.endpoint.statistics()
    assert counts.read_bytes == 5 * sum(SHAPE.page_bytes().values())
    assert counts.layers_read == SHAPE.layers
    assert counts.timeline.transfers == 1
    assert producer.endpoint.statistics().published_parts == SHAPE.layers


def test_what_is_not_read_is_not_written(make: Make, transport: Transport) -> None:
    producer = make(ProducerSide, transports=[transport])
    consumer = make(ConsumerSide, transports=[transport])
    begin(producer, consumer, "t", [10, 11])
    producer.publish(transfer="t")
    end_well([producer], [consumer], "t")
    others = [block for block in range(SHAPE.num_blocks) if block not in (11, 12)]
    assert consumer.memory.holds_only(others, 0x5A)


def test_chunks_and_a_prefix_hit_of_decode(make: Make, transport: Transport) -> None:
    producer = make(ProducerSide, transports=[transport])
    consumer = make(ConsumerSide, transports=[transport])
    begin(producer, consumer, "t", list(range(5, 15)), first_block=7)
    producer.publish(transfer="t", first=0, end=4)
    producer.publish(transfer="t", first=4, end=4)  # a chunk that completes no block
    producer.publish(transfer="t", first=4, end=10)
    end_well([producer], [consumer], "t")


def test_a_prompt_that_decode_has_already_still_ends(make: Make) -> None:
    producer, consumer = make(ProducerSide), make(ConsumerSide)
    begin(producer, consumer, "t", [], first_block=3)
    producer.publish(transfer="t")
    end_well([producer], [consumer], "t")


def test_prefill_may_publish_before_decode_expects(make: Make) -> None:
    producer, consumer = make(ProducerSide), make(ConsumerSide)
    producer.open(transfer="t", address=consumer.address(), blocks=[1, 2])
    producer.publish(transfer="t")
    poll_until(
        lambda: (
            sum(consumer.endpoint.statistics().codec.dropped.values()) == 0
            and consumer.endpoint.statistics().codec.decoded >= 3
        ),
        DEADLINE_S,
        "the opening to be repeated",
    )
    consumer.expect(transfer="t", blocks=[7, 8])
    end_well([producer], [consumer], "t")


def test_many_transfers_at_once(make: Make, transport: Transport) -> None:
    producer = make(ProducerSide, transports=[transport])
    consumer = make(ConsumerSide, transports=[transport])
    names = [f"t{n}" for n in range(31)]
    for n, name in enumerate(names):
        begin(producer, consumer, name, [2 * n, 2 * n + 1])
    for layer in range(SHAPE.layers):
        for name in names:
            producer.publish(transfer=name, layers=[layer])
    consumer.wait_finished(transfers=names)
    producer.wait_settled(transfers=names)
    for name in names:
        assert consumer.wrong_pages(transfer=name) == [], name
        end_well([producer], [consumer], name)


def ranks(
    make: Make, p_tp: int, d_tp: int, *, is_main_shared: bool = False
) -> tuple[list[ProducerSide], list[ConsumerSide]]:
    producers = [make(ProducerSide, rank=rank, tp_size=p_tp) for rank in range(p_tp)]
    consumers: list[ConsumerSide] = []
    for rank in range(d_tp):
        shared = {"main_of": consumers[0] if rank else None, "main_rank": rank, "main_ranks": d_tp}
        consumers.append(make(ConsumerSide, tp_rank=rank, tp_size=d_tp, **(shared if is_main_shared else {})))
    return producers, consumers


def transfer_between(
    producers: list[ProducerSide], consumers: list[ConsumerSide], transfer: str, blocks: list[int]
) -> None:
    topology = Topology(len(producers), len(consumers))
    for consumer in consumers:
        consumer.expect(transfer=transfer, blocks=[block + 1 for block in blocks])
    for rank, producer in enumerate(producers):
        producer.open(
            transfer=transfer,
            address=consumers[topology.consumer_of(rank)].address(),
            blocks=blocks,
            member=topology.member_of(rank),
            members=topology.ratio,
        )
        producer.publish(transfer=transfer, first=0, end=len(blocks) // 2)
        producer.publish(transfer=transfer, first=len(blocks) // 2)


@pytest.mark.parametrize(("p_tp", "d_tp"), [(2, 1), (4, 2), (4, 1), (2, 2)])
@pytest.mark.parametrize("count", [1, 2, 7])
def test_unequal_ranks_and_contributors_without_blocks(make: Make, p_tp: int, d_tp: int, count: int) -> None:
    producers, consumers = ranks(make, p_tp, d_tp)
    transfer_between(producers, consumers, "t", list(range(3, 3 + count)))
    end_well(producers, consumers, "t")
    bytes_each = count * sum(SHAPE.page_bytes().values())
    assert [c.endpoint.statistics().read_bytes for c in consumers] == [bytes_each] * d_tp


@pytest.mark.parametrize(("p_tp", "d_tp"), [(2, 2), (4, 2)])
def test_ranks_that_share_the_main_pool_read_it_once_together(make: Make, p_tp: int, d_tp: int) -> None:
    producers, consumers = ranks(make, p_tp, d_tp, is_main_shared=True)
    transfer_between(producers, consumers, "t", list(range(4, 13)))
    for consumer in consumers:
        assert consumer.wait_finished(transfers=["t"])["t"] == ["done", ""]
    # Main lies in the first rank's pool, and every rank has an indexer of its own.
    assert consumers[0].wrong_pages(transfer="t") == []
    for consumer in consumers[1:]:
        assert all("main" in page for page in consumer.wrong_pages(transfer="t"))
    read = sum(consumer.endpoint.statistics().read_bytes for consumer in consumers)
    assert read == 9 * SHAPE.layers * (SHAPE.main_bytes + d_tp * SHAPE.indexer_bytes)


def test_a_slow_reader_holds_back_its_own_request_only(make: Make) -> None:
    gate = Gate()
    producer = make(ProducerSide)
    slow = make(ConsumerSide, transports=[WrappedTransport(transport_for("shm"), gate)])
    fast = make(ConsumerSide)
    begin(producer, slow, "slow", [1, 2])
    producer.publish(transfer="slow")
    assert gate.reached.wait(DEADLINE_S)
    for n in range(8):
        begin(producer, fast, f"fast{n}", [3, 4])
        producer.publish(transfer=f"fast{n}")
        assert fast.wait_finished(transfers=[f"fast{n}"])[f"fast{n}"] == ["done", ""]
        assert fast.wrong_pages(transfer=f"fast{n}") == []
        assert producer.wait_settled(transfers=[f"fast{n}"])[f"fast{n}"] == ["done", ""]
    assert "slow" not in producer.settled()
    gate.opened.set()
    end_well(
        [producer],
        [
            slow,
        ],
        "slow",
    )
