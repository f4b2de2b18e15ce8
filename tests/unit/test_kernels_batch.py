"""The batch plan, the registry, the threads, and the promises that hold whatever the data."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from kvstrata.kernels import parallel
from kvstrata.kernels.base import kernels_for
from kvstrata.kernels.batch import BatchPlan, plan_batch
from kvstrata.kernels.compiled import attend_tiles, index_tiles
from kvstrata.kernels.parallel import run_shares


def plan(counts: list[int], lengths: list[int], *, tile_tokens: int = 4) -> BatchPlan:
    starts = torch.tensor([0, *counts]).cumsum(0)
    table = torch.arange(len(counts) * 8, dtype=torch.int32).view(-1, 8)
    return plan_batch(starts, torch.tensor(lengths), table, 4, tile_tokens=tile_tokens)


def test_tokens_and_tiles_of_a_ragged_batch() -> None:
    got = plan([6, 0, 1, 4], [10, 99, 1, 32])
    assert got.tokens == 11
    assert got.token_request.tolist() == [0] * 6 + [2] + [3] * 4
    assert got.token_position.tolist() == [4, 5, 6, 7, 8, 9, 0, 28, 29, 30, 31]
    assert got.tile_request.tolist() == [0, 0, 2, 3]
    assert got.tile_start.tolist() == [0, 4, 6, 7]
    assert got.tile_tokens.tolist() == [4, 2, 1, 4]
    assert got.tile_kv_tokens.tolist() == [8, 10, 1, 32]
    assert got.max_kv_tokens == 32
    assert got.highest_block == 31


def test_groups_keep_within_the_budget_and_cover_every_tile_once() -> None:
    got = plan([6, 0, 1, 4], [10, 99, 1, 32])
    for budget, sizes in ((1, [1, 1, 1, 1]), (8 * 4 * 2, [2, 2]), (10**9, [4])):
        groups = list(got.tile_groups(8, budget))
        assert [t.stop - t.start for t, _ in groups] == sizes
        assert groups[0][1].start == 0
        assert groups[-1][1].stop == 11
        assert all(a[1].stop == b[1].start for a, b in itertools.pairwise(groups))


@pytest.mark.parametrize(
    ("counts", "lengths", "match"),
    [([5], [4], "as long as"), ([1], [33], "too narrow"), ([-1], [4], "decrease")],
)
def test_an_impossible_batch_is_caught(counts: list[int], lengths: list[int], match: str) -> None:
    with pytest.raises(AssertionError, match=match):
        plan(counts, lengths)


def test_a_block_missing_from_the_table_or_the_cache_is_caught() -> None:
    with pytest.raises(AssertionError, match="missing"):
        plan_batch(torch.tensor([0, 1]), torch.tensor([5]), torch.tensor([[0, -1]]), 4)
    beyond = plan_batch(torch.tensor([0, 1]), torch.tensor([5]), torch.tensor([[0, 2]]), 4)
    with pytest.raises(AssertionError, match="beyond the cache"):
        kernels_for("cpu").dense_mla(
            torch.zeros(1, 1, 4), torch.zeros(2, 4, 4), beyond, scale=1.0, kv_lora_rank=4
        )


@pytest.mark.parametrize("counts", [[], [0], [0, 0]])
def test_an_empty_step_gives_nothing_and_pads_with_zeros(counts: list[int]) -> None:
    empty = plan(counts, [3] * len(counts))
    assert (empty.tokens, empty.tiles, empty.max_kv_tokens) == (0, 0, 0)
    kernels = kernels_for("cpu")
    q, cache = torch.ones(2, 1, 4), torch.ones(2, 4, 4)
    out = torch.full((2, 1, 3), 5.0)
    assert kernels.dense_mla(q, cache, empty, scale=1.0, kv_lora_rank=3, out=out) is out
    assert not out.any()
    selected = torch.full((2, 5), 7, dtype=torch.int32)
    assert not kernels.sparse_mla(q, cache, empty, selected, scale=1.0, kv_lora_rank=3).any()
    kernels.index_topk(q, torch.ones(2, 1), cache, empty, 5, selected, quantised=False)
    assert (selected == 7).all()


def test_results_go_into_the_given_tensor_whatever_its_layout_and_dtype() -> None:
    kernels = kernels_for("cpu")
    torch.manual_seed(0)
    step = plan([6, 2], [10, 9])
    q, cache = torch.randn(8, 2, 6), torch.randn(16, 4, 6)
    want = kernels.dense_mla(q, cache, step, scale=1.0, kv_lora_rank=4)
    wide = torch.full((8, 2, 7), 9.0, dtype=torch.bfloat16)
    kernels.dense_mla(q, cache, step, scale=1.0, kv_lora_rank=4, out=wide[..., :4])
    assert torch.equal(wide[..., :4], want.bfloat16())
    assert (wide[..., 4:] == 9).all()
    columns = torch.full((8, 9), 9, dtype=torch.int32)
    kernels.index_topk(q, torch.ones(8, 2), cache, step, 3, columns[:, :5], quantised=False)
    assert (columns[:, 5:] == 9).all()
    assert (columns[:, 3:5] == -1).all()
    assert ((columns[:, :3] >= 0) & (columns[:, :3] <= step.token_position[:, None])).all()


def test_only_the_cpu_has_kernels_so_far() -> None:
    for device in ("cuda", "npu"):
        with pytest.raises(NotImplementedError, match=device):
            kernels_for(device)


@pytest.fixture
def three_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def test_threads_change_no_bit(three_threads: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel, "_WORTH_A_THREAD", 1)
    kernels = kernels_for("cpu")
    torch.manual_seed(1)
    step = plan([20, 1, 7], [32, 9, 30])
    q, cache, weights = torch.randn(28, 3, 12), torch.randn(24, 4, 12), torch.randn(28, 3)

    def results() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        selected = torch.empty(28, 6, dtype=torch.int32)
        kernels.index_topk(q, weights, cache, step, 6, selected, quantised=False)
        dense = kernels.dense_mla(q, cache, step, scale=0.5, kv_lora_rank=8)
        return selected, dense, kernels.sparse_mla(q, cache, step, selected, scale=0.5, kv_lora_rank=8)

    many = results()
    torch.set_num_threads(1)
    for a, b in zip(many, results(), strict=True):
        assert torch.equal(a, b)


def test_every_share_is_run_once_and_a_failure_comes_back(three_threads: None) -> None:
    seen: list[tuple[int, int, str]] = []
    run_shares(lambda *call: seen.append(call), ("x",), shares=8, multiply_adds=10**9)
    assert sorted(seen) == [(0, 3, "x"), (1, 3, "x"), (2, 3, "x")]
    seen.clear()
    run_shares(lambda *call: seen.append(call), ("x",), shares=2, multiply_adds=10**9)
    assert sorted(seen) == [(0, 2, "x"), (1, 2, "x")]

    seen.clear()
    run_shares(lambda *call: seen.append(call), ("x",), shares=8, multiply_adds=1000)
    assert seen == [(0, 1, "x")], "too little work for a second thread"

    def fail(worker: int, workers: int) -> None:
        if worker == 2:
            raise MemoryError("of worker 2")

    with pytest.raises(MemoryError, match="of worker 2"):
        run_shares(fail, (), shares=8, multiply_adds=10**9)


@pytest.mark.skipif(
    not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) < 2, reason="needs two CPUs"
)
def test_helpers_leave_the_one_cpu_their_caller_is_bound_to() -> None:
    """As under vLLM, which binds the calling thread and each OpenMP thread to a CPU of its own."""
    script = """
import os, threading, torch
from kvstrata.kernels.parallel import run_shares
first, second = sorted(os.sched_getaffinity(0))[:2]
done = threading.Event()
bound = threading.Event()
def other():
    os.sched_setaffinity(0, {second}); bound.set(); done.wait(60)
threading.Thread(target=other, daemon=True).start()
assert bound.wait(60)
for task in os.listdir("/proc/self/task"):
    if os.sched_getaffinity(int(task)) != {second}:
        os.sched_setaffinity(int(task), {first})
torch.set_num_threads(2)
masks = {}
def note(worker, workers):
    masks[worker] = os.sched_getaffinity(0)
run_shares(note, (), shares=2, multiply_adds=10**9)
done.set()
assert masks == {0: {first}, 1: {first, second}}, masks
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


def test_one_machine_code_serves_every_dtype_and_layout() -> None:
    """Compiled twice for different layouts, the same input could give different bits."""
    kernels = kernels_for("cpu")
    step = plan([3], [9])
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        for cache in (torch.zeros(8, 4, 6, dtype=dtype), torch.zeros(8, 2, 4, 9, dtype=dtype)[:, 1, :, :6]):
            q = torch.ones(3, 4, 6, dtype=dtype).transpose(0, 1)[:3]
            q = q[:, :2]
            selected = torch.empty(3, 9, dtype=torch.int32)[:, :4]
            kernels.index_topk(q, torch.ones(3, 2), cache, step, 4, selected, quantised=False)
            kernels.dense_mla(q, cache, step, scale=1.0, kv_lora_rank=4)
            kernels.sparse_mla(q, cache, step, selected, scale=1.0, kv_lora_rank=4)
    packed = torch.zeros(8, 4, 10, dtype=torch.uint8)
    kernels.index_topk(q, torch.ones(3, 2), packed, step, 4, selected, quantised=True)
    assert len(attend_tiles.signatures) == 1
    assert len(index_tiles.signatures) == 1
