"""`kvstrata bench store`: puts and gets of every store that can run here, against memcpy in the same run.

A put is reserve, write and publish of new objects, one after the other; a get is one `read_many` of all of
them under leases that were acquired before. memcpy copies as many pieces of the same size between memory of
this process. Put, get and memcpy take turns; the stores follow each other. Then prompts are served with each
store by real engines (`store_prefill`).
"""

from __future__ import annotations

import ctypes
import json
import mmap
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from rich.table import Table

from kvstrata.bench.machine import describe_machine, package_version
from kvstrata.bench.store_prefill import (
    StorePrefillOptions,
    StorePrefillRuns,
    engines_on,
    local_store_config,
    measure_store_prefill,
    store_prompts,
)
from kvstrata.errors import ConfigurationError, KVStrataError, StoreError
from kvstrata.serve_pd.machine import free_port
from kvstrata.serve_store.plan import StorePlan, engine_config
from kvstrata.serve_store.processes import StoreProcesses
from kvstrata.store.base import ByteRange, ReadLease, Status, Store, StoreKey, WriteHandle
from kvstrata.store.local import LocalStore
from kvstrata.store.pool.libraries import library
from kvstrata.store.pool.opening import open_pool
from kvstrata.terminal import Terminal, engine_noise_to

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
    prefill: StorePrefillOptions | None = field(default_factory=StorePrefillOptions)  # None: no engines


@dataclass(frozen=True, kw_only=True)
class StoreRuns:
    """Seconds of every run of one store and size, in order; the three kinds took turns."""

    put_s: tuple[float, ...]
    get_s: tuple[float, ...]
    memcpy_s: tuple[float, ...]


def bench_store(options: StoreBenchOptions, *, json_file: Path | None, log: Path) -> dict[str, Any]:
    """Run the benchmark for a person at a terminal; return and, if asked, write the result.

    Raises `ConfigurationError` for a store it does not know. One that cannot run here is left out, with why.
    """
    for name in options.stores:
        if name not in STORES:
            raise ConfigurationError(f"--store {name!r} is unknown; use one of: {', '.join(STORES)}")
    runs: dict[str, dict[str, StoreRuns]] = {}
    skipped: dict[str, str] = {}
    with engine_noise_to(log) as terminal:
        for name in options.stores:
            try:
                with terminal.console.status(name), _opened(name) as store:
                    runs[name] = {size: _measure(store, size, options.repeats) for size in SIZES}
            except (KVStrataError, OSError) as error:
                skipped[name] = str(error)
        prefills = {} if options.prefill is None else _measure_prefills(options.prefill, runs, terminal)
        result = summarise(options, runs, skipped, prefills)
        for table in as_tables(result):
            terminal.console.print(table)
        for name, why in skipped.items():
            terminal.console.print(f"left out: {name}: {why}", highlight=False, markup=False)
        if json_file is not None:
            json_file.parent.mkdir(parents=True, exist_ok=True)
            json_file.write_text(json.dumps(result, indent=1) + "\n")
            terminal.console.print(f"written: {json_file}")
    return result


def summarise(
    options: StoreBenchOptions,
    runs: dict[str, dict[str, StoreRuns]],
    skipped: dict[str, str],
    prefills: dict[str, StorePrefillRuns],
) -> dict[str, Any]:
    """The result file. Keys `store.<name>.<size>.put|get` hold bytes a second over memcpy's, by medians.

    Keys `prefill.<name>.saved|found` hold the time of a prefill over plain vLLM's: of a prompt that is
    computed and saved to the store, and of one that is found there.
    """
    ratios = {
        f"store.{name}.{size}.{kind}": median(measured.memcpy_s) / median(seconds)
        for name, sizes in runs.items()
        for size, measured in sizes.items()
        for kind, seconds in (("put", measured.put_s), ("get", measured.get_s))
    }
    for name, prefill in prefills.items():
        ratios |= {f"prefill.{name}.{what}": ratio for what, ratio in prefill.ratios().items()}
    return {
        "kvstrata_bench_store": 1,
        "options": asdict(options),
        "machine": describe_machine(),
        "libraries": {
            name: version
            for name in ("mooncake-transfer-engine-non-cuda", "mooncake-transfer-engine", "memcache_hybrid")
            if (version := package_version(name)) is not None
        },
        **ratios,
        "skipped": skipped,
        "runs": {name: {size: asdict(one) for size, one in sizes.items()} for name, sizes in runs.items()},
        "prefills": {name: measured.as_json() for name, measured in prefills.items()},
    }


def as_tables(result: dict[str, Any]) -> tuple[Table, ...]:
    """What a person sees: GB/s with the share of memcpy's speed, and prefills against plain vLLM."""
    prefills = Table(title="Layerwise prefill with the store: time over plain vLLM's")
    for column in ("store", "prompt saved", "prompt found"):
        prefills.add_column(column)
    for name in result["prefills"]:
        prefills.add_row(name, *(f"{result[f'prefill.{name}.{what}']:.2f}" for what in ("saved", "found")))
    return (_speeds(result), prefills) if result["prefills"] else (_speeds(result),)


def _speeds(result: dict[str, Any]) -> Table:
    table = Table(title="Stores: GB/s (share of memcpy in the same run)")
    table.add_column("store")
    for size, (_, count) in SIZES.items():
        table.add_column(f"{size} x{count} put", justify="right")
        table.add_column("get", justify="right")
    for name, sizes in result["runs"].items():
        cells = []
        for size, (object_bytes, count) in SIZES.items():
            for kind in ("put", "get"):
                gb_per_s = object_bytes * count / median(sizes[size][f"{kind}_s"]) / 1e9
                cells.append(f"{gb_per_s:.2f} ({result[f'store.{name}.{size}.{kind}']:.0%})")
        table.add_row(name, *cells)
    return table


def _measure_prefills(
    options: StorePrefillOptions, names: Iterable[str], terminal: Terminal
) -> dict[str, StorePrefillRuns]:
    prompts = store_prompts(options)
    prefills = {}
    for name in names:
        with (
            terminal.step(f"{len(prompts)} prompts served with {name}"),
            _served(name) as (connector, environment),
        ):
            prefills[name] = measure_store_prefill(
                options,
                engines_on(options, terminal),
                prompts,
                connector=connector,
                environment=environment,
            )
    return prefills


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
    with ExitStack() as stack:
        store: Store
        if name == "local":
            local = LocalStore.open(
                stack.enter_context(_shared_directory()) / "store", size_bytes=STORE_BYTES
            )
            local.prefault()
            store = local
        else:
            plan = stack.enter_context(_servers(name))
            store = open_pool(
                plan.backend,
                address=plan.address,
                client_address=plan.second_address if plan.protocol == "shm" else None,
                config_address=plan.second_address if plan.backend == "memcache" else None,
                protocol=plan.protocol,
                size_bytes=STORE_BYTES,
                object_bytes=16 * MIB,
            )
        stack.callback(store.close)
        yield store


@contextmanager
def _served(name: str) -> Iterator[tuple[dict[str, Any], Mapping[str, str]]]:
    """What engines are told of a store of their own, and the environment that they need."""
    if name == "local":
        with _shared_directory() as directory:
            yield local_store_config(directory / "store", STORE_BYTES), {}
        return
    with _servers(name) as plan:
        yield engine_config(plan), plan.environment


@contextmanager
def _servers(name: str) -> Iterator[StorePlan]:
    backend, _, protocol = name.partition("-")
    library(backend)
    with tempfile.TemporaryDirectory(prefix="kvstrata-bench-") as directory:
        plan = StorePlan(
            backend=backend,
            size_bytes=STORE_BYTES,
            log_dir=Path(directory),
            port=free_port(_HOST),
            second_port=free_port(_HOST),
            metrics_port=free_port(_HOST),
            protocol=protocol or None,
        )
        processes = StoreProcesses(plan)
        try:
            processes.start(deadline_s=_START_DEADLINE_S)
            yield plan
        finally:
            processes.close()


@contextmanager
def _shared_directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        yield Path(directory)
