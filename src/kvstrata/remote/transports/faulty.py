"""A transport whose reads go wrong when a script says so, to test that its users survive it.

Wraps any transport under the name of that one, and passes the same conformance tests while the script is
silent.
"""

from __future__ import annotations

import math
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

from kvstrata.errors import DeadlineExceeded, TransferFailed
from kvstrata.memory.region import HostRegion
from kvstrata.remote.holds import Hold, HoldTable
from kvstrata.remote.transports.base import (
    Destination,
    Exporter,
    Reader,
    ReadPlan,
    Transport,
    TransportStatistics,
)


class ReadFault(Enum):
    """What can happen to one read."""

    FAIL = "fail"  # nothing moves
    DELAY = "delay"  # it begins late, or misses its deadline
    DUPLICATE = "duplicate"  # every byte lands twice
    TRUNCATE = "truncate"  # half of the bytes land, then it fails
    DEATH = "death"  # this and every later read of this reader fails
    WRONG_HOLD = "wrong hold"  # it names a hold that was never granted
    NOTHING = "nothing"  # no byte lands, and it says that all of them did: for negative controls only


@dataclass(frozen=True, kw_only=True)
class Call:
    """One read, as a script sees it."""

    count: int  # of all reads through the transport, this one included: the first is 1
    total_bytes: int
    deadline_s: float = math.inf
    closed: threading.Event = field(default_factory=threading.Event)  # the reader


Script = Callable[[Call], ReadFault | None]
"""Says what goes wrong; None lets the read through.

Several readers may ask at once. It may wait, within the call's deadline and until the reader is closed, and
raise what a read may raise.
"""


def no_faults(call: Call) -> None:
    """The silent script."""


def on(count: int, fault: ReadFault) -> Script:
    """A script with one fault, at the `count`-th read."""
    return lambda call: fault if call.count == count else None


def seeded(seed: int, rates: Mapping[ReadFault, float]) -> Script:
    """A script that draws each read's fault with these probabilities; the same seed, the same faults."""
    generator = random.Random(seed)
    faults, weights = list(rates), list(rates.values())
    rest = 1.0 - sum(weights)
    if rest < 0 or min(weights, default=0.0) < 0:
        raise ValueError(f"probabilities of faults must be positive and at most 1 together, got {rates}")
    return lambda call: generator.choices([*faults, None], [*weights, rest])[0]


class FaultyTransport:
    """Implements `Transport` on top of another one."""

    def __init__(
        self,
        inner: Transport,
        script: Script = no_faults,
        *,
        delay_s: float = 0.05,
        pause: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`delay_s` is how late a DELAY is; `pause` and `clock` are passed in by tests."""
        self._inner = inner
        self._script = script
        self._delay_s = delay_s
        self._pause = pause
        self._clock = clock
        self._count = 0
        self._lock = threading.Lock()

    @property
    def name(self) -> str:
        return self._inner.name

    def usable(self) -> str | None:
        return self._inner.usable()

    def export(
        self, regions: Sequence[HostRegion], holds: HoldTable, *, host: str, secret: bytes
    ) -> Exporter:
        return self._inner.export(regions, holds, host=host, secret=secret)

    def reaches(self, ticket: bytes) -> str | None:
        return self._inner.reaches(ticket)

    def connect(
        self, ticket: bytes, destinations: Sequence[Destination], *, secret: bytes, deadline_s: float
    ) -> Reader:
        reader = self._inner.connect(ticket, destinations, secret=secret, deadline_s=deadline_s)
        return _FaultyReader(reader, self._draw, delay_s=self._delay_s, pause=self._pause, clock=self._clock)

    def _draw(self, total_bytes: int, deadline_s: float, closed: threading.Event) -> ReadFault | None:
        with self._lock:  # readers share the count
            self._count += 1
            count = self._count
        return self._script(Call(count=count, total_bytes=total_bytes, deadline_s=deadline_s, closed=closed))


class _FaultyReader:
    def __init__(
        self,
        inner: Reader,
        draw: Callable[[int, float, threading.Event], ReadFault | None],
        *,
        delay_s: float,
        pause: Callable[[float], None],
        clock: Callable[[], float],
    ) -> None:
        self._inner = inner
        self._draw = draw
        self._delay_s = delay_s
        self._pause = pause
        self._clock = clock
        self._is_dead = False
        self._closed = threading.Event()

    def read(self, plan: ReadPlan, hold: Hold, *, deadline_s: float) -> None:
        begun_s = self._clock()
        fault = self._draw(plan.total_bytes, deadline_s, self._closed)
        deadline_s -= self._clock() - begun_s
        if fault is ReadFault.NOTHING:
            return
        if fault is ReadFault.DEATH:
            self._is_dead = True
        if self._is_dead:
            raise TransferFailed("faulty transport: the producer is dead")
        if fault is ReadFault.FAIL:
            raise TransferFailed("faulty transport: this read fails")
        if fault is ReadFault.DELAY:
            self._pause(min(self._delay_s, deadline_s))
            if self._delay_s >= deadline_s:
                raise DeadlineExceeded("faulty transport: a late read", deadline_s)
            deadline_s -= self._delay_s
        if fault is ReadFault.TRUNCATE:
            self._inner.read(_half(plan), hold, deadline_s=deadline_s)
            raise TransferFailed("faulty transport: this read was cut off")
        if fault is ReadFault.WRONG_HOLD:
            hold = replace(hold, generation=hold.generation + (1 << 40))
        if fault is ReadFault.DUPLICATE:
            self._inner.read(plan, hold, deadline_s=deadline_s)
        self._inner.read(plan, hold, deadline_s=deadline_s)

    def statistics(self) -> TransportStatistics:
        return self._inner.statistics()

    def close(self) -> None:
        self._closed.set()
        self._inner.close()


def _half(plan: ReadPlan) -> ReadPlan:
    """The first half of every range."""
    is_kept = plan.size > 1
    return ReadPlan(
        region=plan.region[is_kept],
        offset=plan.offset[is_kept],
        dst=plan.dst[is_kept],
        size=plan.size[is_kept] // 2,
    )
