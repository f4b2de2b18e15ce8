"""Of the tests of the endpoints: transports that wait or fail, how a transfer begins and ends well."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

from kvstrata.remote.holds import Hold
from kvstrata.remote.testing.memory import Shape
from kvstrata.remote.testing.sides import ConsumerSide, ProducerSide, quick_options
from kvstrata.remote.transports.base import Destination, Reader, ReadPlan, Transport
from kvstrata.remote.transports.registry import transport_for

DEADLINE_S = 30.0
SHAPE = Shape(gap_bytes=48)
Make = Callable[..., Any]


def maker(stack: ExitStack) -> Make:
    """Makes sides, which are closed with the stack."""

    def make_side(side: Callable[..., Any], **more: Any) -> Any:
        settings = {"options": quick_options(), "shape": SHAPE, "transports": [transport_for("shm")]}
        made = side(**settings | more)
        stack.callback(made.close)
        return made

    return make_side


class WrappedReader:
    """Runs `before` ahead of every read."""

    def __init__(self, reader: Reader, before: Callable[[], None]) -> None:
        self._reader = reader
        self._before = before
        self.statistics = reader.statistics
        self.close = reader.close

    def read(self, plan: ReadPlan, hold: Hold, *, deadline_s: float) -> None:
        self._before()
        self._reader.read(plan, hold, deadline_s=deadline_s)


class WrappedTransport:
    """A transport whose reads wait, or fail, as `before` says."""

    def __init__(self, inner: Transport, before: Callable[[], None]) -> None:
        self._inner = inner
        self._before = before
        self.name = inner.name
        self.usable, self.export, self.reaches = inner.usable, inner.export, inner.reaches

    def connect(
        self, ticket: bytes, destinations: Sequence[Destination], *, secret: bytes, deadline_s: float
    ) -> Reader:
        reader = self._inner.connect(ticket, destinations, secret=secret, deadline_s=deadline_s)
        return WrappedReader(reader, self._before)


class Gate:
    """Holds reads back until it is opened."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.opened = threading.Event()

    def __call__(self) -> None:
        self.reached.set()
        assert self.opened.wait(DEADLINE_S)


def check_nothing_is_left(*sides: ProducerSide | ConsumerSide) -> None:
    for side in sides:
        summary = side.summary()
        assert summary["transfers_open"] == 0, summary
        if isinstance(side, ProducerSide):
            assert summary["holds"]["live"] == 0, summary
        else:
            assert summary["quarantined_blocks"] == 0, summary
            assert summary["reads"]["queued"] == summary["reads"]["running"] == 0, summary


def begin(
    producer: ProducerSide, consumer: ConsumerSide, transfer: str, blocks: Sequence[int], **more: Any
) -> None:
    """Expect and open, at the same block ids shifted by one."""
    consumer.expect(transfer=transfer, blocks=[block + 1 for block in blocks], **more)
    producer.open(transfer=transfer, address=consumer.address(), blocks=blocks, **more)


def end_well(producers: Sequence[ProducerSide], consumers: Sequence[ConsumerSide], transfer: str) -> None:
    for consumer in consumers:
        assert consumer.wait_finished(transfers=[transfer])[transfer] == ["done", ""]
        assert consumer.wrong_pages(transfer=transfer) == []
    for producer in producers:
        assert producer.wait_settled(transfers=[transfer])[transfer] == ["done", ""]
    check_nothing_is_left(*producers, *consumers)
