"""`kvstrata bench pd` on a pretended deployment: turns, ratios, what it refuses and what it writes."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
from rich.console import Console

from kvstrata.bench.pd import PdBenchOptions, as_table, measure_first_tokens, summarise
from kvstrata.bench.pd_runs import FirstTokenRuns, first_tokens
from kvstrata.demo.model import find_model
from kvstrata.demo.pd import PdCounters
from kvstrata.errors import KVStrataError
from kvstrata.terminal import Terminal

QUIET = Terminal(Console(quiet=True))


class FakeDeployment:
    """The proxy takes the next of `through_s`, prefill alone the next of `alone_s`."""

    proxy, prefill = "http://proxy", "http://prefill"

    def __init__(
        self, alone_s: Sequence[float], through_s: Sequence[float], *, recomputes_from: int = 99
    ) -> None:
        self._seconds = {self.prefill: list(alone_s), self.proxy: list(through_s)}
        self._recomputes_from = recomputes_from
        self.asked: list[tuple[str, int]] = []
        self._pulls = 5  # from before

    def seconds_to_first_token(self, url: str, prompt: Sequence[int]) -> float:
        self.asked.append((url, len(prompt)))
        through = [asked for asked, _ in self.asked].count(self.proxy)
        if url == self.proxy and through <= self._recomputes_from:
            self._pulls += 1
        return self._seconds[url].pop(0)

    def settled_counters(self) -> PdCounters:
        return PdCounters(
            pulls_done=self._pulls,
            sends_done=self._pulls,
            parts_pulled=24 * self._pulls,
            bytes_pulled=1000 * self._pulls,
            pulls_open=0,
            leases_open=0,
        )


def runs_of(deployment: FakeDeployment, *, warm_ups: int = 1, repeats: int = 3) -> FirstTokenRuns:
    return first_tokens(
        deployment,
        [1, 2, 3],
        warm_ups=warm_ups,
        repeats=repeats,
        terminal=QUIET,
        pause=lambda seconds: None,
    )


def test_both_ways_take_turns_prefill_alone_first():
    deployment = FakeDeployment([1.0] * 4, [1.0] * 4)
    runs_of(deployment)
    assert deployment.asked == [("http://prefill", 3), ("http://proxy", 3)] * 4


def test_the_ratio_is_the_median_of_turns_that_followed_each_other_without_the_warm_up():
    runs = runs_of(FakeDeployment([50.0, 1.0, 2.0, 4.0], [1.0, 1.1, 2.0, 6.0]))
    assert runs.ratios == pytest.approx([1.1, 1.0, 1.5])
    assert runs.ratio == pytest.approx(1.1)
    assert runs.alone_s == (1.0, 2.0, 4.0)
    assert runs.through_s == (1.1, 2.0, 6.0)
    assert runs.as_json()["bytes_pulled_per_request"] == 1000


@pytest.mark.parametrize("recomputes_from", [0, 2])
def test_prompts_that_decode_computed_itself_are_not_measured(recomputes_from: int):
    deployment = FakeDeployment([1.0] * 4, [1.0] * 4, recomputes_from=recomputes_from)
    with pytest.raises(KVStrataError, match=f"the KV of {recomputes_from} of 4 prompts"):
        runs_of(deployment)


READS = {
    "shm_over_memcpy": 0.91,
    "tcp_over_memcpy": 0.23,
    "eight_peers_over_one": 0.97,
    "runs": {"shm_over_memcpy": [0.9, 0.91, 0.95], "bytes": 42},
}


def result_of(monkeypatch: pytest.MonkeyPatch) -> tuple[dict[str, Any], FakeDeployment]:
    monkeypatch.setattr("kvstrata.bench.pd_runs.QUIET_S", 0.0)
    options = PdBenchOptions(repeats=2, warm_ups=1, prompt_tokens=300)
    deployment = FakeDeployment([1.0] * 3, [9.0, 1.05, 1.09])

    @contextmanager
    def opened() -> Iterator[FakeDeployment]:
        yield deployment

    first = measure_first_tokens(options, find_model(None), opened, QUIET)
    return summarise(options, READS, first), deployment


def test_the_result_has_the_published_keys(monkeypatch: pytest.MonkeyPatch):
    result, deployment = result_of(monkeypatch)
    assert result["kvstrata_bench_pd"] == 1
    assert result["shm_over_memcpy"] == 0.91
    assert result["tcp_over_memcpy"] == 0.23
    assert result["eight_peers_over_one"] == 0.97
    assert result["ttft_ratio"] == pytest.approx(1.07)
    assert result["runs"]["first_tokens"]["prefill_alone_s"] == [1.0, 1.0]
    assert result["runs"]["first_tokens"]["prefill_decode_s"] == [1.05, 1.09]
    assert result["runs"]["reads"]["bytes"] == 42
    assert result["machine"]["cores"] >= 1
    assert result["options"]["device_kv_budget_bytes"] == 48 << 20
    (length,) = {length for _, length in deployment.asked}
    assert 250 < length <= 300


def test_the_table_shows_every_figure_beside_its_aim(monkeypatch: pytest.MonkeyPatch):
    console = Console(width=160, force_terminal=False)
    with console.capture() as captured:
        console.print(as_table(result_of(monkeypatch)[0]))
    shown = captured.get()
    for figure in ("0.91", "0.90 to 0.95", ">= 0.8", "0.23", "0.97", "1.07", "1.05 to 1.09", "<= 1.1"):
        assert figure in shown
