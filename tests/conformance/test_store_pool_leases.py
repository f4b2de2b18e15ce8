"""Leases of pools that run out while a read is under way: the bytes of one object, or a miss.

A process reads without a pause and is stopped, wherever it is, for longer than any lease. Meanwhile every
object is dropped, others are put in its place and under its key, and the pool is filled until it evicts.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from store_pools import KINDS, LOST, MIB, POOL_BYTES, Pool, Where, eventually, running

from kvstrata.store.base import ByteRange, ReadLease, Status
from kvstrata.store.pool.envelope import pool_key
from kvstrata.store.pool.session import PoolLimits
from kvstrata.store.pool.store import PooledStore
from kvstrata.store.testing import key, pattern, put_bytes, read_bytes

LEASE_S = 1.0  # of the servers (`store_pools`)
# Nobody keeps a lease alive.
LIMITS = PoolLimits(deadline_s=20.0, rest_s=0.1, full_wait_s=0.3, keep_every_s=1000.0)
OBJECTS = 3
VERSIONS = 50
ROUNDS = 8
ANSWER_S = 120.0


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> tuple[str, str | None]:
    return KINDS[request.param]


@pytest.fixture
def pool(kind: tuple[str, str | None], tmp_path: Path) -> Iterator[Pool]:
    with running(kind[0], tmp_path) as pool:
        yield pool


@pytest.fixture
def store(pool: Pool, kind: tuple[str, str | None]) -> Iterator[PooledStore]:
    made = pool.open(protocol=kind[1], limits=LIMITS)
    yield made
    made.check_integrity()
    made.close()


def contents(number: int, version: int) -> bytes:
    return pattern(number + OBJECTS * version, MIB)


def _read_on(pipe: Connection, where: Where) -> None:
    """Read until told otherwise; then say how often what came, and everything that was wrong."""
    store = where.open()
    versions = {contents(n, version): (n, version) for n in range(OBJECTS) for version in range(VERSIONS)}
    counts: Counter[str] = Counter()
    wrong: list[str] = []
    pipe.send("reads")
    while not pipe.poll(0):
        for number in range(OBJECTS):
            (lease,) = store.acquire([key(number)], ttl_s=1000)
            if not isinstance(lease, ReadLease):
                counts[lease.name] += 1
                continue
            for _ in range(5):
                got = read_bytes(store, lease)
                counts["OK" if isinstance(got, bytes) else got.name] += 1
                if isinstance(got, bytes) and versions.get(got, (None, 0))[0] != number:
                    wrong.append(f"object {number}: {got[:16]!r} ...")
            store.release([lease])
    store.check_integrity()
    pipe.send((counts, wrong))
    os._exit(0)  # what a library does at the end is not asked


def test_a_lease_that_runs_out_in_the_middle_of_reads_means_misses(
    store: PooledStore, pool: Pool, kind: tuple[str, str | None]
) -> None:
    dice = random.Random(1)
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_read_on, args=(theirs, pool.where(kind[1], LIMITS)), daemon=True)
    process.start()
    assert process.pid is not None
    try:
        assert ours.poll(ANSWER_S), "the reader never began"
        assert ours.recv() == "reads"
        version = 0

        def replace_all() -> None:
            nonlocal version
            version += 1
            store.clear(force=True)
            for number in range(OBJECTS):
                eventually(
                    lambda number=number: (
                        put_bytes(store, key(number), contents(number, version)) is Status.OK
                    )
                )

        replace_all()
        for turn in range(ROUNDS):
            time.sleep(0.1 + 0.1 * dice.random())
            os.kill(process.pid, signal.SIGSTOP)
            try:
                time.sleep(1.2 * LEASE_S)
                replace_all()
                if turn % 2:  # what is not leased is evicted, the new ones too
                    for filler in range(2 * POOL_BYTES // MIB):
                        put_bytes(store, key(1000 + filler), contents(1000 + filler, 0))
            finally:
                os.kill(process.pid, signal.SIGCONT)
        ours.send("stop")
        assert ours.poll(ANSWER_S), "the reader never ended"
        counts, wrong = ours.recv()
    finally:
        process.kill()
        process.join(ANSWER_S)
    assert wrong == []
    assert counts["OK"] > 0
    assert counts["MISSING"] > 0, counts
    assert set(counts) <= {"OK", *(status.name for status in LOST)}, counts


@pytest.mark.parametrize("ending", ["replaced", "evicted"])
def test_a_read_that_begins_in_time_and_goes_on_past_its_lease_is_a_miss(
    store: PooledStore, monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    """The same at a known place: after the head, in the middle of a read of several pieces."""
    assert put_bytes(store, key(0), contents(0, 0)) is Status.OK
    (lease,) = store.acquire([key(0)], ttl_s=1000)
    assert isinstance(lease, ReadLease)
    assert read_bytes(store, lease) == contents(0, 0)
    client = store._session.client
    read = client.read
    calls = 0

    def read_late(*args: object, **kwargs: object) -> list[Status]:
        nonlocal calls
        calls += 1
        if calls == 1:
            time.sleep(1.3 * LEASE_S)
            if ending == "replaced":
                client.remove([pool_key(key(0))], force=True)
                monkeypatch.setattr(client, "read", read)
                eventually(lambda: put_bytes(store, key(0), contents(0, 1)) is Status.OK)
            else:
                for filler in range(3 * POOL_BYTES // MIB):
                    put_bytes(store, key(1000 + filler), contents(1000 + filler, 0))
        return read(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(client, "read", read_late)
    memory = (ctypes.c_char * MIB)()
    spans = [
        ByteRange(offset=at, dst_address=ctypes.addressof(memory) + at, size_bytes=MIB // 4)
        for at in range(0, MIB, MIB // 4)
    ]
    answer = store.read(lease, spans)
    if ending == "replaced":
        assert answer is Status.MISSING
    else:  # the pool may have had room for it
        assert answer in LOST or memory.raw == contents(0, 0)
