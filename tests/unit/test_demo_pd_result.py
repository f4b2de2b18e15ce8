"""The demonstration's third part on pretended engines: what it asks, counts, shows and calls a failure."""

import json

import demo_fakes
import pytest
from demo_fakes import (
    MORE,
    OTHER,
    PROMPT,
    FakeDeployment,
    run,
    shown_table,
)

from kvstrata.demo.pd_servers import metrics_of
from kvstrata.demo.report import as_json


def test_prefill_and_decode_get_the_prompts_that_plain_vllm_answered():
    deployment = FakeDeployment()
    pd = run(deployment=deployment)[0].pd
    assert deployment.asked == [PROMPT.token_ids, *(more.token_ids for more in MORE), MORE[0].token_ids]
    assert pd.exact
    assert pd.is_exact == (True, True, True)
    # Of the requests alone: neither what was before nor the control.
    assert (pd.counters.pulls_done, pd.counters.parts_pulled, pd.counters.bytes_pulled) == (3, 9, 300)
    assert pd.control.text == OTHER.expected_answer
    assert pd.negative_control_diverges
    assert pd.problems == []


PD_FAILURES = [
    (FakeDeployment(wrong=1), ["1 of 3 answers through prefill and decode differ"]),
    (FakeDeployment(leaks=2), ["2 leases and 0 reads were open at the end"]),
    (FakeDeployment(unsettled=1), ["decode read 11 prompts to their end, prefill knows of 10"]),
    (
        FakeDeployment(recomputes=True),
        ["it did not use what it read", "KV of 0 prompts was read, of 3", "decode read nothing"],
    ),
]


@pytest.mark.parametrize(("deployment", "problems"), PD_FAILURES)
def test_what_makes_prefill_and_decode_a_failure(deployment: FakeDeployment, problems: list[str]):
    found = run(deployment=deployment)[0].problems
    assert len(found) == len(problems)
    for problem, words in zip(found, problems, strict=True):
        assert words in problem


def test_a_model_that_cannot_do_the_further_prompts_shows_nothing(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(demo_fakes, "text_of", lambda prompt: "no idea")
    problems = run()[0].problems
    assert [problem for problem in problems if "'The pass key is 11111.'" in problem] == problems[:1]
    assert len(problems) == len(MORE)


def test_json_of_prefill_and_decode_has_the_published_keys():
    shown = as_json(run()[0], {"cpu": "some"})["pd"]
    assert shown["exact"] is True
    assert (shown["requests"], shown["requests_pulled"]) == (3, 3)
    assert (shown["layers_pulled"], shown["bytes_pulled"]) == (9, 300)
    assert shown["leases_open_at_end"] == 0
    assert shown["negative_control_diverges"] is True
    assert [answer["expected_answer"] for answer in shown["answers"]] == [
        one.expected_answer for one in (PROMPT, *MORE)
    ]
    assert shown["negative_control"]["answer"] == "The pass key is 33333."
    assert shown["problems"] == []
    json.dumps(shown)


def test_tables_show_what_decode_read():
    good = shown_table(run()[0])
    assert "decode read 0.0 MiB in 9 parts" in good
    assert "for 3 prompts; leases open at the end: 0" in good
    assert "'The pass key is 33333.', not 'The pass key is 11111.'" in good
    bad = shown_table(run(deployment=FakeDeployment(recomputes=True))[0])
    assert "THE SAME TOKENS" in bad
    assert "FAILED: decode read nothing from prefill" in bad


def test_counters_of_remote_read_are_those_of_the_page_of_metrics():
    page = """\
# HELP vllm:kvstrata_remote_done_pulls_total Decode: transfers that arrived whole.
# TYPE vllm:kvstrata_remote_done_pulls_total counter
vllm:kvstrata_remote_done_pulls_total{engine="0",model_name="demo"} 3.0
vllm:kvstrata_remote_done_pulls_total{engine="1",model_name="demo"} 1.0
vllm:kvstrata_remote_done_pulls_created{engine="0",model_name="demo"} 1.7e+09
vllm:kvstrata_remote_open_sends{engine="0",model_name="demo"} 2.0
vllm:kvstrata_remote_pulled_bytes_total{engine="0",model_name="demo"} 6.3e+07
"""
    found = metrics_of(page)
    assert found["remote_done_pulls"] == 4
    assert found["remote_open_sends"] == 2
    assert found["remote_pulled_bytes"] == 63_000_000
