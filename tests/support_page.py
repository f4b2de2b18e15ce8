"""The page docs/support_matrix.md, from the facts and from what the tests say they run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from support_facts import FEATURES, LIMITS, NAMES, OURS, RULES, Rule
from support_gaps import NOT_TESTED_PAIRS
from support_matrix import VERDICTS, Engine, Matrix, Run

_HEAD = """\
# What works with what

<!-- Rendered by `make docs` from tests/support_facts.py and the marks of tests/e2e: change those. -->

Which features one engine can have together, and what shows it. Every cell is about one running engine:

| in a cell | means |
|---|---|
| t and a number | works: an [end-to-end test](#tests) runs it, and the answers are those of plain vLLM |
| r and a number | [refused](#refused) when the engine starts, by name |
| n and a number | allowed, but [one of the two has no effect](#without-effect) |
| ? | not refused and [not tested](#not-tested) in one engine: it may work, nobody has shown it |

A test in a cell may run more than the two; [its row](#tests) lists everything. What the features are and how
they are switched on is [below](#features); what is refused whatever else is on stands under
[outside the matrix](#outside-the-matrix).
"""

_MATRIX = "## kvstrata's features with each other and with vLLM's"

_VLLM_PAIRS = """\
## vLLM's features with each other, under kvstrata

In engines that have at least one of kvstrata's features.
"""

_PREFILL_AND_DECODE = """\
## Prefill and decode engines

What one engine computes, the other reads; each keeps KV in its own way. Rows: prefill, columns: decode.
"""

_OUTSIDE = """\
## Outside the matrix

Refused by name when the engine starts, beside the features of the second column:
"""

_NOT_TESTED = """\
## Not tested

Nothing refuses these pairs, and no test runs them in one engine:
"""

_TRIPLES = """\
## Triples

For each pair that a test runs: with which third features a test of CI runs it, with which only one of
`make test-all` does, and with which none. `kvpp` needs `tp`: what rules out the one rules out the other.
"""

_TESTS = """\
## Tests

What CI runs, and after that what only `make test-all` does. The features of several engines are separated by
semicolons.
"""

_PREFILL_HOMES = ((), ("layerwise",), ("sparse",), ("kvpp",), ("layerwise", "kvpp"))
_DECODE_HOMES = ((), ("layerwise",), ("sparse",))


def render(matrix: Matrix) -> str:
    """Return the whole page."""
    numbers = {run.test: f"t{at}" for at, run in enumerate(matrix.runs, 1)}
    theirs = [name for name in NAMES if name not in OURS]
    parts = (
        [_HEAD, *_counts(matrix), ""],
        [_MATRIX, "", *_pair_table(matrix, numbers, NAMES, OURS), ""],
        [_VLLM_PAIRS, *_pair_table(matrix, numbers, theirs, theirs), ""],
        [_PREFILL_AND_DECODE, *_home_table(matrix, numbers), ""],
        ["## Features", "", *_features(), ""],
        ["## Refused", "", *_rules("refused"), ""],
        ["## Without effect", "", *_rules("no effect"), ""],
        [_OUTSIDE, *_outside(), ""],
        [_NOT_TESTED, *_not_tested(), ""],
        [_TRIPLES, *_triples(matrix), ""],
        [_TESTS, *_tests(matrix, numbers), "", *_targets(matrix, numbers)],
    )
    return "\n".join(line for part in parts for line in part) + "\n"


def pairs_of(text: str) -> list[tuple[str, str]]:
    """Return the pairs of a line of `NOT_TESTED_PAIRS`, each in the features' order."""
    return [_in_order(pair.split("+")) for pair in text.split()]  # type: ignore[misc]


def rule_names() -> dict[Rule, str]:
    """Number the rules of each effect."""
    counts = {"refused": 0, "no effect": 0}
    names = {}
    for rule in RULES:
        counts[rule.effect] += 1
        names[rule] = f"{rule.effect[0]}{counts[rule.effect]}"
    return names


def _in_order(features: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted(features, key=NAMES.index))


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield "|---" * len(head) + "|"
    for row in rows:
        yield f"| {' | '.join(row)} |"


def _counts(matrix: Matrix) -> Iterator[str]:
    kinds = ("tested by CI", "only by `make test-all`", "refused", "no effect", "not tested")
    counts = {"pairs": matrix.counts(2), "triples": matrix.counts(3)}
    yield from _table(
        (f"of {len(NAMES)} features", *kinds),
        ((what, *map(str, found.values())) for what, found in counts.items()),
    )


def _pair_table(
    matrix: Matrix, numbers: dict[str, str], rows: Sequence[str], columns: Sequence[str]
) -> Iterator[str]:
    cells = ((f"**{row}**", *(_cell(matrix, numbers, row, column) for column in columns)) for row in rows)
    yield from _table(("", *columns), cells)


def _cell(matrix: Matrix, numbers: dict[str, str], row: str, column: str) -> str:
    if row == column:
        return ""
    rule = matrix.rule((row, column))
    if rule is not None:
        return f"[{rule_names()[rule]}](#{'refused' if rule.effect == 'refused' else 'without-effect'})"
    return _number(matrix.run((row, column)), numbers)


def _number(run: Run | None, numbers: dict[str, str]) -> str:
    return "?" if run is None else f"[{numbers[run.test]}]"


def _home_table(matrix: Matrix, numbers: dict[str, str]) -> Iterator[str]:
    def cell(prefill: tuple[str, ...], decode: tuple[str, ...]) -> str:
        if matrix.rule(("prefill", *prefill)) or matrix.rule(("decode", *decode)):
            return "refused"
        return _number(matrix.transfer(frozenset(prefill), frozenset(decode)), numbers)

    def name(home: tuple[str, ...]) -> str:
        return " + ".join(home) or "device"

    rows = (
        (f"**{name(prefill)}**", *(cell(prefill, decode) for decode in _DECODE_HOMES))
        for prefill in _PREFILL_HOMES
    )
    yield from _table(("", *(name(home) for home in _DECODE_HOMES)), rows)


def _features() -> Iterator[str]:
    rows = ((f"`{item.name}`", item.knob, item.meaning) for item in FEATURES)
    yield from _table(("name", "switched on by", "what it is"), rows)


def _rules(effect: str) -> Iterator[str]:
    rows = (
        (name, " + ".join(_in_order(rule.features)), f"“{rule.words}”", f"`{rule.test}`")
        for rule, name in rule_names().items()
        if rule.effect == effect
    )
    yield from _table(("", "together", "what it says", "shown by"), rows)


def _outside() -> Iterator[str]:
    rows = ((limit.what, limit.beside, f"“{limit.words}”", f"`{limit.test}`") for limit in LIMITS)
    yield from _table(("what", "beside", "what it says", "shown by"), rows)


def _not_tested() -> Iterator[str]:
    rows = (
        (", ".join(" + ".join(pair) for pair in pairs_of(pairs)), why)
        for why, pairs in NOT_TESTED_PAIRS.items()
    )
    yield from _table(("pairs", "why"), rows)


def _triples(matrix: Matrix) -> Iterator[str]:
    rows = []
    for at, first in enumerate(NAMES):
        for second in NAMES[at + 1 :]:
            if matrix.rule((first, second)) is not None or matrix.run((first, second)) is None:
                continue
            thirds: dict[str, list[str]] = {verdict: [] for verdict in VERDICTS}
            for third in NAMES:
                if third not in (first, second):
                    thirds[matrix.verdict((first, second, third))].append(third)
            rows.append((f"{first} + {second}", *(", ".join(names) for names in thirds.values())))
    heads = (
        "tested with",
        "only by `make test-all` with",
        "refused or without effect with",
        "not tested with",
    )
    yield from _table(("pair", *heads), rows)


def _tests(matrix: Matrix, numbers: dict[str, str]) -> Iterator[str]:
    for is_in_ci in (True, False):
        runs = [run for run in matrix.runs if run.is_in_ci is is_in_ci]
        rows = ((numbers[run.test], f"`{run.test}`", _engines(run)) for run in runs)
        yield from _table(("", "test of CI" if is_in_ci else "test beyond", "runs together"), rows)
        yield ""


def _engines(run: Run) -> str:
    return "; ".join(sorted((_features_of(engine) for engine in run.engines), reverse=True))


def _features_of(engine: Engine) -> str:
    return " + ".join(_in_order(engine))


def _targets(matrix: Matrix, numbers: dict[str, str]) -> Iterator[str]:
    """What the numbers in cells lead to, with the test's name to be shown beside."""
    for run in matrix.runs:
        yield f'[{numbers[run.test]}]: ../{run.test.partition("::")[0]} "{run.test}"'
