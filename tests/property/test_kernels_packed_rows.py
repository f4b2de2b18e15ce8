"""SFA-C8 main rows: where each byte lies, how far values move, and attention against the slow reference."""

from __future__ import annotations

import itertools
import struct

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernels_reference import BLOCK_TOKENS, Paged, Request, attend, page, requests

from kvstrata.kernels import attention
from kvstrata.kernels.base import PackedCpuKernels, kernels_for
from kvstrata.kernels.batch import BatchPlan, plan_batch
from kvstrata.kernels.packed_rows import PackedRows
from kvstrata.kernels.rows import write_rows
from kvstrata.kernels.warmup import warm_up

# Latent and rope values: several groups, one group, no multiple of 4, odd rope parts.
SHAPES = ((512, 64), (256, 16), (128, 3), (64, 16), (100, 32), (130, 5), (5, 1))
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
dtypes = st.sampled_from(list(TOLERANCE))
shapes = st.sampled_from(SHAPES)


def layout_of(shape: tuple[int, int], dtype: torch.dtype) -> PackedRows:
    return PackedRows(kv_lora_rank=shape[0], rope=shape[1], rope_dtype=dtype)


def random_parts(length: int, layout: PackedRows) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of the model's dtype whose groups differ in magnitude by orders."""
    latent = torch.randn(length, layout.kv_lora_rank) * 4.0 ** torch.randint(-3, 3, (length, 1))
    latent[:, layout.kv_lora_rank // 2 :] *= 16
    return latent.to(layout.rope_dtype), torch.randn(length, layout.rope).to(layout.rope_dtype)


def naive_row(latent: list[float], rope: bytes) -> tuple[bytes, list[float]]:
    """One packed row and what its latent values became, an element at a time."""
    rank = len(latent)
    group = 128 if rank % 128 == 0 else rank
    values, scales, kept = b"", b"", []
    for low in range(0, rank, group):
        part = latent[low : low + group]
        largest = np.float32(max(abs(x) for x in part))
        scale = np.float32(largest / np.float32(127))
        steps = [round(float(np.float32(x) / scale)) if scale else 0 for x in part]
        values += struct.pack(f"<{len(part)}b", *steps)
        scales += struct.pack("<f", scale)
        kept += [float(np.float32(step) * scale) for step in steps]
    row = values + bytes(-rank % 4) + scales + rope
    return row + bytes(-len(row) % 4), kept


def naive_rows(latent: torch.Tensor, rope: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Packed rows [T, row_bytes] and the rows that attention must see, [T, width] float32."""
    stored, seen = [], []
    for t in range(len(latent)):
        row, kept = naive_row(latent[t].tolist(), rope[t].contiguous().view(torch.uint8).numpy().tobytes())
        stored.append(list(row))
        seen.append(kept + rope[t].tolist())
    return torch.tensor(stored, dtype=torch.uint8), torch.tensor(seen, dtype=torch.float32)


def test_a_deepseek_row_takes_656_bytes() -> None:
    assert layout_of((512, 64), torch.bfloat16).row_bytes == 512 + 4 * 4 + 64 * 2
    assert layout_of((512, 64), torch.float32).row_bytes == 512 + 4 * 4 + 64 * 4


def test_layouts_of_equal_bytes_have_different_names() -> None:
    assert layout_of((512, 64), torch.bfloat16).name != layout_of((512, 64), torch.float16).name


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
def test_every_byte_of_a_packed_row_is_where_the_layout_says(
    shape: tuple[int, int], dtype: torch.dtype
) -> None:
    torch.manual_seed(1)
    layout = layout_of(shape, dtype)
    latent, rope = random_parts(5, layout)
    latent[3, : shape[0] // 2] = 0
    packed = layout.pack(latent, rope)
    assert packed.shape == (5, layout.row_bytes)
    assert layout.row_bytes % 4 == 0
    assert torch.equal(packed, naive_rows(latent, rope)[0])


@settings(max_examples=40, deadline=None)
@given(
    shape=shapes, dtype=dtypes, exponent=st.integers(-20, 12), rows=st.integers(0, 4), seed=st.integers(0, 99)
)
def test_a_value_moves_by_at_most_a_127th_of_its_groups_largest(
    shape: tuple[int, int], dtype: torch.dtype, exponent: int, rows: int, seed: int
) -> None:
    """Read back through attention: a token alone in its request attends to its own row alone."""
    torch.manual_seed(seed)
    layout = layout_of(shape, dtype)
    rank = shape[0]
    latent = (torch.randn(rows, rank) * 2.0**exponent).to(dtype)
    packed = layout.pack(latent, torch.randn(rows, shape[1]).to(dtype))
    plan = plan_batch(
        torch.arange(rows + 1), torch.ones(rows), torch.arange(rows, dtype=torch.int32)[:, None], 1
    )
    got = kernels_for("cpu", layout).dense_mla(
        torch.zeros(rows, 1, layout.width), packed[:, None], plan, scale=1.0, kv_lora_rank=rank
    )[:, 0]
    for low in range(0, rank, 128 if rank % 128 == 0 else rank):
        part = slice(low, low + (128 if rank % 128 == 0 else rank))
        largest = latent[:, part].float().abs().amax(dim=1, keepdim=True)
        assert ((got[:, part] - latent[:, part].float()).abs() <= largest / 127).all()


def build(
    batch: list[Request], layout: PackedRows, block_tokens: int, strided: bool, seed: int
) -> tuple[Paged, list[torch.Tensor]]:
    """Packed pages, and per request the float32 rows that they stand for."""
    torch.manual_seed(seed)
    rows = [naive_rows(*random_parts(r.length, layout)) for r in batch]
    paged = page(batch, [stored for stored, _ in rows], block_tokens, strided=strided, seed=seed)
    return paged, [seen for _, seen in rows]


def plan_of(paged: Paged) -> BatchPlan:
    return plan_batch(
        paged.query_start_loc, paged.seq_lens, paged.block_table, paged.block_tokens, tile_tokens=4
    )


def assert_near(got: torch.Tensor, want: torch.Tensor, rows: torch.Tensor, dtype: torch.dtype) -> None:
    """To the tolerance of values of about 1, times the largest value there is."""
    bound = TOLERANCE[dtype] * max(1.0, float(rows.abs().max()))
    assert float((got.double() - want).abs().max()) <= bound


@settings(max_examples=30, deadline=None)
@given(
    batch=requests(max_history=90, max_new=5),
    shape=shapes,
    heads=st.integers(1, 5),
    dtype=dtypes,
    block_tokens=st.sampled_from(BLOCK_TOKENS),
    topk=st.integers(1, 80),
    strided=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_dense_and_sparse_over_packed_pages_equal_the_reference_over_what_the_rows_stand_for(
    batch: list[Request],
    shape: tuple[int, int],
    heads: int,
    dtype: torch.dtype,
    block_tokens: int,
    topk: int,
    strided: bool,
    seed: int,
) -> None:
    layout = layout_of(shape, dtype)
    paged, rows = build(batch, layout, block_tokens, strided, seed)
    kernels = PackedCpuKernels(layout)
    tokens = paged.tokens()
    scale = 0.05 * layout.width**-0.5
    q = torch.randn(len(tokens) + 1, heads, layout.width).to(dtype)
    plan = plan_of(paged)
    dense = kernels.dense_mla(q, paged.cache, plan, scale=scale, kv_lora_rank=layout.kv_lora_rank)
    assert dense.dtype == dtype
    assert not dense[len(tokens) :].any(), "padding rows give zeros"
    chosen = torch.full((len(tokens), topk), -1, dtype=torch.int32)
    for t, (_, position) in enumerate(tokens):
        picked = torch.randperm(position + 1)[:topk]
        chosen[t, torch.randperm(topk)[: picked.shape[0]]] = picked.to(torch.int32)
    sparse = kernels.sparse_mla(q, paged.cache, plan, chosen, scale=scale, kv_lora_rank=layout.kv_lora_rank)
    for t, (request, position) in enumerate(tokens):
        everything = list(range(position + 1))
        some = [p for p in chosen[t].tolist() if p >= 0]
        for got, positions in ((dense[t], everything), (sparse[t], some)):
            want = attend(q[t], rows[request], positions, scale, layout.kv_lora_rank)
            assert_near(got, want, rows[request], dtype)


@pytest.mark.parametrize("part", ["a value", "a scale", "a rope value"])
def test_the_comparison_sees_one_wrong_byte(part: str) -> None:
    layout = layout_of((256, 16), torch.float32)
    paged, rows = build([Request(history=0, new=1)], layout, 1, False, 7)
    block = int(paged.block_table[0, 0])
    at, bit = {"a value": (130, 0x40), "a scale": (256 + 4 + 3, 0x01), "a rope value": (264 + 3, 0x80)}[part]
    paged.cache[block, 0, at] ^= bit
    q = torch.ones(1, 1, layout.width)
    lse = torch.empty(1, 1)
    got = PackedCpuKernels(layout).sparse_mla(
        q,
        paged.cache,
        plan_of(paged),
        torch.zeros(1, 1, dtype=torch.int32),
        scale=1.0,
        kv_lora_rank=256,
        lse=lse,
    )
    want = attend(q[0], rows[0], [0], 1.0, 256)
    wrong_value = float((got[0].double() - want).abs().max()) > 1e-3
    wrong_score = abs(float(lse[0, 0]) - float(q[0, 0].double() @ rows[0][0].double())) > 1e-3
    assert wrong_value == (part != "a rope value")
    assert wrong_score


@settings(max_examples=20, deadline=None)
@given(
    length=st.integers(2, 120),
    cuts=st.lists(st.integers(1, 119), max_size=3),
    shape=shapes,
    dtype=dtypes,
    blocks=st.tuples(st.sampled_from(BLOCK_TOKENS), st.sampled_from(BLOCK_TOKENS)),
    seed=st.integers(0, 2**31),
)
def test_chunking_company_and_pages_change_no_bit_and_selecting_everything_is_dense(
    length: int,
    cuts: list[int],
    shape: tuple[int, int],
    dtype: torch.dtype,
    blocks: tuple[int, int],
    seed: int,
) -> None:
    torch.manual_seed(seed)
    layout = layout_of(shape, dtype)
    kernels = PackedCpuKernels(layout)
    rank = layout.kv_lora_rank
    rows = layout.pack(*random_parts(length, layout))
    other = layout.pack(*random_parts(12, layout))
    q = torch.randn(length, 3, layout.width).to(dtype)
    chosen = torch.arange(length, dtype=torch.int32).repeat(length, 1)
    chosen[chosen > torch.arange(length)[:, None]] = -1
    whole = page([Request(history=0, new=length)], [rows], blocks[0], strided=False, seed=seed)
    dense = kernels.dense_mla(q, whole.cache, plan_of(whole), scale=0.05, kv_lora_rank=rank)
    sparse = kernels.sparse_mla(q, whole.cache, plan_of(whole), chosen, scale=0.05, kv_lora_rank=rank)
    assert torch.equal(dense, sparse)
    edges = [0, *sorted({c for c in cuts if c < length}), length]
    for low, high in itertools.pairwise(edges):
        batch = [Request(history=9, new=3), Request(history=low, new=high - low)]
        part = page(batch, [other, rows[:high]], blocks[1], strided=True, seed=seed + 1)
        q_part = torch.cat((torch.randn(3, 3, layout.width).to(dtype), q[low:high]))
        got = kernels.dense_mla(q_part, part.cache, plan_of(part), scale=0.05, kv_lora_rank=rank)
        assert torch.equal(got[3:], dense[low:high])


def test_packed_rows_are_written_by_slot_as_they_are() -> None:
    layout = layout_of((128, 3), torch.bfloat16)
    rows = layout.pack(*random_parts(3, layout))
    cache = torch.zeros(2, 4, layout.row_bytes, dtype=torch.uint8)
    write_rows(cache, rows, torch.tensor([6, -1, 1]))
    assert torch.equal(cache[1, 2], rows[0])
    assert torch.equal(cache[0, 1], rows[2])
    cache[1, 2] = cache[0, 1] = 0
    assert not cache.any()


def test_another_cache_than_the_layouts_is_not_read() -> None:
    layout = layout_of((128, 16), torch.float32)
    for cache in (
        torch.zeros(2, 4, layout.row_bytes),
        torch.zeros(2, 4, layout.row_bytes + 4, dtype=torch.uint8),
        torch.zeros(2, 4, layout.row_bytes + 4, dtype=torch.uint8).flatten(1)[:, 1 : 1 + 4 * layout.row_bytes]
        .unflatten(1, (4, layout.row_bytes)),
    ):  # fmt: skip
        with pytest.raises(AssertionError):
            layout.flat(cache)


def test_packed_rows_need_no_compilation_of_their_own_once_warm() -> None:
    warm_up(kernels_for("cpu"))
    before = len(attention.attend_tiles.signatures)
    layout = layout_of((128, 16), torch.bfloat16)
    paged, _ = build([Request(history=3, new=2)], layout, 4, True, 1)
    q = torch.ones(2, 1, layout.width)
    PackedCpuKernels(layout).dense_mla(q, paged.cache, plan_of(paged), scale=1.0, kv_lora_rank=128)
    assert len(attention.attend_tiles.signatures) == before >= 1
