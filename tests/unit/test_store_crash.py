"""Other processes: killed in the middle of anything, working at the same time, forked, stopped."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvstrata.errors import DeadlineExceeded, StoreError
from kvstrata.store.base import ReadLease, Status, WriteHandle
from kvstrata.store.local import LocalStore
from kvstrata.store.testing import get_bytes, key, pattern, put_bytes, read_bytes, write_bytes

MIB = 1 << 20
CAPACITY_BYTES = 4 * MIB
PRELUDE = f"""
import os, pickle, sys, time
from kvstrata.store.base import *
from kvstrata.store.local import LocalStore
from kvstrata.store.testing import *
MIB = 1 << 20
def ready(*words):
    print(*words, flush=True)
    sys.stdin.readline()
store = LocalStore.open(sys.argv[1], size_bytes={CAPACITY_BYTES})
"""


@contextmanager
def process(path: Path, body: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Runs `body` with `store` open; `ready(...)` prints a line and waits for one."""
    started = subprocess.Popen(
        [sys.executable, "-c", PRELUDE + textwrap.dedent(body), str(path), *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield started
    finally:
        started.kill()
        started.communicate()


def line_of(running: subprocess.Popen[str]) -> str:
    assert running.stdout is not None
    line = running.stdout.readline().strip()
    assert line, "the other process ended early"
    return line


def go_on(running: subprocess.Popen[str]) -> None:
    assert running.stdin is not None
    running.stdin.write("\n")
    running.stdin.flush()


def kill(running: subprocess.Popen[str]) -> None:
    running.send_signal(signal.SIGKILL)
    running.wait(30)


def open_store(path: Path, **options: float) -> LocalStore:
    return LocalStore.open(path, size_bytes=CAPACITY_BYTES, **options)


def test_a_writer_killed_in_mid_write_leaves_nothing(tmp_path: Path) -> None:
    body = """
        handle = store.reserve(key(1), 3 * MIB, "layout")
        write_bytes(store, handle, 0, bytes(MIB))
        ready("writing")
    """
    store = open_store(tmp_path)
    with process(tmp_path, body) as writer:
        assert line_of(writer) == "writing"
        assert store.statistics().reserved_bytes == 3 * MIB
        assert store.reserve(key(2), 2 * MIB, "layout") is Status.FULL, "a live writer is never robbed"
        kill(writer)
    assert store.contains([key(1)]) == [Status.MISSING]
    assert put_bytes(store, key(2), pattern(2, 4 * MIB)) is Status.OK
    assert get_bytes(store, key(2)) == pattern(2, 4 * MIB)
    assert store.statistics().reclaimed == 1
    store.check_integrity()
    store.close()


def test_a_zombie_counts_as_dead(tmp_path: Path) -> None:
    body = 'handle = store.reserve(key(1), 4 * MIB, "layout"); ready("x")'
    store = open_store(tmp_path)
    with process(tmp_path, body) as writer:
        line_of(writer)
        writer.send_signal(signal.SIGKILL)
        os.waitid(os.P_PID, writer.pid, os.WEXITED | os.WNOWAIT)  # dead, but not reaped
        assert put_bytes(store, key(2), b"x") is Status.OK
    store.close()


def test_a_stopped_writer_past_its_deadline_keeps_its_memory(tmp_path: Path) -> None:
    body = """
        handle = store.reserve(key(1), 4 * MIB, "layout")
        write_bytes(store, handle, 0, pattern(1, 2 * MIB))
        ready("half")
        write_bytes(store, handle, 2 * MIB, pattern(1, 4 * MIB)[2 * MIB:])
        ready(store.publish(handle).name)
    """
    with process(tmp_path, body) as writer:
        assert line_of(writer) == "half"
        store = open_store(tmp_path, clock=lambda: 2e9 + 1e9)  # decades later
        writer.send_signal(signal.SIGSTOP)
        assert store.statistics().quarantined_bytes == 4 * MIB
        assert store.reserve(key(2), 1, "layout") is Status.FULL
        store.clear(force=True)
        assert store.statistics().reserved_bytes == 4 * MIB
        writer.send_signal(signal.SIGCONT)
        go_on(writer)
        assert line_of(writer) == "OK"
    assert get_bytes(store, key(1)) == pattern(1, 4 * MIB)
    store.close()


@pytest.mark.parametrize("step", ["changed", "committed"])
def test_a_process_killed_in_a_transaction_leaves_all_or_nothing(tmp_path: Path, step: str) -> None:
    body = """
        step = sys.argv[2]
        handle = store.reserve(key(1), MIB, "layout")
        write_bytes(store, handle, 0, pattern(1, MIB))
        index = store._files.index
        if step == "changed":
            with index.write("publish") as changes:
                store._ledger.published(changes, handle, now_us=0)
                changes.save_counters()
                ready("inside")
        store.publish(handle)
        ready("after")
    """
    store = open_store(tmp_path)
    with process(tmp_path, body, step) as writer:
        line_of(writer)
        kill(writer)
    expected = pattern(1, MIB) if step == "committed" else Status.MISSING
    assert get_bytes(store, key(1)) == expected
    store.check_integrity()
    assert put_bytes(store, key(2), pattern(2, 4 * MIB)) is Status.OK
    store.check_integrity()
    store.close()


def test_a_process_killed_while_it_makes_the_store(tmp_path: Path) -> None:
    body = """
        import signal
        from kvstrata.store import directory
        store.close()
        directory.os.replace = lambda *names: os.kill(os.getpid(), signal.SIGKILL)
        LocalStore.open(sys.argv[1] + "/deep/store", size_bytes=MIB)
    """
    with process(tmp_path / "other", body) as maker:
        maker.wait(60)
        assert maker.returncode == -signal.SIGKILL
    path = tmp_path / "other/deep/store"
    assert (path / "kvstrata-arena.bin").exists()
    store = open_store(path)
    assert put_bytes(store, key(1), pattern(1, 4 * MIB)) is Status.OK
    store.check_integrity()
    store.close()


def test_leases_of_a_dead_process_end(tmp_path: Path) -> None:
    body = 'store.acquire([key(1)], ttl_s=100000); ready("leased")'
    store = open_store(tmp_path)
    put_bytes(store, key(1), bytes(4 * MIB))
    with process(tmp_path, body) as reader:
        line_of(reader)
        assert store.remove([key(1)]) == [Status.LEASED]
        assert store.reserve(key(2), 1, "layout") is Status.FULL
        kill(reader)
    assert put_bytes(store, key(2), b"x") is Status.OK
    store.close()


def test_one_process_acquires_and_another_reads(tmp_path: Path) -> None:
    body = """
        lease = pickle.loads(bytes.fromhex(sys.argv[2]))
        data = read_bytes(store, lease)
        ready(data == pattern(5, MIB), store.contains([key(5)])[0].name)
        ready(read_bytes(store, lease))
    """
    store = open_store(tmp_path)
    put_bytes(store, key(5), pattern(5, MIB))
    (lease,) = store.acquire([key(5)], ttl_s=1000)
    with process(tmp_path, body, pickle.dumps(lease).hex()) as reader:
        assert line_of(reader) == "True OK"
        store.remove([key(5)], force=True)
        put_bytes(store, key(6), bytes(4 * MIB))
        go_on(reader)
        assert line_of(reader) == "Status.MISSING"
    store.close()


def test_two_processes_write_read_and_evict_together(tmp_path: Path) -> None:
    body = """
        me, wrong = int(sys.argv[2]), 0
        ready("start")
        for step in range(120):
            number = (step * 7 + me * 3) % 12
            put_bytes(store, key(number), pattern(number, MIB // 2 + number * 1001))
            found = get_bytes(store, key((number + step) % 12))
            expected = (number + step) % 12
            if not isinstance(found, Status):
                wrong += found != pattern(expected, MIB // 2 + expected * 1001)
            elif found not in (Status.MISSING, Status.OK):
                wrong += 1
        store.close()
        ready(wrong)
    """
    with process(tmp_path, body, "0") as one, process(tmp_path, body, "1") as two:
        for running in (one, two):
            assert line_of(running) == "start"
        for running in (one, two):
            go_on(running)
        assert [line_of(running) for running in (one, two)] == ["0", "0"]
        store = open_store(tmp_path)
        store.check_integrity()
        seen = store.statistics()
        assert seen.hits + seen.misses == 240
        assert seen.evictions > 0
        assert seen.published > 12
        store.close()


def test_many_processes_open_at_once_and_make_one_store(tmp_path: Path) -> None:
    body = 'ready(put_bytes(store, key(int(sys.argv[2])), b"x").name)'
    with (
        process(tmp_path, body, "1") as one,
        process(tmp_path, body, "2") as two,
        process(tmp_path, body, "3") as three,
    ):
        assert [line_of(running) for running in (one, two, three)] == ["OK"] * 3
        store = open_store(tmp_path)
        assert store.contains([key(number) for number in (1, 2, 3)]) == [Status.OK] * 3
        store.close()


def test_objects_outlive_the_processes(tmp_path: Path) -> None:
    with process(tmp_path, 'put_bytes(store, key(1), pattern(1, MIB)); store.close(); ready("x")') as writer:
        line_of(writer)
    store = open_store(tmp_path)
    assert get_bytes(store, key(1)) == pattern(1, MIB)
    store.close()


def test_a_forked_child_is_refused(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        words = []
        for attempt in (lambda: store.contains([key(1)]), lambda: open_store(tmp_path), store.close):
            try:
                attempt()
                words.append("no error")
            except StoreError as error:
                words.append("spawn" if "spawn" in str(error) else str(error))
        os.write(writing, " ".join(words).encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(reading, 1000) == b"spawn spawn spawn"
    assert put_bytes(store, key(1), b"x") is Status.OK
    os.close(reading)
    os.close(writing)
    store.close()


def test_a_stopped_process_inside_a_transaction_does_not_hang_others(tmp_path: Path) -> None:
    body = """
        with store._files.index.write("sit here") as changes:
            ready("inside")
    """
    store = open_store(tmp_path, lock_timeout_s=0.05)
    put_bytes(store, key(1), pattern(1, 1000))
    (lease,) = store.acquire([key(1)], ttl_s=1000)
    assert isinstance(lease, ReadLease)
    with process(tmp_path, body) as sitter:
        line_of(sitter)
        assert read_bytes(store, lease) == pattern(1, 1000), "readers wait for nobody"
        assert store.acquire([key(1)], ttl_s=1) == [Status.BACKEND_DOWN]
        assert store.reserve(key(2), 1, "layout") is Status.BACKEND_DOWN
        assert store.remove([key(1)]) == [Status.BACKEND_DOWN]
        with pytest.raises(DeadlineExceeded, match="clear the store"):
            store.clear()
    assert put_bytes(store, key(2), b"x") is Status.OK
    store.close()


def test_a_publish_that_cannot_commit_gives_its_room_back_later(tmp_path: Path) -> None:
    body = """
        ready("open")
        with store._files.index.write("sit here") as changes:
            ready("inside")
    """
    store = open_store(tmp_path, lock_timeout_s=0.05)
    with process(tmp_path, body) as sitter:
        line_of(sitter)
        handle = store.reserve(key(1), 4 * MIB, "layout")
        assert isinstance(handle, WriteHandle)
        write_bytes(store, handle, 0, bytes(4 * MIB))
        go_on(sitter)
        line_of(sitter)
        assert store.publish(handle) is Status.BACKEND_DOWN
    assert put_bytes(store, key(2), bytes(4 * MIB)) is Status.OK
    assert store.contains([key(1)]) == [Status.MISSING]
    store.check_integrity()
    store.close()
