"""For tests and measurements: a producer in a process of its own, and bytes that say where they are from."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstrata.errors import DeadlineExceeded
from kvstrata.memory.region import HostRegion
from kvstrata.remote.holds import Hold, HoldTable
from kvstrata.remote.transports.base import Destination, Int64Array, ReadPlan, TransportStatistics
from kvstrata.remote.transports.registry import transport_for

ANSWER_S = 120.0
"""Starting a process and importing everything takes seconds, on a busy machine many."""

CANARY = 0xA5


def pattern(region: int, offset: int, size_bytes: int, *, salt: int) -> npt.NDArray[np.uint8]:
    """The bytes at `[offset, offset + size_bytes)` of a region; another place or salt has others."""
    place = np.arange(offset, offset + size_bytes, dtype=np.uint64)
    mixed = (place + np.uint64(region * 1_000_003 + salt * 7_368_787 + 1)) * np.uint64(0x9E3779B97F4A7C15)
    return (mixed >> np.uint64(53)).astype(np.uint8)


def plan_of(ranges: Sequence[tuple[int, int, int, int]]) -> ReadPlan:
    """A plan of (region, offset, dst, size) each."""
    columns: Int64Array = np.array(ranges, dtype=np.int64).reshape(-1, 4).T
    region, offset, dst, size = (np.ascontiguousarray(column) for column in columns)
    return ReadPlan(region=region, offset=offset, dst=dst, size=size)


class Memory:
    """A destination full of CANARY, between two strips that no read may touch."""

    STRIP_BYTES = 1 << 16

    def __init__(self, size_bytes: int) -> None:
        self.whole: npt.NDArray[np.uint8] = np.full(size_bytes + 2 * self.STRIP_BYTES, CANARY, dtype=np.uint8)
        self.bytes = self.whole[self.STRIP_BYTES : -self.STRIP_BYTES]
        self.address: int = self.bytes.ctypes.data
        self.destination = Destination(address=self.address, size_bytes=size_bytes)

    def check(self) -> None:
        """Assert that the strips are as they were."""
        assert (self.whole[: self.STRIP_BYTES] == CANARY).all()
        assert (self.whole[-self.STRIP_BYTES :] == CANARY).all()

    def is_untouched(self) -> bool:
        """Whether nothing was read, or only canaries."""
        return bool((self.whole == CANARY).all())


class ProducerProcess:
    """A child process that exports regions; every method waits for its answer, at most ANSWER_S.

    It exports them over `transport` and those named in `also`; what is said of "the exporter" is said of the
    first. Regions are zero until `fill`. `close` ends the child, whatever state it is in.
    """

    def __init__(
        self,
        transport: str,
        region_bytes: Sequence[int],
        *,
        secret: bytes,
        host: str = "127.0.0.1",
        also: Sequence[str] = (),
    ) -> None:
        names = (transport, *also)
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=_produce, args=(theirs, names, tuple(region_bytes), host, secret), daemon=True
        )
        self._process.start()
        theirs.close()
        self.tickets: dict[str, bytes] = self._receive()
        self.ticket = self.tickets[transport]
        assert self._process.pid is not None
        self.pid: int = self._process.pid

    def grant(self) -> Hold:
        """Return a new hold."""
        hold: Hold = self._ask("grant")
        return hold

    def revoke(self, hold: Hold) -> bool:
        """End a hold; False if it has ended already."""
        has_ended: bool = self._ask("revoke", hold)
        return has_ended

    def fill(self, region: int, offset: int, size_bytes: int, *, salt: int) -> None:
        """Write `pattern` there."""
        self._ask("fill", region, offset, size_bytes, salt)

    def revoke_then_fill(self, hold: Hold, region: int, offset: int, size_bytes: int, *, salt: int) -> None:
        """What a producer does that reuses memory; returns at once, before it has happened."""
        self._pipe.send(("revoke_then_fill", hold, region, offset, size_bytes, salt))

    def answer(self) -> Any:
        """Wait for the answer to what returned at once."""
        return self._receive()

    def statistics(self) -> TransportStatistics:
        """Return the exporter's counts."""
        counts: TransportStatistics = self._ask("statistics")
        return counts

    def close_export(self) -> None:
        """Close the exporter; the process lives on."""
        self._ask("close_export")

    def stop(self) -> None:
        """SIGSTOP."""
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT."""
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL; `join` waits for the end."""
        self._process.kill()

    def join(self) -> None:
        """Wait until the process is gone."""
        self._process.join(ANSWER_S)
        if self._process.is_alive():
            raise DeadlineExceeded("the end of a producer process", ANSWER_S)

    def close(self) -> None:
        """End the process. Harmless to repeat."""
        if self._process.is_alive():
            self.kill()
            self.join()
        self._pipe.close()

    def __enter__(self) -> ProducerProcess:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _ask(self, *question: Any) -> Any:
        self._pipe.send(question)
        return self._receive()

    def _receive(self) -> Any:
        if not self._pipe.poll(ANSWER_S):
            raise DeadlineExceeded("an answer of a producer process", ANSWER_S)
        return self._pipe.recv()


def _produce(
    pipe: Connection, transports: tuple[str, ...], region_bytes: tuple[int, ...], host: str, secret: bytes
) -> None:
    regions = [
        HostRegion.create(size, f"producer-{index}", huge_pages=True)
        for index, size in enumerate(region_bytes)
    ]
    memory = [region.tensor().numpy() for region in regions]
    holds = HoldTable()
    exporters = {
        name: transport_for(name).export(regions, holds, host=host, secret=secret) for name in transports
    }
    exporter = exporters[transports[0]]
    pipe.send({name: one.ticket for name, one in exporters.items()})

    def fill(region: int, offset: int, size_bytes: int, salt: int) -> None:
        step = 4 << 20  # the pattern takes eight bytes a byte while it is made
        for at in range(offset, offset + size_bytes, step):
            size = min(step, offset + size_bytes - at)
            memory[region][at : at + size] = pattern(region, at, size, salt=salt)

    def revoke_then_fill(hold: Hold, region: int, offset: int, size_bytes: int, salt: int) -> None:
        holds.revoke(hold)
        fill(region, offset, size_bytes, salt)

    answers: dict[str, Callable[..., Any]] = {
        "grant": holds.grant,
        "revoke": holds.revoke,
        "fill": fill,
        "revoke_then_fill": revoke_then_fill,
        "statistics": exporter.statistics,
        "close_export": exporter.close,
    }
    while True:
        try:
            name, *arguments = pipe.recv()
        except EOFError:  # the parent closed the pipe or is gone
            return
        pipe.send(answers[name](*arguments))
