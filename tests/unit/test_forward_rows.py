"""Which tokens of a forward decode, and how the prompts' contexts are cut into pieces."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.move.forward_rows import ForwardRows, FreshRows, WindowLimits, WindowPass, forward_rows
from kvstrata.move.sparse_testing import Span, split

TOKENS = 4


def limits(*, window: int = 2, capacity: int = 8, topk: int = 4, decode_tokens: int = 1) -> WindowLimits:
    return WindowLimits(
        block_tokens=TOKENS,
        window_blocks=window,
        capacity=capacity,
        topk=topk,
        decode_tokens=decode_tokens,
    )


def spans(*lengths: tuple[int, int]) -> list[Span]:
    """Requests of (context, new tokens), each with blocks of its own: 100.., 200.., ..."""
    return [
        Span(blocks=range(100 * at, 100 * at + -(-(old + new) // TOKENS)), begin=old, end=old + new)
        for at, (old, new) in enumerate(lengths, start=1)
    ]


def made(*lengths: tuple[int, int], unwritten: Sequence[int] = (), **more: Any) -> ForwardRows:
    return split(spans(*lengths), limits(**more), unwritten=unwritten)


def decoding(forward: ForwardRows) -> list[list[int]]:
    return [group.tokens.tolist() for group in forward.decode]


def passes(forward: ForwardRows) -> tuple[WindowPass, ...]:
    assert forward.prompt is not None
    return forward.prompt.passes


def test_one_new_token_behind_a_context_decodes_and_all_others_are_prompts():
    forward = made((9, 1), (0, 3), (5, 2), (1, 1))
    assert decoding(forward) == [[0, 6]]
    assert forward.prompt is not None
    assert forward.prompt.tokens.tolist() == [1, 2, 3, 4, 5]
    assert forward.token_request.tolist() == [0, 1, 1, 1, 2, 2, 3]
    assert forward.context.tolist() == [9, 0, 5, 1]
    assert forward.tokens == 7


@pytest.mark.parametrize(("new", "decodes"), [(1, True), (3, True), (4, False)])
def test_drafts_under_verification_decode_up_to_the_threshold(new: int, decodes: bool):
    forward = made((9, new), decode_tokens=3, topk=2)
    assert decoding(forward) == ([list(range(new))] if decodes else [])
    assert (forward.prompt is None) is decodes


def test_a_single_token_without_context_is_a_prompt():
    forward = made((0, 1))
    assert (forward.decode, passes(forward)) == ((), ())
    assert forward.prompt is not None
    assert forward.prompt.tokens.tolist() == [0]


def test_requests_without_tokens_take_no_part_wherever_they_stand():
    forward = made((7, 0), (9, 1), (3, 0), (6, 5), (2, 0))
    assert decoding(forward) == [[0]]
    assert forward.token_request.tolist() == [1, 3, 3, 3, 3, 3]
    assert forward.context.tolist() == [0, 9, 0, 6, 0]
    (piece,) = passes(forward)
    assert piece.blocks.tolist() == [400, 401]


def test_a_forward_of_nothing_has_no_parts():
    for forward in (made(), made((5, 0))):
        assert (forward.tokens, forward.decode, forward.prompt, forward.rows.size) == (0, (), None, 0)


def test_padded_requests_may_hold_anything_as_their_length():
    forward = forward_rows(
        query_start_loc=np.array([0, 1, 1], dtype=np.int32),
        seq_lens=np.array([3, -5, 77], dtype=np.int32),
        block_table=np.array([[2], [-1], [-1]], dtype=np.int32),
        slot_mapping=np.array([10], dtype=np.int64),
        limits=limits(),
    )
    assert forward.context.tolist() == [2, 0]
    assert forward.block_table.shape == (2, 1)


def test_a_sequence_shorter_than_its_new_tokens_is_caught():
    with pytest.raises(AssertionError, match="at least as long"):
        split([Span(blocks=[1], begin=-1, end=2)], limits())


def test_written_rows_and_their_tokens_leave_out_what_has_no_slot():
    forward = made((9, 1), (0, 3), (5, 2), unwritten=[2, 4])
    assert forward.rows.tolist() == [102 * 4 + 1, 200 * 4, 200 * 4 + 2, 301 * 4 + 2]
    assert forward.row_token.tolist() == [0, 1, 3, 5]
    assert forward.tokens == 6, "they attend all the same"


def test_rows_beyond_2_to_the_31_stay_exact():
    block = (1 << 31) - 5
    forward = split([Span(blocks=[7, block], begin=5, end=6)], limits())
    assert forward.rows.tolist() == [block * TOKENS + 1]
    assert forward.rows.dtype == np.int64


@pytest.mark.parametrize(
    ("capacity", "groups"), [(4, [[0], [1], [2], [3]]), (11, [[0, 1], [2, 3]]), (16, [[0, 1, 2, 3]])]
)
def test_decode_tokens_are_grouped_so_that_their_selections_fit(capacity: int, groups: list[list[int]]):
    forward = made((9, 1), (9, 2), (5, 1), capacity=capacity, topk=4, decode_tokens=2)
    assert decoding(forward) == groups
    for group in forward.decode:
        assert (group.plan.tokens, group.plan.block_tokens) == (len(group.tokens), capacity)
        assert group.plan.max_kv_tokens == capacity


def test_a_context_passes_the_window_in_whole_blocks_in_order():
    first, second, third = passes(made((19, 3), window=2))
    assert [piece.blocks.tolist() for piece in (first, second, third)] == [[100, 101], [102, 103], [104]]
    assert [(piece.first[0], piece.end[0], piece.base[0]) for piece in (first, second, third)] == [
        (0, 8, 0),
        (8, 16, 0),
        (16, 19, 0),  # the last block is half full
    ]
    for piece in (first, second, third):
        assert piece.span == slice(0, 3)
        assert (piece.plan.tokens, piece.plan.block_tokens) == (3, 2 * TOKENS)


def test_two_requests_share_a_pass_and_one_is_cut_in_the_middle():
    first, second = passes(made((5, 2), (13, 3), window=4))
    assert first.blocks.tolist() == [100, 101, 200, 201]
    assert first.span == slice(0, 5)
    assert first.first.tolist() == [0] * 5
    assert first.end.tolist() == [5, 5, 8, 8, 8]
    assert first.base.tolist() == [0, 0, 8, 8, 8]
    assert second.blocks.tolist() == [202, 203]
    assert second.span == slice(2, 5), "the first request is through"
    assert (second.first.tolist(), second.end.tolist(), second.base.tolist()) == ([8] * 3, [13] * 3, [0] * 3)


def test_a_request_without_context_between_two_finds_nothing_in_their_pass():
    (piece,) = passes(made((4, 2), (0, 3), (3, 2), window=3))
    assert piece.blocks.tolist() == [100, 300]
    assert piece.span == slice(0, 7)
    assert piece.first.tolist() == [0] * 7
    assert piece.end.tolist() == [4, 4, 0, 0, 0, 3, 3]
    assert piece.base.tolist() == [0, 0, 0, 0, 0, 4, 4]
    assert piece.plan.token_request.tolist() == [0, 0, 1, 1, 1, 2, 2]


def test_requests_without_context_at_the_ends_are_left_out_of_a_pass():
    (piece,) = passes(made((0, 3), (4, 2), (0, 2)))
    assert piece.span == slice(3, 5)


def test_spans_count_prompt_tokens_only():
    (piece,) = passes(made((9, 1), (4, 2)))
    assert piece.span == slice(0, 2), "the token that decodes is no prompt token"


def test_a_window_of_one_block_takes_one_block_a_pass():
    found = passes(made((6, 2), (9, 2), window=1))
    assert [piece.blocks.tolist() for piece in found] == [[100], [101], [200], [201], [202]]
    assert [piece.span for piece in found] == [slice(0, 2)] * 2 + [slice(2, 4)] * 3


def test_two_requests_of_one_block_each_load_it_for_themselves():
    shared = [Span(blocks=[7, 1], begin=4, end=6), Span(blocks=[7, 2], begin=4, end=7)]
    (piece,) = passes(split(shared, limits()))
    assert piece.blocks.tolist() == [7, 7]
    assert piece.base.tolist() == [0, 0, 4, 4, 4]


@given(
    lengths=st.lists(st.tuples(st.integers(0, 30), st.integers(0, 5)), max_size=5),
    window=st.integers(1, 5),
    decode_tokens=st.integers(1, 3),
)
def test_every_context_position_of_a_prompt_token_is_in_one_pass(
    lengths: list[tuple[int, int]], window: int, decode_tokens: int
):
    batch = spans(*lengths)
    forward = split(batch, limits(window=window, decode_tokens=decode_tokens, topk=1))
    decodes = sorted(token for group in forward.decode for token in group.tokens.tolist())
    prompts = forward.prompt.tokens.tolist() if forward.prompt else []
    assert sorted(decodes + prompts) == list(range(forward.tokens)), "each token has one part"
    places: dict[int, list[tuple[int, int]]] = {at: [] for at in range(len(prompts))}
    for piece in forward.prompt.passes if forward.prompt else ():
        assert 0 < piece.blocks.size <= window
        for at, first, end, base in zip(
            range(piece.span.start, piece.span.stop), piece.first, piece.end, piece.base, strict=True
        ):
            places[at] += [
                (int(p), int(piece.blocks[(base + p - first) // TOKENS])) for p in range(first, end)
            ]
    for at, token in enumerate(prompts):
        request = int(forward.token_request[token])
        blocks, context = batch[request].blocks, batch[request].begin
        assert places[at] == [(p, blocks[p // TOKENS]) for p in range(context)]


def test_fresh_rows_are_those_of_the_current_forward():
    fresh = FreshRows(2000)
    one, two = made((9, 1), (0, 3)), made((10, 1))
    assert fresh.enter(one)
    assert not fresh.enter(one)
    assert np.flatnonzero(fresh.table >= 0).tolist() == sorted(one.rows.tolist())
    assert fresh.table[one.rows].tolist() == [0, 1, 2, 3]
    assert fresh.enter(two), "another forward takes its place"
    assert np.flatnonzero(fresh.table >= 0).tolist() == two.rows.tolist()
    fresh.leave()
    fresh.leave()
    assert (fresh.table == -1).all()
    assert fresh.enter(two), "it may come again"


def test_the_first_of_equal_forwards_stands_for_all():
    fresh = FreshRows(2000)
    one, same, other = made((9, 1)), made((9, 1)), made((8, 1))
    assert fresh.known(one) is one
    fresh.enter(one)
    assert fresh.known(same) is one
    assert fresh.known(other) is other
    fresh.leave()
    assert fresh.known(same) is same


@pytest.mark.parametrize(
    "other",
    [
        [Span(blocks=[5, 6], begin=6, end=7)],  # another context
        [Span(blocks=[5, 6], begin=5, end=7)],  # another count
        [Span(blocks=[4, 6], begin=5, end=6)],  # another block of the context
        [Span(blocks=[5, 7], begin=5, end=6)],  # another place to write
    ],
)
def test_batches_that_differ_anywhere_are_not_the_same(other: list[Span]):
    one = split([Span(blocks=[5, 6], begin=5, end=6)], limits())
    assert one.is_same_batch(split([Span(blocks=[5, 6], begin=5, end=6)], limits()))
    assert not one.is_same_batch(split(other, limits()))


def test_a_row_beyond_the_host_pool_is_refused_and_nothing_is_fresh():
    fresh = FreshRows(403)
    fresh.enter(split([Span(blocks=[3], begin=1, end=2)], limits()))
    with pytest.raises(IndexError, match=r"400\.\.403 of 403"):
        fresh.enter(split([Span(blocks=[100], begin=0, end=4)], limits()))
    assert (fresh.table == -1).all()
