"""The spill file of the local store: what comes back from it, what is let go, damage, owners."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from store_cases import MIB, acquire, spilling_store

from kvstrata.errors import ConfigurationError
from kvstrata.store.base import Status
from kvstrata.store.local import LocalStore
from kvstrata.store.testing import (
    ManualClock,
    key,
    pattern,
    put_bytes,
    read_bytes,
)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def spilling(tmp_path: Path, clock: ManualClock) -> Iterator[LocalStore]:
    with spilling_store(tmp_path, clock) as made:
        yield made


def spill_file(tmp_path: Path) -> Path:
    (file,) = (tmp_path / "spill").iterdir()
    return file


def test_evicted_objects_come_back_from_disk(spilling: LocalStore) -> None:
    sizes = [300_000 + number for number in range(8)]
    for number, size in enumerate(sizes):
        assert put_bytes(spilling, key(number), pattern(number, size)) is Status.OK
    seen = spilling.statistics()
    assert (seen.spilled_objects, seen.spill_evictions, seen.objects) == (5, 0, 8)
    for number, size in enumerate(sizes):
        lease = acquire(spilling, number)
        assert read_bytes(spilling, lease) == pattern(number, size)
        assert read_bytes(spilling, lease, 65_000, 70_001) == pattern(number, size)[65_000:135_001]
        assert read_bytes(spilling, lease, size, 0) == b""


def test_a_full_spill_file_lets_its_oldest_go(spilling: LocalStore, clock: ManualClock) -> None:
    for number in range(5):
        clock.now_s += 2
        put_bytes(spilling, key(number), pattern(number, MIB))
    assert spilling.contains([key(number) for number in range(5)]) == [Status.MISSING] * 2 + [Status.OK] * 3
    assert spilling.statistics().spill_evictions == 2


def test_a_leased_spilled_object_stays(spilling: LocalStore, clock: ManualClock) -> None:
    put_bytes(spilling, key(0), pattern(0, MIB))
    put_bytes(spilling, key(1), pattern(1, MIB))
    lease = acquire(spilling, 0, ttl_s=1000)
    for number in range(2, 7):
        clock.now_s += 2
        put_bytes(spilling, key(number), pattern(number, MIB))
    assert read_bytes(spilling, lease) == pattern(0, MIB)


@pytest.mark.parametrize("damage", ["changed", "cut off"])
def test_corrupt_spill_is_missing_and_forgotten(spilling: LocalStore, tmp_path: Path, damage: str) -> None:
    put_bytes(spilling, key(0), pattern(0, MIB))
    put_bytes(spilling, key(1), pattern(1, MIB))
    lease = acquire(spilling, 0)
    if damage == "changed":
        with spill_file(tmp_path).open("r+b") as file:
            file.seek(4096 + 500_000)
            file.write(b"!")
    else:
        os.truncate(spill_file(tmp_path), 4096 + 500_000)
    assert read_bytes(spilling, lease, 0, 1000) == pattern(0, 1000), "the chunks before it are sound"
    assert read_bytes(spilling, lease, 499_000, 2000) is Status.MISSING
    assert spilling.contains([key(0)]) == [Status.MISSING]
    seen = spilling.statistics()
    assert (seen.spill_corrupt, seen.spill_used_bytes, seen.leases) == (1, 0, 0)


def test_a_spill_file_that_cannot_be_written_costs_objects_not_the_store(
    spilling: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object) -> int:
        raise OSError(5, "Input/output error")

    put_bytes(spilling, key(0), pattern(0, MIB))
    monkeypatch.setattr("kvstrata.store.spill.os.pwrite", fail)
    assert put_bytes(spilling, key(1), pattern(1, MIB)) is Status.OK
    assert spilling.contains([key(0), key(1)]) == [Status.MISSING, Status.OK]


def test_a_spill_file_of_the_users_is_left_alone(tmp_path: Path) -> None:
    options = {"spill_path": tmp_path / "spill", "spill_size_bytes": MIB}
    LocalStore.open(tmp_path / "store", size_bytes=MIB, **options).close()  # type: ignore[arg-type]
    file = spill_file(tmp_path)
    LocalStore.delete(tmp_path / "store")
    file.write_text("my notes")
    with pytest.raises(ConfigurationError, match="store_spill_path"):
        LocalStore.open(tmp_path / "store", size_bytes=MIB, **options)  # type: ignore[arg-type]
    assert file.read_text() == "my notes"


def test_a_spill_file_whose_store_is_gone_is_taken_over(tmp_path: Path) -> None:
    options = {"spill_path": tmp_path / "spill", "spill_size_bytes": MIB}
    for path in (tmp_path / "store", tmp_path / "store"):
        LocalStore.open(path, size_bytes=MIB, **options).close()  # type: ignore[arg-type]
        for file in path.rglob("*.*"):
            file.unlink()
        (path / "kvstrata-index").rmdir()
    assert spill_file(tmp_path).stat().st_size == 4096 + MIB
