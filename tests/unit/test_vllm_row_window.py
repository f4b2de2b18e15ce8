"""A layer's attention on the row window, in vLLM's terms, against the full window of plain vLLM."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from kvstrata.errors import TransferFailed
from kvstrata.kernels.base import CpuKernels
from kvstrata.kernels.batch import plan_batch
from kvstrata.move.forward_rows import WindowLimits
from kvstrata.move.sparse_testing import WIDTH, Home, Rank, Span, choose
from kvstrata.vllm.hooks import FullWindow
from kvstrata.vllm.metadata import KVStrataMetadata
from kvstrata.vllm.row_window import ComparedWindow, RowHook, RowWindow

TOKENS, BLOCKS, HEADS, RANK, TOPK = 4, 8, 2, 3, 6
KERNELS = CpuKernels()


def metadata_of(*spans: Span) -> KVStrataMetadata:
    """One forward, as the builder makes it; the slot mapping is padded."""
    starts = torch.tensor([0, *(span.end - span.begin for span in spans)], dtype=torch.int32).cumsum(0)
    lengths = torch.tensor([span.end for span in spans], dtype=torch.int32)
    table = torch.full((len(spans), BLOCKS), -1, dtype=torch.int32)
    slots = []
    for at, span in enumerate(spans):
        table[at, : len(span.blocks)] = torch.tensor(list(span.blocks), dtype=torch.int32)
        slots += [span.blocks[p // TOKENS] * TOKENS + p % TOKENS for p in range(span.begin, span.end)]
    return KVStrataMetadata(
        plan=plan_batch(starts, lengths, table, TOKENS),
        num_reqs=len(spans),
        num_actual_tokens=len(slots),
        query_start_loc=starts,
        seq_lens=lengths,
        block_table=table,
        slot_mapping=torch.tensor(slots, dtype=torch.int64),
        num_decodes=len(spans),
        num_decode_tokens=len(slots),
    )


class Bench:
    """Two layers of one share group on the row window, and plain vLLM's full caches beside them."""

    def __init__(self, kind: type[RowWindow], dtype: torch.dtype, capacity: int) -> None:
        torch.manual_seed(0)
        self.home = Home(layers=2, leaders=(0,), blocks=BLOCKS, block_tokens=TOKENS, dtype=dtype)
        self.limits = WindowLimits(
            block_tokens=TOKENS, window_blocks=2, capacity=capacity, topk=TOPK, decode_tokens=2
        )
        self.rank = Rank(self.home, self.limits)
        self.windows = [kind(self.rank.pipeline, layer, self.limits, KERNELS, None) for layer in (0, 1)]
        shape = (BLOCKS, TOKENS, WIDTH)
        self.spare = [torch.full(shape, torch.nan, dtype=dtype) for _ in (0, 1)]
        self.plain = [torch.zeros(shape, dtype=dtype) for _ in (0, 1)]
        self.seed = 0

    def step(self, *spans: Span, layers: tuple[int, ...] = (0, 1)) -> None:
        """Run the layers on both; their results must agree."""
        self.seed += 1
        chosen = choose(spans, TOPK, self.seed).positions
        topk = torch.from_numpy(
            np.vstack([chosen, np.full((3, TOPK), 7, dtype=np.int32)])
        )  # vLLM's buffer is long
        self.rank.pipeline.begin_step()
        for layer in layers:
            metadata = metadata_of(*spans)
            tokens = metadata.num_actual_tokens
            rows = torch.randn(tokens, WIDTH)
            length = tokens + 2 * (self.seed % 2)  # vLLM pads some batches
            q = torch.randn(length, HEADS, WIDTH)
            full = FullWindow(KERNELS)
            full.write(rows, self.plain[layer], metadata.slot_mapping, metadata)
            wanted = full.attend(q, self.plain[layer], metadata, topk, 0.5, RANK)
            window, cache = self.windows[layer], self.spare[layer]
            window.write(rows, cache, metadata.slot_mapping, metadata)
            got = window.attend(q, cache, metadata, topk, 0.5, RANK)
            assert got.shape == wanted.shape == (length, HEADS, RANK)
            torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)
            assert wanted[:tokens].abs().max() > 0.01
        self.rank.pipeline.end_step()
        self.rank.poison()


@pytest.fixture
def bench() -> Iterator[Callable[..., Bench]]:
    made: list[Bench] = []

    def make(
        kind: type[RowWindow] = RowWindow, *, dtype: torch.dtype = torch.float32, capacity: int = 2 * TOPK
    ) -> Bench:
        made.append(Bench(kind, dtype, capacity))
        return made[-1]

    yield make
    for it in made:
        it.rank.engine.close(1.0)
        it.home.pool.close()


def request(begin: int, end: int, *blocks: int) -> Span:
    return Span(blocks=blocks, begin=begin, end=end)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("capacity", [TOPK, 2 * TOPK, 8 * TOPK])
def test_M4_attention_is_that_of_the_full_window(bench, dtype, capacity):  # noqa: N802
    it = bench(dtype=dtype, capacity=capacity)
    one, two = (3, 1, 5, 0), (6, 2, 7, 4)
    it.step(request(0, 6, *one))
    it.step(request(6, 11, *one), request(0, 9, *two))
    it.step(request(11, 12, *one), request(9, 11, *two))
    for at in range(3):
        it.step(request(12 + at, 13 + at, *one), request(10 + at, 12 + at, *two))
    assert it.rank.hot.statistics().hit_rows > 0


def test_the_cache_that_vllm_bound_is_not_touched(bench):
    it = bench()
    it.step(request(0, 6, 0, 1, 2))
    it.step(request(6, 7, 0, 1, 2))
    assert all(cache.isnan().all() for cache in it.spare)


def test_a_dummy_run_writes_nowhere(bench):
    it = bench()
    before = it.home.tensors[0].clone()
    it.windows[0].write(torch.ones(2, WIDTH), it.spare[0], torch.tensor([0, 1]), None)
    assert torch.equal(it.home.tensors[0], before)
    assert it.rank.pipeline.statistics().written_rows == 0
    assert it.spare[0].isnan().all()


def test_a_forward_is_split_once_for_all_layers_whatever_metadata_they_are_given(bench, monkeypatch):
    it = bench()
    seen: list[Any] = []
    known = it.rank.pipeline.known

    def note(forward: Any) -> Any:
        seen.append(known(forward))
        return seen[-1]

    monkeypatch.setattr(it.rank.pipeline, "known", note)
    it.step(request(0, 6, 0, 1))
    assert len(seen) == 2, "a metadata object each"
    assert seen[0] is seen[1]


def test_near_positions_of_the_forwards_tokens_reach_the_pipeline(bench, monkeypatch):
    it = bench()
    near = torch.arange(40, dtype=torch.int32).view(20, 2)
    window = RowWindow(it.rank.pipeline, 0, it.limits, KERNELS, near)
    given: list[Any] = []

    def attend(layer, forward, q, rank, selection, kernel):
        given.append(selection)
        return q

    monkeypatch.setattr(it.rank.pipeline, "attend", attend)
    metadata = metadata_of(request(4, 7, 0, 1))
    topk = torch.zeros(20, TOPK, dtype=torch.int32)
    window.attend(torch.zeros(3, HEADS, WIDTH), it.spare[0], metadata, topk, 1.0, RANK)
    it.windows[0].attend(torch.zeros(3, HEADS, WIDTH), it.spare[0], metadata, topk, 1.0, RANK)
    assert given[0].positions.shape == (3, TOPK)
    assert given[0].near.tolist() == near[:3].tolist()
    assert given[1].near is None


def test_dense_attention_is_caught(bench):
    it = bench()
    with pytest.raises(AssertionError, match="start-up refuses"):
        it.windows[0].attend(torch.zeros(1, HEADS, WIDTH), it.spare[0], metadata_of(), None, 1.0, RANK)


def test_the_hook_waits_for_a_store_and_saves_nothing(bench):
    it = bench()
    arrived: list[int] = []
    it.rank.pipeline.begin_step()
    token = it.rank.engine.lane("store").call(lambda: arrived.append(1), name="rows of layer 1")
    it.rank.pipeline.expect([0], {1: token})
    metadata = metadata_of(request(4, 5, 0, 1))
    RowHook(it.rank.pipeline, 0).acquire(metadata)
    assert arrived == []
    RowHook(it.rank.pipeline, 1).acquire(metadata)
    assert arrived == [1]
    RowHook(it.rank.pipeline, 1).release(metadata)
    it.rank.pipeline.end_step()


def compared(bench: Callable[..., Bench], **more: Any) -> Bench:
    """Layers on the debugging aid: the bound caches are full ones."""
    it = bench(ComparedWindow, **more)
    for cache in it.spare:
        cache.zero_()
    it.step(request(0, 9, 3, 1, 5))
    it.step(request(9, 10, 3, 1, 5))
    return it


@pytest.mark.parametrize("capacity", [TOPK, 8 * TOPK])
def test_the_compared_window_agrees_where_nothing_is_wrong(bench, capacity):
    it = compared(bench, capacity=capacity)
    for cache, plain in zip(it.spare, it.plain, strict=True):
        assert torch.equal(cache, plain), "it writes to both"
    it.step(request(10, 11, 3, 1, 5), request(0, 4, 7))
    it.step(request(11, 12, 3, 1, 5), request(4, 6, 7, 2))


@pytest.mark.parametrize("layer", [0, 1])
def test_the_compared_window_names_layer_row_and_block_of_a_wrong_row(bench, layer):
    it = compared(bench)
    rows, _ = it.rank.tables[0, 1].residents()
    it.seed = next(  # a step whose selection has a row that is resident already
        seed for seed in range(100) if set(chosen_rows(seed + 1)) & set(rows.tolist())
    )
    wrong = min(set(chosen_rows(it.seed + 1)) & set(rows.tolist()))
    it.spare[layer].view(-1, WIDTH)[wrong, 1] += 1
    words = rf"1 hot rows of layer {layer} differ .* first is host row {wrong} \(block {wrong // TOKENS}\)"
    with pytest.raises(TransferFailed, match=words):
        it.step(request(10, 11, 3, 1, 5))


def chosen_rows(seed: int) -> list[int]:
    """The host rows that the step of `seed` selects for its token, without its own."""
    blocks = (3, 1, 5)
    positions = choose([request(10, 11, *blocks)], TOPK, seed).positions[0].tolist()
    return [blocks[p // TOKENS] * TOKENS + p % TOKENS for p in positions if 0 <= p < 10]


def test_the_compared_window_has_nothing_to_say_of_prompts(bench):
    it = compared(bench)
    it.spare[0].view(-1, WIDTH)[3 * TOKENS] += 1
    it.step(request(0, 4, 7))


def test_the_compared_window_looks_at_every_group_of_a_batch(bench):
    """Room for one token's selection: the first token's rows are gone when the second one is served."""
    it = compared(bench, capacity=TOPK)
    it.step(request(0, 4, 7))
    for layer in (0, 1):
        it.spare[layer].view(-1, WIDTH)[7 * TOKENS : 7 * TOKENS + 4] += 1
    with pytest.raises(TransferFailed, match=r"hot rows of layer 0 differ .* \(block 7\)"):
        it.step(request(4, 5, 7, 2), request(10, 11, 3, 1, 5))
