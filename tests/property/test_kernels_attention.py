"""Dense and sparse MLA against the slow reference, on ragged batches among poisoned blocks."""

from __future__ import annotations

import itertools
import math

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernels_reference import BLOCK_TOKENS, Paged, Request, attend, page, requests

from kvstrata.kernels.attention import dense_mla, join_parts, sparse_mla
from kvstrata.kernels.batch import BatchPlan, plan_batch, plan_selection

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


def flat(rows: torch.Tensor, counts: list[int]) -> tuple[torch.Tensor, BatchPlan]:
    """Rows that lie in one piece, and sources of `counts` query tokens each that may select any of them."""
    table = np.zeros((len(counts), 1), dtype=np.int32)
    ends = np.full(len(counts), len(rows), dtype=np.int64)
    plan = plan_selection(np.array(counts, dtype=np.int64), table, len(rows), ends, tile_tokens=4)
    return rows.unsqueeze(0), plan


@settings(max_examples=30, deadline=None)
@given(
    counts=st.lists(st.integers(0, 9), min_size=1, max_size=4),
    length=st.integers(1, 60),
    topk=st.integers(1, 40),
    heads=st.integers(1, 6),
    dtype=dtypes,
    seed=st.integers(0, 2**31),
)
def test_a_selection_from_rows_in_one_piece_equals_the_reference_and_so_does_its_lse(
    counts: list[int], length: int, topk: int, heads: int, dtype: torch.dtype, seed: int
) -> None:
    torch.manual_seed(seed)
    width, rank, tokens = 80, 64, sum(counts)
    rows = torch.randn(length, width).to(dtype)
    cache, plan = flat(rows, counts)
    q = torch.randn(tokens + 2, heads, width).to(dtype)
    chosen = torch.randint(0, length, (tokens, topk), dtype=torch.int32)
    chosen[torch.rand(chosen.shape) < 0.4] = -1
    lse = torch.full((tokens + 2, heads), 77.0)
    got = sparse_mla(q, cache, plan, chosen, scale=0.1, kv_lora_rank=rank, lse=lse)
    assert (lse[tokens:] == 77.0).all(), "padding has none"
    for t in range(tokens):
        positions = [p for p in chosen[t].tolist() if p >= 0]
        want = attend(q[t], rows, positions, 0.1, rank)
        torch.testing.assert_close(got[t].double(), want, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
        for h in range(heads):
            scores = [0.1 * float(q[t, h].double() @ rows[p].double()) for p in positions]
            wanted = math.log(sum(map(math.exp, scores))) if scores else -math.inf
            assert lse[t, h] == wanted or abs(float(lse[t, h]) - wanted) < 1e-4


@settings(max_examples=30, deadline=None)
@given(
    tokens=st.integers(1, 9),
    length=st.integers(1, 80),
    pieces=st.integers(1, 5),
    heads=st.integers(1, 4),
    magnitude=st.sampled_from([1.0, 30.0]),
    seed=st.integers(0, 2**31),
)
def test_parts_joined_are_attention_over_all_their_rows(
    tokens: int, length: int, pieces: int, heads: int, magnitude: float, seed: int
) -> None:
    torch.manual_seed(seed)
    rows = torch.randn(length, 80) * magnitude
    cache, plan = flat(rows, [tokens])
    q = torch.randn(tokens, heads, 80)
    chosen = torch.full((tokens, length), -1, dtype=torch.int32)
    for t in range(tokens):
        picked = torch.randperm(length)[: int(torch.randint(0, length + 1, ()))].sort().values
        chosen[t, : len(picked)] = picked.to(torch.int32)
    lse = torch.empty(tokens, heads)
    whole = sparse_mla(q, cache, plan, chosen, scale=0.1, kv_lora_rank=64, lse=lse)
    owner = torch.randint(0, pieces, (length,))
    out, joined = torch.zeros(tokens, heads, 64), torch.full((tokens, heads), -torch.inf)
    for piece in range(pieces):  # some hold nothing for some tokens
        mine = torch.where((chosen >= 0) & (owner[chosen.clamp(min=0).long()] == piece), chosen, -1)
        part_lse = torch.empty(tokens, heads)
        part = sparse_mla(q, cache, plan, mine.to(torch.int32), scale=0.1, kv_lora_rank=64, lse=part_lse)
        join_parts(out, joined, part, part_lse)
    torch.testing.assert_close(out, whole, rtol=1e-4, atol=1e-4 * magnitude)
    torch.testing.assert_close(joined, lse, rtol=1e-4, atol=1e-4)
    assert not out.isnan().any()


def test_parts_over_nothing_change_nothing_and_nothing_stays_zero() -> None:
    nothing = torch.zeros(1, 1, 4), torch.full((1, 1), -torch.inf)
    some = torch.tensor([[[1.0, -2.0, 3.0, 4.0]]]), torch.tensor([[0.5]])
    for first, second in ((some, nothing), (nothing, some)):
        out, lse = first[0].clone(), first[1].clone()
        join_parts(out, lse, second[0].clone(), second[1].clone())
        assert torch.equal(out, some[0])
        assert torch.equal(lse, some[1])
    out, lse = nothing[0].clone(), nothing[1].clone()
    join_parts(out, lse, nothing[0].clone(), nothing[1].clone())
    assert torch.equal(out, nothing[0])
    assert torch.equal(lse, nothing[1])


def test_a_part_that_outweighs_another_beyond_float32_keeps_its_bits() -> None:
    small, large = torch.full((1, 1, 2), 5.0), torch.tensor([[[0.25, -8.0]]])
    for swap in (False, True):
        sides = [(small.clone(), torch.tensor([[-300.0]])), (large.clone(), torch.tensor([[300.0]]))]
        (out, lse), (part, part_lse) = reversed(sides) if swap else sides
        join_parts(out, lse, part, part_lse)
        assert torch.equal(out, large)
        assert lse.item() == 300.0
