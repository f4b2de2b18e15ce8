"""Hot rows of share groups: what is copied when, by whom, and what a failure leaves resident."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from kvstrata.errors import DeadlineExceeded, TransferFailed
from kvstrata.move.forward_rows import ForwardRows, WindowLimits
from kvstrata.move.hot_path import ROW_LANE, HotPath, Selection
from kvstrata.move.sparse_testing import WIDTH, Home, Rank, Span, split

TOKENS, BLOCKS = 4, 8
ROW_BYTES = WIDTH * 4


def no_fault(kind: str, layer: int) -> None:
    """Let every copy succeed."""


class Bench:
    """Layers 0, 1 and 2 share a selection, 3 has its own; one request in blocks 0, 1, ..."""

    def __init__(self, *, topk: int, capacity: int, decode_tokens: int, **more: Any) -> None:
        self.home = Home(layers=4, leaders=(0, 3), blocks=BLOCKS, block_tokens=TOKENS, **more)
        self.limits = WindowLimits(
            block_tokens=TOKENS,
            window_blocks=2,
            capacity=capacity,
            topk=topk,
            decode_tokens=decode_tokens,
        )
        self.rank = Rank(self.home, self.limits)
        self.lane = self.rank.engine.lane(ROW_LANE)
        self.new_rows: dict[int, torch.Tensor] = {}
        self.rank.pipeline.begin_step()
        span = Span(blocks=range(BLOCKS), begin=0, end=BLOCKS * TOKENS - 8)
        self.forward(span)
        for layer in self.home.order:
            self.attend(layer, [[]] * self.batch.tokens)
        self.rank.pipeline.end_step()

    @property
    def hot(self) -> HotPath:
        return self.rank.hot

    def forward(self, *spans: Span) -> ForwardRows:
        self.batch = split(spans, self.limits)
        return self.batch

    def one(self, position: int, count: int = 1) -> ForwardRows:
        """The request computes `count` tokens from `position` on."""
        return self.forward(Span(blocks=range(BLOCKS), begin=position, end=position + count))

    def selection(self, chosen: list[list[int]]) -> Selection:
        padded = [row + [-1] * (self.limits.topk - len(row)) for row in chosen]
        return Selection(positions=np.array(padded, dtype=np.int32))

    def attend(self, layer: int, chosen: list[list[int]]) -> None:
        """Write and attend; the rank checks what is read."""
        self.write(layer)
        self.rank.attend(layer, self.batch, self.new_rows[layer], self.selection(chosen))

    def write(self, layer: int) -> None:
        self.new_rows[layer] = self.home.new_rows(layer, self.batch)
        self.rank.write(layer, self.batch, self.new_rows[layer])

    def step(self, position: int, chosen: list[list[int]], layers: Any = None) -> None:
        self.rank.pipeline.begin_step()
        self.one(position, len(chosen))
        for layer in self.home.order if layers is None else layers:
            self.attend(layer, chosen)
        self.rank.pipeline.end_step()
        self.rank.check()
        self.rank.poison()

    def fail_rows_of(self, layer: int) -> None:
        def before_copy(kind: str, at: int) -> None:
            if (kind, at) == ("rows", layer):
                raise OSError("the bus is on fire")

        self.rank.before_copy = before_copy

    def resident(self, *positions: int) -> list[bool]:
        table = self.rank.table_of(0)
        return (table.resident(np.array(positions, dtype=np.int64)) >= 0).tolist()


@pytest.fixture
def bench() -> Iterator[Callable[..., Bench]]:
    made: list[Bench] = []

    def make(*, topk: int = 3, capacity: int = 9, decode_tokens: int = 3, **more: Any) -> Bench:
        made.append(Bench(topk=topk, capacity=capacity, decode_tokens=decode_tokens, **more))
        return made[-1]

    yield make
    for it in made:
        it.rank.engine.check_integrity()
        it.rank.engine.close(1.0)
        it.home.pool.close()


def lane_counts(it: Bench) -> Any:
    return it.lane.ledger.statistics()


def test_prompts_leave_the_hot_rows_alone(bench):
    it = bench()
    assert it.hot.statistics().selected_rows == 0
    assert it.rank.copied == {0: 0, 1: 0, 2: 0, 3: 0}


def test_misses_are_copied_once_for_every_layer_of_a_group_and_hits_move_nothing(bench):
    it = bench()
    it.step(20, [[1, 5, 9]])
    assert it.rank.copied == {0: 3, 1: 3, 2: 3, 3: 3}
    it.step(21, [[1, 5, 9]])
    it.step(22, [[5, 9, 13]])
    assert it.rank.copied == {0: 4, 1: 4, 2: 4, 3: 4}
    counts = it.hot.statistics()
    assert (counts.selected_rows, counts.hit_rows, counts.missed_rows) == (2 * 9, 2 * 5, 2 * 4)
    assert counts.miss_bytes == 4 * 4 * ROW_BYTES, "every layer's"
    it.hot.check_integrity()


def test_the_forwards_own_rows_are_placed_without_a_copy(bench):
    it = bench()
    it.step(20, [[19, 20], [20, 21], [19, 21, 22]])
    assert it.rank.copied == {0: 1, 1: 1, 2: 1, 3: 1}, "row 19 alone comes from the host"
    counts = it.hot.statistics()
    assert (counts.placed_rows, counts.missed_rows) == (2 * 3, 2 * 1)
    it.step(23, [[20, 21, 22]])
    assert it.rank.copied[0] == 1, "they have stayed"


def test_R4_rows_written_again_are_not_served_as_they_were(bench):  # noqa: N802
    it = bench()
    it.step(20, [[20], [21], [22]])
    it.step(21, [[20, 21]])  # 21 and 22 were rejected; 21 is computed again, 22 is not yet
    assert it.hot.statistics().invalidated_rows == 2 * 1, "by two groups"
    it.step(22, [[22, 21]])
    it.step(23, [[20, 21, 22]])


def test_R4_rows_that_a_prompt_writes_are_no_longer_resident(bench):  # noqa: N802
    it = bench(decode_tokens=1)
    it.step(20, [[1, 2, 3]])
    it.step(2, [[2], [3]])  # as a prompt
    assert it.resident(1, 2, 3) == [True, False, False]


@pytest.mark.parametrize("capacity", [3, 4, 6])
def test_tokens_beyond_the_capacity_decode_in_groups_followers_alike(bench, capacity):
    it = bench(capacity=capacity)
    chosen = [[0, 1, 2], [3, 4, 20], [0, 5, 22]]
    it.step(20, chosen)
    groups = 3 if capacity < 6 else 2
    assert len(it.batch.decode) == groups
    assert len(set(it.rank.copied.values())) == 1
    it.step(20, chosen)
    for table in it.rank.tables.values():
        assert table.statistics().resolves == 2 * groups


def test_followers_rows_are_copied_ahead_of_their_turn_in_order(bench):
    it = bench()
    it.rank.pipeline.begin_step()
    it.one(20)
    it.attend(0, [[1, 5, 9]])
    counts = lane_counts(it)
    assert (counts.submitted, counts.pending) == (2, 2)
    order: list[int] = []
    it.rank.before_copy = lambda kind, layer: order.append(layer)
    it.rank.engine.run_until_idle()
    assert order == [1, 2]
    it.attend(1, [[1, 5, 9]])
    it.attend(2, [[1, 5, 9]])
    assert order == [1, 2], "nothing was left to copy"
    it.rank.pipeline.end_step()


def test_a_follower_waits_for_its_own_rows_alone(bench):
    it = bench()
    it.rank.pipeline.begin_step()
    it.one(20)
    it.attend(0, [[1, 5, 9]])
    it.attend(1, [[1, 5, 9]])
    assert lane_counts(it).pending == 1, "layer 2's"
    it.attend(2, [[1, 5, 9]])
    it.rank.pipeline.end_step()


def test_only_a_forwards_first_group_is_copied_ahead(bench):
    it = bench(capacity=3)
    it.rank.pipeline.begin_step()
    it.one(20, 2)
    it.attend(0, [[1, 5, 9], [2, 6, 10]])
    assert lane_counts(it).submitted == 2
    for layer in (1, 2):
        it.attend(layer, [[1, 5, 9], [2, 6, 10]])
    assert it.rank.copied[2] == 6
    it.rank.pipeline.end_step()


def test_nothing_is_copied_ahead_where_nothing_is_missing(bench):
    it = bench()
    it.step(20, [[1, 5, 9]])
    before = lane_counts(it).submitted
    it.step(21, [[1, 5, 9]])
    it.step(22, [[22]])
    it.step(23, [[]])
    assert lane_counts(it).submitted == before


def test_a_copy_ahead_that_fails_is_told_to_its_layer_and_its_rows_are_resident_for_none(bench):
    it = bench()
    it.step(20, [[2]])
    it.fail_rows_of(1)
    it.rank.pipeline.begin_step()
    it.one(21)
    it.attend(0, [[1, 2, 21]])
    with pytest.raises(TransferFailed, match=r"rows of layer 1 copied ahead.*bus is on fire"):
        it.attend(1, [[1, 2, 21]])
    it.rank.pipeline.end_step()
    assert it.resident(1, 2, 21) == [False, True, False]
    it.rank.before_copy = no_fault
    it.rank.poison()
    it.step(21, [[1, 2, 21]])


def test_the_leaders_own_copy_that_fails_leaves_nothing_resident(bench):
    it = bench()
    it.fail_rows_of(0)
    it.rank.pipeline.begin_step()
    it.one(20)
    with pytest.raises(OSError, match="bus is on fire"):
        it.attend(0, [[1, 5, 20]])
    assert lane_counts(it).submitted == 0
    it.rank.pipeline.end_step()
    assert it.resident(1, 5, 20) == [False] * 3
    it.rank.before_copy = no_fault
    it.step(20, [[1, 5, 20]])


@pytest.mark.parametrize("last", [0, 1])
def test_rows_of_a_forward_that_broke_off_are_resident_for_no_layer(bench, last):
    it = bench()
    it.step(20, [[1, 2, 3]])
    it.rank.pipeline.begin_step()
    it.one(21)
    for layer in range(last + 1):
        it.attend(layer, [[1, 7, 21]])
    it.rank.pipeline.end_step()
    assert it.resident(1, 2, 3, 7, 21) == [True, True, True, False, False]
    assert it.resident(20) == [False]
    it.rank.check()
    it.rank.poison()
    it.step(21, [[1, 7, 21]])


def test_rows_that_all_layers_of_a_group_have_stay_although_later_layers_broke(bench):
    it = bench()
    it.rank.pipeline.begin_step()
    it.one(20)
    for layer in (0, 1, 2):
        it.attend(layer, [[1, 7, 20]])
    it.write(3)
    it.rank.pipeline.end_step()
    assert it.resident(1, 7, 20) == [True] * 3
    it.rank.check()


def test_an_unused_copy_that_fails_ends_the_step_all_the_same(bench):
    it = bench()
    it.fail_rows_of(2)
    it.rank.pipeline.begin_step()
    it.one(20)
    it.attend(0, [[1, 5, 9]])
    it.rank.pipeline.end_step()
    assert it.rank.engine.statistics().unreported == 0
    assert it.resident(1, 5, 9) == [False] * 3
    it.rank.before_copy = no_fault
    it.step(20, [[1, 5, 9]])


def test_M3_a_late_copy_keeps_its_slots_until_it_has_ended(bench):  # noqa: N802
    it = bench(capacity=3)
    it.rank.pipeline.begin_step()
    it.one(20)
    it.attend(0, [[1, 5, 9]])
    it.lane.held = True
    with pytest.raises(DeadlineExceeded, match="rows of layer 1 copied ahead"):
        it.attend(1, [[1, 5, 9]])
    for end in (it.rank.pipeline.end_step, it.rank.pipeline.begin_step, it.rank.pipeline.end_step):
        with pytest.raises(DeadlineExceeded, match="unused rows of layer"):
            end()
    assert lane_counts(it).pending == 2
    it.lane.held = False
    it.rank.pipeline.begin_step()
    assert lane_counts(it).pending == 0
    it.rank.pipeline.end_step()
    it.step(20, [[2, 6, 10]])  # takes the very slots that were written late


def test_M3_every_group_is_settled_although_one_is_late(bench):  # noqa: N802
    it = bench()
    it.fail_rows_of(3)
    it.rank.pipeline.begin_step()
    it.one(20)
    it.attend(0, [[1, 5, 9]])
    with pytest.raises(OSError, match="bus is on fire"):
        it.attend(3, [[1, 5, 9]])
    it.lane.held = True
    with pytest.raises(DeadlineExceeded):
        it.hot.settle()
    for layer in (0, 3):
        assert (it.rank.table_of(layer).resident(np.array([1, 5, 9])) == -1).all()
    it.lane.held = False
    it.rank.pipeline.end_step()


def test_a_lane_that_is_gone_leaves_nothing_resident(bench):
    it = bench()
    it.rank.engine.close(1.0)
    it.rank.pipeline.begin_step()
    it.one(20)
    with pytest.raises(TransferFailed, match="closed"):
        it.attend(0, [[1, 5, 9]])
    it.rank.pipeline.end_step()
    assert it.resident(1, 5, 9) == [False] * 3


def test_M4_copies_ahead_wait_for_what_a_store_brings_to_their_layer(bench):  # noqa: N802
    """A request whose whole prompt but one token is in the store decodes in the step that fetches it."""
    it = bench()
    it.step(20, [[1, 5, 9]])
    it.rank.pipeline.begin_step()
    store = it.rank.engine.lane("store")
    arrivals = {
        layer: store.call(lambda layer=layer: it.home.bring(layer, [0, 1]), name=f"rows of layer {layer}")
        for layer in it.home.order
    }
    it.rank.pipeline.expect([0, 1], arrivals)
    assert it.resident(1, 5, 9) == [False, False, True]
    it.one(21)
    it.attend(0, [[1, 5, 9]])
    store.held = True
    it.rank.engine.run_until_idle()
    assert lane_counts(it).pending == 2
    store.held = False
    for layer in (1, 2, 3):
        it.attend(layer, [[1, 5, 9]])
    it.rank.pipeline.end_step()
    it.rank.check()


def test_arrivals_are_forgotten_with_their_step(bench):
    it = bench()
    it.rank.pipeline.begin_step()
    store = it.rank.engine.lane("store")
    store.held = True
    it.rank.pipeline.expect([0], {1: store.call(lambda: None, name="rows of layer 1")})
    it.rank.pipeline.end_step()
    it.step(20, [[1, 5, 9]])
    store.held = False


def test_serving_a_forward_that_was_not_entered_is_caught(bench):
    it = bench()
    it.rank.pipeline.begin_step()
    it.one(20)
    with pytest.raises(AssertionError, match="layer 0 serves a forward that it did not enter"):
        next(it.hot.serve(0, it.batch, it.selection([[1]]), torch.empty(0)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_have_the_homes_dtype_wherever_they_come_from(bench, dtype):
    it = bench(dtype=dtype)
    it.step(20, [[1, 19, 20], [20, 21]])
    it.step(22, [[1, 20, 21]])
    assert {buffer.dtype for buffer in it.rank.buffers.values()} == {dtype}
    assert it.hot.statistics().miss_bytes == 4 * 2 * WIDTH * dtype.itemsize


class Watcher:
    """Writes down what an observer is told."""

    def __init__(self) -> None:
        self.told: list[tuple[Any, ...]] = []

    def resolving(self, layer, rows, fresh_rows, near_rows) -> None:
        near = None if near_rows is None else near_rows.tolist()
        self.told.append(("resolving", layer, rows.tolist(), fresh_rows.tolist(), near))

    def rewritten(self, layer, rows) -> None:
        self.told.append(("rewritten", layer, rows.tolist()))

    def close(self) -> None:
        pass


def test_an_observer_is_told_of_each_group_once_in_the_tables_order(bench):
    it = bench()
    watcher = it.hot._observer = Watcher()
    it.rank.pipeline.begin_step()
    it.rank.pipeline.expect([5], {})
    it.one(20)
    near = np.array([[7, -1]], dtype=np.int32)
    for layer in it.home.order:
        it.write(layer)
        chosen = Selection(positions=it.selection([[3, 20]]).positions, near=near)
        it.rank.attend(layer, it.batch, it.new_rows[layer], chosen)
    it.rank.pipeline.end_step()
    assert watcher.told == [
        ("rewritten", None, [20, 21, 22, 23]),
        ("rewritten", 0, [20]),
        ("resolving", 0, [[3, 20, -1]], [20], [[7, -1]]),
        ("rewritten", 3, [20]),
        ("resolving", 3, [[3, 20, -1]], [20], [[7, -1]]),
    ]
