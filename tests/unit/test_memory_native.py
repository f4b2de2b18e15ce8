"""The private copy of libibverbs: loaded where there is one, nothing where there is none."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstrata.memory import native


def test_an_empty_folder_is_nothing(tmp_path: Path):
    native.load_ibverbs(tmp_path)


def test_a_system_that_has_it_needs_no_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    asked: list[str] = []
    monkeypatch.setattr("ctypes.CDLL", lambda name, **options: asked.append(name))
    native.load_ibverbs(tmp_path)
    assert asked == ["libibverbs.so.1"]


def test_programs_find_it_behind_what_they_are_given_already(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
    assert native.library_path(tmp_path) == {"LD_LIBRARY_PATH": str(tmp_path)}
    monkeypatch.setenv("LD_LIBRARY_PATH", "/given")
    assert native.library_path(tmp_path) == {"LD_LIBRARY_PATH": f"/given:{tmp_path}"}
    assert native.library_path(tmp_path / "missing") == {}


def test_else_the_folders_are_loaded_in_the_order_of_their_needs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    asked: list[str] = []

    def load(name: str, **options: object) -> None:
        if not name.startswith(str(tmp_path)):
            raise OSError("not found")
        asked.append(Path(name).name)

    monkeypatch.setattr("ctypes.CDLL", load)
    native.load_ibverbs(tmp_path)
    assert asked == list(native.IBVERBS)
