"""`kvstrata bench store`: turns and ratios of pretended engines, refusals, the local store for real."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvstrata.bench import store as bench
from kvstrata.bench.store import STORES, StoreBenchOptions, StoreRuns, as_tables, bench_store, summarise
from kvstrata.bench.store_prefill import (
    OpenBoth,
    Prefiller,
    StorePrefillOptions,
    StorePrefillRuns,
    measure_store_prefill,
    store_prompts,
)
from kvstrata.errors import ConfigurationError, KVStrataError, StoreError

OPTIONS = StorePrefillOptions(repeats=2, prompt_tokens=300)
CONNECTOR = {"kv_connector": "KVStrataConnector", "kv_connector_extra_config": {"backend": "local"}}


class FakeEngine:
    """Takes the given seconds for one prefill after the other."""

    def __init__(self, name: str, turns: list[str], seconds: Sequence[float], fetched: int = 0) -> None:
        self.name, self.turns, self.seconds, self.fetched = name, turns, list(seconds), fetched
        self.answer = (1, 2)

    def prefill_s(self, prompt: Sequence[int]) -> float:
        self.turns.append(f"{self.name} {prompt[0]}")
        return self.seconds.pop(0)

    def answer_ids(self, prompt: Sequence[int]) -> tuple[int, ...]:
        return self.answer

    def worker_statistics(self) -> list[dict[str, Any]]:
        return [{"fetched_blocks": self.fetched}]


def opener(plain: FakeEngine, ours: FakeEngine) -> OpenBoth:
    @contextmanager
    def open_both(
        connector: Mapping[str, Any], environment: Mapping[str, str]
    ) -> Iterator[tuple[Prefiller, Prefiller]]:
        assert (connector, environment) == (CONNECTOR, {"A": "b"})
        yield plain, ours

    return open_both


def measured(plain: FakeEngine, ours: FakeEngine) -> StorePrefillRuns:
    return measure_store_prefill(
        OPTIONS,
        opener(plain, ours),
        [(7,), (8,), (9,)],
        connector=CONNECTOR,
        environment={"A": "b"},
        pause=lambda seconds: None,
    )


def test_every_prompt_is_computed_saved_and_found_and_the_first_one_is_a_warm_up() -> None:
    turns: list[str] = []
    plain = FakeEngine("plain", turns, [50.0, 2.0, 4.0])
    ours = FakeEngine("ours", turns, [90.0, 90.0, 3.0, 1.0, 5.0, 1.0], fetched=12)
    runs = measured(plain, ours)
    assert turns == [f"{name} {prompt}" for prompt in (7, 8, 9) for name in ("plain", "ours", "ours")]
    assert runs == StorePrefillRuns(
        plain_s=(2.0, 4.0), saved_s=(3.0, 5.0), found_s=(1.0, 1.0), fetched_blocks=12
    )
    assert runs.ratios() == {"saved": pytest.approx(1.375), "found": pytest.approx(0.375)}


def test_a_store_that_found_nothing_is_not_timed() -> None:
    with pytest.raises(StoreError, match="nothing was found"):
        measured(FakeEngine("plain", [], [1.0] * 3), FakeEngine("ours", [], [1.0] * 6))


def test_engines_that_answer_differently_are_not_compared() -> None:
    ours = FakeEngine("ours", [], [1.0] * 6, fetched=1)
    ours.answer = (1, 3)
    with pytest.raises(KVStrataError, match="answered differently"):
        measured(FakeEngine("plain", [], [1.0] * 3), ours)


def test_no_two_prompts_begin_alike() -> None:
    prompts = store_prompts(OPTIONS)
    assert [len(prompt) for prompt in prompts] == [300] * 3
    assert len({prompt[:16] for prompt in prompts}) == 3


def test_the_result_has_the_published_keys_and_the_tables_their_figures(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runs = {"local": {"1MiB": StoreRuns(put_s=(0.2,), get_s=(0.1,), memcpy_s=(0.05,))}}
    prefills = {"local": StorePrefillRuns(plain_s=(2.0,), saved_s=(2.5,), found_s=(0.5,), fetched_blocks=1)}
    result = summarise(StoreBenchOptions(), runs, {"memcache": "no driver"}, prefills)
    assert result["store.local.1MiB.put"] == pytest.approx(0.25)
    assert result["store.local.1MiB.get"] == pytest.approx(0.5)
    assert (result["prefill.local.saved"], result["prefill.local.found"]) == (1.25, 0.25)
    assert result["skipped"] == {"memcache": "no driver"}
    assert result["prefills"]["local"]["saved_s"] == (2.5,)
    monkeypatch.setattr(bench, "SIZES", {"1MiB": (1 << 20, 32)})
    speed_table, prefill_table = as_tables(result)
    assert [list(column.cells) for column in speed_table.columns] == [
        ["local"],
        ["0.17 (25%)"],
        ["0.34 (50%)"],
    ]
    assert [list(column.cells) for column in prefill_table.columns] == [["local"], ["1.25"], ["0.25"]]


def test_a_store_that_is_unknown_is_refused_by_name(tmp_path: Path) -> None:
    options = StoreBenchOptions(stores=("locl",), prefill=None)
    with pytest.raises(ConfigurationError, match=f"'locl' is unknown; use one of: {', '.join(STORES)}"):
        bench_store(options, json_file=None, log=tmp_path / "log")


def test_the_local_store_is_measured_and_one_that_cannot_run_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "SIZES", {"4KiB": (4096, 8)})
    monkeypatch.setattr(bench, "STORE_BYTES", 1 << 20)

    def missing(backend: str) -> Any:
        raise StoreError(f"{backend} is not installed")

    monkeypatch.setattr(bench, "library", missing)
    options = StoreBenchOptions(repeats=2, stores=("local", "mooncake"), prefill=None)
    file = tmp_path / "out" / "store.json"
    result = bench_store(options, json_file=file, log=tmp_path / "log")
    assert list(result["runs"]) == ["local"]
    assert len(result["runs"]["local"]["4KiB"]["put_s"]) == 2
    assert result["skipped"] == {"mooncake": "mooncake is not installed"}
    assert file.is_file()
    assert "left out: mooncake: mooncake is not installed" in capfd.readouterr().out
