"""Reads of another process's memory over shm and tcp against memcpy, and of eight processes at once.

A read is what decode does for one layer of DeepSeek-V3.2 in bf16 and a prompt of 32 K tokens, 38 MB: every
second page of a producer's home goes to a random page of a host pool, so that no two can be merged. The
memcpy is one contiguous copy of as many bytes between memory of the same kind, which is shared.
Every run reads other pages than the one before it; together they are several times as large as a cache.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from statistics import median
from typing import Any

import numpy as np

from kvstrata.errors import KVStrataError
from kvstrata.memory.region import HostRegion
from kvstrata.remote.holds import Hold
from kvstrata.remote.transports.base import Destination, Reader, ReadPlan
from kvstrata.remote.transports.registry import transport_for
from kvstrata.remote.transports.testing import ProducerProcess, pattern

PAGE_BYTES = 64 * 1152  # 64 tokens of 576 bf16 values
PAGES = 512  # of a layer: 32 K tokens
LAYERS = 4  # of a producer, in turn
PEERS = 8
TRANSPORTS = ("shm", "tcp")
DEADLINE_S = 60.0
SEED = 21
SECRET = b"of both sides of a measurement"


@dataclass(frozen=True, kw_only=True)
class TransportRuns:
    """Seconds of every run, in order; the kinds took turns.

    `memcpy_s`, `shm_s` and `tcp_s` are of `layer_bytes` each; the others of `peers` times as much, read one
    after the other from one producer, or from all at once by as many threads.
    """

    page_bytes: int
    pages: int
    layer_bytes: int
    peers: int
    memcpy_s: Sequence[float]
    shm_s: Sequence[float]
    tcp_s: Sequence[float]
    shm_one_peer_s: Sequence[float]
    shm_all_peers_s: Sequence[float]
    tcp_one_peer_s: Sequence[float]
    tcp_all_peers_s: Sequence[float]

    def ratios(self) -> dict[str, list[float]]:
        """Bytes a second of the first over those of the second, of runs that followed each other."""
        pairs = {
            "shm_over_memcpy": (self.shm_s, self.memcpy_s),
            "tcp_over_memcpy": (self.tcp_s, self.memcpy_s),
            # What `auto` takes on one host.
            "eight_peers_over_one": (self.shm_all_peers_s, self.shm_one_peer_s),
            "tcp_eight_peers_over_one": (self.tcp_all_peers_s, self.tcp_one_peer_s),
        }
        return {
            key: [reference / run for run, reference in zip(runs, references, strict=True)]
            for key, (runs, references) in pairs.items()
        }

    def as_json(self) -> dict[str, Any]:
        """Return the medians of the ratios by name and, as `runs`, all that they come from."""
        ratios = self.ratios()
        medians = {key: median(values) for key, values in ratios.items()}
        return {**medians, "runs": {**ratios, **asdict(self)}}


def measure_transports(*, repeats: int, pages: int = PAGES, peers: int = PEERS) -> dict[str, Any]:
    """Time `repeats` runs of each kind, at least five, after one untimed round; see `TransportRuns.as_json`.

    Starts `peers` processes and takes some 2 GiB meanwhile. Raises KVStrataError if a read brought wrong
    bytes: then there is nothing to time.
    """
    layer_bytes = pages * PAGE_BYTES
    with ExitStack() as opened:
        producers = [opened.enter_context(_producer(pages)) for _ in range(peers)]
        # Twice as many pages as one round needs: they are taken at random.
        pool = touched(2 * peers * layer_bytes, "bench-destination")
        opened.callback(pool.close)
        source = touched(LAYERS * layer_bytes, "bench-source")
        opened.callback(source.close)
        bench = _Bench(producers, pool, source, pages=pages)
        opened.callback(bench.close)
        runs = take_turns(bench.kinds(), max(5, repeats))
        bench.check_bytes()
    return TransportRuns(
        page_bytes=PAGE_BYTES, pages=pages, layer_bytes=layer_bytes, peers=peers, **runs
    ).as_json()


class _Bench:
    """A consumer: one reader of each producer over each transport, and a thread for each producer."""

    def __init__(
        self, producers: Sequence[ProducerProcess], pool: HostRegion, source: HostRegion, *, pages: int
    ) -> None:
        self._pool = pool
        self._source = source
        self._pages = pages
        self._holds: list[Hold] = [producer.grant() for producer in producers]
        destination = Destination(address=pool.address, size_bytes=pool.size_bytes)
        self._readers: dict[str, list[Reader]] = {
            name: [
                transport_for(name).connect(
                    producer.tickets[name], [destination], secret=SECRET, deadline_s=DEADLINE_S
                )
                for producer in producers
            ]
            for name in TRANSPORTS
        }
        self._threads = ThreadPoolExecutor(len(producers), thread_name_prefix="bench-reader")
        self._generator = np.random.default_rng(SEED)
        self._layer = 0

    def kinds(self) -> Mapping[str, Callable[[], Callable[[], object]]]:
        """What is timed: each prepares a run, and what it returns is the run."""
        kinds: dict[str, Callable[[], Callable[[], object]]] = {"memcpy_s": self._memcpy}
        for name in TRANSPORTS:
            kinds[f"{name}_s"] = partial(self._reads, name, [0])
        every = range(len(self._holds))
        for name in TRANSPORTS:
            kinds[f"{name}_one_peer_s"] = partial(self._reads, name, [0 for _ in every])
            kinds[f"{name}_all_peers_s"] = partial(self._reads, name, every, at_once=True)
        return kinds

    def check_bytes(self) -> None:
        """Read once more over each transport and compare every byte."""
        for name in TRANSPORTS:
            for peer, reader in enumerate(self._readers[name]):
                (plan,) = self._plans(1)
                reader.read(plan, self._holds[peer], deadline_s=DEADLINE_S)
                memory = self._pool.tensor().numpy()
                for offset, dst in zip(plan.offset.tolist(), plan.dst.tolist(), strict=True):
                    at = dst - self._pool.address
                    expected = pattern(0, offset, PAGE_BYTES, salt=0)
                    if not np.array_equal(memory[at : at + PAGE_BYTES], expected):
                        raise KVStrataError(f"a read over {name} brought other bytes than the producer has")

    def close(self) -> None:
        self._threads.shutdown()
        for readers in self._readers.values():
            for reader in readers:
                reader.close()

    def _memcpy(self) -> Callable[[], object]:
        size = self._pages * PAGE_BYTES
        self._layer += 1
        source = self._source.address + self._layer % LAYERS * size
        target = self._pool.address + self._layer % (self._pool.size_bytes // size) * size
        return lambda: ctypes.memmove(target, source, size)

    def _reads(self, name: str, peers: Sequence[int], *, at_once: bool = False) -> Callable[[], object]:
        readers = self._readers[name]
        work = list(zip(peers, self._plans(len(peers)), strict=True))

        def read(one: tuple[int, ReadPlan]) -> None:
            peer, plan = one
            readers[peer].read(plan, self._holds[peer], deadline_s=DEADLINE_S)

        return lambda: list(self._threads.map(read, work) if at_once else map(read, work))

    def _plans(self, count: int) -> list[ReadPlan]:
        """Plans for as many reads at once: no two write the same page."""
        pages = self._pages
        places = self._generator.permutation(self._pool.size_bytes // PAGE_BYTES)[: count * pages]
        plans = []
        for targets in places.reshape(count, pages):
            self._layer += 1
            group, odd = divmod(self._layer % LAYERS, 2)
            sources = group * 2 * pages + 2 * np.arange(pages, dtype=np.int64) + odd
            plans.append(
                ReadPlan(
                    region=np.zeros(pages, dtype=np.int64),
                    offset=sources * PAGE_BYTES,
                    dst=self._pool.address + targets.astype(np.int64) * PAGE_BYTES,
                    size=np.full(pages, PAGE_BYTES, dtype=np.int64),
                )
            )
        return plans


def _producer(pages: int) -> ProducerProcess:
    size_bytes = LAYERS * pages * PAGE_BYTES
    first, *others = TRANSPORTS
    producer = ProducerProcess(first, (size_bytes,), secret=SECRET, also=others)
    producer.fill(0, 0, size_bytes, salt=0)
    return producer


def touched(size_bytes: int, name: str) -> HostRegion:
    """Shared memory that was written once, so that every page is there."""
    region = HostRegion.create(size_bytes, name, huge_pages=True)
    region.tensor().fill_(1)
    return region


def take_turns(
    kinds: Mapping[str, Callable[[], Callable[[], object]]], repeats: int
) -> dict[str, tuple[float, ...]]:
    """Time `repeats` runs of each kind, one kind after the other, after one untimed round.

    A kind prepares a run, and what it returns is the run. Returns seconds, by kind.
    """
    runs: dict[str, list[float]] = {kind: [] for kind in kinds}
    for run in range(repeats + 1):
        for kind, prepare in kinds.items():
            work = prepare()
            started = time.perf_counter()
            work()
            if run:
                runs[kind].append(time.perf_counter() - started)
    return {kind: tuple(seconds) for kind, seconds in runs.items()}
