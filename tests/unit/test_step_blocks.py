"""Which blocks a forward reads and writes, against a loop over requests and positions."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.move.step import StepBlocks, step_blocks


def by_loop(
    new: list[int], ends: list[int], table: list[list[int]], block_tokens: int
) -> tuple[set[int], set[int]]:
    load, save = set(), set()
    for count, end, blocks in zip(new, ends, table, strict=True):
        if count == 0:
            continue
        for position in range(end):
            (load if position < end - count else save).add(blocks[position // block_tokens])
    return load, save


def ask(new: list[int], ends: list[int], table: list[list[int]], block_tokens: int) -> StepBlocks:
    starts = np.cumsum([0, *new]).astype(np.int32)
    width = max((len(row) for row in table), default=0)
    padded = np.full((len(table), width), -1, dtype=np.int32)
    for at, row in enumerate(table):
        padded[at, : len(row)] = row
    return step_blocks(starts, np.array(ends, dtype=np.int32), padded, block_tokens)


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[int], list[int], list[list[int]], int]:
    block_tokens = draw(st.integers(1, 7))
    new, ends, table = [], [], []
    for _ in range(draw(st.integers(0, 5))):
        count, prefix = draw(st.integers(0, 15)), draw(st.integers(0, 20))
        new.append(count)
        ends.append(prefix + count)
        needed = -(-(prefix + count) // block_tokens)
        # Requests may share blocks, and may have blocks that this forward does not touch.
        table.append(draw(st.lists(st.integers(0, 9), min_size=needed, max_size=needed + 3)))
    return new, ends, table, block_tokens


@given(batches())
def test_equals_a_loop_over_requests_and_positions(batch: tuple[list[int], list[int], list[list[int]], int]):
    blocks = ask(*batch)
    load, save = by_loop(*batch)
    for got, wanted in ((blocks.load, load), (blocks.save, save)):
        assert got.dtype == np.int64
        assert got.tolist() == sorted(wanted), "unique and ascending"


def test_a_block_half_filled_by_the_prefix_is_loaded_and_saved():
    blocks = ask([2], [7], [[3, 8]], 4)
    assert (blocks.load.tolist(), blocks.save.tolist()) == ([3, 8], [8])


def test_a_prefix_that_ends_with_a_block_leaves_the_new_block_alone():
    blocks = ask([1], [5], [[3, 8]], 4)
    assert (blocks.load.tolist(), blocks.save.tolist()) == ([3], [8])


def test_fault_6_padding_requests_and_padding_of_the_table_take_no_part():
    blocks = ask([3, 0], [3, 0], [[5], [-1]], 4)
    assert (blocks.load.tolist(), blocks.save.tolist()) == ([], [5])
    stale = ask([3, 0], [3, 9], [[5, -1, -1], [7, 8, 9]], 4)  # a padding row keeps a former request's length
    assert (stale.load.tolist(), stale.save.tolist()) == ([], [5])


def test_lengths_beyond_the_batch_are_padding():
    starts = np.array([0, 1], dtype=np.int32)
    blocks = step_blocks(starts, np.array([5, 77], dtype=np.int32), np.array([[3, 8], [1, 1]], np.int32), 4)
    assert (blocks.load.tolist(), blocks.save.tolist()) == ([3], [8])


@pytest.mark.parametrize("end", [9, 12, 100])
def test_fault_7_a_table_too_narrow_names_both_counts(end: int):
    with pytest.raises(ValueError, match=rf"needs {-(-end // 4)} blocks, its block table has 2"):
        ask([1], [end], [[3, 8]], 4)


def test_fault_7_lengths_do_not_wrap_at_32_bits():
    # 2^31 - 1 tokens: adding a block's tokens to it in 32 bits would be negative.
    with pytest.raises(ValueError, match=f"needs {2**31 // 64} blocks"):
        ask([1], [2**31 - 1], [[3, 8]], 64)


def test_a_forward_without_requests_moves_nothing():
    blocks = ask([], [], [], 4)
    assert blocks.load.size == 0
    assert blocks.save.size == 0
