"""Selected positions as host rows, as rows of the forward's own, and as rows of a window."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.kernels.selection import host_rows, select_fresh, select_piece


def int32(*rows: list[int]) -> np.ndarray:
    return np.array(rows, dtype=np.int32)


def int64(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def test_positions_become_rows_of_their_own_requests_blocks():
    selected = int32([0, 3, 4, -1], [-1, 5, -5, 1])
    table = int32([7, 2], [9, 4])
    rows = host_rows(selected, int64(1, 0), table, 4)
    assert rows.tolist() == [[36, 39, 16, -1], [-1, 9, -1, 29]]
    assert rows.dtype == np.int64


def test_rows_beyond_2_to_the_31_do_not_wrap():
    top = (1 << 31) - 1
    rows = host_rows(int32([0, 130]), int64(0), int32([top, top - 1]), 128)
    assert rows.tolist() == [[top * 128, (top - 1) * 128 + 2]]


def test_late_positions_are_not_wrapped_either():
    position = (1 << 31) - 1
    wide = np.zeros((1, 1 << 15), dtype=np.int32)
    wide[0, -1] = 3
    assert host_rows(int32([position]), int64(0), wide, 1 << 16).tolist() == [[3 * (1 << 16) + (1 << 16) - 1]]


@pytest.mark.parametrize("shape", [(0, 4), (3, 0)])
def test_nothing_selected_gives_nothing(shape: tuple[int, int]):
    selected = np.empty(shape, dtype=np.int32)
    rows = host_rows(selected, np.zeros(shape[0], np.int64), int32([1]), 4)
    assert rows.shape == shape
    assert select_fresh(rows, np.zeros(3, np.int32)).shape == shape


def test_fresh_rows_are_given_by_their_index_and_no_other_is():
    fresh = np.full(10, -1, dtype=np.int32)
    fresh[[3, 9]] = [0, 7]
    rows = np.array([[9, 2, -1], [3, 3, -6]], dtype=np.int64)
    assert select_fresh(rows, fresh).tolist() == [[7, -1, -1], [0, 0, -1]]


def test_a_negative_row_is_never_counted_from_the_tables_end():
    fresh = np.full(4, 5, dtype=np.int32)
    assert select_fresh(np.array([[-1, -4]], dtype=np.int64), fresh).tolist() == [[-1, -1]]


def test_a_piece_takes_its_positions_and_leaves_fresh_rows_out():
    fresh = np.full(100, -1, dtype=np.int32)
    fresh[41] = 2
    selected = int32([3, 4, 5, 7, 8], [4, -1, 0, 5, 6])
    rows = np.array([[33, 40, 41, 43, 80], [60, -1, 20, 61, 62]], dtype=np.int64)
    found = select_piece(selected, rows, fresh, int64(4, 0), int64(8, 6), int64(0, 12))
    assert found.tolist() == [[-1, 0, -1, 3, -1], [16, -1, 12, 17, -1]]
    assert found.dtype == np.int32


def test_an_empty_piece_takes_nothing():
    fresh = np.full(8, -1, dtype=np.int32)
    assert select_piece(int32([0, 1]), np.array([[0, 1]]), fresh, int64(0), int64(0), int64(0)).tolist() == [
        [-1, -1]
    ]


@given(
    context=st.integers(0, 20),
    cuts=st.lists(st.integers(1, 19), max_size=4),
    own=st.sets(st.integers(0, 24)),
    chosen=st.lists(st.integers(-2, 24), min_size=1, max_size=12),
)
def test_each_selected_position_is_in_one_part_only(
    context: int, cuts: list[int], own: set[int], chosen: list[int]
):
    """Parts of a prompt token: the forward's own rows, and the pieces its context is cut into."""
    end = 25
    own |= set(range(context, end))  # what lies behind the context is new
    table = np.arange(100, 100 + end, dtype=np.int32)[None]  # blocks of one token
    fresh = np.full(200, -1, dtype=np.int32)
    for at, position in enumerate(sorted(own)):
        fresh[100 + position] = at
    selected = int32(chosen)
    rows = host_rows(selected, int64(0), table, 1)
    edges = [0, *sorted({cut for cut in cuts if cut < context}), context]
    parts = [select_fresh(rows, fresh)] + [
        select_piece(selected, rows, fresh, int64(low), int64(high), int64(50))
        for low, high in itertools.pairwise(edges)
    ]
    for k, position in enumerate(chosen):
        found = [(at, int(part[0, k])) for at, part in enumerate(parts) if part[0, k] >= 0]
        if position < 0:
            assert found == []
        elif position in own:
            assert found == [(0, sorted(own).index(position))]
        else:
            ((at, place),) = found
            assert edges[at - 1] + place - 50 == position
