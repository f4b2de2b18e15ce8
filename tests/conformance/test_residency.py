"""What every residency table must answer: `core.residency`, slot for slot, whatever it is asked.

A new member is one line in MEMBERS: a class with the methods of `Member`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import pytest

from kvstrata.core.eviction import POLICIES
from kvstrata.core.residency import Residency, ResidencyOverflow, ResidencyStatistics
from kvstrata.kernels.residency import ResidencyTable, table_bytes

Array = np.ndarray[Any, Any]


class Answer(NamedTuple):
    slots: list[list[int]]
    loads: list[tuple[int, int]]
    placements: list[tuple[int, int]]
    selected: int
    hits: int
    evictions: int


class Member(Protocol):
    """One table. IndexError and ResidencyOverflow as `ResidencyTable` raises them."""

    def __init__(self, *, host_rows: int, capacity: int, max_entries: int, policy: str) -> None: ...

    def resolve(self, rows: Array, fresh: Array | None = None, near: Array | None = None) -> Answer:
        """rows [T, K] int64, fresh [host_rows] int32, near [m] int64."""

    def invalidate(self, rows: Array) -> None: ...

    def resident(self, rows: Array) -> list[int]: ...

    def statistics(self) -> ResidencyStatistics: ...

    def check_integrity(self) -> None: ...


class Compiled:
    """The CPU's own."""

    def __init__(self, *, host_rows: int, capacity: int, max_entries: int, policy: str) -> None:
        self.table = ResidencyTable(host_rows=host_rows, capacity=capacity, policy=policy)

    def resolve(self, rows: Array, fresh: Array | None = None, near: Array | None = None) -> Answer:
        found = self.table.resolve(rows, fresh, near_rows=near)
        assert found.slots.dtype == np.int32
        assert found.misses == found.load_rows.size
        return Answer(
            found.slots.tolist(),
            pairs(found.load_rows, found.load_slots),
            pairs(found.placed_index, found.placed_slots),
            found.selected,
            found.hits,
            found.evictions,
        )

    def invalidate(self, rows: Array) -> None:
        self.table.invalidate(rows)

    def resident(self, rows: Array) -> list[int]:
        return list(self.table.resident(rows))

    def statistics(self) -> ResidencyStatistics:
        return self.table.statistics()

    def check_integrity(self) -> None:
        self.table.check_integrity()


MEMBERS: list[type[Member]] = [
    Compiled,
]
if os.environ.get("TRITON_INTERPRET"):  # see test_triton_kernels.py
    from triton_member import Interpreted

    MEMBERS = [Interpreted]


def pairs(first: Array, second: Array) -> list[tuple[int, int]]:
    assert first.dtype == second.dtype == np.int64
    return list(zip(first.tolist(), second.tolist(), strict=True))


class Both:
    """A member and the reference side by side: one is asked what the other is, and must answer alike."""

    def __init__(
        self, member: type[Member], policy: str, *, capacity: int, host_rows: int, max_entries: int = 64
    ) -> None:
        self.host_rows = host_rows
        self.capacity = capacity
        self.reference = Residency(capacity, policy)
        self.member = member(
            host_rows=host_rows, capacity=capacity, max_entries=max(max_entries, capacity), policy=policy
        )

    def resolve(
        self, rows: Sequence[Sequence[int]] | Array, fresh: Array | None = None, near: Sequence[int] = ()
    ) -> Answer:
        asked = np.ascontiguousarray(rows, dtype=np.int64)
        near_rows = np.array(near, np.int64) if len(near) else None
        expected = self.reference.resolve(
            asked.tolist(),
            (lambda row: -1) if fresh is None else (lambda row: int(fresh[row])),
            near_rows=near,
        )
        got = self.member.resolve(asked, fresh, near_rows)
        assert got.slots == [list(token) for token in expected.slots]
        assert got.loads == list(expected.loads)
        assert got.placements == list(expected.placements)
        assert (got.selected, got.hits, got.evictions) == (
            expected.selected, expected.hits, expected.evictions,
        )  # fmt: skip
        return got

    def invalidate(self, rows: Sequence[int]) -> None:
        self.reference.invalidate(rows)
        self.member.invalidate(np.array(rows, np.int64))

    def check(self) -> None:
        everything = np.arange(self.host_rows)
        assert self.member.resident(everything) == self.reference.resident(everything.tolist())
        assert self.member.statistics() == self.reference.statistics()
        self.member.check_integrity()
        self.reference.check_integrity()


@pytest.fixture(params=MEMBERS, ids=lambda member: member.__name__.lower())
def member(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture(params=sorted(POLICIES))
def policy(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.mark.parametrize("capacity", [1, 2, 7, 64, 300])
def test_random_selections_with_rewrites_new_rows_and_near_misses(
    member: type[Member], policy: str, capacity: int
) -> None:
    random = np.random.default_rng(capacity)
    for host_rows in (capacity, 2 * capacity + 1, 6 * capacity):
        both = Both(member, policy, capacity=capacity, host_rows=host_rows, max_entries=4 * capacity)
        for _ in range(12):
            rewritten = random.integers(-1, host_rows, random.integers(0, 1 + capacity // 3))
            both.invalidate(rewritten.tolist())
            fresh = np.full(host_rows, -1, np.int32)
            fresh[rewritten[rewritten >= 0]] = np.arange(np.count_nonzero(rewritten >= 0))
            tokens = int(random.integers(1, 1 + min(4, capacity)))
            columns = int(random.integers(1, 1 + capacity // tokens))
            rows = random.integers(-1, host_rows, (tokens, columns))
            rows //= int(random.integers(1, 4))  # close together: many repeat, many were there before
            near = random.integers(-1, host_rows, random.integers(0, 1 + capacity // 2))
            both.resolve(rows, fresh, near.tolist())
        both.check()


def test_one_row_named_by_every_entry_is_loaded_once(member: type[Member], policy: str) -> None:
    both = Both(member, policy, capacity=8, host_rows=100, max_entries=24 * 16)
    got = both.resolve(np.full((24, 16), 99))
    assert got.loads == [(99, 0)]
    assert got.hits == 24 * 16 - 1
    assert both.resolve(np.full((24, 16), 99)).loads == []
    both.check()


def test_capacity_is_filled_to_the_last_slot_and_turned_over(member: type[Member], policy: str) -> None:
    both = Both(member, policy, capacity=48, host_rows=200)
    both.resolve(np.arange(48).reshape(24, 2))
    got = both.resolve(np.arange(100, 148).reshape(2, 24))
    assert got.evictions == 48
    assert sorted(slot for token in got.slots for slot in token) == list(range(48))
    both.check()


def test_one_row_more_than_capacity_is_refused_and_changes_nothing(member: type[Member], policy: str) -> None:
    both = Both(member, policy, capacity=4, host_rows=20)
    both.resolve([[3, 5, 7]])
    before = both.member.statistics()
    too_many = np.array([[5, 7, 9, -1], [5, 11, 13, 9]])
    with pytest.raises(ResidencyOverflow) as refused:
        both.member.resolve(too_many)
    assert (refused.value.distinct_rows, refused.value.capacity_rows) == (5, 4)
    assert both.member.statistics() == before
    both.check()
    with pytest.raises(ResidencyOverflow, match="5 distinct rows"):
        both.reference.resolve(too_many.tolist())
    both.resolve([[5, 9, 11]])  # an untouched table goes on as the reference does
    both.check()


def test_far_more_rows_than_capacity_are_counted_to_the_last_and_change_nothing(
    member: type[Member], policy: str
) -> None:
    both = Both(member, policy, capacity=4, host_rows=400, max_entries=300)
    both.resolve([[3, 5, 7]])
    too_many = np.arange(3, 303).reshape(3, 100)
    too_many[-1, -1] = 3
    with pytest.raises(ResidencyOverflow, match="299 distinct rows"):
        both.member.resolve(too_many)
    both.check()
    both.resolve([[5, 9, 11] * 40, [-1, 5, 9] * 40])
    both.check()


BEYOND: dict[str, Callable[[Member], object]] = {
    "selection": lambda table: table.resolve(np.array([[3, 2**40, 5]])),
    "near": lambda table: table.resolve(np.array([[3, 5]]), None, np.array([7, 20])),
    "invalidate": lambda table: table.invalidate(np.array([3, 20])),
}


@pytest.mark.parametrize("call", BEYOND.values(), ids=BEYOND)
def test_a_row_beyond_the_host_pool_is_an_error_and_changes_nothing(
    member: type[Member], policy: str, call: Callable[[Member], object]
) -> None:
    both = Both(member, policy, capacity=4, host_rows=20)
    both.resolve([[3, 19, 7]])
    with pytest.raises(IndexError, match="host pool"):
        call(both.member)
    both.check()


def test_descending_rows_take_slots_in_the_order_they_are_named(member: type[Member], policy: str) -> None:
    both = Both(member, policy, capacity=16, host_rows=64)
    assert both.resolve([list(range(63, 47, -1))]).loads == [(63 - i, i) for i in range(16)]
    both.resolve([list(range(55, 39, -1))])
    both.check()


def test_a_call_that_names_nothing_moves_nothing(member: type[Member], policy: str) -> None:
    both = Both(member, policy, capacity=4, host_rows=9)
    both.resolve([[1, 2, 3]])
    got = both.resolve([[-1, -1], [-7, -(2**62)]], near=[-1, -7, -(2**62)])
    assert (got.slots, got.loads, got.selected) == ([[-1, -1], [-1, -1]], [], 0)
    both.resolve(np.empty((0, 4)))
    both.check()


def test_rows_at_the_end_of_a_huge_pool(member: type[Member], policy: str) -> None:
    host_rows = 2_000_003
    both = Both(member, policy, capacity=6, host_rows=host_rows)
    both.resolve([[host_rows - 1, 0, host_rows - 2]])
    both.invalidate([host_rows - 1, -1])
    fresh = np.full(host_rows, -1, np.int32)
    fresh[-1] = 5
    got = both.resolve([[0, host_rows - 1, host_rows - 3]], fresh)
    assert got.placements == [(5, 0)]
    both.resolve([[host_rows - 4, host_rows - 5, host_rows - 6, 1, 2, 3]])
    both.check()


def test_order_holds_between_rows_that_were_last_selected_long_ago(member: type[Member], policy: str) -> None:
    # Ages of more than one byte, and counts that have faded to nothing.
    both = Both(member, policy, capacity=40, host_rows=500)
    for row in range(39):
        both.resolve([[row]])
        for _ in range(17):
            both.resolve([[100]])
    got = both.resolve([list(range(200, 239))])
    assert got.evictions == 39
    assert both.reference.resident([100]) != [-1]
    both.resolve([list(range(39))])
    both.check()


def test_ties_go_to_the_lowest_slots(member: type[Member], policy: str) -> None:
    both = Both(member, policy, capacity=700, host_rows=4000, max_entries=700)
    both.resolve([list(range(700))])
    both.resolve([list(range(0, 700, 3))])
    both.resolve([list(range(1, 700, 3))])
    got = both.resolve([list(range(1000, 1301))])
    assert len(got.loads) == 301
    both.check()


def test_the_bytes_of_a_table_are_told_before_it_is_made(policy: str) -> None:
    table = ResidencyTable(host_rows=1000, capacity=64, policy=policy)
    arrays = {
        id(owner(value)): owner(value) for value in vars(table).values() if isinstance(value, np.ndarray)
    }
    assert sum(array.nbytes for array in arrays.values()) == table_bytes(host_rows=1000, capacity=64)


def owner(array: Array) -> Array:
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array
