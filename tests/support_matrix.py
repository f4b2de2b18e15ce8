"""Render docs/support_matrix.md: `python tests/support_matrix.py > docs/support_matrix.md`.

A cell is a test that says, by `pytest.mark.features`, that it runs the features together in one engine, or a
refusal from `support_facts.py`, or nothing. Tests are collected in a process of their own; no engine starts.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support_facts import NAMES, NEEDS, RULES, Rule

ROOT = Path(__file__).parents[1]
COLLECTION_DEADLINE_S = 300

Engine = frozenset[str]
Engines = frozenset[Engine]

VERDICTS = ("tested", "tested beyond CI", "ruled out", "not tested")
"""Of a set of features in one engine; the first: by a test of CI."""

HOMES = frozenset({"layerwise", "sparse", "kvpp"})
"""Where an engine keeps its KV, if not on the device: see docs/design.md."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """A test, all parameter sets of it that run the same, and the features of each of its engines."""

    test: str  # its id; without parameters if they make no difference
    engines: Engines
    is_in_ci: bool = True  # by one of its parameter sets at least; else `make test-all` runs it


Mark = tuple[str, list[list[str]], bool]
"""A test's id, the features of each of its engines, whether CI runs it."""


def collect() -> list[Mark]:
    """Return what the end-to-end tests say they run, in their order; takes half a minute.

    Raises AssertionError with pytest's output if it cannot collect.
    """
    with tempfile.TemporaryDirectory() as directory:
        result = Path(directory) / "marks.json"
        command = [sys.executable, __file__, "--collect-into", str(result)]
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=COLLECTION_DEADLINE_S, check=False
        )
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
        return [(test, engines, is_in_ci) for test, engines, is_in_ci in json.loads(result.read_text())]


def merged(marked: Iterable[Mark]) -> tuple[Run, ...]:
    """Join a test's parameter sets where all of them run the same."""
    sets_of: dict[str, list[Run]] = {}
    for test, engines, is_in_ci in marked:
        run = Run(test=test, engines=frozenset(map(frozenset, engines)), is_in_ci=is_in_ci)
        sets_of.setdefault(test.partition("[")[0], []).append(run)
    runs: list[Run] = []
    for function, sets in sets_of.items():
        if len({run.engines for run in sets}) == 1:
            is_in_ci = any(run.is_in_ci for run in sets)
            sets = [Run(test=function, engines=sets[0].engines, is_in_ci=is_in_ci)]
        runs += [run for run in sets if run.engines]
    return tuple(runs)


class _Marks:
    """A plugin of pytest that writes down marks instead of running tests."""

    def __init__(self, into: Path) -> None:
        self._into = into

    def pytest_collection_finish(self, session: Any) -> None:
        marks = [
            (
                item.nodeid,
                [mark.args for mark in item.iter_markers("features")],
                not any(item.get_closest_marker(name) for name in ("faults", "extended")),
            )
            for item in session.items
        ]
        self._into.write_text(json.dumps(marks))


def _collect_into(path: Path) -> int:
    import pytest

    options = ["--collect-only", "-q", "-p", "no:cacheprovider", "tests/e2e"]
    return int(pytest.main(options, plugins=[_Marks(path)]))


@dataclass(frozen=True)
class Matrix:
    """What is known of every set of features in one engine."""

    runs: tuple[Run, ...]

    def rule(self, features: Iterable[str]) -> Rule | None:
        """The first rule against them, and what they cannot do without, if there is one."""
        wanted = set(features)
        for feature, needed in NEEDS.items():
            if feature in wanted and len(needed) == 1:
                wanted |= set(needed)
        return next((rule for rule in RULES if rule.features <= wanted), None)

    def run(self, features: Iterable[str]) -> Run | None:
        """The test of an engine with these: one of CI if there is one, and with as few others as there is."""
        wanted = frozenset(features)
        sizes = [
            (not run.is_in_ci, min(len(engine) for engine in run.engines if wanted <= engine), at)
            for at, run in enumerate(self.runs)
            if any(wanted <= engine for engine in run.engines)
        ]
        return self.runs[min(sizes)[-1]] if sizes else None

    def transfer(self, prefill: Engine, decode: Engine) -> Run | None:
        """The first test of a prefill and a decode engine that keep their KV in these ways."""

        def has(run: Run, role: str, home: Engine) -> bool:
            return any(role in engine and engine & HOMES == home for engine in run.engines)

        return next((r for r in self.runs if has(r, "prefill", prefill) and has(r, "decode", decode)), None)

    def verdict(self, features: Iterable[str]) -> str:
        """One of `VERDICTS`."""
        wanted = frozenset(features)
        if self.rule(wanted) is not None:
            return "ruled out"
        run = self.run(wanted)
        if run is None:
            return "not tested"
        return "tested" if run.is_in_ci else "tested beyond CI"

    def untested_pairs(self) -> list[tuple[str, ...]]:
        """The pairs, in the features' order, that are neither run by a test of CI nor ruled out."""
        pairs = itertools.combinations(NAMES, 2)
        return [pair for pair in pairs if self.verdict(pair) in ("tested beyond CI", "not tested")]

    def untested_triples(self) -> list[tuple[str, ...]]:
        """The triples, in the features' order, that are neither run by any test nor ruled out."""
        triples = itertools.combinations(NAMES, 3)
        return [triple for triple in triples if self.verdict(triple) == "not tested"]

    def counts(self, size: int) -> dict[str, int]:
        """How many sets of that size have which verdict, those ruled out by their effect."""
        found = dict.fromkeys(("tested", "tested beyond CI", "refused", "no effect", "not tested"), 0)
        for features in itertools.combinations(NAMES, size):
            rule = self.rule(features)
            found[self.verdict(features) if rule is None else rule.effect] += 1
        return found


if __name__ == "__main__":
    if sys.argv[1:2] == ["--collect-into"]:
        sys.exit(_collect_into(Path(sys.argv[2])))
    from support_page import render

    print(render(Matrix(merged(collect()))), end="")
