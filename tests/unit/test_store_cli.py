"""`kvstrata store stat|clear`: readable answers, and errors without tracebacks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvstrata.store.cli import app
from kvstrata.store.local import LocalStore
from kvstrata.store.testing import key, put_bytes

MIB = 1 << 20


@pytest.fixture
def path(tmp_path: Path) -> Path:
    store = LocalStore.open(tmp_path / "store", size_bytes=2 * MIB)
    for number in range(3):
        put_bytes(store, key(number), bytes(MIB // 2))
    store.acquire([key(0), key(9)], ttl_s=10_000)
    store.close()
    return tmp_path / "store"


def run(*words: str, given: str = "") -> tuple[int, str]:
    result = CliRunner().invoke(app, list(words), input=given)
    assert result.exception is None or isinstance(result.exception, SystemExit)
    return result.exit_code, result.output


def test_stat_as_a_table_and_as_json(path: Path) -> None:
    code, output = run("stat", "--path", str(path))
    assert code == 0
    assert [line for line in output.splitlines() if "used" in line and "1.5 MiB" in line]
    assert "50.0%" in output
    code, output = run("stat", "--path", str(path), "--json")
    assert code == 0
    found = json.loads(output)
    assert (found["objects"], found["used_bytes"], found["hits"], found["misses"]) == (3, 3 * MIB // 2, 1, 1)


def test_clear_asks_first(path: Path) -> None:
    code, output = run("clear", "--path", str(path), given="n\n")
    assert (code, "Nothing was changed" in output) == (1, True)
    code, output = run("clear", "--path", str(path), "--yes")
    assert code == 0
    assert "Dropped 2 blocks" in output
    assert "--force" in output
    code, output = run("clear", "--path", str(path), given="y\n")
    assert (code, "Dropped 0 blocks" in output) == (0, True)
    code, output = run("clear", "--path", str(path), "--yes", "--force")
    assert (code, "Dropped 1 blocks" in output) == (0, True)


def test_delete_frees_the_memory_even_of_a_corrupt_store(path: Path) -> None:
    (path / "kvstrata-store.json").write_text("{")
    code, output = run("clear", "--path", str(path), "--yes")
    assert (code, "--delete" in output) == (2, True)
    code, output = run("clear", "--path", str(path), "--yes", "--delete")
    assert code == 0
    assert [file.name for file in path.iterdir()] == ["kvstrata.lock"]


@pytest.mark.parametrize(
    "command", [("stat",), ("stat", "--json"), ("clear", "--yes"), ("clear", "--yes", "--delete")]
)
def test_a_directory_without_a_store(tmp_path: Path, command: tuple[str, ...]) -> None:
    code, output = run(*command, "--path", str(tmp_path / "nowhere"))
    assert code == 2
    assert "Error: store_path=" in output
    assert "holds no store" in output
    assert not (tmp_path / "nowhere").exists()
