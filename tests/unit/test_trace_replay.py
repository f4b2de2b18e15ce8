"""Replaying: misses are those of an LRU written down anew; warm-up, rewrites and near rows count."""

from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest

from kvstrata.bench.trace_sources import SyntheticSource, open_source
from kvstrata.core.eviction import POLICIES
from kvstrata.errors import ConfigurationError
from kvstrata.trace.events import Event, Rewritten, Selection
from kvstrata.trace.recording import TopkTrace, TopkTraceWriter
from kvstrata.trace.replay import OPTIMUM, MissCount, passes, replay

TOPK = 8
HOST_ROWS = 400


def record(path: Path, *, seed: int = 0, steps: int = 40) -> Path:
    """Write a run of two share groups and up to two requests, with rewrites, as an engine would."""
    rng = np.random.default_rng(seed)
    with TopkTraceWriter(path, topk=TOPK, block_tokens=16, host_rows=HOST_ROWS) as writer:
        for step in range(steps):
            new_rows = np.array([100 + step, 300 + step], np.int64)
            writer.rewritten(step=step, rows=new_rows)
            if step % 5 == 4:
                writer.rewritten(step=step, rows=rng.integers(0, 40, 3), layer=3)
            for layer in (0, 3):
                rows = rng.integers(0, 40, (2, TOPK))
                rows[:, 0] = new_rows
                rows[1, 1:3] = (rows[0, 1], -1)
                near = rng.integers(0, 40, 6)
                writer.append(layer=layer, step=step, rows=rows, fresh_rows=new_rows, near_rows=near)
    return writer.path


def lru_counts(events: list[Event], layer: int, capacity: int, warm_up: int) -> tuple[int, int]:
    """(selected, misses) of plain LRU over whole selections; victims of one step's touch leave by slot."""
    resident: OrderedDict[int, tuple[int, int]] = OrderedDict()  # row -> (step of last touch, slot)
    selected = misses = calls = 0
    for event in events:
        if event.layer not in (None, layer):
            continue
        rows = [row for row in event.rows.ravel().tolist() if row >= 0]
        if isinstance(event, Rewritten):
            for row in rows:
                resident.pop(row, None)
            continue
        calls += 1
        missing = [row for row in dict.fromkeys(rows) if row not in resident]
        loads = [row for row in missing if row not in event.fresh_rows.tolist()]
        free = sorted(set(range(capacity)) - {slot for _, slot in resident.values()})
        victims = sorted((touch, slot, row) for row, (touch, slot) in resident.items() if row not in rows)
        for _, _, row in victims[: max(0, len(missing) - len(free))]:
            free.append(resident.pop(row)[1])
        free.sort()
        for row in rows:
            slot = resident[row][1] if row in resident else free.pop(0)
            resident[row] = (calls, slot)
        if calls > warm_up:
            selected += len(rows)
            misses += len(loads)
    return selected, misses


@pytest.mark.parametrize("warm_up", [0, 7])
@pytest.mark.parametrize("size", [1, 1.5])
def test_misses_are_those_of_lru_in_every_share_group(tmp_path: Path, size: float, warm_up: int):
    trace = TopkTrace(record(tmp_path / "a.trace"))
    events = list(trace.events())
    result = replay(trace, policies=["lru"], sizes=[size], warm_up=warm_up)
    groups = [lru_counts(events, layer, int(size * TOPK * 2), warm_up) for layer in (0, 3)]
    expected = MissCount(selected=sum(s for s, _ in groups), misses=sum(m for _, m in groups))
    assert result.counts["lru", size] == expected
    assert 0 < expected.misses < expected.selected


def test_no_policy_misses_less_than_the_optimum(tmp_path: Path):
    trace = TopkTrace(record(tmp_path / "a.trace", steps=80))
    result = replay(trace, policies=sorted(POLICIES), sizes=[1, 2], warm_up=0)
    for size in (1, 2):
        best = result.counts[OPTIMUM, size]
        for policy in POLICIES:
            count = result.counts[policy, size]
            assert count.selected == best.selected
            assert count.misses >= best.misses
    assert result.counts[OPTIMUM, 1].misses > result.counts[OPTIMUM, 2].misses


def test_a_row_written_in_the_step_that_selects_it_is_no_miss(tmp_path: Path):
    with TopkTraceWriter(tmp_path / "b.trace", topk=2, block_tokens=16, host_rows=9) as writer:
        for fresh in ([5], []):
            writer.rewritten(step=0, rows=np.array([5], np.int64))
            writer.append(
                layer=0, step=0, rows=np.array([[5, -1]], np.int64), fresh_rows=np.array(fresh, np.int64)
            )
    counts = replay(TopkTrace(writer.path), policies=["lru"], sizes=[1], warm_up=0).counts
    assert counts["lru", 1] == counts[OPTIMUM, 1] == MissCount(selected=2, misses=1)


def test_near_rows_reach_the_policy(tmp_path: Path):
    """Rows 0 and 1 are equal but for 0 being almost selected: `frequency` keeps it, `lru` takes slot 0."""
    with TopkTraceWriter(tmp_path / "c.trace", topk=2, block_tokens=16, host_rows=9) as writer:

        def select(*rows: int, near: int = -1) -> None:
            writer.append(
                layer=0, step=0, rows=np.array([rows], np.int64), near_rows=np.array([near], np.int64)
            )

        select(0, 1)
        for _ in range(3):
            select(2, 3, near=0)
        select(4, 3, near=0)
        select(0, 3)
    counts = replay(TopkTrace(writer.path), policies=["lru", "frequency"], sizes=[2], warm_up=5).counts
    assert counts["lru", 2].misses == 1
    assert counts["frequency", 2].misses == 0


def test_keys_name_trace_policy_and_size(tmp_path: Path):
    result = replay(TopkTrace(record(tmp_path / "a.trace")), policies=["lru"], sizes=[1, 2.5], warm_up=0)
    assert list(result.rates()) == [
        f"misses.a-rank0-trace.{name}" for name in ("lru.1x", "lru.2.5x", "belady.1x", "belady.2.5x")
    ]
    assert result.as_json()["counts"]["lru.1x"]["selected"] == result.counts["lru", 1].selected


def test_progress_is_told_as_often_as_announced(tmp_path: Path):
    told = []
    replay(
        TopkTrace(record(tmp_path / "a.trace")),
        policies=["lru", "frequency"],
        sizes=[1, 2],
        warm_up=0,
        progress=lambda: told.append(None),
    )
    assert len(told) == passes(["lru", "frequency"], [1, 2]) == 6


def test_a_warm_up_that_leaves_nothing_names_both_numbers(tmp_path: Path):
    trace = TopkTrace(record(tmp_path / "a.trace"))
    with pytest.raises(ConfigurationError, match=r"warm_up=40: .* 80 selections of 2 share groups"):
        replay(trace, policies=["lru"], sizes=[1], warm_up=40)


def test_a_synthetic_source_repeats_itself_and_names_the_next_best_rows():
    def events() -> list[Event]:
        return list(SyntheticSource(name="calibrated", topk=128, tokens=2048, steps=3, seeds=(4, 5)).events())

    for one, two in zip(events(), events(), strict=True):
        assert isinstance(one, Selection)
        assert one.rows.tolist() == two.rows.tolist()
        assert len(one.near_rows) == 64
        assert not set(one.near_rows.tolist()) & set(one.rows.ravel().tolist())
    rows = {(event.layer, event.step): event.rows.tolist() for event in events()}
    assert rows.keys() == {(layer, step) for layer in (0, 1) for step in range(3)}
    assert rows[0, 0] != rows[1, 0]


def test_a_name_is_a_profile_or_a_file(tmp_path: Path):
    source, warm_up = open_source("harder")
    assert (source.name, warm_up) == ("harder", 64)
    recorded, warm_up = open_source(str(record(tmp_path / "a.trace")))
    assert (recorded.topk, recorded.host_rows, warm_up) == (TOPK, HOST_ROWS, 0)
    with pytest.raises(ConfigurationError, match=r"'nothing': no such file; .*calibrated, harder"):
        open_source("nothing")
