"""The prompt window: order, waits, and what becomes of buffers when copies fail or come late."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from kvstrata.errors import DeadlineExceeded, TransferFailed
from kvstrata.memory.pages import PageView
from kvstrata.move.forward_rows import WindowLimits, WindowPass
from kvstrata.move.inline import InlineEngine
from kvstrata.move.memcpy import copy_ranges
from kvstrata.move.plan import CopyPlan
from kvstrata.move.prompt_window import PROMPT_LANE, PromptWindow
from kvstrata.move.sparse_testing import Span, split

BLOCKS, TOKENS, WIDTH, LAYERS = 8, 2, 3, 3
PAGE_BYTES = TOKENS * WIDTH * 4


class Bench:
    """A window over homes whose every element says layer and block."""

    def __init__(self, buffers: int = 2, window_blocks: int = 2) -> None:
        self.failures: list[Exception] = []
        self.homes = [
            (torch.arange(BLOCKS) + 100.0 * layer)[:, None, None].expand(-1, TOKENS, WIDTH).contiguous()
            for layer in range(LAYERS)
        ]
        self.buffers = [torch.full((window_blocks, TOKENS, WIDTH), -1.0) for _ in range(buffers)]
        self.engine = InlineEngine(copy=self._copy)
        self.lane = self.engine.lane(PROMPT_LANE)
        self.ticks = 0.0
        self.window = PromptWindow(
            homes={layer: PageView.of_tensor(home) for layer, home in enumerate(self.homes)},
            buffers=self.buffers,
            engine=self.engine,
            deadline_s=5.0,
            clock=self._clock,
        )
        self.limits = WindowLimits(
            block_tokens=TOKENS, window_blocks=window_blocks, capacity=1, topk=1, decode_tokens=1
        )

    def _copy(self, plan: CopyPlan) -> None:
        if self.failures:
            raise self.failures.pop()
        copy_ranges(plan)

    def _clock(self) -> float:
        self.ticks += 1.0
        return self.ticks

    def passes(self, *blocks: int) -> tuple[WindowPass, ...]:
        """Of one request that has these blocks for its context."""
        context = len(blocks) * TOKENS
        span = Span(blocks=[*blocks, 0, 0], begin=context, end=context + 3)
        prompt = split([span], self.limits).prompt
        assert prompt is not None
        return prompt.passes

    def read(self, layer: int, number: int) -> list[float]:
        """Take a piece and return its blocks' values; the tail of the last piece is left over."""
        rows = self.window.take(layer, number)
        assert rows.shape == (1, len(self.buffers[0]) * TOKENS, WIDTH)
        return rows[0, ::TOKENS, 0].tolist()


@pytest.fixture
def bench() -> Iterator[Bench]:
    it = Bench()
    yield it
    it.window.check_integrity()
    it.engine.check_integrity()
    it.engine.close(1.0)


def pending(it: Bench) -> int:
    return it.lane.ledger.statistics().pending


def test_pieces_come_layer_by_layer_each_from_its_own_home(bench: Bench):
    bench.window.begin(bench.passes(6, 1, 3), [0, 1, 2], {})
    for layer in range(LAYERS):
        base = 100.0 * layer
        assert bench.read(layer, 0) == [base + 6, base + 1]
        bench.window.done()
        assert bench.read(layer, 1)[0] == base + 3
        bench.window.done()
    assert pending(bench) == 0
    assert bench.window.statistics().prompt_loaded_bytes == LAYERS * 3 * PAGE_BYTES


def test_one_piece_is_loaded_ahead_and_never_over_the_one_that_is_read(bench: Bench):
    bench.window.begin(bench.passes(0, 1, 2, 3, 4), [0, 1], {})
    assert pending(bench) == 2, "a buffer each"
    assert bench.read(0, 0) == [0.0, 1.0]
    bench.engine.run_until_idle()
    assert bench.read(0, 0) == [0.0, 1.0], "M1: what is queued leaves it alone"
    assert pending(bench) == 0
    bench.window.done()
    assert pending(bench) == 1, "the third piece, into the buffer of the first"
    assert bench.read(0, 1) == [2.0, 3.0]


def test_the_next_layers_first_piece_is_loaded_while_a_layer_reads_its_last(bench: Bench):
    bench.window.begin(bench.passes(5), [0, 1], {})
    bench.read(0, 0)
    bench.engine.run_until_idle()
    assert sorted(buffer[0, 0, 0].item() for buffer in bench.buffers) == [5.0, 105.0]
    bench.window.done()
    assert bench.read(1, 0)[0] == 105.0


def test_one_buffer_is_enough():
    it = Bench(buffers=1)
    it.window.begin(it.passes(0, 1, 2), [0, 1], {})
    for layer in (0, 1):
        for number in (0, 1):
            assert it.read(layer, number)[0] == 100 * layer + 2 * number
            it.window.done()
    it.window.check_integrity()


@pytest.mark.parametrize(("layer", "number"), [(0, 1), (1, 0)])
def test_pieces_out_of_order_are_caught(bench: Bench, layer: int, number: int):
    bench.window.begin(bench.passes(0, 1, 2), [0, 1], {})
    with pytest.raises(AssertionError, match="due is 0 of 0"):
        bench.window.take(layer, number)


def test_a_piece_too_many_is_caught(bench: Bench):
    bench.window.begin(bench.passes(0), [0], {})
    bench.read(0, 0)
    bench.window.done()
    with pytest.raises(AssertionError, match="none is due"):
        bench.window.take(0, 0)


def test_a_layer_s_loads_come_after_what_a_store_brings_for_it(bench: Bench):
    def arrive() -> None:
        bench.homes[1][4] = 999.0

    store = bench.engine.lane("store")
    token = store.call(arrive, name="rows of layer 1")
    store.held = True
    bench.window.begin(bench.passes(4), [0, 1], {1: token})
    assert bench.read(0, 0)[0] == 4.0, "layer 0 waits for nobody"
    bench.engine.run_until_idle()
    assert pending(bench) == 1
    bench.window.done()
    store.held = False
    assert bench.read(1, 0)[0] == 999.0


def test_a_store_that_fails_fails_the_piece_by_name(bench: Bench):
    def broken() -> None:
        raise OSError("no such row")

    token = bench.engine.lane("store").call(broken, name="rows of layer 0")
    bench.window.begin(bench.passes(4), [0], {0: token})
    with pytest.raises(TransferFailed, match=r"context piece 0 of layer 0.*no such row"):
        bench.window.take(0, 0)
    bench.window.reset()


def test_a_failed_piece_is_told_and_the_next_forward_begins_anew(bench: Bench):
    bench.failures.append(OSError("the bus is on fire"))
    bench.window.begin(bench.passes(3, 4, 5), [0, 1], {})
    with pytest.raises(TransferFailed, match="bus is on fire"):
        bench.window.take(0, 0)
    bench.window.check_integrity()
    bench.window.begin(bench.passes(1), [0], {})
    assert bench.read(0, 0)[0] == 1.0


def test_a_forward_that_broke_off_leaves_nothing_in_flight(bench: Bench):
    bench.window.begin(bench.passes(3, 4, 5), [0, 1], {})
    bench.read(0, 0)  # and then the forward broke, before `done`
    bench.window.reset()
    assert pending(bench) == 0
    with pytest.raises(AssertionError, match="none is due"):
        bench.window.take(0, 1)
    bench.window.begin(bench.passes(7), [2], {})
    assert bench.read(2, 0)[0] == 207.0


def test_a_piece_that_nobody_took_may_fail_unnoticed(bench: Bench):
    bench.failures += [OSError("late"), OSError("later")]
    bench.window.begin(bench.passes(3, 4, 5), [0], {})
    bench.window.reset()
    assert bench.engine.statistics().unreported == 0
    bench.window.begin(bench.passes(6), [0], {})
    assert bench.read(0, 0)[0] == 6.0


def test_M3_a_buffer_stays_out_of_use_until_its_late_load_has_ended(bench: Bench):  # noqa: N802
    bench.window.begin(bench.passes(3, 4, 5), [0], {})
    bench.lane.held = True
    with pytest.raises(DeadlineExceeded, match="load of context piece 0 of layer 0"):
        bench.window.take(0, 0)
    for _ in range(2):
        with pytest.raises(DeadlineExceeded, match="unused load of context piece"):
            bench.window.reset()
        bench.window.check_integrity()
    with pytest.raises(DeadlineExceeded):
        bench.window.begin(bench.passes(6), [0], {})
    assert pending(bench) == 2, "nothing was queued into the buffers behind the late ones"
    bench.lane.held = False
    bench.window.begin(bench.passes(6), [0], {})
    assert bench.read(0, 0)[0] == 6.0


@pytest.mark.parametrize("wrong", [-1, BLOCKS])
def test_a_block_that_does_not_exist_is_an_error_and_costs_no_buffer(bench: Bench, wrong: int):
    for _ in range(len(bench.buffers) + 1):
        with pytest.raises(IndexError, match=f"block id {wrong} "):
            bench.window.begin(bench.passes(wrong), [0], {})
        bench.window.check_integrity()
    bench.window.begin(bench.passes(2), [0], {})
    assert bench.read(0, 0)[0] == 2.0


def test_a_lane_that_is_gone_costs_no_buffer():
    it = Bench()
    it.engine.close(1.0)
    with pytest.raises(TransferFailed, match="closed"):
        it.window.begin(it.passes(2), [0], {})
    it.window.check_integrity()


def test_a_forward_without_contexts_loads_nothing(bench: Bench):
    bench.window.begin((), [0, 1], {})
    assert (pending(bench), bench.lane.ledger.statistics().submitted) == (0, 0)
    bench.window.reset()


def test_waits_are_timed_failed_ones_too(bench: Bench):
    bench.window.begin(bench.passes(2), [0], {})
    bench.read(0, 0)
    assert bench.window.statistics().prompt_wait_s == 1.0, "one tick of the clock"
    bench.window.done()
    bench.failures.append(OSError("no"))
    bench.window.begin(bench.passes(2), [0], {})
    with pytest.raises(TransferFailed):
        bench.read(0, 0)
    assert bench.window.statistics().prompt_wait_s == 2.0
    bench.window.reset()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_neighbouring_blocks_are_one_copy_of_any_dtype(dtype: torch.dtype):
    home = torch.arange(BLOCKS * TOKENS * WIDTH).view(BLOCKS, TOKENS, WIDTH).to(dtype)
    buffer = torch.zeros(4, TOKENS, WIDTH, dtype=dtype)
    plans: list[CopyPlan] = []

    def copy(plan: CopyPlan) -> None:
        plans.append(plan)
        copy_ranges(plan)

    engine = InlineEngine(copy=copy)
    window = PromptWindow(
        homes={0: PageView.of_tensor(home)}, buffers=[buffer], engine=engine, deadline_s=5.0
    )
    bench = Bench(window_blocks=4)
    window.begin(bench.passes(2, 3, 6, 7), [0], {})
    assert torch.equal(window.take(0, 0).view(4, TOKENS, WIDTH), home[[2, 3, 6, 7]])
    assert [len(plan) for plan in plans] == [2]
    assert np.all(plans[0].size == 2 * TOKENS * WIDTH * dtype.itemsize)
