"""Hot rows case by case, on the reference and on the compiled table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from kvstrata.core.eviction import DEFAULT_POLICY, FREQUENCY, LRU, POLICIES
from kvstrata.core.residency import Residency, ResidencyOverflow
from kvstrata.kernels.residency import ResidencyTable

HOST_ROWS = 1000


class Slow:
    """The reference."""

    def __init__(self, capacity: int, policy: str) -> None:
        self.table = Residency(capacity, policy)

    def select(
        self, *tokens: Sequence[int], fresh: dict[int, int] | None = None, near: Sequence[int] = ()
    ) -> tuple[list[list[int]], list[tuple[int, int]], list[tuple[int, int]]]:
        new = fresh or {}
        found = self.table.resolve(tokens, lambda row: new.get(row, -1), near_rows=near)
        return [list(token) for token in found.slots], list(found.loads), list(found.placements)

    def rewritten(self, *rows: int) -> int:
        return self.table.invalidate(rows)

    def where(self, *rows: int) -> list[int]:
        return self.table.resident(rows)


class Fast:
    """The compiled one."""

    def __init__(self, capacity: int, policy: str) -> None:
        self.table = ResidencyTable(host_rows=HOST_ROWS, capacity=capacity, policy=policy)

    def select(
        self, *tokens: Sequence[int], fresh: dict[int, int] | None = None, near: Sequence[int] = ()
    ) -> tuple[list[list[int]], list[tuple[int, int]], list[tuple[int, int]]]:
        new = np.full(HOST_ROWS, -1, np.int32)
        for row, index in (fresh or {}).items():
            new[row] = index
        found = self.table.resolve(np.array(tokens), new, near_rows=np.array(near, np.int64))
        loads = zip(found.load_rows.tolist(), found.load_slots.tolist(), strict=True)
        placements = zip(found.placed_index.tolist(), found.placed_slots.tolist(), strict=True)
        return found.slots.tolist(), list(loads), list(placements)

    def rewritten(self, *rows: int) -> int:
        return self.table.invalidate(np.array(rows, np.int64))

    def where(self, *rows: int) -> list[int]:
        return list(self.table.resident(np.array(rows, np.int64)))


@pytest.fixture(params=[Slow, Fast], ids=["reference", "compiled"])
def kind(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture(params=sorted(POLICIES))
def policy(request: pytest.FixtureRequest) -> Any:
    return request.param


def test_case_1_the_first_selection_fills_free_slots_and_the_same_again_loads_nothing(
    kind: Any, policy: str
) -> None:
    table = kind(4, policy)
    assert table.select([5, 2, 9, -1]) == ([[0, 1, 2, -1]], [(5, 0), (2, 1), (9, 2)], [])
    assert table.select([5, 2, 9, -1]) == ([[0, 1, 2, -1]], [], [])


def test_case_2_order_does_not_matter_and_only_the_new_row_is_loaded(kind: Any, policy: str) -> None:
    table = kind(4, policy)
    table.select([5, 2, 9, -1])
    assert table.select([9, 5, -1, 2]) == ([[2, 0, -1, 1]], [], [])
    assert table.select([9, 5, 11, -1]) == ([[2, 0, 3, -1]], [(11, 3)], [])


def test_case_2_lru_takes_the_oldest_slot(kind: Any) -> None:
    table = kind(4, LRU)
    table.select([5, 2, 9, 11])
    table.select([9, 5, 11, -1])
    assert table.select([20, 5, -1, -1]) == ([[1, 0, -1, -1]], [(20, 1)], [])


def test_case_3_a_selection_of_nothing_leaves_the_state_alone(kind: Any, policy: str) -> None:
    table = kind(4, policy)
    table.select([5, 2, 9, -1])
    before = table.where(*range(HOST_ROWS))
    assert table.select([-1, -1, -1, -1]) == ([[-1, -1, -1, -1]], [], [])
    assert table.where(*range(HOST_ROWS)) == before
    assert table.select([5, 2, 9, -1]) == ([[0, 1, 2, -1]], [], [])


def test_case_4_another_request_gets_rows_of_its_own_whatever_stood_in_the_slots(
    kind: Any, policy: str
) -> None:
    table = kind(3, policy)
    table.select([5, 6, 7])
    # The same positions of another request are other host rows.
    assert table.select([105, 106, 107])[1] == [(105, 0), (106, 1), (107, 2)]
    assert table.where(5, 6, 7) == [-1, -1, -1]
    assert [row for row, _ in table.select([5, 6, 7])[1]] == [5, 6, 7]


def test_case_4_a_prefix_that_requests_share_is_resident_once(kind: Any, policy: str) -> None:
    table = kind(6, policy)
    slots, loads, _ = table.select([1, 2, 30], [1, 2, 40])
    assert slots == [[0, 1, 2], [0, 1, 3]]
    assert loads == [(1, 0), (2, 1), (30, 2), (40, 3)]


def test_case_5_rows_that_speculation_rewrote_are_fetched_again(kind: Any, policy: str) -> None:
    table = kind(4, policy)
    assert len(table.select([3, 10, 11, -1])[1]) == 3
    assert table.rewritten(10, 11, 12) == 2  # at or above the stable length of 10
    assert [row for row, _ in table.select([3, 10, 11, -1])[1]] == [10, 11]


def test_case_6_only_entries_that_name_a_row_get_a_slot(kind: Any, policy: str) -> None:
    # Positions out of range become -1 before they are rows; any negative entry is skipped.
    table = kind(4, policy)
    assert table.select([99, -1, -1, -5]) == ([[0, -1, -1, -1]], [(99, 0)], [])


def test_case_7_duplicates_load_once_and_name_one_slot(kind: Any, policy: str) -> None:
    table = kind(4, policy)
    assert table.select([4, 4, 6, -1]) == ([[0, 0, 1, -1]], [(4, 0), (6, 1)], [])
    assert (table.table.statistics().hits, table.table.statistics().misses) == (1, 2)


def test_case_8_a_selection_larger_than_the_buffer_is_an_error_never_minus_one(
    kind: Any, policy: str
) -> None:
    table = kind(2, policy)
    with pytest.raises(ResidencyOverflow, match="4 distinct rows and the hot buffer holds 2"):
        table.select([1, 2, 3, 4])
    assert table.where(1, 2, 3, 4) == [-1, -1, -1, -1]


def test_rows_of_this_step_are_placed_not_loaded(kind: Any, policy: str) -> None:
    table = kind(4, policy)
    found = table.select([7, 50, 51, 50], fresh={50: 0, 51: 1, 52: 2})
    assert found == ([[0, 1, 2, 1]], [(7, 0)], [(0, 1), (1, 2)])
    statistics = table.table.statistics()
    assert (statistics.selected, statistics.hits, statistics.misses, statistics.placements) == (4, 3, 1, 2)
    # In the next step they are rows like any other.
    assert table.select([7, 50, 51, 52]) == ([[0, 1, 2, 3]], [(52, 3)], [])


def test_a_freed_slot_is_given_before_any_row_has_to_go(kind: Any, policy: str) -> None:
    table = kind(4, policy)
    table.select([1, 2, 3, 4])
    assert table.rewritten(3, 2, 2, 77, -1) == 2
    assert table.select([8, 9, -1, -1])[1] == [(8, 1), (9, 2)]
    assert table.table.statistics().evictions == 0
    assert table.table.statistics().invalidated == 2


def test_slots_are_handed_out_by_ascending_number_whatever_they_held_was_worth(
    kind: Any, policy: str
) -> None:
    table = kind(4, policy)
    table.select([1, 2, 3, 4])
    table.select([1, 3])
    table.select([1])
    assert table.rewritten(4) == 1
    # Slot 3 is free, slot 1 holds the row that was selected least, slot 2 the next.
    assert table.select([9, 8, 7])[1] == [(9, 1), (8, 2), (7, 3)]


def test_R1_every_resident_row_has_one_slot_and_every_slot_one_row(kind: Any, policy: str) -> None:  # noqa: N802
    table = kind(5, policy)
    for first in range(0, 60, 3):
        table.select([first, first + 1, first + 2])
        slots = [slot for slot in table.where(*range(HOST_ROWS)) if slot != -1]
        assert len(slots) == len(set(slots)) == min(first + 3, 5)
        table.table.check_integrity()


def test_R2_a_hit_moves_no_bytes(kind: Any, policy: str) -> None:  # noqa: N802
    table = kind(5, policy)
    table.select([1, 2, 3, 4])
    before = table.where(1, 2, 3, 4)
    slots, loads, placements = table.select([4, 2, 8, 9])
    assert [row for row, _ in loads] == [8, 9]
    assert placements == []
    assert slots[0][:2] == [before[3], before[1]]


def test_R3_a_victim_is_never_in_the_current_selection(kind: Any, policy: str) -> None:  # noqa: N802
    table = kind(3, policy)
    table.select([1, -1, -1])
    table.select([2, -1, -1])
    for _ in range(20):
        table.select([3, 2, -1])
    # Row 1 is the least valuable by any rule, and selected: 2 or 3 has to go.
    table.select([9, 1, -1])
    assert table.where(1, 9).count(-1) == 0
    assert table.where(2, 3).count(-1) == 1


def test_R4_a_rewritten_row_is_not_resident_any_more(kind: Any, policy: str) -> None:  # noqa: N802
    table = kind(4, policy)
    table.select([1, 2, 3, -1])
    table.rewritten(2)
    assert table.where(1, 2, 3) == [0, -1, 2]
    assert table.select([1, 2, 3, -1])[1] == [(2, 1)]


def test_R5_a_row_named_twice_in_one_call_moves_once_also_when_it_is_new(kind: Any, policy: str) -> None:  # noqa: N802
    table = kind(4, policy)
    found = table.select([6, 6, -1], [6, 30, 30], fresh={30: 3})
    assert found == ([[0, 0, -1], [0, 1, 1]], [(6, 0)], [(3, 1)])


def test_frequency_keeps_a_row_selected_often_over_one_selected_lately(kind: Any) -> None:
    table = kind(2, FREQUENCY)
    for _ in range(5):
        table.select([1])
    table.select([2])
    table.select([3])
    assert table.where(1, 2) == [0, -1]
    lru = kind(2, LRU)
    for row in (1, 1, 1, 1, 1, 2, 3):
        lru.select([row])
    assert lru.where(1, 2) == [-1, 1]


def test_frequency_forgets_rows_that_were_once_selected_often(kind: Any) -> None:
    table = kind(3, FREQUENCY)
    for _ in range(100):
        table.select([1])
    for _ in range(60):
        table.select([2])
    table.select([3])
    table.select([4])
    assert table.where(1) == [-1]


def test_near_rows_stay_longer_but_are_never_loaded(kind: Any) -> None:
    for near, stays in (([1, 500], True), ([2, 500], False)):
        table = kind(3, FREQUENCY)
        table.select([1])
        table.select([2])
        assert table.select([3], near=near) == ([[2]], [(3, 2)], [])
        for _ in range(3):
            assert table.select([3], near=near) == ([[2]], [], [])
        table.select([4])
        assert table.where(1) == ([0] if stays else [-1])
        assert table.where(500) == [-1]


def test_lru_does_not_look_at_near_rows(kind: Any) -> None:
    table = kind(2, LRU)
    table.select([1])
    table.select([2], near=[1])
    table.select([3], near=[1])
    assert table.where(1, 2) == [-1, 1]


def test_an_unknown_policy_and_an_empty_buffer_are_refused(kind: Any) -> None:
    with pytest.raises(ValueError, match=r"'random' is unknown; choose one of frequency, lru"):
        kind(4, "random")
    with pytest.raises(ValueError, match="0"):
        kind(0, DEFAULT_POLICY)
