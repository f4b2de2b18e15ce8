"""The demonstration on pretended engines: what it asks, what it counts, when it calls itself a failure."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from kvstrata.demo.prompt import DemoPrompt, build_prompt, handbook
from kvstrata.demo.report import as_json, as_table
from kvstrata.demo.run import LAYERWISE, LOADS_SKIPPED, PLAIN, DemoResult, formula, run_demo
from kvstrata.errors import KVStrataError
from kvstrata.terminal import Terminal

MIB = 1 << 20
RIGHT, WRONG = (7, 8, 9), (7, 8, 1)


def letters(text: str) -> list[int]:
    return [ord(letter) for letter in text]


PROMPT = build_prompt(letters, text=handbook(), prompt_tokens=1000, pass_key="12345", depth=0.5)


class FakeEngine:
    """Holds 100 tokens a MiB, twice as many with kvstrata; copies its prefix on every prefill."""

    def __init__(self, budget_bytes: int, mode: str, answers: dict[str, tuple[int, ...]]) -> None:
        self.mode = mode
        self.max_tokens = budget_bytes // MIB * (100 if mode == PLAIN else 200)
        self._tokens = answers[mode]
        self._prefills = 0
        self._loaded_bytes = 0

    def answer(self, prompt: tuple[int, ...], *, max_new_tokens: int) -> Any:
        self._prefills += 1
        self._loaded_bytes += 0 if self.mode == LOADS_SKIPPED else 1000
        text = PROMPT.expected_answer if self._tokens == RIGHT else f"text of {self._tokens}"
        return SimpleNamespace(token_ids=self._tokens, text=text, seconds=2.0)

    def refusal(self, prompt: tuple[int, ...]) -> str | None:
        if len(prompt) > self.max_tokens:
            return "too long"
        self.answer(prompt, max_new_tokens=1)
        return None

    def prefill_s(self, prompt: tuple[int, ...]) -> float:
        self.answer(prompt, max_new_tokens=1)
        return float(self._prefills) * (1.0 if self.mode == PLAIN else 1.5)

    def worker_statistics(self) -> list[dict[str, Any]]:
        assert self.mode != PLAIN, "plain vLLM has no statistics of kvstrata's"
        return [{"loaded_bytes": self._loaded_bytes, "saved_bytes": 10 * self._prefills, "plan": "slots"}]


def run(
    answers: dict[str, tuple[int, ...]] | None = None,
    *,
    small_bytes: int = 6 * MIB,
    roomy_bytes: int = 20 * MIB,
) -> tuple[DemoResult, list[tuple[int, str]]]:
    opened: list[tuple[int, str]] = []
    alive: list[str] = []
    told = {PLAIN: RIGHT, LAYERWISE: RIGHT, LOADS_SKIPPED: WRONG} | (answers or {})

    @contextmanager
    def open_engine(budget_bytes: int, mode: str) -> Iterator[FakeEngine]:
        assert not alive, "one engine at a time"
        opened.append((budget_bytes, mode))
        alive.append(mode)
        yield FakeEngine(budget_bytes, mode, told)
        alive.pop()

    result = run_demo(
        open_engine,
        PROMPT,
        device_kv_budget_bytes=small_bytes,
        roomy_kv_budget_bytes=roomy_bytes,
        capacity_ratio_formula=2.0,
        timed_runs=3,
        terminal=Terminal(Console(quiet=True)),
    )
    return result, opened


def test_four_servings_on_two_budgets():
    result, opened = run()
    assert opened == [(6 * MIB, PLAIN), (20 * MIB, PLAIN), (6 * MIB, LAYERWISE), (6 * MIB, LOADS_SKIPPED)]
    assert result.problems == []
    assert result.plain.refusal == "too long"
    assert (result.plain.max_tokens, result.kvstrata.max_tokens, result.capacity_ratio) == (600, 1200, 2.0)


def test_bytes_are_those_of_one_answer_not_of_the_warm_up_or_the_timed_runs():
    result, _ = run()
    assert (result.kvstrata.loaded_bytes, result.kvstrata.saved_bytes) == (1000, 10)


def test_times_are_medians_of_runs_after_the_warm_up():
    result, _ = run()
    assert result.roomy.prefill_s == (3.0, 4.0, 5.0)
    assert result.prefill_time_ratio == pytest.approx(1.5)


FAILURES = [
    ({LAYERWISE: WRONG}, "kvstrata's answer differs"),
    ({LOADS_SKIPPED: RIGHT}, "proves nothing"),
    # Two engines that agree on a wrong answer show nothing.
    ({PLAIN: (7,), LAYERWISE: (7,), LOADS_SKIPPED: WRONG}, "did not answer 'The pass key is 12345.'"),
]


@pytest.mark.parametrize(("answers", "problem"), FAILURES)
def test_what_makes_it_a_failure(answers: dict[str, tuple[int, ...]], problem: str):
    result, _ = run(answers)
    assert len(result.problems) == 1
    assert problem in result.problems[0]


def test_two_empty_answers_are_not_exact():
    result, _ = run({PLAIN: (), LAYERWISE: (), LOADS_SKIPPED: WRONG})
    assert any("kvstrata's answer differs" in problem for problem in result.problems)


def test_a_budget_that_fits_plain_vllm_shows_nothing():
    result, _ = run(small_bytes=19 * MIB)
    assert any("too large to show anything" in problem for problem in result.problems)


def test_a_reference_that_refuses_is_an_error():
    with pytest.raises(KVStrataError, match="reference engine"):
        run(roomy_bytes=7 * MIB)


def test_json_has_the_published_keys():
    result, _ = run()
    layerwise = as_json(result, {"cpu": "some"})["layerwise"]
    assert layerwise["device_kv_budget_bytes"] == 6 * MIB
    assert layerwise["plain"]["max_tokens"] == 600
    assert layerwise["kvstrata"]["max_tokens"] == 1200
    assert layerwise["capacity_ratio"] == layerwise["capacity_ratio_formula"] == 2.0
    assert layerwise["exact"] is True
    assert layerwise["negative_control_diverges"] is True
    assert layerwise["prefill_time_ratio"] == pytest.approx(1.5)
    assert len(layerwise["kvstrata"]["prefill_s_runs"]) == 3


def test_table_shows_verdict_and_failure():
    console = Console(width=160, record=True, quiet=False, file=None, force_terminal=False)
    with console.capture() as captured:
        console.print(as_table(run()[0]))
        console.print(as_table(run({LAYERWISE: WRONG})[0]))
    good, bad = captured.get().split("negative control, loads skipped", 1)
    assert "6.0 MiB" in good
    assert "1,200" in good
    assert "yes" in good
    assert "FAILED: kvstrata's answer differs" in bad


@pytest.mark.parametrize(
    ("layers", "independent", "shared", "ratio"),
    [(6, 1, 2, 2.0), (27, 1, 6, 27 / 7), (6, 1, 9, 1.0), (6, 0, 1, 6.0)],
)
def test_the_formula_of_the_seed(layers: int, independent: int, shared: int, ratio: float):
    assert formula(
        num_layers=layers, num_independent=independent, num_shared_buffers=shared
    ) == pytest.approx(ratio)


@pytest.mark.parametrize("depth", [0.0, 0.15, 0.5, 0.99])
@pytest.mark.parametrize("prompt_tokens", [300, 1000, 4000])
def test_prompt_holds_the_fact_once_where_it_says(prompt_tokens: int, depth: float):
    prompt = build_prompt(
        letters, text=handbook(), prompt_tokens=prompt_tokens, pass_key="90210", depth=depth
    )
    assert isinstance(prompt, DemoPrompt)
    assert prompt_tokens - 90 < len(prompt.token_ids) <= prompt_tokens
    text = "".join(map(chr, prompt.token_ids))
    assert text == prompt.text
    assert text.count("The pass key is 90210.\n") == 1
    assert text.index("The pass key is 90210.\n") == prompt.fact_position_tokens
    assert text.startswith("<s><|user|>")
    assert text.endswith("\nWhat is the pass key?<|assistant|>")
    assert prompt.expected_answer == "The pass key is 90210."


def test_a_text_too_short_for_the_prompt_is_an_error():
    with pytest.raises(KVStrataError, match="prompt_tokens=100000"):
        build_prompt(letters, text=handbook(), prompt_tokens=100_000, pass_key="1", depth=0.5)
