"""What the tests of the tcp transport share."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kvstrata.memory.region import HostRegion
from kvstrata.remote.holds import HoldTable
from kvstrata.remote.transports.testing import pattern

SECRET = b"of both sides"
HOST = "127.0.0.1"
LONG_S = 120.0
SIZE = 8 << 20


@contextmanager
def exported_region() -> Iterator[HostRegion]:
    region = HostRegion.create(SIZE, "tcp-test", huge_pages=False)
    region.tensor().numpy()[:] = pattern(0, 0, SIZE, salt=1)
    yield region
    region.close()


@contextmanager
def hold_table() -> Iterator[HoldTable]:
    holds = HoldTable()
    yield holds
    holds.close()


def soon() -> float:
    return time.monotonic() + LONG_S


def poll(condition: Callable[[], bool], what: str) -> None:
    give_up_s = soon()
    while not condition():
        assert time.monotonic() < give_up_s, f"{what} never happened"
        time.sleep(0.005)


def server_threads() -> int:
    return sum(thread.name.startswith("kvstrata-tcp") for thread in threading.enumerate())
