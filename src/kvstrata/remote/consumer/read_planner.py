"""What a consumer's rank takes from whom: it judges a producer's Hello and plans the reads of its parts.

Source: seed, Unequal Tensor Parallelism; Validation and Failure Handling.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvstrata.core.layers import Component
from kvstrata.core.shares import member_blocks, overlap
from kvstrata.memory.pages import PageView
from kvstrata.remote.consumer.read_pool import Unreadable
from kvstrata.remote.protocol.actions import StartRead
from kvstrata.remote.protocol.handshake import check_hello
from kvstrata.remote.protocol.messages import ComponentLayout, Hello
from kvstrata.remote.ranges import CacheKey, RangeRefused, Source, plan_reads, sources_of
from kvstrata.remote.timeline import Timeline
from kvstrata.remote.transports.base import Destination, Int64Array, Reader, ReadPlan, Transport


@dataclass(frozen=True, kw_only=True, eq=False)
class ReadTarget:
    """Where a transfer goes: block `first_block + i` of the request into this engine's `blocks[i]`."""

    first_block: int
    end_block: int
    blocks: Int64Array
    timeline: Timeline


@dataclass(frozen=True, kw_only=True, eq=False)
class ReadSource:
    """What a producer said in the Hello that was accepted."""

    epoch: str
    caches: Mapping[CacheKey, Source]
    transport: Transport
    ticket: bytes


@dataclass(frozen=True, kw_only=True, eq=False)
class ReadPlanner:
    """One rank's. Immutable: any thread may call.

    `main_ranks` ranks share one main pool, this one is `main_rank` of them.
    """

    components: Sequence[ComponentLayout]
    destinations: Mapping[CacheKey, PageView]
    transports: Sequence[Transport]
    tp_rank: int
    tp_size: int
    main_rank: int
    main_ranks: int
    memfabric_protocol: str
    secret: bytes
    connect_deadline_s: float
    model: str = ""

    def __post_init__(self) -> None:
        keys = {(layout.layer, Component(layout.component)) for layout in self.components}
        assert keys == self.destinations.keys(), (keys, self.destinations.keys())
        assert 0 <= self.main_rank < self.main_ranks, (self.main_rank, self.main_ranks)

    def accept(self, hello: Hello) -> ReadSource:
        """Return how to read from this producer. Raises Mismatch with both sides' values."""
        name = check_hello(
            hello,
            components=self.components,
            tp_rank=self.tp_rank,
            tp_size=self.tp_size,
            transports=self.transports,
            memfabric_protocol=self.memfabric_protocol,
            model=self.model,
        )
        return ReadSource(
            epoch=hello.epoch,
            caches=sources_of(hello),
            transport=next(transport for transport in self.transports if transport.name == name),
            ticket=next(offer.ticket for offer in hello.offers if offer.name == name),
        )

    def plan(self, read: StartRead, target: ReadTarget, source: ReadSource) -> ReadPlan:
        """Return the bytes of the part that this rank takes from this member. Raises Unreadable."""
        blocks = {}
        for layer, component in self.destinations:
            if layer != read.layer:
                continue
            share = member_blocks(
                component,
                target.first_block,
                target.end_block,
                member=read.member,
                members=read.members,
                main_rank=self.main_rank,
                main_ranks=self.main_ranks,
            )
            first, end = overlap((read.first_block, read.end_block), share)
            blocks[component] = (
                read.blocks[first - read.first_block : end - read.first_block],
                target.blocks[first - target.first_block : end - target.first_block],
            )
        try:
            return plan_reads(
                components=source.caches, destinations=self.destinations, layer=read.layer, blocks=blocks
            )
        except RangeRefused as refused:
            raise Unreadable(str(refused)) from refused

    def connect(self, source: ReadSource) -> Reader:
        """Open the way to a producer. Raises TransferFailed or DeadlineExceeded."""
        writable = [
            Destination(address=view.address, size_bytes=view.span_bytes)
            for view in self.destinations.values()
        ]
        return source.transport.connect(
            source.ticket, writable, secret=self.secret, deadline_s=self.connect_deadline_s
        )
