"""Directories a user may point the store at: a working store, or an error that says what to do."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstrata.errors import ConfigurationError, StoreFormatError, StoreUnavailable
from kvstrata.store.base import Status
from kvstrata.store.local import LocalStore
from kvstrata.store.registry import open_store
from kvstrata.store.testing import get_bytes, key, pattern, put_bytes

MIB = 1 << 20


def make(path: Path, count: int = 3) -> None:
    """A closed store of 4 MiB with some objects."""
    store = LocalStore.open(path, size_bytes=4 * MIB)
    for number in range(count):
        assert put_bytes(store, key(number), pattern(number, 1000)) is Status.OK
    store.close()


def snapshot(path: Path) -> dict[str, bytes]:
    return {
        str(file.relative_to(path)): file.read_bytes()
        for file in sorted(path.rglob("*"))
        if file.is_file() and file.name not in ("lock.mdb", "kvstrata.lock")
    }


@pytest.fixture
def user_files(tmp_path: Path) -> Iterator[Path]:
    """A directory with a file of the user's in it, which has to be there afterwards."""
    (tmp_path / "thesis.txt").write_text("years of work")
    yield tmp_path
    assert (tmp_path / "thesis.txt").read_text() == "years of work"


def test_another_version_is_named_with_the_way_out(user_files: Path) -> None:
    make(user_files)
    record = user_files / "kvstrata-store.json"
    record.write_text(record.read_text().replace('"version": 1', '"version": 99'))
    before = snapshot(user_files)
    with pytest.raises(StoreFormatError, match=r"version 99.*reads 1.*store clear --path .* --delete"):
        LocalStore.open(user_files, size_bytes=4 * MIB)
    assert snapshot(user_files) == before
    LocalStore.delete(user_files)
    make(user_files)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        '{"version": 1}',
        '{"version": 1, "parameters": {"size_bytes": "many"}}',
        "\xff\xfe",
    ],
)
def test_a_record_that_is_no_record(user_files: Path, text: str) -> None:
    make(user_files)
    (user_files / "kvstrata-store.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(StoreFormatError, match="store clear"):
        LocalStore.open(user_files, size_bytes=4 * MIB)
    with pytest.raises(StoreFormatError, match="store clear"):
        LocalStore.attach(user_files)
    LocalStore.delete(user_files)


def overwrite(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


DAMAGE = {
    "index overwritten": lambda path: overwrite(path / "kvstrata-index/data.mdb", 0, b"\xa5" * 8192),
    "index emptied": lambda path: os.truncate(path / "kvstrata-index/data.mdb", 0),
    "index cut": lambda path: os.truncate(path / "kvstrata-index/data.mdb", 3 * 4096),
    "index gone": lambda path: (path / "kvstrata-index/data.mdb").unlink(),
    "index directory gone": lambda path: shutil.rmtree(path / "kvstrata-index"),
    "arena cut": lambda path: os.truncate(path / "kvstrata-arena.bin", MIB),
    "arena gone": lambda path: (path / "kvstrata-arena.bin").unlink(),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_found_when_the_store_is_opened(user_files: Path, damage: str) -> None:
    make(user_files, 30)
    DAMAGE[damage](user_files)
    with pytest.raises(StoreFormatError, match="store clear"):
        LocalStore.open(user_files, size_bytes=4 * MIB)
    LocalStore.delete(user_files)
    make(user_files)


def test_the_index_of_another_store_is_refused(tmp_path: Path) -> None:
    make(tmp_path / "a")
    make(tmp_path / "b")
    shutil.copy(tmp_path / "a/kvstrata-index/data.mdb", tmp_path / "b/kvstrata-index/data.mdb")
    with pytest.raises(StoreFormatError, match="another store"):
        LocalStore.open(tmp_path / "b", size_bytes=4 * MIB)


def test_a_full_file_system(user_files: Path) -> None:
    room = os.statvfs(user_files)
    with pytest.raises(StoreUnavailable, match=r"(?s)store_path=.*store_size_GB=.*No space left.*Fix: "):
        LocalStore.open(user_files, size_bytes=room.f_blocks * room.f_frsize)
    assert snapshot(user_files) == {"thesis.txt": b"years of work"}


def test_a_file_system_that_fills_up_meanwhile(user_files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("kvstrata.store.arena.os.posix_fallocate", fail)
    with pytest.raises(StoreUnavailable, match="store_size_GB"):
        LocalStore.open(user_files, size_bytes=MIB)
    assert snapshot(user_files) == {"thesis.txt": b"years of work"}


@pytest.mark.parametrize("has_store", [False, True])
def test_a_directory_that_may_not_be_written(tmp_path: Path, has_store: bool) -> None:
    path = tmp_path / "store"
    make(path) if has_store else path.mkdir()
    before = snapshot(path)
    for file in [path, *path.rglob("*")]:
        file.chmod(0o555 if file.is_dir() else 0o444)
    tmp_path.chmod(0o755)
    for parent in list(tmp_path.parents)[:2]:
        parent.chmod(parent.stat().st_mode | 0o055)
    # Root may write everywhere, so a user who may not is asked for.
    attempt = """if True:
        import os, sys
        from kvstrata.errors import StoreUnavailable
        from kvstrata.store.local import LocalStore
        if os.geteuid() == 0:
            os.seteuid(65534)
        try:
            LocalStore.open(sys.argv[1], size_bytes=4 << 20)
        except StoreUnavailable as error:
            print(error)
    """
    answer = subprocess.run(
        [sys.executable, "-c", attempt, str(path)], capture_output=True, text=True, check=True, timeout=60
    )
    path.chmod(0o755)
    assert "Permission denied" in answer.stdout
    assert f"store_path={path}" in answer.stdout
    assert "Fix: " in answer.stdout
    assert snapshot(path) == before


def test_a_path_that_is_a_file(user_files: Path) -> None:
    with pytest.raises(StoreUnavailable, match="store_path"):
        LocalStore.open(user_files / "thesis.txt", size_bytes=MIB)


def test_other_sizes_are_named_and_nothing_is_lost(tmp_path: Path) -> None:
    make(tmp_path)
    with pytest.raises(ConfigurationError, match=r"store_size_GB.*4194304 bytes.*8388608 bytes.*Fix: "):
        LocalStore.open(tmp_path, size_bytes=8 * MIB)
    with pytest.raises(ConfigurationError, match=r"store_spill_path"):
        LocalStore.open(tmp_path, size_bytes=4 * MIB, spill_path=tmp_path / "spill", spill_size_bytes=MIB)
    store = LocalStore.open(tmp_path, size_bytes=4 * MIB + 17)  # the same in whole granules
    assert get_bytes(store, key(1)) == pattern(1, 1000)
    with pytest.raises(ConfigurationError, match="store_size_GB"):
        LocalStore.open(tmp_path, size_bytes=8 * MIB)  # also while this process has it open
    assert get_bytes(store, key(1)) == pattern(1, 1000)
    store.close()


@pytest.mark.parametrize(
    ("size_bytes", "spill", "spill_size_bytes", "knob"),
    [
        (0, False, 0, "store_size_GB"),
        (-1, False, 0, "store_size_GB"),
        (4095, False, 0, "store_size_GB"),
        (MIB, False, MIB, "store_spill_path"),
        (MIB, True, 0, "store_spill_size_GB"),
        (MIB, True, 17, "store_spill_size_GB"),
        (MIB, True, -4096, "store_spill_size_GB"),
    ],
)
def test_sizes_that_make_no_store(
    tmp_path: Path, size_bytes: int, spill: bool, spill_size_bytes: int, knob: str
) -> None:
    with pytest.raises(ConfigurationError, match=knob):
        LocalStore.open(
            tmp_path / "store",
            size_bytes=size_bytes,
            spill_path=tmp_path / "spill" if spill else None,
            spill_size_bytes=spill_size_bytes,
        )
    assert not list(tmp_path.iterdir())


def test_after_a_restart_of_the_machine_the_store_starts_empty(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make(tmp_path)
    record = tmp_path / "kvstrata-store.json"
    record.write_text(json.dumps(json.loads(record.read_text()) | {"boot_id": "another"}))
    store = LocalStore.open(tmp_path, size_bytes=4 * MIB)
    assert "starts empty" in caplog.text
    assert store.statistics().objects == 0
    assert put_bytes(store, key(1), b"x") is Status.OK
    store.close()


def test_two_stores_of_one_process_share_the_files(tmp_path: Path) -> None:
    one = LocalStore.open(tmp_path, size_bytes=MIB)
    two = LocalStore.open(tmp_path / "." / "", size_bytes=MIB)
    put_bytes(one, key(1), pattern(1, 1000))
    one.close()
    assert get_bytes(two, key(1)) == pattern(1, 1000)
    two.close()
    again = LocalStore.open(tmp_path, size_bytes=MIB)
    assert get_bytes(again, key(1)) == pattern(1, 1000)
    again.close()


def test_delete_refuses_a_store_in_use_and_leaves_other_files(user_files: Path) -> None:
    store = LocalStore.open(user_files, size_bytes=MIB)
    put_bytes(store, key(1), b"x")
    with pytest.raises(StoreUnavailable, match="in use"):
        LocalStore.delete(user_files)
    assert get_bytes(store, key(1)) == b"x"
    store.close()
    LocalStore.delete(user_files)
    assert {path.name for path in user_files.iterdir()} == {"thesis.txt", "kvstrata.lock"}
    with pytest.raises(StoreUnavailable, match="holds no store"):
        LocalStore.delete(user_files)
    with pytest.raises(StoreUnavailable, match="holds no store"):
        LocalStore.attach(user_files)


def test_attach_takes_the_sizes_from_the_store(tmp_path: Path) -> None:
    LocalStore.open(
        tmp_path / "store", size_bytes=MIB, spill_path=tmp_path / "spill", spill_size_bytes=2 * MIB
    ).close()
    store = LocalStore.attach(tmp_path / "store")
    seen = store.statistics()
    assert (seen.capacity_bytes, seen.spill_capacity_bytes) == (MIB, 2 * MIB)
    store.close()
    LocalStore.delete(tmp_path / "store")
    assert not list((tmp_path / "spill").iterdir())


def test_open_store_knows_its_backends(tmp_path: Path) -> None:
    store = open_store("local", path=tmp_path, size_bytes=MIB)
    assert isinstance(store, LocalStore)
    store.close()
    with pytest.raises(ConfigurationError, match=r"backend='redis'.*local"):
        open_store("redis")
