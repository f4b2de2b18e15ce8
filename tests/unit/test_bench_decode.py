"""`kvstrata bench decode` on pretended engines: turns, ratios, what it refuses and what it writes."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
from rich.console import Console

from kvstrata.bench.decode import (
    DecodeBenchOptions,
    OpenPlain,
    as_table,
    check_pressure,
    measure_batches,
    measure_ceiling,
    measure_constrained,
    spread_prompts,
    summarise,
)
from kvstrata.bench.decode_runs import Decoder, Pair, PairRuns, by_turns
from kvstrata.errors import KVStrataError
from kvstrata.terminal import Terminal
from kvstrata.vllm.engines import Decoding

QUIET = Terminal(Console(quiet=True))
TEXT = list(range(2000))


def decoding(requests: int, tokens: int, step_s: float, *, first: int = 0) -> Decoding:
    """All requests start together and get a token every `step_s`."""
    return Decoding(
        token_ids=tuple(tuple(range(first, first + tokens)) for _ in range(requests)),
        token_s=tuple(tuple(step_s * (1 + at) for at in range(tokens)) for _ in range(requests)),
    )


class FakeEngine:
    """Takes `step_s` a token, one after another in `steps_s`; nine of ten rows hit after the first run."""

    def __init__(self, name: str, turns: list[str], steps_s: Sequence[float], max_tokens: int) -> None:
        self.name, self.turns, self.steps_s = name, turns, list(steps_s)
        self._max_tokens = max_tokens
        self.asked: list[tuple[int, int]] = []
        self.first_token = 0
        self._selected = self._hits = 0

    def max_tokens(self) -> int:
        return self._max_tokens

    def decode(self, prompts: Sequence[Sequence[int]], *, new_tokens: int) -> Decoding:
        self.turns.append(self.name)
        self._hits += 0 if not self.asked else 90
        self._selected += 100
        self.asked.append((len(prompts), new_tokens))
        return decoding(len(prompts), new_tokens, self.steps_s.pop(0), first=self.first_token)

    def worker_statistics(self) -> list[dict[str, Any]]:
        assert self.name == "kvstrata", "plain vLLM has no statistics of kvstrata's"
        return [{"selected_rows": self._selected, "hit_rows": self._hits, "plan": "rows"}]


def pair_of(
    plain_s: Sequence[float], ours_s: Sequence[float], *, plain_tokens: int = 100, ours_tokens: int = 500
) -> tuple[Pair, list[str]]:
    turns: list[str] = []
    return (
        Pair(
            plain=FakeEngine("plain", turns, plain_s, plain_tokens),
            kvstrata=FakeEngine("kvstrata", turns, ours_s, ours_tokens),
        ),
        turns,
    )


def turns_of(pair: Pair, *, repeats: int = 3, warm_ups: int = 1) -> PairRuns:
    return by_turns(
        pair,
        [(1, 2, 3), (4, 5)],
        new_tokens=4,
        warm_ups=warm_ups,
        repeats=repeats,
        terminal=QUIET,
        title="turns",
        pause=lambda seconds: None,
    )


def test_the_engines_take_turns_plain_first():
    pair, turns = pair_of([1.0] * 4, [1.0] * 4)
    turns_of(pair)
    assert turns == ["plain", "kvstrata"] * 4


def test_ratios_are_medians_of_turns_that_followed_each_other_without_the_warm_up():
    pair, _ = pair_of([50.0, 1.0, 2.0, 4.0], [1.0, 2.0, 2.0, 6.0])
    runs = turns_of(pair)
    assert runs.tpot_ratios == pytest.approx([2.0, 1.0, 1.5])
    assert runs.tpot_ratio == pytest.approx(1.5)
    assert runs.throughput_ratio == pytest.approx(1 / 1.5)
    assert runs.plain_s == pytest.approx((4.0, 8.0, 16.0))
    assert runs.generated_tokens == 8


def test_hit_rates_leave_the_warm_up_out():
    runs = turns_of(pair_of([1.0] * 4, [1.0] * 4)[0])
    assert runs.rows["selected_rows"] == 300
    assert runs.hit_rate == pytest.approx(0.9)


@pytest.mark.parametrize("warm_ups", [0, 1])
def test_engines_that_answer_differently_are_not_compared(warm_ups: int):
    pair, _ = pair_of([1.0] * 4, [1.0] * 4)
    pair.kvstrata.first_token = 7  # type: ignore[attr-defined]
    with pytest.raises(KVStrataError, match="request 0, token 0 is 0 with plain vLLM and 7 with kvstrata"):
        turns_of(pair, warm_ups=warm_ups)


def test_time_per_token_starts_with_the_last_first_token_and_ends_with_the_first_last():
    times = ((1.0, 2.0, 3.0, 4.0, 5.0), (3.0, 4.0, 5.0, 9.0, 10.0))
    both = Decoding(token_ids=((1,) * 5, (2,) * 5), token_s=times)
    assert both.s_per_token == pytest.approx(1.0)  # from 3 to 5: two tokens each
    assert both.seconds == 10.0
    assert both.num_tokens == 10


def test_requests_that_queue_have_no_time_per_token():
    queued = Decoding(token_ids=((1, 1), (2, 2)), token_s=((1.0, 2.0), (3.0, 4.0)))
    with pytest.raises(ValueError, match="never decode together"):
        _ = queued.s_per_token


class QueueingEngine(FakeEngine):
    """Serves one request after the other."""

    def decode(self, prompts: Sequence[Sequence[int]], *, new_tokens: int) -> Decoding:
        together = super().decode(prompts, new_tokens=new_tokens)
        step_s = together.token_s[0][0]
        return Decoding(
            token_ids=together.token_ids,
            token_s=tuple(
                tuple(step_s * (1 + request * new_tokens + at) for at in range(new_tokens))
                for request in range(len(prompts))
            ),
        )


def test_queueing_costs_throughput():
    turns: list[str] = []
    runs = turns_of(
        Pair(
            plain=QueueingEngine("plain", turns, [1.0] * 4, 5),
            kvstrata=FakeEngine("kvstrata", turns, [1.0] * 4, 50),
        )
    )
    assert runs.throughput_ratio == pytest.approx(2.0)
    assert runs.plain_s_per_token == (None, None, None)
    assert runs.tpot_ratios == []


SMALL = DecodeBenchOptions(
    repeats=2,
    batches=(1, 3),
    shortest_prompt_tokens=20,
    longest_prompt_tokens=50,
    new_tokens=4,
    constrained_requests=4,
    constrained_prompt_tokens=40,
    constrained_new_tokens=10,
)


def plain_opener(ample_tokens: int) -> OpenPlain:
    @contextmanager
    def open_plain(both: dict[str, Any], budgets: tuple[int, int]) -> Iterator[tuple[Decoder, Decoder]]:
        assert both == {"max_num_seqs": 4, "max_model_len": 50}
        assert budgets == (SMALL.constrained_kv_budget_bytes, SMALL.roomy_kv_budget_bytes)
        turns: list[str] = []
        yield (
            QueueingEngine("queueing", turns, [1.0] * 9, 70),
            FakeEngine("roomy", turns, [1.0] * 9, ample_tokens),
        )
        assert turns == ["queueing", "roomy"] * 3

    return open_plain


def test_memory_for_all_is_the_most_that_saving_memory_can_bring():
    ceiling = measure_ceiling(SMALL, plain_opener(200), TEXT, QUIET, pause=lambda seconds: None)
    assert ceiling == pytest.approx([4.0, 4.0])


def test_a_ceiling_takes_memory_for_all():
    with pytest.raises(
        KVStrataError, match=r"roomy_kv_budget_bytes=.* holds 3 of the 4 constrained requests"
    ):
        measure_ceiling(SMALL, plain_opener(199), TEXT, QUIET, pause=lambda seconds: None)


def measured(options: DecodeBenchOptions = SMALL) -> tuple[dict[str, Any], list[dict[str, Any]], list[Pair]]:
    asked: list[dict[str, Any]] = []
    pairs: list[Pair] = []

    @contextmanager
    def open_pair(both: dict[str, Any]) -> Iterator[Pair]:
        asked.append(both)
        pairs.append(pair_of([2.0] * 9, [1.0] * 9, plain_tokens=70, ours_tokens=210)[0])
        yield pairs[-1]

    batches = measure_batches(options, open_pair, TEXT, QUIET, pause=lambda seconds: None)
    constrained = measure_constrained(options, open_pair, TEXT, QUIET, pause=lambda seconds: None)
    ceiling = measure_ceiling(options, plain_opener(200), TEXT, QUIET, pause=lambda seconds: None)
    return summarise(options, batches, constrained, ceiling), asked, pairs


def test_every_batch_has_engines_of_its_own_size():
    _, asked, pairs = measured()
    assert [both["max_num_seqs"] for both in asked] == [1, 3, 4]
    budgets = [both["device_kv_budget_bytes"] for both in asked]
    roomy, scarce = SMALL.roomy_kv_budget_bytes, SMALL.constrained_kv_budget_bytes
    assert budgets == [roomy, roomy, scarce]
    # One warm-up and two timed turns of each side.
    assert [pair.plain.asked for pair in pairs] == [[(1, 4)] * 3, [(3, 4)] * 3, [(4, 10)] * 3]  # type: ignore[attr-defined]


def test_the_result_has_the_published_keys():
    result, _, _ = measured()
    assert result["tpot_ratio.1"] == result["tpot_ratio.3"] == pytest.approx(0.5)
    assert result["throughput_ratio_constrained"] == pytest.approx(2.0)
    assert result["throughput_ceiling_constrained"] == pytest.approx(4.0)
    assert result["hit_rate.1"] == result["hit_rate_constrained"] == pytest.approx(0.9)
    assert result["capacity_ratio_constrained"] == pytest.approx(3.0)
    assert result["requests_held_constrained"] == {"plain": 1, "kvstrata": 4}
    assert result["machine"]["cores"] >= 1
    assert result["options"]["constrained_kv_budget_bytes"] == 37 << 20
    assert result["runs"]["batch.3"]["prompt_tokens"] == [50, 35, 20]
    constrained = result["runs"]["constrained"]
    assert len(constrained["plain_s"]) == len(constrained["kvstrata_s"]) == 2
    assert constrained["plain_tokens_per_s"] == pytest.approx([2.0, 2.0])


def test_the_table_shows_every_figure_beside_its_aim():
    console = Console(width=160, force_terminal=False)
    with console.capture() as captured:
        console.print(as_table(measured()[0]))
    shown = captured.get()
    for figure in ("batch 1", "batch 3", "0.500", "2.00", "90.0%", "<= 1.08", ">= 3", "4.00", "the most"):
        assert figure in shown
    assert "37 MiB hold 1 requests of plain vLLM's and 4 of kvstrata's" in " ".join(shown.split())


@pytest.mark.parametrize(
    ("plain_tokens", "kvstrata_tokens", "words"),
    [
        (200, 200, "would not queue"),
        (49, 200, "plain vLLM holds 0"),
        (80, 200, "would start 2 prompts, finish 1 and preempt"),
        (79, 199, "kvstrata holds 3 of the 4"),
    ],
)
def test_a_budget_that_shows_no_queueing_is_refused(plain_tokens: int, kvstrata_tokens: int, words: str):
    with pytest.raises(KVStrataError, match=words):
        check_pressure(SMALL, plain_tokens=plain_tokens, kvstrata_tokens=kvstrata_tokens)
    check_pressure(SMALL, plain_tokens=79, kvstrata_tokens=200)


@pytest.mark.parametrize("count", [1, 2, 7, 16])
def test_prompts_differ_and_have_their_lengths(count: int):
    prompts = spread_prompts(TEXT, count, shortest_tokens=400, longest_tokens=900)
    assert len(set(prompts)) == len({prompt[0] for prompt in prompts}) == count
    assert len(prompts[0]) == 900
    assert count == 1 or len(prompts[-1]) == 400
    assert all(prompt == tuple(range(prompt[0], prompt[0] + len(prompt))) for prompt in prompts)
