"""The sparse pipeline as a whole: steps, prompts, drafts, ranks of one pool, and what it tells others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from kvstrata.core.layers import Component
from kvstrata.errors import DeadlineExceeded, TransferFailed
from kvstrata.memory.allocator import SharedMemoryAllocator
from kvstrata.memory.step_fence import StepFence
from kvstrata.move.forward_rows import WindowLimits
from kvstrata.move.hot_path import ROW_LANE
from kvstrata.move.prompt_window import PROMPT_LANE
from kvstrata.move.sparse_testing import WIDTH, Home, Rank, Span, choose, split

TOKENS, BLOCKS = 4, 8


class Bench:
    """Two target layers that share a selection, and a draft layer; one rank or two."""

    def __init__(self, ranks: int = 1, **more: Any) -> None:
        self.home = Home(layers=2, drafts=1, leaders=(0, 2), blocks=BLOCKS, block_tokens=TOKENS, **more)
        self.limits = WindowLimits(block_tokens=TOKENS, window_blocks=2, capacity=6, topk=3, decode_tokens=2)
        self.now_s = 0.0
        self.fences: list[Any] = [None]
        if ranks > 1:
            shared = {"ranks": ranks, "deadline_s": 1.0, "clock": self._clock, "pause": lambda _: None}
            first = StepFence.create(SharedMemoryAllocator(), **shared)
            self.fences = [first, *(StepFence.open(first.handle, rank=at, **shared) for at in (1,))]
        self.ranks = [
            Rank(self.home, self.limits, writes_home=fence in (None, self.fences[0]), fence=fence)
            for fence in self.fences
        ]
        self.seed = 0

    def _clock(self) -> float:
        self.now_s += 0.1
        return self.now_s

    def layer(self, layer: int, *spans: Span, ranks: list[Rank] | None = None) -> None:
        self.seed += 1
        selection = choose(spans, 3, self.seed if layer == 2 else 1)
        turns = [
            (rank, rank.pipeline.known(split(spans, self.limits)))
            for rank in (self.ranks if ranks is None else ranks)
        ]
        new_rows = self.home.new_rows(layer, turns[0][1])
        for rank, forward in turns:
            rank.write(layer, forward, new_rows)
            rank.attend(layer, forward, new_rows, selection)

    def step(self, *spans: Span, passes: int = 0) -> None:
        for rank in self.ranks:
            rank.pipeline.begin_step()
        for layer in (0, 1, *[2] * passes):
            self.layer(layer, *spans)
        for rank in self.ranks:
            rank.pipeline.end_step()
            rank.check()
            rank.poison()


def prompt(begin: int, end: int, first: int = 0) -> Span:
    return Span(blocks=range(first, BLOCKS), begin=begin, end=end)


@pytest.fixture
def bench() -> Iterator[Callable[..., Bench]]:
    made: list[Bench] = []

    def make(**more: Any) -> Bench:
        made.append(Bench(**more))
        return made[-1]

    yield make
    for it in made:
        for rank in it.ranks:
            rank.engine.check_integrity()
            rank.engine.close(1.0)
        for fence in it.fences:
            if fence is not None:
                fence.close()
        it.home.pool.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_M4_prompts_in_chunks_read_context_and_own_rows_as_a_cache_of_that_dtype_holds_them(  # noqa: N802
    bench, dtype
):
    it = bench(dtype=dtype)
    rank = it.ranks[0]
    whole = it.home.new_rows
    it.home.new_rows = lambda layer, forward: whole(layer, forward) + 1 / 1024  # bfloat16 rounds it
    for begin, end in ((0, 3), (3, 9), (9, 22)):
        it.step(prompt(begin, end), passes=1)
    it.step(prompt(22, 23), passes=1)
    assert rank.compared > 60
    assert rank.pipeline.statistics().prompt_loaded_bytes > 0


def test_a_prompts_pieces_are_loaded_once_for_each_layer_and_each_turn_of_a_draft_layer(bench):
    it = bench()
    it.step(prompt(0, 9))
    before = it.ranks[0].pipeline.statistics().prompt_loaded_bytes
    it.step(prompt(9, 14), passes=2)
    loaded = it.ranks[0].pipeline.statistics().prompt_loaded_bytes - before
    assert loaded == (2 + 2) * 3 * TOKENS * WIDTH * 4


def test_R4_a_draft_layer_that_runs_the_same_batch_again_reads_its_newest_rows(bench):  # noqa: N802
    it = bench()
    it.step(prompt(0, 9))
    it.step(prompt(9, 11), passes=3)
    it.step(prompt(11, 17), passes=2)


def test_passes_of_drafts_read_rows_of_the_pass_before(bench):
    it = bench()
    it.step(prompt(0, 9), passes=1)
    rank = it.ranks[0]
    rank.pipeline.begin_step()
    for layer in (0, 1, 2):
        it.layer(layer, prompt(9, 11))
    for ahead in (11, 12):
        it.layer(2, prompt(ahead, ahead + 1))
    rank.pipeline.end_step()
    rank.check()


def test_what_was_written_is_counted(bench):
    it = bench()
    it.step(prompt(0, 9))
    counts = it.ranks[0].pipeline.statistics()
    assert (counts.steps, counts.written_rows, counts.written_bytes) == (1, 2 * 9, 2 * 9 * WIDTH * 4)
    assert it.ranks[0].pipeline.home(1, Component.MAIN) == it.home.pool.view(1, Component.MAIN)


def test_tokens_without_a_slot_are_written_nowhere(bench):
    it = bench()
    it.home.tensors[0].fill_(-3)
    it.ranks[0].pipeline.begin_step()
    forward = split([prompt(0, 3)], it.limits, unwritten=[1])
    it.ranks[0].write(0, forward, it.home.new_rows(0, forward))
    assert (it.home.tensors[0].view(-1, WIDTH)[:, 0] == 0).nonzero().flatten().tolist() == [0, 2]
    it.ranks[0].pipeline.end_step()


def test_a_forward_got_through_when_all_target_layers_did(bench):
    it = bench()
    pipeline = it.ranks[0].pipeline
    pipeline.begin_step()
    it.layer(0, prompt(0, 3))
    assert not pipeline.ran_all_target_layers()
    it.layer(1, prompt(0, 3))
    assert pipeline.ran_all_target_layers(), "drafts may or may not run"
    pipeline.end_step()
    assert pipeline.ran_all_target_layers(), "asked for after the step"
    pipeline.begin_step()
    assert not pipeline.ran_all_target_layers()
    pipeline.end_step()


def test_a_step_that_nobody_ended_is_ended_by_the_next(bench):
    it = bench()
    it.step(prompt(0, 9))
    rank = it.ranks[0]
    rank.pipeline.begin_step()
    it.layer(0, prompt(9, 15))
    rank.pipeline.begin_step()
    assert (rank.fresh.table == -1).all()
    it.layer(0, prompt(9, 15))
    it.layer(1, prompt(9, 15))
    rank.pipeline.end_step()
    rank.pipeline.end_step()
    rank.check()
    assert rank.pipeline.statistics().steps == 3


def test_rows_of_a_step_are_at_home_after_it(bench):
    it = bench()
    it.step(prompt(0, 9), passes=1)
    assert (it.ranks[0].fresh.table == -1).all()


def test_a_prompt_piece_that_fails_is_told_and_the_next_step_is_exact(bench):
    it = bench()
    it.step(prompt(0, 9))
    rank = it.ranks[0]

    def broken(kind: str, layer: int) -> None:
        raise OSError("the bus is on fire")

    rank.before_copy = broken
    rank.pipeline.begin_step()
    with pytest.raises(TransferFailed, match=r"piece 0 of layer 0.*bus is on fire"):
        it.layer(0, prompt(9, 15))
    rank.pipeline.end_step()
    rank.before_copy = lambda kind, layer: None
    rank.check()
    it.step(prompt(9, 15))


def test_rows_of_a_store_are_waited_for_before_a_layers_turn_and_timed(bench):
    it = bench()
    it.step(prompt(0, 9))
    pipeline = it.ranks[0].pipeline
    pipeline.begin_step()
    store = it.ranks[0].engine.lane("store")
    tokens = {
        layer: store.call(lambda layer=layer: it.home.bring(layer, [0, 1]), name=f"rows of {layer}")
        for layer in (0, 1)
    }
    pipeline.expect([0, 1], tokens)
    pipeline._clock = iter(range(100)).__next__
    for layer in (0, 1):
        it.layer(layer, prompt(8, 14))
    pipeline.end_step()
    assert pipeline.statistics().store_wait_s == 2, "a tick of the clock each"


def test_rows_of_a_store_that_fail_are_told_by_layer(bench):
    it = bench()

    def broken() -> None:
        raise OSError("no such row")

    pipeline = it.ranks[0].pipeline
    pipeline.begin_step()
    store = it.ranks[0].engine.lane("store")
    pipeline.expect([0], {0: store.call(broken, name="rows of layer 0")})
    with pytest.raises(TransferFailed, match=r"store rows of layer 0.*no such row"):
        pipeline.acquire(0)
    pipeline.acquire(1)
    pipeline.end_step()


def test_a_rank_that_shares_the_pool_reads_its_own_new_rows_and_writes_none(bench):
    it = bench(ranks=2)
    writer, reader = it.ranks
    it.step(prompt(0, 9), passes=2)
    it.step(prompt(9, 14), passes=1)
    for rank in it.ranks:
        rank.pipeline.begin_step()
    for layer in (0, 1):  # the reader is always first
        it.layer(layer, prompt(14, 15), ranks=[reader])
        assert (it.home.oracle[layer][14] == 0).all()
        it.layer(layer, prompt(14, 15), ranks=[writer])
    reader.pipeline.end_step()
    writer.pipeline.end_step()
    assert reader.pipeline.statistics().written_rows == 0
    assert writer.pipeline.statistics().written_rows == 2 * (9 + 5 + 1) + 9 * 2 + 5


def test_M1_a_rank_begins_a_step_only_when_the_others_have_ended_the_one_before(bench):  # noqa: N802
    it = bench(ranks=2)
    writer, reader = it.ranks
    writer.pipeline.begin_step()
    reader.pipeline.begin_step()
    writer.pipeline.end_step()
    with pytest.raises(DeadlineExceeded, match="rank 0 begins step 2 after rank 1 ends step 1"):
        writer.pipeline.begin_step()
    reader.pipeline.end_step()
    writer.pipeline.begin_step()
    assert writer.pipeline.statistics().steps == 2, "the try that failed was no step"
    reader.pipeline.begin_step()
    for rank in it.ranks:
        rank.pipeline.end_step()


@pytest.mark.parametrize("lane", [ROW_LANE, PROMPT_LANE])
def test_M3_a_step_that_cannot_end_is_told_to_the_other_ranks_of_the_pool(bench, lane):  # noqa: N802
    it = bench(ranks=2)
    writer, reader = it.ranks
    it.step(prompt(0, 9))
    for rank in it.ranks:
        rank.pipeline.begin_step()
        rank.engine.lane(lane).held = rank is reader
    forward = reader.pipeline.known(split([prompt(9, 15), prompt(9, 10)], it.limits))
    new_rows = it.home.new_rows(0, forward)
    reader.write(0, forward, new_rows)
    if lane == ROW_LANE:
        selection = choose([prompt(9, 15), prompt(9, 10)], 3, 1)
        selection.positions[-1] = [0, 1, 2]
        reader.attend(0, forward, new_rows, selection)
    with pytest.raises(DeadlineExceeded, match="unused"):
        reader.pipeline.end_step()
    writer.pipeline.end_step()
    with pytest.raises(TransferFailed, match=r"rank 1 failed: step 2 did not end: unused .*layer"):
        writer.pipeline.begin_step()
    reader.engine.lane(lane).held = False
