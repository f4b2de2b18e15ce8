"""`kvstrata bench transport`: reads over every transport that this machine has, against memcpy.

The ranges of a read lie apart on both sides, so that none can be merged; the memcpy is one contiguous copy of
as many bytes. All take turns, and every run touches other memory than the one before it.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import numpy as np
from rich.console import Console
from rich.table import Table

from kvstrata.bench.machine import describe_machine, package_version
from kvstrata.bench.remote import take_turns, touched
from kvstrata.errors import KVStrataError
from kvstrata.memory.region import HostRegion
from kvstrata.remote.holds import Hold
from kvstrata.remote.transports.base import Destination, Reader, ReadPlan
from kvstrata.remote.transports.registry import transport_for
from kvstrata.remote.transports.testing import ProducerProcess, pattern

KIB, MIB = 1 << 10, 1 << 20
SHAPES: Mapping[str, tuple[int, int]] = {
    "4KiB": (4 * KIB, 64),
    "64KiB": (64 * KIB, 64),
    "1MiB": (MIB, 32),
    "16MiB": (16 * MIB, 2),
}
"""Bytes of a range, and ranges of a read."""
MEMORY_BYTES = 128 * MIB
DEADLINE_S = 60.0
SEED = 22
SECRET = b"of both sides of a measurement"
LIBRARIES = ("nixl-cu12", "mooncake-transfer-engine-non-cuda")


@dataclass(frozen=True, kw_only=True)
class Member:
    """One column of the result: a transport, and the environment that both of its ends are started in."""

    name: str
    transport: str
    environment: tuple[tuple[str, str], ...] = ()


MEMBERS = (
    Member(name="shm", transport="shm"),
    Member(name="tcp", transport="tcp"),
    Member(name="nixl", transport="nixl"),
    Member(name="nixl_tcp", transport="nixl", environment=(("UCX_TLS", "tcp"),)),
    Member(name="mooncake", transport="mooncake"),
)


def bench_transport(*, repeats: int, json_file: Path | None, console: Console) -> dict[str, Any]:
    """Run the benchmark for a person at a terminal; return and, if asked, write the result.

    Raises KVStrataError if a read brought wrong bytes: then there is nothing to time.
    """
    result = measure(repeats=repeats)
    console.print(as_table(result))
    for name, reason in result["skipped"].items():
        console.print(f"not measured: {name}: {reason}", highlight=False)
    if json_file is not None:
        json_file.parent.mkdir(parents=True, exist_ok=True)
        json_file.write_text(json.dumps(result, indent=1) + "\n")
        console.print(f"written: {json_file}")
    return result


def measure(
    *,
    repeats: int,
    members: Sequence[Member] = MEMBERS,
    shapes: Mapping[str, tuple[int, int]] = SHAPES,
    memory_bytes: int = MEMORY_BYTES,
) -> dict[str, Any]:
    """Time `repeats` reads of each shape over each member, after one untimed round.

    `transport.<member>.<shape>` is the median of bytes a second over those of the memcpy before it. Starts a
    process a member and takes `memory_bytes` for each, and twice here.
    """
    skipped = {}
    runs: dict[str, dict[str, Sequence[float]]] = {}
    with ExitStack() as opened:
        pool, source = (touched(memory_bytes, f"bench-{side}") for side in ("destination", "source"))
        opened.callback(pool.close)
        opened.callback(source.close)
        ends = {}
        for member in members:
            reason = transport_for(member.transport).usable()
            if reason is None:
                ends[member.name] = opened.enter_context(_End(member, pool))
            else:
                skipped[member.name] = reason
        for shape, (range_bytes, ranges) in shapes.items():
            bench = _Shape(pool, source, range_bytes=range_bytes, ranges=ranges)
            kinds = {"memcpy": bench.memcpy} | {name: bench.read(end) for name, end in ends.items()}
            runs[shape] = dict(take_turns(kinds, repeats))
            for name, end in ends.items():
                bench.check_bytes(name, end)
    ratios = {
        f"transport.{name}.{shape}": median(
            memcpy / run for memcpy, run in zip(found["memcpy"], found[name], strict=True)
        )
        for shape, found in runs.items()
        for name in found
        if name != "memcpy"
    }
    return {
        "kvstrata_bench_transport": 1,
        "machine": describe_machine(),
        "libraries": {name: version for name in LIBRARIES if (version := package_version(name)) is not None},
        "repeats": repeats,
        **ratios,
        "skipped": skipped,
        "runs": {
            "seconds": runs,
            "read_bytes": {shape: size * count for shape, (size, count) in shapes.items()},
        },
    }


def as_table(result: Mapping[str, Any]) -> Table:
    """Return the ratios for people: a row a shape, a column a member."""
    seconds = result["runs"]["seconds"]
    names = [name for name in next(iter(seconds.values())) if name != "memcpy"]
    table = Table(title=f"Bytes/s over those of memcpy, medians of {result['repeats']} runs")
    for column in ("ranges of", *names):
        table.add_column(column)
    for shape in seconds:
        table.add_row(shape, *(f"{result[f'transport.{name}.{shape}']:.3f}" for name in names))
    return table


class _End:
    """A producer in its process and a reader of it here. A context manager."""

    def __init__(self, member: Member, pool: HostRegion) -> None:
        # Libraries look at the environment when an end is made.
        with patch.dict("os.environ", dict(member.environment)):
            self._producer = ProducerProcess(member.transport, (pool.size_bytes,), secret=SECRET)
            destination = Destination(address=pool.address, size_bytes=pool.size_bytes)
            self.reader: Reader = transport_for(member.transport).connect(
                self._producer.ticket, [destination], secret=SECRET, deadline_s=DEADLINE_S
            )
        self._producer.fill(0, 0, pool.size_bytes, salt=0)
        self.hold: Hold = self._producer.grant()

    def __enter__(self) -> _End:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.reader.close()
        self._producer.close()


class _Shape:
    """Runs of one size of range."""

    def __init__(self, pool: HostRegion, source: HostRegion, *, range_bytes: int, ranges: int) -> None:
        self._pool = pool
        self._source = source
        self._range_bytes = range_bytes
        self._ranges = ranges
        self._generator = np.random.default_rng(SEED)

    def memcpy(self) -> Callable[[], object]:
        """Prepare one copy."""
        size = self._range_bytes * self._ranges
        places = self._generator.integers(self._pool.size_bytes // size, size=2) * size
        target, source = self._pool.address + int(places[0]), self._source.address + int(places[1])
        return lambda: ctypes.memmove(target, source, size)

    def read(self, end: _End) -> Callable[[], Callable[[], object]]:
        """What prepares one read over a member."""

        def prepare() -> Callable[[], object]:
            plan = self._plan()
            return lambda: end.reader.read(plan, end.hold, deadline_s=DEADLINE_S)

        return prepare

    def check_bytes(self, name: str, end: _End) -> None:
        """Read once more and compare every byte."""
        plan = self._plan()
        end.reader.read(plan, end.hold, deadline_s=DEADLINE_S)
        memory = self._pool.tensor().numpy()
        for offset, dst in zip(plan.offset.tolist(), plan.dst.tolist(), strict=True):
            at = dst - self._pool.address
            expected = pattern(0, offset, self._range_bytes, salt=0)
            if not np.array_equal(memory[at : at + self._range_bytes], expected):
                raise KVStrataError(f"a read over {name} brought other bytes than the producer has")

    def _plan(self) -> ReadPlan:
        # Every second place at the most: no two ranges are neighbours.
        places = 2 * np.arange(self._pool.size_bytes // self._range_bytes // 2, dtype=np.int64)
        theirs, ours = (self._generator.permutation(places)[: self._ranges] for _ in range(2))
        return ReadPlan(
            region=np.zeros(self._ranges, dtype=np.int64),
            offset=theirs * self._range_bytes,
            dst=self._pool.address + ours * self._range_bytes,
            size=np.full(self._ranges, self._range_bytes, dtype=np.int64),
        )
