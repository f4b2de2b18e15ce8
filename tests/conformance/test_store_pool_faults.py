"""Pools whose servers are killed, stopped and restarted: misses and bounded waits, never a wrong byte.

Real servers, one pool a test, with stores in this process. What is read is compared byte by byte every time.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from store_pools import KINDS, LOST, MIB, START_DEADLINE_S, Pool, Where, eventually, running

from kvstrata.store.base import ReadLease, Status
from kvstrata.store.pool.envelope import pool_key
from kvstrata.store.pool.session import PoolLimits
from kvstrata.store.pool.store import PooledStore
from kvstrata.store.testing import get_bytes, key, pattern, put_bytes, read_bytes

LIMITS = PoolLimits(deadline_s=1.5, rest_s=0.2, full_wait_s=0.2)
# A call meets the deadline at most twice, before and after it found the pool silent; the rest is slack.
BOUND_S = 20.0
ANSWER_S = 120.0
# Over shared memory a client of Mooncake that was killed under calls may never be found again: no wrong byte,
# no crash, but misses until the engine is started again. See docs/data_plane.md.
NOT_FOUND_AGAIN = {("shm", "owner")}
DIRECTORIES = {"mooncake": "master", "memcache": "meta"}


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


@pytest.fixture
def directory(kind: tuple[str, str | None]) -> str:
    """The server that knows the keys; the other one, "owner", has the bytes."""
    return DIRECTORIES[kind[0]]


@contextmanager
def stopped(pool: Pool, name: str) -> Iterator[None]:
    os.kill(pool.processes.pid(name), signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pool.processes.pid(name), signal.SIGCONT)


def filled(store: PooledStore, count: int = 4) -> list[ReadLease]:
    """Objects 0 .. count, each under a lease."""
    for number in range(count):
        assert put_bytes(store, key(number), pattern(number, MIB)) is Status.OK
    leases = store.acquire([key(number) for number in range(count)], ttl_s=1000)
    assert all(isinstance(lease, ReadLease) for lease in leases)
    return [lease for lease in leases if isinstance(lease, ReadLease)]


def check_reads(store: PooledStore, leases: list[ReadLease]) -> list[Status]:
    """Read everything: the right bytes or a status that means a miss, in bounded time."""
    statuses = []
    for number, lease in enumerate(leases):
        begun_s = time.monotonic()
        got = read_bytes(store, lease)
        assert time.monotonic() - begun_s < BOUND_S
        assert got == pattern(number, MIB) or got in LOST
        statuses.append(got if isinstance(got, Status) else Status.OK)
    return statuses


def works_again(store: PooledStore, number: int) -> bool:
    put_bytes(store, key(number), pattern(number, MIB))
    return get_bytes(store, key(number)) == pattern(number, MIB)


@pytest.mark.parametrize("victim", ["directory", "owner"])
def test_a_killed_server_means_misses_and_a_new_one_works(
    store: PooledStore, pool: Pool, kind: tuple[str, str | None], directory: str, victim: str
) -> None:
    name = directory if victim == "directory" else "owner"
    leases = filled(store)
    pool.processes.kill(name)
    check_reads(store, leases)
    begun_s = time.monotonic()
    assert put_bytes(store, key(90), pattern(90, MIB)) not in (Status.OK, Status.EXISTS)
    assert all(not isinstance(answer, ReadLease) for answer in store.acquire([key(91)], ttl_s=10))
    assert time.monotonic() - begun_s < BOUND_S
    pool.processes.start_one(name, deadline_s=START_DEADLINE_S)
    if (kind[1], victim) not in NOT_FOUND_AGAIN:
        numbers = iter(range(100, 10_000))
        eventually(lambda: works_again(store, next(numbers)))
    assert check_reads(store, leases) != [Status.OK] * len(leases)


@pytest.mark.parametrize("victim", ["directory", "owner"])
def test_a_stopped_server_costs_a_deadline_and_comes_back(
    store: PooledStore, pool: Pool, directory: str, victim: str
) -> None:
    leases = filled(store)
    with stopped(pool, directory if victim == "directory" else "owner"):
        check_reads(store, leases)
        begun_s = time.monotonic()
        store.contains([key(0)])
        put_bytes(store, key(90), pattern(90, MIB))
        get_bytes(store, key(0))
        assert time.monotonic() - begun_s < BOUND_S
        store.check_integrity()
    numbers = iter(range(100, 10_000))
    eventually(lambda: works_again(store, next(numbers)))
    eventually(lambda: store._session.calls.stuck == 0)
    eventually(lambda: store._session.staging.usage() == (0, 0))  # what hung came back, and its memory too


def _hammer(pipe: Connection, where: Where, is_found_again: bool) -> None:
    """In a process of its own: read and write in three threads while the parent kills and starts a server.

    Asks for both, and says then what was wrong, and how long a call took at the longest.
    """
    store = where.open()
    leases = filled(store)
    is_over = threading.Event()
    wrong: list[str] = []
    rounds = [0, 0, 0]
    longest_s = [0.0]

    def timed(call: Callable[[], bytes | Status]) -> bytes | Status:
        begun_s = time.monotonic()
        got = call()
        longest_s.append(time.monotonic() - begun_s)
        return got

    def read(at: int) -> None:
        while not is_over.is_set():
            for number, lease in enumerate(leases):
                got = timed(lambda lease=lease: read_bytes(store, lease, 1000 * at, 500_000))
                expected = pattern(number, MIB)[1000 * at : 1000 * at + 500_000]
                if got != expected and got not in LOST:
                    wrong.append(f"object {number}: {got!r:.80}")
            rounds[at] += 1

    def write(at: int) -> None:
        number = 1000
        while not is_over.is_set():
            number += 1
            timed(lambda number=number: put_bytes(store, key(number), pattern(number, MIB)))
            got = timed(lambda number=number: get_bytes(store, key(number)))
            if got != pattern(number, MIB) and got not in LOST:
                wrong.append(f"object {number}: {got!r:.80}")
            rounds[at] += 1

    def ask(what: str) -> None:
        pipe.send(what)
        pipe.recv()

    threads = [
        threading.Thread(target=work, args=(at,), daemon=True) for at, work in enumerate((read, read, write))
    ]
    for thread in threads:
        thread.start()
    try:
        eventually(lambda: min(rounds) > 2)
        ask("kill")
        seen = list(rounds)
        eventually(lambda: all(now > before for now, before in zip(rounds, seen, strict=True)))
        ask("start")
        numbers = iter(range(100_000, 200_000))
        if is_found_again:
            eventually(lambda: works_again(store, next(numbers)))
        else:
            seen = list(rounds)
            eventually(lambda: all(now > before for now, before in zip(rounds, seen, strict=True)))
        is_over.set()
        for thread in threads:
            thread.join(BOUND_S)
        if any(thread.is_alive() for thread in threads):
            wrong.append("a call never ended")
        store.check_integrity()
        store.close()
    except BaseException as error:
        wrong.append(f"{type(error).__name__}: {error}")
    pipe.send((wrong, max(longest_s)))
    # memcache_hybrid 1.3.0 may leave a call hanging for good, and crashes when a process ends after that.
    os._exit(0)


@pytest.mark.parametrize("victim", ["directory", "owner"])
def test_servers_killed_while_many_threads_read_and_write(
    pool: Pool, kind: tuple[str, str | None], directory: str, victim: str
) -> None:
    """Whatever was in progress: right bytes or a miss, in bounded time, and the process lives."""
    name = directory if victim == "directory" else "owner"
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    is_found_again = (kind[1], victim) not in NOT_FOUND_AGAIN
    arguments = (theirs, pool.where(kind[1], LIMITS), is_found_again)
    process = context.Process(target=_hammer, args=arguments, daemon=True)
    process.start()
    theirs.close()
    try:
        while True:
            assert ours.poll(ANSWER_S), "the process neither asked for anything nor ended"
            asked = ours.recv()  # EOFError: the library ended it
            if asked == "kill":
                pool.processes.kill(name)
            elif asked == "start":
                pool.processes.start_one(name, deadline_s=START_DEADLINE_S)
            else:
                wrong, longest_s = asked
                break
            ours.send("done")
        process.join(ANSWER_S)
        assert process.exitcode == 0
    finally:
        process.kill()
        process.join(ANSWER_S)
    assert wrong == []
    assert longest_s < BOUND_S


def test_an_object_that_changed_under_its_key_is_never_read(store: PooledStore, pool: Pool) -> None:
    """Negative control of all of the above: the checks find bytes that are not the object's."""
    (lease,) = filled(store, 1)
    envelope = next(iter(store._known.values()))
    store.remove([key(0)], force=True)
    raw = store._session.client
    room = store._session.staging.take(2 * MIB)
    assert room is not None
    forged = envelope.encode() + pattern(0, MIB // 2) + pattern(1, MIB)[MIB // 2 :]
    ctypes.memmove(room.address, forged, len(forged))
    eventually(lambda: raw.put(pool_key(key(0)), room.address, len(forged)) is Status.OK)
    assert read_bytes(store, lease, 0, MIB // 4) == pattern(0, MIB // 4)
    assert read_bytes(store, lease) is Status.MISSING
    assert get_bytes(store, key(0)) is Status.MISSING
    store._session.staging.give_back(room)
