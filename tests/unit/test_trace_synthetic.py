"""The synthetic traces: shape, determinism, and the published misses that they are made to repeat."""

from collections import OrderedDict
from itertools import pairwise

import numpy as np
import pytest

from kvstrata.bench.topk_traces import RECENT_TOKENS, SINK_TOKENS, synthetic_trace
from kvstrata.errors import ConfigurationError

TOPK = 2048


def lru_misses(selections: list[list[int]], capacity: int, *, warm_up_steps: int) -> float:
    """Share of selected rows that plain LRU would load, counted after the warm-up."""
    rows: OrderedDict[int, None] = OrderedDict()
    misses = selected = 0
    for step, selection in enumerate(selections):
        missed = [row for row in selection if row not in rows]
        for row in selection:
            rows[row] = None
            rows.move_to_end(row)
        while len(rows) > capacity:
            rows.popitem(last=False)
        if step >= warm_up_steps:
            misses += len(missed)
            selected += len(selection)
    return misses / selected


def selections(profile: str, steps: int) -> list[list[int]]:
    return [positions.tolist() for positions, _ in synthetic_trace(profile, steps=steps, seed=7)]


@pytest.fixture(scope="module")
def calibrated() -> list[list[int]]:
    return selections("calibrated", 120)


@pytest.mark.parametrize(("times", "published"), [(1, 0.30), (2, 0.134), (4, 0.067)])
def test_lru_misses_on_the_calibrated_trace_are_about_the_published_ones(
    calibrated: list[list[int]], times: int, published: float
):
    assert lru_misses(calibrated, times * TOPK, warm_up_steps=30) == pytest.approx(
        published, rel=0.12, abs=0.006
    )


def test_the_harder_trace_keeps_about_41_percent_from_step_to_step():
    kept = [len(set(a) & set(b)) / TOPK for a, b in pairwise(selections("harder", 20))]
    assert sum(kept) / len(kept) == pytest.approx(0.41, abs=0.015)


@pytest.mark.parametrize("profile", ["calibrated", "harder"])
def test_positions_are_the_best_scores_in_ascending_order(profile: str):
    for positions, scores in synthetic_trace(profile, tokens=4096, topk=256, steps=5, seed=3):
        assert (positions.dtype, scores.dtype) == (np.int32, np.float32)
        assert (positions.shape, scores.shape) == ((256,), (4096,))
        assert (np.diff(positions) > 0).all()
        others = np.delete(scores, positions)
        assert scores[positions].min() > others.max()


def test_the_first_and_the_last_tokens_are_in_every_selection():
    always = {*range(SINK_TOKENS), *range(4096 - RECENT_TOKENS, 4096)}
    for positions, _ in synthetic_trace("harder", tokens=4096, topk=256, steps=5, seed=3):
        assert always <= set(positions.tolist())


def test_a_seed_gives_the_same_trace_again_and_another_seed_another():
    def first(seed: int) -> list[int]:
        return next(synthetic_trace("calibrated", tokens=4096, topk=256, steps=1, seed=seed))[0].tolist()

    assert first(1) == first(1)
    assert first(1) != first(2)


def test_an_unknown_profile_names_the_known_ones():
    with pytest.raises(ConfigurationError, match=r"profile='easy': use one of calibrated, harder"):
        synthetic_trace("easy", steps=1, seed=0)


@pytest.mark.parametrize("topk", [68, 2049])
def test_a_topk_that_leaves_no_choice_is_refused(topk: int):
    with pytest.raises(ConfigurationError, match=f"topk={topk}"):
        synthetic_trace("calibrated", tokens=4096, topk=topk, steps=1, seed=0)
