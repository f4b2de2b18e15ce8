"""Dense and sparse MLA against the slow reference, on ragged batches among poisoned blocks."""

from __future__ import annotations

import itertools

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernels_reference import BLOCK_TOKENS, Paged, Request, attend, page, requests

from kvstrata.kernels.attention import dense_mla, sparse_mla
from kvstrata.kernels.batch import BatchPlan, plan_batch

WIDTHS = ((576, 512), (80, 64), (132, 100), (9, 5))
# Relative to values of about 1: float32 sums of a few hundred terms, or one rounding of the result.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
dtypes = st.sampled_from(list(TOLERANCE))


def build(
    batch: list[Request], width: int, dtype: torch.dtype, block_tokens: int, strided: bool, seed: int
) -> Paged:
    torch.manual_seed(seed)
    rows = [torch.randn(r.length, width).to(dtype) for r in batch]
    return page(batch, rows, block_tokens, strided=strided, seed=seed)


def plan_of(paged: Paged, tile_tokens: int = 4) -> BatchPlan:
    return plan_batch(
        paged.query_start_loc, paged.seq_lens, paged.block_table, paged.block_tokens, tile_tokens=tile_tokens
    )


@settings(max_examples=40, deadline=None)
@given(
    batch=requests(max_history=150, max_new=9),
    shape=st.sampled_from(WIDTHS),
    heads=st.integers(1, 6),
    dtype=dtypes,
    block_tokens=st.sampled_from(BLOCK_TOKENS),
    strided=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_dense_equals_the_reference(
    batch: list[Request],
    shape: tuple[int, int],
    heads: int,
    dtype: torch.dtype,
    block_tokens: int,
    strided: bool,
    seed: int,
) -> None:
    width, rank = shape
    paged = build(batch, width, dtype, block_tokens, strided, seed)
    tokens = paged.tokens()
    q = torch.randn(len(tokens) + 2, heads, width).to(dtype)
    scale = width**-0.5
    got = dense_mla(q, paged.cache, plan_of(paged), scale=scale, kv_lora_rank=rank)
    assert got.dtype == dtype
    assert got.shape == (len(tokens) + 2, heads, rank)
    assert not got[len(tokens) :].any(), "padding rows give zeros"
    for t, (request, position) in enumerate(tokens):
        want = attend(q[t], paged.rows[request], list(range(position + 1)), scale, rank)
        torch.testing.assert_close(got[t].double(), want, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@settings(max_examples=40, deadline=None)
@given(
    batch=requests(max_history=150, max_new=9),
    shape=st.sampled_from(WIDTHS),
    heads=st.integers(1, 6),
    dtype=dtypes,
    block_tokens=st.sampled_from(BLOCK_TOKENS),
    topk=st.integers(1, 100),
    absent=st.sampled_from((0.0, 0.4, 1.0)),
    strided=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_sparse_equals_the_reference_wherever_minus_one_stands(
    batch: list[Request],
    shape: tuple[int, int],
    heads: int,
    dtype: torch.dtype,
    block_tokens: int,
    topk: int,
    absent: float,
    strided: bool,
    seed: int,
) -> None:
    width, rank = shape
    paged = build(batch, width, dtype, block_tokens, strided, seed)
    tokens = paged.tokens()
    q = torch.randn(len(tokens), heads, width).to(dtype)
    chosen = torch.full((len(tokens) + 1, topk), -1, dtype=torch.int32)
    for t, (_, position) in enumerate(tokens):
        picked = torch.randperm(position + 1)[:topk]
        places = torch.randperm(topk)[: picked.shape[0]]
        chosen[t, places] = picked.to(torch.int32)
    chosen[torch.rand(chosen.shape) < absent] = -1
    scale = width**-0.5
    got = sparse_mla(q, paged.cache, plan_of(paged), chosen, scale=scale, kv_lora_rank=rank)
    for t, (request, _) in enumerate(tokens):
        positions = [p for p in chosen[t].tolist() if p >= 0]
        want = attend(q[t], paged.rows[request], positions, scale, rank)
        torch.testing.assert_close(got[t].double(), want, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
        assert positions or not got[t].any(), "a token that selects nothing gives zeros"


@settings(max_examples=25, deadline=None)
@given(
    batch=requests(max_history=150, max_new=9),
    heads=st.integers(1, 6),
    dtype=dtypes,
    seed=st.integers(0, 2**31),
)
def test_selecting_everything_is_dense_attention_to_the_bit(
    batch: list[Request], heads: int, dtype: torch.dtype, seed: int
) -> None:
    paged = build(batch, 80, dtype, 16, True, seed)
    tokens = paged.tokens()
    q = torch.randn(len(tokens), heads, 80).to(dtype)
    chosen = torch.full((len(tokens), 200), -1, dtype=torch.int32)
    for t, (_, position) in enumerate(tokens):
        chosen[t, 20 : 21 + position] = torch.arange(position + 1)
    plan = plan_of(paged)
    dense = dense_mla(q, paged.cache, plan, scale=0.1, kv_lora_rank=64)
    assert torch.equal(dense, sparse_mla(q, paged.cache, plan, chosen, scale=0.1, kv_lora_rank=64))


@settings(max_examples=25, deadline=None)
@given(
    length=st.integers(2, 200),
    cuts=st.lists(st.integers(1, 199), max_size=4),
    heads=st.integers(1, 6),
    dtype=dtypes,
    blocks=st.tuples(st.sampled_from(BLOCK_TOKENS), st.sampled_from(BLOCK_TOKENS)),
    tiles=st.tuples(st.integers(1, 32), st.integers(1, 32)),
    seed=st.integers(0, 2**31),
)
def test_chunking_company_and_layout_change_no_bit(
    length: int,
    cuts: list[int],
    heads: int,
    dtype: torch.dtype,
    blocks: tuple[int, int],
    tiles: tuple[int, int],
    seed: int,
) -> None:
    torch.manual_seed(seed)
    rows = torch.randn(length, 80).to(dtype)
    q = torch.randn(length, heads, 80).to(dtype)
    chosen = torch.full((length, 90), -1, dtype=torch.int32)
    for t in range(length):
        picked = torch.randperm(t + 1)[:90].sort().values
        chosen[t, : picked.shape[0]] = picked.to(torch.int32)

    whole = page([Request(history=0, new=length)], [rows], blocks[0], strided=False, seed=seed)
    plan = plan_of(whole, tiles[0])
    dense = dense_mla(q, whole.cache, plan, scale=0.1, kv_lora_rank=64)
    sparse = sparse_mla(q, whole.cache, plan, chosen, scale=0.1, kv_lora_rank=64)

    edges = [0, *sorted({c for c in cuts if c < length}), length]
    for low, high in itertools.pairwise(edges):
        # Each chunk runs behind another request's five tokens.
        batch = [Request(history=30, new=5), Request(history=low, new=high - low)]
        other = torch.randn(35, 80).to(dtype)
        part = page(batch, [other, rows[:high]], blocks[1], strided=True, seed=seed + 1)
        plan = plan_of(part, tiles[1])
        q_part = torch.cat((torch.randn(5, heads, 80).to(dtype), q[low:high]))
        chosen_part = torch.cat((chosen.new_zeros(5, 90), chosen[low:high]))
        got = dense_mla(q_part, part.cache, plan, scale=0.1, kv_lora_rank=64)
        assert torch.equal(got[5:], dense[low:high])
        got = sparse_mla(q_part, part.cache, plan, chosen_part, scale=0.1, kv_lora_rank=64)
        assert torch.equal(got[5:], sparse[low:high])
