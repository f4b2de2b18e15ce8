"""The demonstration on pretended engines: what it asks, what it counts, when it calls itself a failure."""

from typing import Any

import pytest
from demo_fakes import MIB, PROMPT, RIGHT, WRONG, FakeEngine, run, shown_table

from kvstrata.demo.report import as_json
from kvstrata.demo.serving import (
    BROADCASTS_SKIPPED,
    KVPP,
    LAYERWISE,
    LOADS_SKIPPED,
    PLAIN,
    SPARSE,
    STALE_ROWS,
    TWO_RANKS,
)
from kvstrata.errors import KVStrataError


def test_nine_servings_on_three_budgets():
    result, opened = run()
    assert opened == [
        (6 * MIB, PLAIN),
        (20 * MIB, PLAIN),
        (6 * MIB, LAYERWISE),
        (6 * MIB, LOADS_SKIPPED),
        (6 * MIB, SPARSE),
        (6 * MIB, STALE_ROWS),
        (9 * MIB, TWO_RANKS),
        (9 * MIB, KVPP),
        (9 * MIB, BROADCASTS_SKIPPED),
    ]
    assert result.problems == []
    assert result.baseline.plain.refusal == "too long"
    assert result.baseline.plain.max_tokens == 600
    assert (result.layerwise.kvstrata.max_tokens, result.layerwise.capacity_ratio) == (1200, 2.0)
    assert (result.sparse.kvstrata.max_tokens, result.sparse.capacity_ratio) == (2880, 4.8)


def test_bytes_are_those_of_one_answer_not_of_the_warm_up_or_the_timed_runs():
    ours = run()[0].layerwise.kvstrata
    assert (ours.loaded_bytes, ours.saved_bytes) == (1000, 10)


def test_rows_are_those_of_the_long_decoding_alone():
    decoded = run()[0].sparse.kvstrata.decoded
    assert decoded is not None
    assert decoded.counters == {"selected_rows": 80, "hit_rows": 72, "missed_rows": 8}


def test_the_hit_rate_is_hits_over_selected_rows():
    assert run(hits=9)[0].sparse.hit_rate == pytest.approx(0.9)
    assert run(hits=4)[0].sparse.hit_rate == pytest.approx(0.4)


def test_times_are_medians_of_runs_after_the_warm_up():
    result, _ = run()
    assert result.baseline.roomy.prefill_s == (3.0, 4.0, 5.0)
    assert result.layerwise.prefill_time_ratio == pytest.approx(1.5)


FAILURES = [
    ({LAYERWISE: WRONG}, "kvstrata's answer differs"),
    ({LOADS_SKIPPED: RIGHT}, "proves nothing"),
    ({SPARSE: WRONG}, "tokens with sparse offload differ"),
    ({STALE_ROWS: RIGHT}, "the sparse comparison proves nothing"),
    # Two engines that agree on a wrong answer show nothing.
    (
        {PLAIN: (7,), LAYERWISE: (7,), SPARSE: (7,), KVPP: (7,), LOADS_SKIPPED: WRONG},
        "did not answer 'The pass key is 12345.'",
    ),
]


@pytest.mark.parametrize(("answers", "problem"), FAILURES)
def test_what_makes_it_a_failure(answers: dict[str, tuple[int, ...]], problem: str):
    result, _ = run(answers)
    assert len(result.problems) == 1
    assert problem in result.problems[0]


def test_hot_rows_that_never_hit_are_a_failure():
    (problem,) = run(hits=0)[0].problems
    assert "no selected row was found hot" in problem


def test_hot_rows_that_hold_everything_are_a_failure():
    (problem,) = run(hits=10)[0].problems
    assert "no row was copied from the host" in problem


def test_a_capacity_below_95_percent_of_the_formula_is_a_failure():
    assert run(sparse_formula=4.8 / 0.951)[0].problems == []
    (problem,) = run(sparse_formula=4.8 / 0.949)[0].problems
    assert "capacity grew 4.80 times" in problem


def test_two_empty_answers_are_not_exact():
    result, _ = run({PLAIN: (), LAYERWISE: (), SPARSE: ()})
    assert any("kvstrata's answer differs" in problem for problem in result.problems)
    assert any("with sparse offload differ" in problem for problem in result.problems)


def test_tokens_that_differ_only_beyond_the_answer_are_not_exact(monkeypatch: pytest.MonkeyPatch):
    decode = FakeEngine.decode

    def goes_wrong_late(self: FakeEngine, prompts: list[tuple[int, ...]], *, new_tokens: int) -> Any:
        run = decode(self, prompts, new_tokens=new_tokens)
        if self.mode == SPARSE:
            run.token_ids = ((*run.token_ids[0][:-1], 99),)
        return run

    monkeypatch.setattr(FakeEngine, "decode", goes_wrong_late)
    (problem,) = run()[0].problems
    assert "tokens with sparse offload differ" in problem


def test_a_budget_that_fits_plain_vllm_shows_nothing_and_says_so_once():
    result, _ = run(small_bytes=19 * MIB)
    assert sum("too large to show anything" in problem for problem in result.problems) == 1


def test_a_reference_that_refuses_is_an_error():
    with pytest.raises(KVStrataError, match="reference engine"):
        run(roomy_bytes=7 * MIB)


@pytest.mark.parametrize(("part", "max_tokens", "ratio"), [("layerwise", 1200, 2.0), ("sparse", 2880, 4.8)])
def test_json_has_the_published_keys(part: str, max_tokens: int, ratio: float):
    shown = as_json(run(sparse_formula=4.8)[0], {"cpu": "some"})[part]
    assert shown["device_kv_budget_bytes"] == 6 * MIB
    assert shown["prompt_tokens"] == len(PROMPT.token_ids)
    assert shown["expected_answer"] == "The pass key is 12345."
    assert shown["plain"]["max_tokens"] == 600
    assert shown["plain"]["refusal"] == "too long"
    assert shown["kvstrata"]["max_tokens"] == max_tokens
    assert shown["kvstrata"]["answer"] == "The pass key is 12345."
    assert shown["capacity_ratio"] == shown["capacity_ratio_formula"] == ratio
    assert shown["exact"] is True
    assert shown["negative_control_diverges"] is True
    assert shown["problems"] == []


def test_json_has_the_keys_of_each_part():
    shown = as_json(run()[0], {"cpu": "some"})
    assert shown["layerwise"]["prefill_time_ratio"] == pytest.approx(1.5)
    assert len(shown["layerwise"]["kvstrata"]["prefill_s_runs"]) == 3
    assert shown["layerwise"]["kvstrata"]["loaded_bytes"] == 1000
    assert shown["sparse"]["hit_rate"] == pytest.approx(0.9)
    decoded = shown["sparse"]["kvstrata"]["decoded"]
    assert len(decoded["token_ids"]) == 8
    assert decoded["counters"]["missed_rows"] == 8
    assert shown["sparse"]["plain_enough_memory"]["decoded"]["token_ids"] == decoded["token_ids"]


def test_tables_show_both_verdicts():
    good = shown_table(run()[0])
    for figure in ("6.0 MiB", "1,200", "2,880", "hit rate: 90.0%", "80 / 8", "250 ms", "too long"):
        assert figure in good
    assert "FAILED" not in good
    assert "NO" not in good.split()


@pytest.mark.parametrize(("mode", "words"), [(LAYERWISE, "kvstrata's answer"), (SPARSE, "sparse offload")])
def test_tables_show_the_failure(mode: str, words: str):
    bad = shown_table(run({mode: WRONG})[0])
    assert "NO" in bad.split()
    (failure,) = [line for line in bad.splitlines() if line.startswith("FAILED")]
    assert words in failure
