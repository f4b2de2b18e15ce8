"""`kvstrata bench kvpp` on pretended engines: turns, ratios, what it refuses and what it writes."""

import multiprocessing
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from kvstrata.bench import kvpp as bench
from kvstrata.bench.kvpp import KvppBenchOptions, as_table, ratios_of, summarise
from kvstrata.bench.kvpp_carriers import CarrierRuns, _received, measure_carriers
from kvstrata.bench.kvpp_engines import EngineKind, KvppRuns, Work, measure_engines
from kvstrata.bench.turns import Turns, take_turns
from kvstrata.demo.two_ranks import TwoRanks
from kvstrata.errors import KVStrataError
from kvstrata.terminal import Terminal
from kvstrata.vllm.engines import Decoding

QUIET = Terminal(Console(quiet=True))
MIB = 1 << 20


def sides(base: Sequence[float], other: Sequence[float], *, warm_ups: int) -> tuple[Turns, list[str]]:
    asked: list[str] = []
    left = {"base": list(base), "other": list(other)}

    def side(name: str) -> float:
        asked.append(name)
        return left[name].pop(0)

    turns = take_turns(
        lambda: side("base"),
        lambda: side("other"),
        warm_ups=warm_ups,
        repeats=len(base) - warm_ups,
        terminal=QUIET,
        title="turns",
        quiet_s=3.0,
        pause=lambda seconds: asked.append(f"quiet for {seconds}"),
    )
    return turns, asked


def test_sides_take_turns_with_quiet_between_them():
    _, asked = sides([1.0, 1.0], [1.0, 1.0], warm_ups=1)
    assert asked == ["quiet for 3.0", "base", "quiet for 3.0", "other"] * 2


def test_the_ratio_is_the_median_of_turns_that_followed_each_other_without_the_warm_up():
    turns, _ = sides([50.0, 1.0, 2.0, 4.0], [1.0, 1.1, 2.0, 6.0], warm_ups=1)
    assert turns.ratios == pytest.approx([1.1, 1.0, 1.5])
    assert turns.ratio == pytest.approx(1.1)
    assert turns.as_json(base="plain", other="kvpp") == {
        "plain_s": [1.0, 2.0, 4.0],
        "kvpp_s": [1.1, 2.0, 6.0],
        "ratio": turns.ratios,
    }


class FakeEngine:
    """Plain vLLM takes 1 s, KVPP 1.5 s and, with all blocks, a second more for every 48 MiB of budget."""

    def __init__(self, kind: EngineKind, first_token: int) -> None:
        self.kind, self._first_token = kind, first_token
        self.prefills = self.decodings = 0

    @property
    def _seconds(self) -> float:
        if self.kind.broadcast is None:
            return 1.0
        return 1.5 + (self.kind.rank_bytes / (48 * MIB) if self.kind.broadcast == "all" else 0)

    def max_tokens(self) -> int:
        return self.kind.rank_bytes // MIB * (10 if self.kind.broadcast is None else 12)

    def prefill_s(self, prompt: Sequence[int]) -> float:
        self.prefills += 1
        return 10 * self._seconds

    def decode(self, prompts: Sequence[Sequence[int]], *, new_tokens: int) -> Decoding:
        (_,) = prompts
        self.decodings += 1
        ids = tuple(range(self._first_token, self._first_token + new_tokens))
        return Decoding(
            token_ids=(ids,), token_s=(tuple(self._seconds * (1 + at) for at in range(new_tokens)),)
        )

    def worker_statistics(self) -> list[dict[str, Any]]:
        assert self.kind.broadcast is not None, "plain vLLM has no statistics of kvstrata's"
        return [{"broadcasts": 7}, {"broadcasts": 8}]


OPTIONS = KvppBenchOptions(repeats=3, warm_ups=1, prompt_tokens=300, new_tokens=4)
CARRIERS = CarrierRuns(moved_bytes=100, shm_s=(1.0, 2.0, 1.0), collective_s=(4.0, 4.0, 3.0))


def measured(*, wrong: EngineKind | None = None) -> tuple[KvppRuns, list[FakeEngine]]:
    opened: list[FakeEngine] = []
    alive: list[EngineKind] = []

    @contextmanager
    def open_engine(kind: EngineKind) -> Iterator[FakeEngine]:
        opened.append(FakeEngine(kind, 99 if kind == wrong else 5))
        alive.append(kind)
        assert len(alive) <= 2, alive
        yield opened[-1]
        alive.remove(kind)

    work = Work(
        prompt=(1, 2, 3), new_tokens=OPTIONS.new_tokens, warm_ups=OPTIONS.warm_ups, repeats=OPTIONS.repeats
    )
    budget = OPTIONS.device_kv_budget_bytes
    runs = measure_engines(
        work, open_engine, QUIET, rank_bytes=budget, growth=OPTIONS.growth, pause=lambda seconds: None
    )
    assert alive == []
    return runs, opened


def test_five_engines_start_once_each_and_two_run_at_a_time():
    _, opened = measured()
    # (kind, budget in MiB, prefills with a warm-up each, decodings with one for each comparison)
    assert [
        (engine.kind.name, engine.kind.rank_bytes // MIB, engine.prefills, engine.decodings)
        for engine in opened
    ] == [
        ("referenced", 48, 4, 8),
        ("referenced", 192, 0, 4),
        ("plain", 48, 8, 5),
        ("all", 48, 4, 5),
        ("all", 192, 0, 4),
    ]


@pytest.mark.parametrize(
    ("wrong", "pair"),
    [
        (EngineKind(broadcast="referenced", rank_bytes=192 * MIB), "referenced and referenced"),
        (EngineKind(broadcast=None, rank_bytes=48 * MIB), "plain and referenced"),
        (EngineKind(broadcast="all", rank_bytes=48 * MIB), "plain and all"),
        (EngineKind(broadcast="all", rank_bytes=192 * MIB), "all and all"),
    ],
)
def test_engines_that_answer_differently_are_not_compared(wrong: EngineKind, pair: str):
    with pytest.raises(KVStrataError, match=f"{pair}, answer differently"):
        measured(wrong=wrong)


def test_the_result_has_the_published_keys():
    result = summarise(OPTIONS, CARRIERS, measured()[0])
    assert result["kvstrata_bench_kvpp"] == 1
    assert result["prefill_ratio.referenced"] == pytest.approx(1.5)
    assert result["prefill_ratio.all"] == pytest.approx(2.5)
    assert result["decode_ratio.referenced"] == pytest.approx(1.5)
    assert result["shm_over_collective"] == pytest.approx(3.0)
    assert result["growth_with_allocated_blocks"] == pytest.approx(1.0)
    assert result["growth_with_allocated_blocks.all"] == pytest.approx(5.5 / 2.5)
    assert result["capacity_ratio"] == pytest.approx(1.2)
    assert result["runs"]["prefill_ratio.referenced"]["plain_s"] == [10.0] * 3
    assert result["runs"]["growth_with_allocated_blocks"]["max_tokens"] == [576, 2304]
    assert result["runs"]["growth_with_allocated_blocks.all"]["per_token_4x_blocks_s"] == pytest.approx(
        [5.5] * 3
    )
    assert result["runs"]["shm_over_collective"]["shm_bytes_per_s"] == [100.0, 50.0, 100.0]
    assert [rank["broadcasts"] for rank in result["ranks"]] == [7, 8]
    assert result["machine"]["cores"] >= 1
    assert result["options"]["growth"] == 4
    assert "model" not in result["options"]


FIGURES = (
    "prefill_ratio.referenced",
    "prefill_ratio.all",
    "decode_ratio.referenced",
    "shm_over_collective",
    "growth_with_allocated_blocks",
    "growth_with_allocated_blocks.all",
)


@pytest.mark.parametrize("figure", FIGURES)
def test_every_figure_has_its_raw_runs(figure: str):
    result = summarise(OPTIONS, CARRIERS, measured()[0])
    assert len(ratios_of(result, figure)) == 3
    assert sorted(ratios_of(result, figure))[1] == result[figure]


def test_the_table_shows_every_figure_beside_its_aim():
    console = Console(width=160, force_terminal=False)
    with console.capture() as captured:
        console.print(as_table(summarise(OPTIONS, CARRIERS, measured()[0])))
    shown = captured.get()
    for figure in ("1.500", "2.500", "3.000", "2.00 to 4.00", "1.000", "2.200", "1.200", "<= 1.02", "flat"):
        assert figure in shown


def test_a_machine_with_one_cpu_has_nothing_to_measure(monkeypatch: pytest.MonkeyPatch, tmp_path: Any):
    monkeypatch.setattr(bench.TwoRanks, "here", lambda: TwoRanks.on([3]))
    with pytest.raises(KVStrataError, match="nothing to measure: each of two ranks"):
        bench.bench_kvpp(OPTIONS, json_file=None, log=tmp_path / "log")


def test_both_carriers_bring_a_rank_the_three_layers_of_the_other():
    runs = measure_carriers(repeats=2, context_tokens=256, warm_ups=1)
    assert runs.moved_bytes == 3 * 256 * (1152 + 132)
    assert len(runs.shm_s) == len(runs.collective_s) == len(runs.ratios) == 2
    assert min(runs.shm_s + runs.collective_s) > 0
    assert replace(runs, shm_s=(1.0, 1.0), collective_s=(2.0, 4.0)).ratio == 3.0


def test_a_rank_of_the_carriers_that_fails_or_ends_says_so():
    ours, theirs = multiprocessing.Pipe()
    theirs.send(("OSError: no memory", None))
    theirs.close()
    with pytest.raises(KVStrataError, match="rank 1 of the carriers' benchmark failed: OSError: no memory"):
        _received(ours, 1)
    with pytest.raises(KVStrataError, match="rank 1 of the carriers' benchmark ended without a word"):
        _received(ours, 1)
