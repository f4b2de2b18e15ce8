"""Belady's optimum against a search of everything that any policy could do."""

from functools import cache
from itertools import combinations

import numpy as np
import pytest

from kvstrata.trace.events import Event, Rewritten, Selection
from kvstrata.trace.optimum import optimal_misses


def select(*rows: int, fresh: tuple[int, ...] = ()) -> Selection:
    return Selection(
        layer=0,
        step=0,
        rows=np.array([rows], np.int64),
        fresh_rows=np.array(fresh, np.int64),
        near_rows=np.empty(0, np.int64),
    )


def rewrite(*rows: int) -> Rewritten:
    return Rewritten(step=0, rows=np.array(rows, np.int64))


def fewest_misses(events: list[Event], capacity: int) -> int:
    """Try every set of victims at every selection."""

    @cache
    def search(index: int, resident: frozenset[int]) -> int:
        if index == len(events):
            return 0
        event = events[index]
        rows = frozenset(event.rows.ravel().tolist()) - {-1}
        if isinstance(event, Rewritten):
            return search(index + 1, resident - rows)
        missed = len(rows - resident - set(event.fresh_rows.tolist()))
        others = sorted(resident - rows)
        kept = min(len(others), capacity - len(rows))
        futures = [search(index + 1, rows | frozenset(stay)) for stay in combinations(others, kept)]
        return missed + min(futures)

    return search(0, frozenset())


@pytest.mark.parametrize("seed", range(60))
def test_no_choice_of_victims_misses_less(seed: int):
    rng = np.random.default_rng(seed)
    events: list[Event] = []
    for _ in range(9):
        if rng.random() < 0.3:
            written = rng.choice(7, 2, replace=False).tolist()
            events.append(rewrite(*written))
            events.append(select(*rng.choice(7, 3).tolist(), -1, fresh=(written[0],)))
        else:
            events.append(select(*rng.choice(7, 3).tolist()))
    assert sum(optimal_misses(events, 4)) == fewest_misses(events, 4)


def test_the_row_needed_last_goes():
    events = [select(1, 2), select(3, -1), select(1, -1), select(2, -1), select(3, -1)]
    assert list(optimal_misses(events, 2)) == [2, 1, 0, 1, 0]


def test_a_row_that_is_written_before_its_next_use_goes_first():
    events = [select(1, 2), select(3), rewrite(1), select(1, fresh=(1,)), select(2)]
    assert list(optimal_misses(events, 2)) == [2, 1, 0, 0]


def test_repeated_entries_and_padding_cost_nothing():
    assert list(optimal_misses([select(4, 4, -1, 6, -5)], 2)) == [2]


def test_a_selection_beyond_the_capacity_is_refused():
    with pytest.raises(ValueError, match="3 different rows selected at once, room for 2"):
        list(optimal_misses([select(1, 2, 3)], 2))


def test_an_empty_trace_has_no_misses():
    assert list(optimal_misses([], 2)) == []
    assert list(optimal_misses([rewrite(3), select(-1, -1)], 2)) == [0]
