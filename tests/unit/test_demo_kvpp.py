"""The demonstration's fourth part on pretended engines: what makes it a failure, when it is left out."""

import json
import os
from typing import Any

import pytest
from demo_fakes import MIB, PROMPT, RIGHT, WRONG, FakeEngine, run, shown_table

from kvstrata.demo.kvpp import KvppResult, formula
from kvstrata.demo.report import as_json
from kvstrata.demo.serving import BROADCASTS_SKIPPED, KVPP
from kvstrata.demo.two_ranks import TwoRanks, two_rank_arguments


def kvpp_of(**changes: Any) -> KvppResult:
    part = run(**changes)[0].kvpp
    assert isinstance(part, KvppResult)
    return part


def test_two_ranks_hold_more_and_answer_as_plain_vllm_with_enough_memory():
    part = kvpp_of()
    assert (part.plain.max_tokens, part.plain.refusal) == (900, "too long")
    assert (part.kvstrata.max_tokens, part.capacity_ratio) == (1080, 1.2)
    assert part.exact
    assert part.negative_control_diverges
    assert part.bytes_per_rank == (9 * MIB - 4, 9 * MIB - 8)
    assert part.broadcast_bytes == 1000  # of both ranks, for one answer: not of the warm-up
    assert part.problems == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"answers": {KVPP: WRONG}}, "KVPP's answer differs"),
        ({"answers": {BROADCASTS_SKIPPED: RIGHT}}, "without broadcasts gave the same answer"),
        ({"kvpp_bytes": 11 * MIB}, "the budget per rank is too large"),
        ({"kvpp_formula": 1.2 / 0.949}, "capacity grew 1.20 times with KVPP"),
    ],
)
def test_what_makes_kvpp_a_failure(changes: dict[str, Any], words: str):
    (problem,) = run(**changes)[0].problems
    assert words in problem


def test_a_capacity_of_95_percent_of_the_formula_is_enough():
    assert kvpp_of(kvpp_formula=1.2 / 0.951).problems == []


@pytest.mark.parametrize(
    ("figures", "words"),
    [
        ([{"broadcast_bytes": 0, "device_bytes": MIB}] * 2, "no layer was passed"),
        ([{"device_bytes": 9 * MIB}, {"device_bytes": 9 * MIB + 1}], f"each may hold {9 * MIB}"),
        ([{"device_bytes": 9 * MIB}], f"the ranks hold [{9 * MIB}]"),
    ],
)
def test_ranks_that_pass_nothing_on_or_hold_too_much_are_a_failure(
    monkeypatch: pytest.MonkeyPatch, figures: list[dict[str, Any]], words: str
):
    statistics = FakeEngine.worker_statistics

    def told(self: FakeEngine) -> list[dict[str, Any]]:
        real = statistics(self)
        if self.mode != KVPP:
            return real
        return [{**own, **changed} for own, changed in zip(real, figures, strict=False)]

    monkeypatch.setattr(FakeEngine, "worker_statistics", told)
    (problem,) = run()[0].problems
    assert words in problem


def test_two_empty_answers_of_kvpp_are_not_exact():
    problems = run({"plain": (), KVPP: ()})[0].problems
    assert any("KVPP's answer differs" in problem for problem in problems)


def test_json_of_kvpp_has_the_published_keys():
    shown = as_json(run()[0], {"cpu": "some"})["kvpp"]
    assert shown["skipped"] is None
    assert shown["capacity_ratio"] == shown["capacity_ratio_formula"] == 1.2
    assert shown["exact"] is True
    assert shown["negative_control_diverges"] is True
    assert shown["bytes_per_rank"] == [9 * MIB - 4, 9 * MIB - 8]
    assert shown["device_kv_budget_bytes_per_rank"] == 9 * MIB
    assert shown["ranks"] == 2
    assert shown["prompt_tokens"] == len(PROMPT.token_ids)
    assert shown["plain"]["max_tokens"] == 900
    assert shown["kvstrata"]["token_ids"] == shown["plain_token_ids"] == list(RIGHT)
    assert shown["negative_control"]["token_ids"] == list(WRONG)
    assert shown["problems"] == []
    json.dumps(shown)


def test_tables_show_both_ranks():
    good = shown_table(run()[0])
    for words in ("9.0 MiB a rank", "1,080", "capacity: 1.20 x plain vLLM on two ranks", "9.0 MiB, 9.0 MiB"):
        assert words in good
    bad = shown_table(run({KVPP: WRONG})[0])
    assert "NO" in bad.split()
    assert "FAILED: KVPP's answer differs" in bad


def test_a_machine_that_cannot_run_two_ranks_skips_them_and_says_why():
    result, opened = run(kvpp_skip_reason="there is one CPU")
    assert len(opened) == 6
    assert result.problems == []
    assert as_json(result, {})["kvpp"] == {"skipped": "there is one CPU", "problems": []}
    assert "KVPP on two ranks was skipped: there is one CPU" in shown_table(result)


@pytest.mark.parametrize(("layers", "ratio"), [(6, 1.2), (7, 7 / 6), (61, 61 / 33)])
def test_the_formula_counts_the_fuller_rank_and_two_scratch_buffers(layers: int, ratio: float):
    assert formula(num_layers=layers) == pytest.approx(ratio)


def test_each_rank_has_cpus_of_its_own():
    two = TwoRanks.on([0, 1])
    assert (two.environment, two.skip_reason) == ({"VLLM_CPU_OMP_THREADS_BIND": "0|1"}, None)
    four = TwoRanks.on([2, 3, 6, 7])
    assert four.environment == {"VLLM_CPU_OMP_THREADS_BIND": "2,3|6,7"}
    assert TwoRanks.on([]).environment == {}  # engines compute elsewhere


def test_one_cpu_is_too_few_and_the_reason_says_so():
    one = TwoRanks.on([3])
    assert one.environment == {}
    assert "this process may use one" in str(one.skip_reason)


@pytest.mark.parametrize("before", [None, "0-3"])
def test_the_binding_lasts_as_long_as_the_engine(monkeypatch: pytest.MonkeyPatch, before: str | None):
    name = "VLLM_CPU_OMP_THREADS_BIND"
    if before is None:
        monkeypatch.delenv(name, raising=False)
    else:
        monkeypatch.setenv(name, before)
    with TwoRanks.on([0, 1]).applied():
        assert os.environ[name] == "0|1"
    assert os.environ.get(name) == before


def test_kvpp_is_asked_for_as_on_the_command_line():
    assert two_rank_arguments() == {"tensor_parallel_size": 2}
    assert two_rank_arguments(kvpp={})["additional_config"] == {"enable_kvpp": True}
    broken = two_rank_arguments(kvpp={"fault": "skip_loads"})["additional_config"]
    assert broken == {"enable_kvpp": True, "kvstrata": {"fault": "skip_loads"}}
