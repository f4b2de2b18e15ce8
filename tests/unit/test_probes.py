"""Optional libraries are tried in processes of their own: whatever they do there is a finding."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstrata import probes
from kvstrata.probes import PROBES, probe_libraries


@pytest.fixture
def nixl_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Makes `nixl_cu12` a module with that text."""

    def make(text: str) -> None:
        (tmp_path / "nixl_cu12").mkdir()
        (tmp_path / "nixl_cu12" / "__init__.py").write_text(text)
        monkeypatch.syspath_prepend(str(tmp_path))

    return make


def found() -> str:
    (finding,) = probe_libraries(PROBES[:1])
    assert finding.name == "NIXL"
    assert finding.why is not None
    return finding.why


def test_each_probe_names_a_library_once():
    assert len({probe.name for probe in PROBES}) == len(PROBES)
    assert len({probe.feature for probe in PROBES}) == len(PROBES)


def test_a_library_that_crashes_is_a_finding(nixl_is):
    nixl_is("import os\nos.write(2, b'terminate called\\n')\nos.abort()")
    assert found() == "loading it ended the process with code -6: terminate called"


def test_a_library_that_prints_is_heard_to_the_end(nixl_is):
    nixl_is("print('{\"why\": 1}')\nraise ImportError('libucp.so.0: missing')")
    assert "libucp.so.0: missing" in found()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "NIXL does not load here: No module named 'nixl_cu12._bindings'. Fix: reinstall: pip install"),
        ("no_such_name", "does not load here: NameError: name 'no_such_name' is not defined. Fix: pip"),
        ("import os\nos.write(1, b'\\xff\\xfe')\nos.write(2, b'\\xff')", "No module named 'nixl_cu12._b"),
    ],
    ids=["half", "raises", "no text"],
)
def test_a_library_that_is_half_there_or_prints_anything_is_named_as_such(nixl_is, text: str, said: str):
    nixl_is(text)
    assert said in found()
    assert "is not installed" not in found()


def test_a_library_that_hangs_is_given_up(nixl_is, monkeypatch: pytest.MonkeyPatch):
    nixl_is("import threading\nthreading.Event().wait()")
    monkeypatch.setattr(probes, "PROBE_S", 3.0)
    assert found() == "it had not loaded after 3 s"
