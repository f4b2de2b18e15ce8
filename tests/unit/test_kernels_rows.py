"""Writing and reading rows of a paged cache, quantised or not."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from kvstrata.kernels.attention import dense_mla, sparse_mla
from kvstrata.kernels.batch import plan_batch
from kvstrata.kernels.indexer import index_topk
from kvstrata.kernels.quantise import quantise_rows, write_quantised_rows
from kvstrata.kernels.rows import gather_rows, write_rows


def strided_cache(blocks: int, block_tokens: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    """Blocks with a gap as large as themselves between them."""
    return torch.zeros(blocks, 2, block_tokens, width, dtype=dtype)[:, 1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("block_tokens", [1, 7, 16])
def test_rows_land_at_their_slots_and_nowhere_else(dtype: torch.dtype, block_tokens: int) -> None:
    cache = strided_cache(6, block_tokens, 5, dtype)
    rows = torch.randn(4, 5)
    slots = torch.tensor([5 * block_tokens, -1, 2 * block_tokens + block_tokens - 1])
    write_rows(cache, rows, slots)
    want = torch.zeros(6 * block_tokens, 5, dtype=dtype)
    want[slots[0]] = rows[0].to(dtype)
    want[slots[2]] = rows[2].to(dtype)
    assert torch.equal(cache.reshape(-1, 5), want)
    ids = slots[[2, 0]].view(2, 1)
    assert torch.equal(gather_rows(cache, ids), want[ids])


@pytest.mark.parametrize("slots", [[], [-1], [-1, -1, -1]])
def test_nothing_to_write_writes_nothing(slots: list[int]) -> None:
    cache = strided_cache(2, 4, 3, torch.float32)
    write_rows(cache, torch.ones(len(slots), 3), torch.tensor(slots, dtype=torch.int64))
    assert not cache.any()


def test_a_slot_beyond_the_cache_is_refused() -> None:
    with pytest.raises(IndexError):
        write_rows(torch.zeros(2, 4, 3), torch.ones(1, 3), torch.tensor([8]))


def test_quantised_layout_is_values_then_a_float32_scale() -> None:
    cache = strided_cache(3, 4, 3 + 4, torch.uint8)
    write_quantised_rows(cache, torch.tensor([[254.0, -127.0, 3.0], [9.0, 9.0, 9.0]]), torch.tensor([6, -1]))
    row = cache[1, 2].numpy()
    assert row[:3].view(np.int8).tolist() == [127, -64, 2]  # 63.5 and 1.5 go to the even neighbour
    assert row[3:].copy().view(np.float32).tolist() == [2.0]
    cache[1, 2] = 0
    assert not cache.any()


@pytest.mark.parametrize("tiny", [0.0, 1e-45, 1e-40])
def test_a_row_of_nearly_nothing_has_no_nan(tiny: float) -> None:
    values, scale = quantise_rows(torch.full((1, 8), tiny))
    assert torch.isfinite(scale).all()
    assert (values.float() * scale).abs().max() <= 2 * tiny
    assert tiny > 0 or not values.any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_16_bit_pattern_is_read_as_its_value(dtype: torch.dtype) -> None:
    """A token alone in its request attends to itself alone: the result is its own row, exactly."""
    rows = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype).view(1024, 64)
    finite = torch.isfinite(rows).all(dim=1)
    assert 0 < int(finite.sum()) < 1024
    ones = torch.ones(1024, dtype=torch.int32)
    table = torch.arange(1024, dtype=torch.int32)[:, None]
    plan = plan_batch(torch.arange(1025), ones, table, 1)
    got = dense_mla(torch.zeros(1024, 1, 64), rows[:, None], plan, scale=1.0, kv_lora_rank=64)[:, 0]
    assert torch.equal(got[finite], rows[finite].float())
    assert not torch.isfinite(got[~finite]).any(), "infinity and NaN may not turn into numbers"


def test_addresses_beyond_two_to_the_31(tmp_path: Path) -> None:
    """A sparse file stands in for a cache whose second block starts beyond 2^31 elements."""
    far = 2**31 + 4096
    memory = np.memmap(tmp_path / "cache", dtype=np.uint16, mode="w+", shape=(far + 4 * 8,))
    cache = torch.from_numpy(memory).view(torch.bfloat16).as_strided((2, 4, 8), (far, 8, 1))
    rows = torch.randn(4, 8).bfloat16()
    write_rows(cache, rows, torch.arange(4, 8))
    assert torch.equal(torch.from_numpy(memory[far : far + 32]).view(torch.bfloat16).view(4, 8), rows)
    assert torch.equal(gather_rows(cache, torch.arange(4, 8)), rows)

    near = torch.zeros(1, 4, 8, dtype=torch.bfloat16)
    near[0] = rows
    q = torch.randn(1, 2, 8).bfloat16()
    results = []
    for where, block in ((near, 0), (cache, 1)):
        plan = plan_batch(torch.tensor([0, 1]), torch.tensor([4]), torch.tensor([[block]]), 4)
        selected = torch.empty(1, 2, dtype=torch.int32)
        index_topk(q, torch.ones(1, 2), where, plan, 2, selected, quantised=False)
        dense = dense_mla(q, where, plan, scale=1.0, kv_lora_rank=6)
        sparse = sparse_mla(q, where, plan, selected, scale=1.0, kv_lora_rank=6)
        results.append((selected, dense, sparse))
    for here, there in zip(*results, strict=True):
        assert torch.equal(here, there)
    assert results[0][1].any()
