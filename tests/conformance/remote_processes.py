"""What the tests of engines in processes share.

A settled transfer's blocks are overwritten at once, and so are those of a transfer that failed at decode, so
that late reads and late writes show.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import pytest

from kvstrata.remote.testing.memory import Shape
from kvstrata.remote.testing.process import SideProcess
from kvstrata.remote.testing.sides import poll_until, quick_options
from kvstrata.remote.transports.registry import transport_for

LEASE_S = 2.0  # where it is to run out
LONG_S = 60.0  # where it is not
SHAPE = Shape(gap_bytes=48)
# What a machine with other work needs on top of a lease, before a test calls it late.
SLACK_S = 30.0
SECRET = b"secret of the tests"
Start = Callable[..., SideProcess]

TRANSPORTS = ("shm", "tcp", "nixl", "mooncake")
over_one_transport = pytest.mark.parametrize("transport", ["shm"])
"""What the control channel alone decides is the same over every transport."""


def usable_or_skip(name: str) -> str:
    """The name of a transport, if it can be used here."""
    reason = transport_for(name).usable()
    if reason is not None:
        pytest.skip(reason)
    return name


def starter(stack: ExitStack, transport: str, **waits_s: float) -> Start:
    def start_side(side: type[Any], *, secret: bytes = SECRET, **more: Any) -> SideProcess:
        options = quick_options(secret, resend_s=0.2, **waits_s)
        settings = {"options": options, "shape": SHAPE, "transports": [transport]} | more
        return stack.enter_context(SideProcess(side, **settings))

    return start_side


def begin(producer: SideProcess, consumer: SideProcess, transfer: str, blocks: Sequence[int]) -> None:
    consumer.ask("expect", transfer=transfer, blocks=[block + 1 for block in blocks])
    producer.ask("open", transfer=transfer, address=consumer.ask("address"), blocks=list(blocks))


def check_whole_transfer(producer: SideProcess, consumer: SideProcess, transfer: str) -> None:
    """A new transfer between the two succeeds, and nothing is left on either side."""
    begin(producer, consumer, transfer, [40, 41, 50])
    producer.ask("publish", transfer=transfer)
    assert consumer.ask("wait_finished", transfers=[transfer])[transfer] == ["done", ""]
    assert consumer.ask("wrong_pages", transfer=transfer) == []
    assert producer.ask("wait_settled", transfers=[transfer])[transfer] == ["done", ""]
    check_nothing_is_left(producer, consumer)


def check_nothing_is_left(*sides: SideProcess) -> None:
    for side in sides:
        summary = side.ask("summary")
        assert summary["transfers_open"] == 0, summary
        if "holds" in summary:
            assert summary["holds"]["live"] == 0, summary
        else:
            assert summary["quarantined_blocks"] == 0, summary
            assert summary["reads"]["queued"] == summary["reads"]["running"] == 0, summary


def ended(side: SideProcess, method: str, transfer: str) -> list[str]:
    """Ending and reason; an AssertionError if it takes longer than a lease and what the machine needs."""
    found: list[str] = side.ask(method, transfers=[transfer], deadline_s=2 * LEASE_S + SLACK_S)[transfer]
    return found


def wait_until_read(consumer: SideProcess, layers: int) -> None:
    poll_until(
        lambda: consumer.ask("summary")["layers_read"] >= layers, SLACK_S, f"{layers} layers to be read"
    )
