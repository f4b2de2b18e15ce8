"""Transports over libraries, without a library: what is missing, who is believed, what blocks."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from kvstrata.errors import ConfigurationError, DeadlineExceeded, TransferFailed
from kvstrata.remote.holds import Hold, HoldRevoked, HoldTable
from kvstrata.remote.transports.base import Destination, Int64Array
from kvstrata.remote.transports.engines import mooncake, nixl
from kvstrata.remote.transports.engines.base import Patience
from kvstrata.remote.transports.engines.guard import Board, Guard
from kvstrata.remote.transports.engines.hosts import address_towards, is_loopback, split_address
from kvstrata.remote.transports.engines.memfabric import MemFabricLibrary
from kvstrata.remote.transports.engines.staged import MAX_GIVEN_UP, GivenUp, StagedEngine
from kvstrata.remote.transports.loops import copy_piece, new_progress
from kvstrata.remote.transports.registry import transport_for, transports_for
from kvstrata.remote.transports.testing import Memory, pattern

LONG_S = 30.0


def patience(seconds: float = LONG_S, useless: Callable[[], str | None] = lambda: None) -> Patience:
    return Patience("remote read over a test", time.monotonic() + seconds, useless)


def ranges(*values: int) -> Int64Array:
    return np.array(values, dtype=np.int64)


# A library that is not there


@pytest.mark.parametrize(
    ("name", "packages", "extra"),
    [
        ("nixl", ["nixl_cu12", "nixl_cu13"], "kvstrata[nixl]"),
        ("mooncake", ["mooncake"], "kvstrata[mooncake]"),
        ("memfabric", ["memfabric_hybrid"], "kvstrata[ascend]"),
    ],
)
def test_a_missing_library_is_one_line_that_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, name: str, packages: Sequence[str], extra: str
) -> None:
    for module in list(sys.modules):
        if module.split(".")[0] in packages:
            monkeypatch.delitem(sys.modules, module)
    for package in packages:
        monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigurationError) as caught:
        transports_for(name)
    said = str(caught.value)
    assert said.startswith(f"transfer_backend={name!r} cannot be used here: ")
    assert f"pip install '{extra}'" in said
    assert "\n" not in said


def test_a_library_that_does_not_load_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for package in ("nixl_cu12", "mooncake", "memfabric_hybrid"):
        for module in [found for found in sys.modules if found.split(".")[0] == package]:
            monkeypatch.delitem(sys.modules, module)
        (tmp_path / package).mkdir()
        for file in ("__init__", "_bindings", "engine"):
            (tmp_path / package / f"{file}.py").write_text("raise ImportError('libsomething.so.1: missing')")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("nixl", "mooncake", "memfabric"):
        assert "libsomething.so.1: missing" in (transport_for(name).usable() or "")


def test_making_a_transport_imports_no_library() -> None:
    before = set(sys.modules)
    for name in ("nixl", "mooncake", "memfabric"):
        assert transport_for(name).name == name
    new = {module.split(".")[0] for module in set(sys.modules) - before}
    assert new.isdisjoint({"nixl_cu12", "nixl_cu13", "mooncake", "memfabric_hybrid"})


def test_auto_never_takes_a_library() -> None:
    assert [transport.name for transport in transports_for("auto")] == ["shm", "tcp"]


def test_memfabrics_protocol_reaches_the_library() -> None:
    assert MemFabricLibrary(protocol="device_urma").options == {"protocol": "device_urma"}
    with pytest.raises(ConfigurationError, match=r"memfabric_transfer_protocol='pigeon'.*sdma"):
        MemFabricLibrary(protocol="pigeon")


@pytest.mark.parametrize("peer", [b"", b"nonsense", b"\xff\xfe", b"host:", b"a" * 999])
def test_a_peer_of_another_library_is_refused(peer: bytes) -> None:
    libraries = (nixl.NixlLibrary(), mooncake.MooncakeLibrary(), MemFabricLibrary())
    for library in libraries:
        with pytest.raises(TransferFailed, match="ticket"):
            library.open(peer, [], patience())


def test_names_of_hosts() -> None:
    assert split_address(b"[::1]:80") == ("[::1]", 80)
    assert [is_loopback(host) for host in ("127.0.0.3", "::1", "localhost", "10.0.0.1", "there")] == [
        True,
        True,
        True,
        False,
        False,
    ]
    assert address_towards("127.0.0.1", 80) == "127.0.0.1"


# The guard


class Direct:
    """An engine whose owner is this process; `torn` cuts off what lands."""

    def __init__(self) -> None:
        self.moves = True

    def read(self, local: Int64Array, remote: Int64Array, size: Int64Array, patience: Patience) -> None:
        if self.moves:
            nothing = np.zeros_like(size)
            copy_piece(nothing, remote, local, size, ranges(0), new_progress(), 1 << 30)

    def tell(self) -> None:
        return

    def close(self) -> None:
        return


def test_the_guard_believes_only_the_export_that_it_was_told_of() -> None:
    board, holds, engine = Board(), HoldTable(), Direct()
    guard = Guard(
        export_id=board.export_id,
        board_address=board.region.address,
        holds_address=holds.region.address,
        wait="a test",
    )
    holds.grant()
    hold = holds.grant()
    guard.check(engine, None, patience())
    guard.check(engine, hold, patience())
    with pytest.raises(HoldRevoked):
        guard.check(engine, Hold(slot=hold.slot, generation=hold.generation + 1), patience())
    # A read that moves nothing must not find what the last one brought.
    engine.moves = False
    with pytest.raises(TransferFailed, match="closed its export"):
        guard.check(engine, hold, patience())
    engine.moves = True
    holds.revoke(hold)
    with pytest.raises(HoldRevoked, match="ended"):
        guard.check(engine, hold, patience())
    other = Board()
    guard._board_address = other.region.address
    with pytest.raises(TransferFailed, match="another took its place"):
        guard.check(engine, None, patience())
    other.close()
    board.close()
    board.close()
    holds.close()


# Calls that block


class Calls:
    """Copies within this process, once `gate` is open."""

    def __init__(self, buffer: Destination) -> None:
        self.buffer = buffer
        self.gate = threading.Event()
        self.gate.set()
        self.began = threading.Event()
        self.closed = threading.Event()
        self.asked: list[list[int]] = []
        self.told = 0
        self.error: Exception | None = None

    def read(self, local: Sequence[int], remote: Sequence[int], size: Sequence[int]) -> None:
        self.began.set()
        assert self.gate.wait(LONG_S)
        if self.error is not None:
            raise self.error
        self.asked.append(list(size))
        for here, there, count in zip(local, remote, size, strict=True):
            assert self.buffer.address <= here
            assert here + count <= self.buffer.address + self.buffer.size_bytes
            Direct().read(ranges(here), ranges(there), ranges(count), patience())

    def tell(self) -> None:
        self.began.set()
        assert self.gate.wait(LONG_S)
        self.told += 1
        raise RuntimeError("nobody listens")

    def close(self) -> None:
        self.closed.set()


class Staged:
    """An engine over Calls with a small buffer."""

    def __init__(self, given_up: GivenUp | None = None) -> None:
        made: list[Calls] = []

        def open_calls(buffer: Destination) -> Calls:
            made.append(Calls(buffer))
            return made[0]

        self.given_up = given_up or GivenUp()
        self.engine = StagedEngine("test", open_calls, self.given_up, patience(), staging_bytes=4096)
        (self.calls,) = made


def test_what_is_larger_than_the_buffer_lands_in_its_place_and_neighbours_are_asked_for_at_once() -> None:
    staged, memory = Staged(), Memory(1 << 16)
    source = pattern(1, 0, 1 << 16, salt=1)
    base = source.ctypes.data
    # Neighbours at the owner, far apart here; then one larger than the buffer.
    staged.engine.read(
        ranges(memory.address + 9000, memory.address, memory.address + 20_000),
        ranges(base, base + 100, base + 5000),
        ranges(100, 200, 10_000),
        patience(),
    )
    assert (memory.bytes[9000:9100] == source[:100]).all()
    assert (memory.bytes[:200] == source[100:300]).all()
    assert (memory.bytes[20_000:30_000] == source[5000:15_000]).all()
    memory.check()
    assert staged.calls.asked[0][0] == 300
    staged.engine.close()
    assert staged.calls.closed.is_set()


def test_a_call_that_blocks_is_given_up_in_time_and_can_reach_only_the_buffer() -> None:
    staged, memory = Staged(), Memory(4096)
    source = pattern(1, 0, 4096, salt=1)
    staged.calls.gate.clear()
    with pytest.raises(DeadlineExceeded, match="remote read over a test"):
        staged.engine.read(ranges(memory.address), ranges(source.ctypes.data), ranges(4096), patience(0.1))
    staged.engine.close()
    assert not staged.calls.closed.is_set()
    staged.calls.gate.set()  # it comes back late
    assert staged.calls.closed.wait(LONG_S)
    assert memory.is_untouched()


def test_a_call_that_blocks_ends_when_waiting_is_useless() -> None:
    staged, memory = Staged(), Memory(4096)
    staged.calls.gate.clear()
    useless = patience(useless=lambda: "the producer has ended" if staged.calls.began.is_set() else None)
    with pytest.raises(TransferFailed, match="the producer has ended"):
        staged.engine.read(ranges(memory.address), ranges(memory.address), ranges(8), useless)
    staged.engine.close()
    staged.calls.gate.set()
    assert staged.calls.closed.wait(LONG_S)


def test_calls_that_were_given_up_are_bounded() -> None:
    given_up = GivenUp()
    blocked = [Staged(given_up) for _ in range(MAX_GIVEN_UP)]
    memory = Memory(64)
    for staged in blocked:
        staged.calls.gate.clear()
        with pytest.raises(DeadlineExceeded):
            staged.engine.read(ranges(memory.address), ranges(memory.address), ranges(8), patience(0.01))
        staged.engine.close()
    with pytest.raises(TransferFailed, match=f"{MAX_GIVEN_UP} earlier reads were given up"):
        Staged(given_up)
    for staged in blocked:
        staged.calls.gate.set()
        assert staged.calls.closed.wait(LONG_S)
    Staged(given_up).engine.close()


def test_telling_the_owner_holds_nobody_up_and_its_failure_fails_nobody() -> None:
    staged, memory = Staged(), Memory(64)
    source = pattern(1, 0, 64, salt=1)
    staged.calls.gate.clear()
    staged.engine.tell()
    assert staged.calls.began.wait(LONG_S)
    staged.calls.gate.set()
    staged.engine.read(ranges(memory.address), ranges(source.ctypes.data), ranges(64), patience())
    assert (memory.bytes == source).all()
    staged.engine.tell()
    staged.engine.close()
    assert staged.calls.told == 2
    assert staged.calls.closed.is_set()


def test_what_a_call_raises_reaches_the_reader() -> None:
    staged, memory = Staged(), Memory(64)
    staged.calls.error = RuntimeError("status -1")
    with pytest.raises(TransferFailed, match=r"remote read over a test: status -1"):
        staged.engine.read(ranges(memory.address), ranges(memory.address), ranges(8), patience())
    staged.engine.close()
    assert staged.calls.closed.is_set()


def test_an_engine_that_cannot_be_opened_leaves_no_thread() -> None:
    def refuse(buffer: Destination) -> Calls:
        raise ConfigurationError("no network")

    with pytest.raises(TransferFailed, match="no network"):
        StagedEngine("refused", refuse, GivenUp(), patience())
    assert not [thread for thread in threading.enumerate() if "refused" in thread.name]
