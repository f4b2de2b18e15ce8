"""`kvstrata bench store`: puts and gets of every store that can run here, against memcpy in the same run.

A put is reserve, write and publish of new objects, one after the other; a get is one `read_many` of all of
them under leases that were acquired before. memcpy copies as many pieces of the same size between memory of
this process. Put, get and memcpy take turns; the stores follow each other.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from kvstrata.bench.machine import describe_machine, package_version
from kvstrata.errors import ConfigurationError, KVStrataError, StoreError
from kvstrata.serve_pd.machine import free_port
from kvstrata.serve_store.plan import StorePlan
from kvstrata.serve_store.processes import StoreProcesses
from kvstrata.store.base import ByteRange, ReadLease, Status, Store, StoreKey, WriteHandle
from kvstrata.store.local import LocalStore
from kvstrata.store.pool.libraries import library
from kvstrata.store.pool.opening import open_pool

KIB, MIB = 1 << 10, 1 << 20
SIZES = {"4KiB": (4 * KIB, 64), "64KiB": (64 * KIB, 64), "1MiB": (MIB, 32), "16MiB": (16 * MIB, 2)}
"""Name of a size -> its bytes, and how many objects."""

STORES = ("local", "mooncake", "mooncake-shm", "memcache")
STORE_BYTES = 512 * MIB
_HOST = "127.0.0.1"
_START_DEADLINE_S = 60.0


@dataclass(frozen=True, kw_only=True)
class StoreBenchOptions:
    """What is measured; all of it goes into the result file."""

    repeats: int = 7
    stores: tuple[str, ...] = STORES


@dataclass(frozen=True, kw_only=True)
class StoreRuns:
    """Seconds of every run of one store and size, in order; the three kinds took turns."""

    put_s: tuple[float, ...]
    get_s: tuple[float, ...]
    memcpy_s: tuple[float, ...]


def bench_store(options: StoreBenchOptions, *, json_file: Path | None, console: Console) -> dict[str, Any]:
    """Run the benchmark for a person at a terminal; return and, if asked, write the result.

    Raises `ConfigurationError` for a store it does not know. One that cannot run here is left out, with why.
    """
    runs: dict[str, dict[str, StoreRuns]] = {}
    left_out: dict[str, str] = {}
    for name in options.stores:
        if name not in STORES:
            raise ConfigurationError(f"--store {name!r} is unknown; use one of: {', '.join(STORES)}")
        try:
            with console.status(name), _opened(name) as store:
                runs[name] = {size: _measure(store, size, options.repeats) for size in SIZES}
        except (KVStrataError, OSError) as error:
            left_out[name] = str(error)
    result = summarise(options, runs, left_out)
    console.print(as_table(result))
    for name, why in left_out.items():
        console.print(f"left out: {name}: {why}", highlight=False, markup=False)
    if json_file is not None:
        json_file.parent.mkdir(parents=True, exist_ok=True)
        json_file.write_text(json.dumps(result, indent=1) + "\n")
        console.print(f"written: {json_file}")
    return result


def summarise(
    options: StoreBenchOptions, runs: dict[str, dict[str, StoreRuns]], left_out: dict[str, str]
) -> dict[str, Any]:
    """The result file. Keys `store.<name>.<size>.put|get` hold GB/s and the ratio to memcpy, by medians."""
    figures = {}
    for name, sizes in runs.items():
        for size, measured in sizes.items():
            object_bytes, count = SIZES[size]
            memcpy_s = median(measured.memcpy_s)
            for kind, seconds in (("put", measured.put_s), ("get", measured.get_s)):
                taken_s = median(seconds)
                figures[f"store.{name}.{size}.{kind}"] = {
                    "GB_per_s": object_bytes * count / taken_s / 1e9,
                    "of_memcpy": memcpy_s / taken_s,
                }
    return {
        "benchmark": "store",
        "options": asdict(options),
        "machine": describe_machine(),
        "libraries": {
            name: version
            for name in ("mooncake-transfer-engine-non-cuda", "mooncake-transfer-engine", "memcache_hybrid")
            if (version := package_version(name)) is not None
        },
        "figures": figures,
        "left_out": left_out,
        "runs": {name: {size: asdict(one) for size, one in sizes.items()} for name, sizes in runs.items()},
    }


def as_table(result: dict[str, Any]) -> Table:
    """What a person sees: GB/s, and the share of memcpy's speed."""
    table = Table(title="Stores: GB/s (share of memcpy in the same run)")
    table.add_column("store")
    for size, (_, count) in SIZES.items():
        table.add_column(f"{size} x{count} put", justify="right")
        table.add_column("get", justify="right")
    figures = result["figures"]
    for name in result["runs"]:
        cells = [figures[f"store.{name}.{size}.{kind}"] for size in SIZES for kind in ("put", "get")]
        table.add_row(name, *(f"{cell['GB_per_s']:.2f} ({cell['of_memcpy']:.0%})" for cell in cells))
    return table


def _measure(store: Store, size: str, repeats: int) -> StoreRuns:
    """Time `repeats` rounds after an untimed one."""
    object_bytes, count = SIZES[size]
    with _memory(object_bytes * count) as source, _memory(object_bytes * count) as target:
        ctypes.memset(source, 0x5A, object_bytes * count)
        ctypes.memset(target, 0, object_bytes * count)
        rounds = [
            _round(store, number, source, target, object_bytes, count) for number in range(repeats + 1)
        ][1:]
    put_s, get_s, memcpy_s = zip(*rounds, strict=True)
    return StoreRuns(put_s=put_s, get_s=get_s, memcpy_s=memcpy_s)


def _round(
    store: Store, number: int, source: int, target: int, object_bytes: int, count: int
) -> tuple[float, float, float]:
    store.clear(force=True)
    keys = [
        StoreKey(namespace="bench", rank="", block_hash=f"{object_bytes}.{number}.{at}".encode())
        for at in range(count)
    ]
    begun_s = time.perf_counter()
    for at, key in enumerate(keys):
        _put(store, key, source + at * object_bytes, object_bytes)
    put_s = time.perf_counter() - begun_s
    leases = [_leased(lease) for lease in store.acquire(keys, ttl_s=60.0)]
    reads = [
        (lease, [ByteRange(offset=0, dst_address=target + at * object_bytes, size_bytes=object_bytes)])
        for at, lease in enumerate(leases)
    ]
    begun_s = time.perf_counter()
    statuses = store.read_many(reads)
    get_s = time.perf_counter() - begun_s
    if any(status is not Status.OK for status in statuses):
        raise StoreError(f"a get of {object_bytes} bytes was answered {statuses}")
    store.release(leases)
    begun_s = time.perf_counter()
    for at in range(0, count * object_bytes, object_bytes):
        ctypes.memmove(target + at, source + at, object_bytes)
    return put_s, get_s, time.perf_counter() - begun_s


def _put(store: Store, key: StoreKey, address: int, size_bytes: int) -> None:
    handle = store.reserve(key, size_bytes, "bench")
    if not isinstance(handle, WriteHandle):
        raise StoreError(f"a reservation of {size_bytes} bytes was answered {handle}")
    store.write(handle, 0, address, size_bytes)
    status = store.publish(handle)
    if status is not Status.OK:
        raise StoreError(f"a put of {size_bytes} bytes was answered {status}")


def _leased(lease: ReadLease | Status) -> ReadLease:
    if isinstance(lease, Status):
        raise StoreError(f"a lease was answered {lease}")
    return lease


@contextmanager
def _memory(size_bytes: int) -> Iterator[int]:
    mapping = mmap.mmap(-1, size_bytes)
    first = ctypes.c_char.from_buffer(mapping)
    try:
        yield ctypes.addressof(first)
    finally:
        del first
        mapping.close()


@contextmanager
def _opened(name: str) -> Iterator[Store]:
    """A store of its own, with servers of its own where it needs some."""
    backend, _, protocol = name.partition("-")
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvstrata-bench-")))
        store: Store
        if backend == "local":
            path = Path(stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm")))
            local = LocalStore.open(path / "store", size_bytes=STORE_BYTES)
            local.prefault()
            store = local
        else:
            library(backend)
            plan = StorePlan(
                backend=backend,
                size_bytes=STORE_BYTES,
                log_dir=directory,
                port=free_port(_HOST),
                second_port=free_port(_HOST),
                metrics_port=free_port(_HOST),
            )
            processes = StoreProcesses(plan)
            stack.callback(processes.close)
            processes.start(deadline_s=_START_DEADLINE_S)
            store = open_pool(
                backend,
                address=plan.address,
                client_address=plan.second_address if protocol == "shm" else None,
                config_address=plan.second_address if backend == "memcache" else None,
                protocol=protocol or None,
                size_bytes=STORE_BYTES,
                object_bytes=16 * MIB,
            )
        stack.callback(store.close)
        yield store
