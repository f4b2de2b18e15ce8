"""`kvstrata bench residency`: the selections it times, the keys it writes, the aims it shows."""

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from kvstrata.bench.gather import GatherRuns
from kvstrata.bench.residency import (
    ResidencyBenchOptions,
    bench_residency,
    make_selections,
    measure_lookups,
)
from kvstrata.core.eviction import DEFAULT_POLICY, POLICIES
from kvstrata.trace.recording import TopkTraceWriter

SMALL = ResidencyBenchOptions(
    repeats=2,
    topk=100,
    capacity_rows=200,
    host_rows=8192,
    context_tokens=2048,
    near_rows=100,
    steps_per_run=10,
    steps_per_block=5,
    warm_up_steps=5,
)


@pytest.fixture(scope="module")
def selections() -> tuple[np.ndarray, np.ndarray]:
    return make_selections(SMALL, 25)


def test_a_step_keeps_70_percent_and_takes_the_others_from_rows_long_unselected(selections):
    steps = [set(row.tolist()) for row in selections[0]]
    assert {len(step) for step in steps} == {100}
    assert {len(a & b) for a, b in pairwise(steps)} == {70}
    for at in range(20, 25):
        recent = set.union(*steps[at - 10 : at])
        assert len(steps[at] - recent) == 30


def test_near_rows_are_not_selected_and_some_were_a_step_before(selections):
    rows, near_rows = ([set(row.tolist()) for row in rows] for rows in selections)
    for before, selected, near in zip(rows, rows[1:], near_rows[1:], strict=False):
        assert len(near) == 100
        assert not near & selected
        assert before - selected <= near


def test_positions_ascend_through_blocks_all_over_the_pool(selections):
    rows, _ = selections
    blocks = np.unique(rows // SMALL.block_tokens)
    assert len(blocks) <= SMALL.context_tokens // SMALL.block_tokens
    assert blocks.max() > SMALL.context_tokens // SMALL.block_tokens
    assert rows.max() < SMALL.host_rows


def test_30_percent_miss_with_every_policy():
    runs = measure_lookups(SMALL)
    assert runs.keys() == POLICIES.keys()
    for run in runs.values():
        assert run.miss_share == pytest.approx(0.3)
        assert len(run.block_ns) == SMALL.repeats * 2


@pytest.fixture
def result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    def gather(*, repeats: int) -> GatherRuns:
        return GatherRuns(
            rows=10,
            row_bytes=1152,
            pool_bytes=1 << 20,
            gather_s=(2e-6,) * repeats,
            memcpy_s=(1e-6,) * repeats,
            index_select_s=(5e-6,) * repeats,
        )

    monkeypatch.setattr("kvstrata.bench.residency.measure_gather", gather)
    with TopkTraceWriter(tmp_path / "a.trace", topk=2, block_tokens=16, host_rows=9) as writer:
        for rows in ([1, 2], [3, 4], [1, 3]):
            writer.append(layer=0, step=0, rows=np.array([rows], np.int64))
    options = replace(SMALL, traces=(str(writer.path),), sizes=(1.0, 2.0))
    with (tmp_path / "shown.txt").open("w") as shown:
        console = Console(file=shown, width=200)
        returned = bench_residency(options, json_file=tmp_path / "new" / "r.json", console=console)
    written = json.loads((tmp_path / "new" / "r.json").read_text())
    assert written == json.loads(json.dumps(returned))
    return {**written, "shown": (tmp_path / "shown.txt").read_text()}


def test_the_result_has_ratios_times_and_miss_rates(result: dict):
    assert result["gather_over_memcpy"] == pytest.approx(0.5)
    assert result["gather_over_index_select"] == pytest.approx(2.5)
    assert result["default_policy"] == DEFAULT_POLICY
    assert result["us_per_row_layer"] == result["us_per_row_layer_by_policy"][DEFAULT_POLICY] > 0
    runs = result["runs"]["lookup"][DEFAULT_POLICY]
    slowest = max(runs["block_ns"]) / runs["steps_per_block"] / 1000
    least = result["least_us_per_row_layer_by_policy"][DEFAULT_POLICY]
    assert least == pytest.approx(min(runs["block_ns"]) / runs["steps_per_block"] / 1000)
    assert least <= result["us_per_row_layer"] <= slowest
    assert result["misses.a-rank0-trace.lru.1x"] == pytest.approx(5 / 6)
    assert result["misses.a-rank0-trace.belady.2x"] == pytest.approx(4 / 6)
    assert result["machine"]["cores"] >= 1


def test_the_table_shows_every_aim(result: dict):
    for aim in ("<= 10 us", ">= 0.5", ">= 1.6"):
        assert aim in result["shown"]
    assert f"{DEFAULT_POLICY} (default)" in result["shown"]
