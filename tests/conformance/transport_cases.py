"""What the tests of transports share: the members of the family, a producer's regions, reads in threads.

The bytes say which region, place and salt they are from, so that a foreign one is betrayed.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvstrata.remote.holds import Hold
from kvstrata.remote.transports.base import Reader, ReadPlan, Transport
from kvstrata.remote.transports.engines import memfabric
from kvstrata.remote.transports.faulty import FaultyTransport
from kvstrata.remote.transports.registry import transport_for
from kvstrata.remote.transports.testing import CANARY, Memory, pattern, plan_of

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
SECRET = b"of both sides"
LONG_S = 120.0
SHORT_S = 0.5
REGIONS = (2 * MIB, 1 * MIB + 12_345, 6 * GIB, 48 * MIB)
FAR = 5 * GIB + 4_321  # in region 2, which is a hole elsewhere
FAR_BYTES = 1 * MIB
BIG, BIG_BYTES = 3, REGIONS[3]  # long enough to be met in mid-read
BIG_PATTERN = pattern(BIG, 0, BIG_BYTES, salt=1)


class Family:
    """One transport by the name of what is underneath, and what a reader of it is made with.

    `asks_owner`: whether a read needs the producer's own process to run. `tells_owner`: whether the exporter
    hears of reads.
    """

    def __init__(
        self,
        inner: str,
        wrap: Callable[[Transport], Transport] = lambda transport: transport,
        *,
        asks_owner: bool = False,
        tells_owner: bool = False,
    ):
        self.inner = inner
        self.asks_owner = asks_owner
        self.tells_owner = tells_owner
        self.transport = wrap(transport_for(inner))

    def connect(self, ticket: bytes, memory: Memory, **options: Any) -> Reader:
        return self.transport.connect(
            ticket, [memory.destination], **({"secret": SECRET, "deadline_s": LONG_S} | options)
        )


FAMILIES: dict[str, Callable[[], Family]] = {
    "shm": lambda: Family("shm"),
    "tcp": lambda: Family("tcp", asks_owner=True, tells_owner=True),
    "faulty": lambda: Family("tcp", FaultyTransport, asks_owner=True, tells_owner=True),
    "nixl": lambda: Family("nixl", tells_owner=True),  # CMA, where the system lets it
    "nixl-tcp": lambda: Family("nixl", tells_owner=True),
    "mooncake": lambda: Family("mooncake", tells_owner=True),
    "memfabric-fake": lambda: Family("memfabric"),
}
"""A library's memory is served by a process beside the producer's: a read does not need that one to run."""
MEMFABRIC_CONTRACT = Path(__file__).parent / "memfabric_contract"


@contextmanager
def environment_of(member: str, folder: Path) -> Iterator[None]:
    """What a member needs of this process and its children; `folder` is empty and its own."""
    with pytest.MonkeyPatch.context() as patch:
        if member == "nixl-tcp":
            patch.setenv("UCX_TLS", "tcp")
        if member == "memfabric-fake":
            patch.syspath_prepend(str(MEMFABRIC_CONTRACT))
            patch.delitem(sys.modules, "memfabric_hybrid", raising=False)
            patch.setenv(memfabric.STORE_VARIABLE, f"tcp://fake{folder}")
            patch.setattr(memfabric, "_DEVICES", "/dev/null")
        yield
        if member == "memfabric-fake":
            sys.modules.pop("memfabric_hybrid", None)


def big_plan(memory: Memory) -> ReadPlan:
    return plan_of([(BIG, 0, memory.address, BIG_BYTES)])


def start_big_read(
    reader: Reader, hold: Hold, memory: Memory, *, deadline_s: float = LONG_S
) -> tuple[threading.Thread, list[BaseException]]:
    """Return when its first byte has landed, or it has ended."""
    assert memory.bytes[0] == CANARY
    thread, errors = in_thread(lambda: reader.read(big_plan(memory), hold, deadline_s=deadline_s))
    poll(lambda: memory.bytes[0] != CANARY or not thread.is_alive(), "the first byte")
    return thread, errors


def in_thread(work: Callable[[], None]) -> tuple[threading.Thread, list[BaseException]]:
    errors: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, errors


def join(thread: threading.Thread) -> None:
    thread.join(LONG_S)
    assert not thread.is_alive(), "the read never ended"


def poll(condition: Callable[[], bool], what: str) -> None:
    give_up_s = time.monotonic() + LONG_S
    while not condition():
        assert time.monotonic() < give_up_s, f"{what} never happened"
