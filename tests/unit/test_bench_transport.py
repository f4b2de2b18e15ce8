"""`kvstrata bench transport`: what it returns, and that it leaves nothing behind. No time is judged."""

from __future__ import annotations

import json
import multiprocessing
import os
import threading
from pathlib import Path

import pytest
from rich.console import Console

from kvstrata.bench import transport
from kvstrata.bench.transport import MEMBERS, SHAPES, Member, as_table, bench_transport, measure

SMALL = {"4KiB": (4096, 8), "64KiB": (65536, 2)}


def small(members: tuple[Member, ...] = MEMBERS[:2], repeats: int = 3) -> dict[str, object]:
    return measure(repeats=repeats, members=members, shapes=SMALL, memory_bytes=1 << 20)


def test_every_member_ran_every_shape_and_nothing_is_left() -> None:
    threads = threading.active_count()
    result = small()
    for shape in SMALL:
        seconds = result["runs"]["seconds"][shape]  # type: ignore[index]
        assert list(seconds) == ["memcpy", "shm", "tcp"]
        assert all(len(runs) == 3 and min(runs) > 0 for runs in seconds.values())
        for name in ("shm", "tcp"):
            assert result[f"transport.{name}.{shape}"] > 0  # type: ignore[operator]
    assert result["runs"]["read_bytes"] == {"4KiB": 32768, "64KiB": 131072}  # type: ignore[index]
    assert json.loads(json.dumps(result))["skipped"] == {}
    assert threading.active_count() == threads
    assert multiprocessing.active_children() == []
    with open("/proc/self/maps") as maps:
        assert "kvstrata-bench" not in maps.read()


def test_a_ratio_is_of_speeds_so_that_more_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = {"memcpy": (1.0, 2.0, 1.0), "shm": (2.0, 2.0, 4.0)}
    monkeypatch.setattr(transport, "take_turns", lambda kinds, repeats: runs)
    assert small(MEMBERS[:1])["transport.shm.4KiB"] == 0.5


def test_a_transport_that_is_not_here_is_skipped_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstrata.remote.transports.shm.ShmTransport.usable", lambda self: "no memfd here")
    result = small(MEMBERS[:2], repeats=1)
    assert result["skipped"] == {"shm": "no memfd here"}
    assert "transport.shm.4KiB" not in result


def test_an_environment_is_that_of_both_ends_and_of_nothing_else() -> None:
    name = "KVSTRATA_TEST_OF_BENCH"
    small((Member(name="shm", transport="shm", environment=((name, "1"),)),), repeats=1)
    assert name not in os.environ


def test_the_table_and_the_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    result = small(repeats=1)
    assert as_table(result).row_count == len(SMALL)
    monkeypatch.setattr(transport, "measure", lambda repeats: result | {"skipped": {"nixl": "not here"}})
    console = Console(record=True, width=100)
    bench_transport(repeats=1, json_file=tmp_path / "new" / "out.json", console=console)
    assert json.loads((tmp_path / "new" / "out.json").read_text())["kvstrata_bench_transport"] == 1
    assert "not measured: nixl: not here" in console.export_text()


def test_the_sizes_are_those_that_were_agreed() -> None:
    assert {key: (size >> 10, count) for key, (size, count) in SHAPES.items()} == {
        "4KiB": (4, 64),
        "64KiB": (64, 64),
        "1MiB": (1024, 32),
        "16MiB": (16384, 2),
    }
