"""The indexer's selection against the slow reference: exact where scores are exact, and tie for tie."""

from __future__ import annotations

import itertools

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernels_reference import BLOCK_TOKENS, Paged, Request, best, index_scores, page, requests

from kvstrata.kernels.batch import plan_batch
from kvstrata.kernels.indexer import index_topk
from kvstrata.kernels.quantise import quantise_rows, write_quantised_rows

dtypes = st.sampled_from((torch.float32, torch.bfloat16, torch.float16))


def select(
    paged: Paged, q: torch.Tensor, weights: torch.Tensor, topk: int, *, quantised: bool, tile_tokens: int = 4
) -> torch.Tensor:
    plan = plan_batch(
        paged.query_start_loc, paged.seq_lens, paged.block_table, paged.block_tokens, tile_tokens=tile_tokens
    )
    out = torch.full((q.shape[0] + 1, topk), 77, dtype=torch.int32)
    index_topk(q, weights, paged.cache, plan, topk, out, quantised=quantised)
    assert (out[-1] == 77).all(), "rows beyond the step's tokens are left alone"
    return out[:-1]


def small_integers(*shape: int) -> torch.Tensor:
    """Exact in every dtype, and so are the scores made of them; most relu terms are zero or tie."""
    return torch.randint(-1, 2, shape).float()


def pack(keys: torch.Tensor) -> torch.Tensor:
    """[n, D] float -> [n, D + 4] uint8, as stored."""
    cache = torch.zeros(1, keys.shape[0], keys.shape[1] + 4, dtype=torch.uint8)
    write_quantised_rows(cache, keys, torch.arange(keys.shape[0]))
    return cache[0]


def padded(positions: list[int], topk: int) -> list[int]:
    return positions + [-1] * (topk - len(positions))


@settings(max_examples=60, deadline=None)
@given(
    batch=requests(max_history=150, max_new=9),
    width=st.sampled_from((128, 24, 9)),
    heads=st.integers(1, 8),
    dtype=dtypes,
    topk=st.integers(1, 80),
    block_tokens=st.sampled_from(BLOCK_TOKENS),
    strided=st.booleans(),
    quantised=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_selection_is_exact_and_ties_go_to_the_lower_position(
    batch: list[Request],
    width: int,
    heads: int,
    dtype: torch.dtype,
    topk: int,
    block_tokens: int,
    strided: bool,
    quantised: bool,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    keys = [small_integers(r.length, width) for r in batch]
    if quantised:
        for k in keys:
            k[:, 0] = 127  # the scale is 1: quantisation is exact
        stored = [pack(k) for k in keys]
    else:
        stored = [k.to(dtype) for k in keys]
    paged = page(batch, stored, block_tokens, strided=strided, seed=seed)
    tokens = paged.tokens()
    q = small_integers(len(tokens), heads, width).to(dtype)
    weights = small_integers(len(tokens), heads)
    got = select(paged, q, weights, topk, quantised=quantised)
    for t, (request, position) in enumerate(tokens):
        scores = index_scores(q[t], weights[t], keys[request][: position + 1])
        assert got[t].tolist() == padded(best(scores, topk), topk)


@settings(max_examples=20, deadline=None)
@given(
    batch=requests(max_history=150, max_new=6),
    dtype=dtypes,
    topk=st.integers(1, 80),
    quantised=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_selection_of_real_scores_leaves_nothing_better_behind(
    batch: list[Request], dtype: torch.dtype, topk: int, quantised: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    keys = [torch.randn(r.length, 24) for r in batch]
    if quantised:
        stored = [pack(k) for k in keys]
        seen = [naive_round_trip(k) for k in keys]
    else:
        stored = seen = [k.to(dtype) for k in keys]
    paged = page(batch, stored, 16, strided=True, seed=seed)
    tokens = paged.tokens()
    q = torch.randn(len(tokens), 4, 24).to(dtype)
    weights = torch.randn(len(tokens), 4)
    got = select(paged, q, weights, topk, quantised=quantised)
    for t, (request, position) in enumerate(tokens):
        scores = index_scores(q[t], weights[t], seen[request][: position + 1])
        picked = [p for p in got[t].tolist() if p >= 0]
        assert picked == sorted(set(picked))
        assert len(picked) == min(topk, position + 1)
        rest = set(range(position + 1)) - set(picked)
        assert min(scores[p] for p in picked) >= max((scores[p] for p in rest), default=-1e30) - 1e-3


def naive_round_trip(k: torch.Tensor) -> torch.Tensor:
    """What LI-C8 keeps of each row, one element at a time."""
    kept = torch.zeros(k.shape, dtype=torch.float64)
    for t, row in enumerate(k.tolist()):
        scale = max(abs(x) for x in row) / 127
        for d, x in enumerate(row):
            kept[t, d] = round(x / scale) * scale if scale else 0.0
    return kept


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(0, 5),
    width=st.integers(1, 130),
    exponent=st.integers(-149, 120),
    dtype=dtypes,
    seed=st.integers(0, 2**31),
)
def test_quantised_rows_are_within_half_a_step(
    rows: int, width: int, exponent: int, dtype: torch.dtype, seed: int
) -> None:
    torch.manual_seed(seed)
    k = (torch.randn(rows, width) * 2.0**exponent).clamp(-1e38, 1e38).to(dtype)
    k = torch.where(torch.isfinite(k), k, 1.0).to(dtype)
    values, scale = quantise_rows(k)
    assert values.dtype == torch.int8
    assert scale.dtype == torch.float32
    assert torch.isfinite(scale).all()
    error = (values.double() * scale[:, None].double() - k.double()).abs()
    # A scale below float32's normal range is itself coarse: up to 127 half-steps of 2 ** -149.
    assert (error <= scale[:, None].double() * 0.50001 + 127 * 2.0**-149).all()
    if 2.0**exponent > 2.0**-100 and dtype == torch.float32:
        assert (values.abs().amax(dim=1) == 127).all() or rows == 0


@settings(max_examples=30, deadline=None)
@given(
    length=st.integers(2, 220),
    cuts=st.lists(st.integers(1, 219), max_size=4),
    heads=st.integers(1, 8),
    topk=st.integers(1, 64),
    ties=st.booleans(),
    quantised=st.booleans(),
    dtype=dtypes,
    tiles=st.tuples(st.integers(1, 32), st.integers(1, 32)),
    seed=st.integers(0, 2**31),
)
def test_chunked_and_whole_prefill_select_the_same_rows(
    length: int,
    cuts: list[int],
    heads: int,
    topk: int,
    ties: bool,
    quantised: bool,
    dtype: torch.dtype,
    tiles: tuple[int, int],
    seed: int,
) -> None:
    torch.manual_seed(seed)
    draw = small_integers if ties else torch.randn
    keys = draw(length, 64)
    rows = pack(keys) if quantised else keys.to(dtype)
    q = draw(length, heads, 64).to(dtype)
    weights = draw(length, heads)
    whole = page([Request(history=0, new=length)], [rows], 128, strided=False, seed=seed)
    want = select(whole, q, weights, topk, quantised=quantised, tile_tokens=tiles[0])
    edges = [0, *sorted({c for c in cuts if c < length}), length]
    for low, high in itertools.pairwise(edges):
        batch = [Request(history=9, new=3), Request(history=low, new=high - low)]
        part = page(batch, [rows[:1].repeat(12, 1), rows[:high]], 7, strided=True, seed=seed + 1)
        q_part = torch.cat((q[:1].repeat(3, 1, 1), q[low:high]))
        weights_part = torch.cat((weights[:1].repeat(3, 1), weights[low:high]))
        got = select(part, q_part, weights_part, topk, quantised=quantised, tile_tokens=tiles[1])
        assert torch.equal(got[3:], want[low:high])
