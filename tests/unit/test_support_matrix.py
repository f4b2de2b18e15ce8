"""docs/support_matrix.md says what the tests run and what the code refuses, and leaves no pair out."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
from support_facts import LIMITS, NAMES, NEEDS, OURS, RULES
from support_gaps import NOT_TESTED_PAIRS
from support_matrix import Mark, Matrix, Run, collect, merged
from support_page import pairs_of, render
from support_tiers import left_out

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "support_matrix.md"
PAIRS = list(itertools.combinations(NAMES, 2))
LISTED = [pair for pairs in NOT_TESTED_PAIRS.values() for pair in pairs_of(pairs)]


@pytest.fixture(scope="module")
def marks() -> list[Mark]:
    return collect()


@pytest.fixture(scope="module")
def matrix(marks: list[Mark]) -> Matrix:
    return Matrix(merged(marks))


@pytest.mark.slow
def test_the_page_is_fresh(matrix: Matrix):
    assert PAGE.read_text() == render(matrix), "run: python tests/support_matrix.py > docs/support_matrix.md"


@pytest.mark.slow
def test_marks_name_features_with_at_least_one_of_kvstratas(matrix: Matrix):
    assert matrix.runs
    for run in matrix.runs:
        for engine in run.engines:
            assert engine <= set(NAMES), f"{run.test}: unknown {sorted(engine - set(NAMES))}"
            assert engine & set(OURS), f"{run.test} names vLLM's features only: {sorted(engine)}"
            for feature, needed in NEEDS.items():
                assert feature not in engine or engine & set(needed), f"{run.test}: {feature} needs {needed}"


@pytest.mark.slow
def test_no_test_says_that_it_runs_what_is_ruled_out(matrix: Matrix):
    for run in matrix.runs:
        for engine in run.engines:
            rule = matrix.rule(engine)
            assert rule is None, f"{run.test} runs {sorted(engine)}; {rule.effect}: {rule.words}"


@pytest.mark.slow
def test_every_pair_is_tested_or_ruled_out_or_listed_as_not_tested(matrix: Matrix):
    untested = set(matrix.untested_pairs())
    missing = sorted("+".join(pair) for pair in untested - set(LISTED))
    assert missing == [], "neither tested nor ruled out: test them, or list them in tests/support_gaps.py"
    done = sorted("+".join(pair) for pair in set(LISTED) - untested)
    assert done == [], "tested or ruled out by now: remove them from tests/support_gaps.py"


@pytest.mark.slow
def test_every_triple_is_tested_or_ruled_out(matrix: Matrix):
    assert ["+".join(triple) for triple in matrix.untested_triples()] == []


def test_a_pair_is_listed_as_not_tested_once():
    assert set(LISTED) <= set(PAIRS)
    assert len(LISTED) == len(set(LISTED))


def source_texts() -> Iterator[str]:
    """Yield every string of the sources; what is filled in is a `{}`."""
    for path in (ROOT / "src" / "kvstrata").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value
            elif isinstance(node, ast.JoinedStr):
                yield "".join(part.value if isinstance(part, ast.Constant) else "{}" for part in node.values)


def test_refusals_are_quoted_as_the_source_says_them():
    texts = list(source_texts())
    words = [item.words for item in (*RULES, *LIMITS)]
    assert [quoted for quoted in words if not any(quoted in text for text in texts)] == []
    assert not any("no such words" in text for text in texts)


@pytest.mark.parametrize("test", sorted({item.test for item in (*RULES, *LIMITS)}))
def test_what_shows_a_refusal_exists(test: str):
    file, _, function = test.partition("::")
    defined = {
        node.name
        for node in ast.walk(ast.parse((ROOT / file).read_text()))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }
    assert function in defined


def test_rules_name_known_features_and_none_follows_from_another():
    for rule in RULES:
        assert rule.features <= set(NAMES)
        assert len(rule.features) > 1
    for one, other in itertools.permutations(RULES, 2):
        assert not one.features <= other.features


def run(test: str, *engines: str, is_in_ci: bool = True) -> Run:
    features = frozenset(frozenset(engine.split("+")) for engine in engines)
    return Run(test=test, engines=features, is_in_ci=is_in_ci)


def test_parameter_sets_are_told_apart_only_where_they_run_something_else():
    runs = merged(
        [
            ("a.py::alike[x]", [["store", "tp"]], False),
            ("a.py::alike[y]", [["tp", "store"]], True),
            ("a.py::apart[x]", [["store"]], True),
            ("a.py::apart[y]", [["store", "pp"]], False),
            ("a.py::apart[z]", [], True),
            ("a.py::silent", [], True),
            ("a.py::pair", [["prefill"], ["decode", "sparse"]], True),
        ]
    )
    assert runs == (
        run("a.py::alike", "store+tp"),
        run("a.py::apart[x]", "store"),
        run("a.py::apart[y]", "store+pp", is_in_ci=False),
        run("a.py::pair", "prefill", "decode+sparse"),
    )


def test_a_cell_shows_the_test_with_the_fewest_other_features_of_one_engine():
    small, large = run("small", "store+tp"), run("large", "layerwise+store+tp", "decode")
    matrix = Matrix((large, small))
    assert matrix.run(("tp", "store")) is small
    assert matrix.run(("tp", "layerwise")) is large
    assert matrix.run(("tp", "decode")) is None, "they run in two engines"
    assert matrix.verdict(("tp", "store")) == "tested"
    assert matrix.verdict(("kvpp", "store")) == "not tested"
    assert matrix.verdict(("kvpp", "sparse", "tp")) == "ruled out"


def test_a_cell_prefers_a_test_of_ci_and_a_pair_without_one_counts_as_not_tested():
    later, large = run("later", "store+tp", is_in_ci=False), run("large", "layerwise+store+tp")
    assert Matrix((later, large)).run(("tp", "store")) is large
    assert Matrix((later,)).run(("tp", "store")) is later
    assert Matrix((later,)).verdict(("tp", "store")) == "tested beyond CI"
    assert ("store", "tp") in Matrix((later,)).untested_pairs()
    assert ("store", "tp") not in Matrix((later, large)).untested_pairs()


def test_what_a_feature_cannot_do_without_is_ruled_out_with_it():
    matrix = Matrix(())
    assert matrix.rule(("kvpp", "ep")) is None
    assert matrix.rule(("ep", "dp")) is None, "it needs one of two, and has one"
    assert matrix.verdict(("kvpp", "dp", "ep")) == "ruled out", "kvpp needs tp"


def test_a_triple_may_be_left_to_tests_beyond_ci():
    later = Matrix((run("later", "layerwise+store+tp", is_in_ci=False),))
    assert ("layerwise", "store", "tp") not in later.untested_triples()
    assert ("layerwise", "store", "pp") in later.untested_triples()


@pytest.mark.slow
def test_what_make_test_leaves_out_exists(marks: list[Mark]):
    assert left_out()
    assert sorted(left_out() - {test for test, *_ in marks}) == []


def test_a_transfer_is_told_by_how_each_end_keeps_its_kv():
    both = run("both", "prefill+layerwise+tp", "decode+sparse")
    matrix = Matrix((run("other", "prefill", "decode"), both))
    assert matrix.transfer(frozenset({"layerwise"}), frozenset({"sparse"})) is both
    assert matrix.transfer(frozenset(), frozenset({"sparse"})) is None


def test_without_tests_nothing_is_said_to_work():
    empty = Matrix(())
    for counts in (empty.counts(2), empty.counts(3)):
        assert counts["tested"] == counts["tested beyond CI"] == 0
    assert len(empty.untested_pairs()) == empty.counts(2)["not tested"]
    assert "[t1]" not in render(empty)
