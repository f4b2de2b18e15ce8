"""What the indexer almost selected: the next best positions, tie for tie; the selection does not move."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernels_reference import Request, best, index_scores, page, requests

from kvstrata.kernels.batch import plan_batch
from kvstrata.kernels.indexer import index_topk

UNTOUCHED = 77


@settings(max_examples=40, deadline=None)
@given(
    batch=requests(max_history=150, max_new=5),
    topk=st.integers(1, 60),
    beyond=st.integers(1, 60),
    ties=st.booleans(),
    strided=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_near_misses_are_the_next_best_and_leave_the_selection_alone(
    batch: list[Request], topk: int, beyond: int, ties: bool, strided: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    keys = [
        torch.randint(-1, 2, (r.length, 16)).float()
        if ties
        else torch.randint(-64, 65, (r.length, 16)).float()
        for r in batch
    ]
    paged = page(batch, keys, 16, strided=strided, seed=seed)
    tokens = paged.tokens()
    q = torch.randint(-8, 9, (len(tokens), 3, 16)).float()
    weights = torch.randint(-1, 3, (len(tokens), 3)).float()
    plan = plan_batch(
        paged.query_start_loc, paged.seq_lens, paged.block_table, paged.block_tokens, tile_tokens=4
    )
    alone = torch.full((len(tokens), topk), UNTOUCHED, dtype=torch.int32)
    index_topk(q, weights, paged.cache, plan, topk, alone, quantised=False)
    out = torch.full_like(alone, UNTOUCHED)
    near = torch.full((len(tokens) + 1, 2 * beyond if strided else beyond), UNTOUCHED, dtype=torch.int32)
    wanted = near[:, ::2] if strided else near
    index_topk(q, weights, paged.cache, plan, topk, out, quantised=False, near=wanted)

    assert torch.equal(out, alone)
    assert (near[-1] == UNTOUCHED).all(), "rows beyond the step's tokens are left alone"
    if strided:
        assert (near[:, 1::2] == UNTOUCHED).all(), "what lies between the columns is left alone"
    for t, (request, position) in enumerate(tokens):
        scores = index_scores(q[t], weights[t], keys[request][: position + 1])
        expected = sorted(set(best(scores, topk + beyond)) - set(best(scores, topk)))
        assert wanted[t].tolist() == expected + [-1] * (beyond - len(expected))
