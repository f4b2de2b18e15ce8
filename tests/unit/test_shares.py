"""Which blocks travel between which ranks, and when they are ready."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.core.layers import Component
from kvstrata.core.shares import (
    Topology,
    control_port,
    member_blocks,
    overlap,
    ready_blocks,
    split_blocks,
)
from kvstrata.errors import ConfigurationError

MAIN, INDEXER = Component.MAIN, Component.INDEXER


def blocks_of(*ranges: tuple[int, int]) -> list[int]:
    return [block for first, end in ranges for block in range(first, end)]


def supplied(component: Component, member: int, members: int, first: int, end: int) -> list[int]:
    """Blocks that a member sends to a consumer that keeps main KV for itself."""
    return blocks_of(
        member_blocks(component, first, end, member=member, members=members, main_rank=0, main_ranks=1)
    )


def test_ten_blocks_over_four_ranks() -> None:
    assert split_blocks(0, 10, 4) == ((0, 3), (3, 6), (6, 8), (8, 10))


def test_one_block_that_starts_at_five_is_rank_ones_alone() -> None:
    assert [blocks_of(share) for share in split_blocks(5, 1, 4)] == [[], [5], [], []]


def test_the_first_owner_rotates_with_the_start() -> None:
    owners = [
        next(rank for rank, (first, end) in enumerate(split_blocks(start, 1, 4)) if end > first)
        for start in range(8)
    ]
    assert owners == [0, 1, 2, 3, 0, 1, 2, 3]


@given(start=st.integers(0, 1 << 40), count=st.integers(0, 200), ranks=st.integers(1, 40))
def test_shares_are_disjoint_complete_even_and_in_turn(start: int, count: int, ranks: int) -> None:
    shares = split_blocks(start, count, ranks)
    in_turn = [shares[(start + turn) % ranks] for turn in range(ranks)]
    assert len(shares) == ranks
    assert blocks_of(*in_turn) == list(range(start, start + count))
    assert all(before[1] == after[0] for before, after in itertools.pairwise(in_turn))
    lengths = [end - first for first, end in in_turn]
    assert max(lengths) - min(lengths) <= 1
    assert lengths == sorted(lengths, reverse=True)


@pytest.mark.parametrize(("start", "count", "ranks"), [(-1, 1, 1), (0, -1, 1), (0, 1, 0)])
def test_a_split_of_nonsense_is_refused(start: int, count: int, ranks: int) -> None:
    with pytest.raises(ValueError, match="must be at least"):
        split_blocks(start, count, ranks)


def test_a_split_counts_in_integers() -> None:
    with pytest.raises(TypeError, match=r"count is an integer, not 1\.0"):
        split_blocks(0, 1.0, 2)  # type: ignore[arg-type]


@given(
    part=st.tuples(st.integers(0, 20), st.integers(0, 20)).map(lambda ends: (min(ends), max(ends))),
    share=st.tuples(st.integers(0, 20), st.integers(0, 20)).map(lambda ends: (min(ends), max(ends))),
)
def test_an_overlap_holds_exactly_the_common_blocks(part: tuple[int, int], share: tuple[int, int]) -> None:
    first, end = overlap(part, share)
    assert part[0] <= first <= end <= part[1]
    assert set(range(first, end)) == set(range(*part)) & set(range(*share))


@pytest.mark.parametrize(
    ("transferred", "block_tokens", "allocated", "ready"),
    [(16, 16, [10, 11, 12], [11, 12]), (16, 32, [20, 21], [20, 21])],
)
def test_the_last_chunk_counts_begun_blocks(
    transferred: int, block_tokens: int, allocated: list[int], ready: list[int]
) -> None:
    first, end = ready_blocks(transferred, 40, block_tokens, True, len(allocated))
    assert allocated[first:end] == ready


def test_an_unfinished_chunk_counts_full_blocks_only() -> None:
    assert ready_blocks(16, 40, 16, False, 3) == (1, 2)
    assert ready_blocks(16, 40, 32, False, 2) == (0, 1)
    assert ready_blocks(16, 31, 16, False, 3) == (1, 1)


def test_a_block_that_was_sent_in_part_is_sent_again() -> None:
    assert ready_blocks(20, 40, 16, True, 3) == (1, 3)


def test_an_end_beyond_the_allocation_is_an_error() -> None:
    with pytest.raises(ValueError, match="49 tokens end in block 3, but 3 blocks of 16 tokens"):
        ready_blocks(16, 49, 16, True, 3)
    assert ready_blocks(16, 49, 16, False, 3) == (1, 3)


def test_nothing_is_ready_inside_the_consumers_own_prefix_hit() -> None:
    # Field fault: a prefix hit at decode that is not subtracted.
    assert ready_blocks(1024, 512, 16, False, 32) == (64, 64)
    assert ready_blocks(1024, 1024, 16, True, 64) == (64, 64)


def test_no_tokens_are_no_blocks() -> None:
    assert ready_blocks(0, 0, 16, True, 0) == (0, 0)


@pytest.mark.parametrize(("transferred", "computed", "block_tokens"), [(-1, 0, 16), (0, -1, 16), (0, 0, 0)])
def test_impossible_token_counts_are_refused(transferred: int, computed: int, block_tokens: int) -> None:
    with pytest.raises(ValueError, match="must be at least"):
        ready_blocks(transferred, computed, block_tokens, False, 0)


@given(
    hit=st.integers(0, 40),
    chunks=st.lists(st.integers(1, 50), min_size=1, max_size=8),
    block_tokens=st.integers(1, 20),
)
def test_chunks_together_send_every_block_from_the_hit_on_once(
    hit: int, chunks: list[int], block_tokens: int
) -> None:
    total = sum(chunks)
    allocated = -(-total // block_tokens)
    hit = min(hit, allocated)
    sent: list[int] = []
    at, computed = hit, 0
    for chunk in chunks:
        computed += chunk
        is_finished = computed == total
        first, end = ready_blocks(at * block_tokens, computed, block_tokens, is_finished, allocated)
        sent += range(first, end)
        at = max(at, end)
    assert sent == list(range(hit, allocated))


@pytest.mark.parametrize(("dp_rank", "port"), [(0, 1000), (1, 1004), (2, 1008), (3, 1012), (5, 1020)])
def test_control_ports_of_four_decode_ranks(dp_rank: int, port: int) -> None:
    assert [control_port(1000, dp_rank, 4, rank) for rank in range(4)] == list(range(port, port + 4))


@pytest.mark.parametrize(
    ("kv_port", "dp_rank", "tp_rank"), [(0, 0, 1), (-5, 2, 0), (65534, 0, 2), (65000, 134, 0), (65536, 0, 0)]
)
def test_a_port_outside_the_range_is_refused_naming_kv_port(kv_port: int, dp_rank: int, tp_rank: int) -> None:
    with pytest.raises(ConfigurationError, match=f"kv_port={kv_port} "):
        control_port(kv_port, dp_rank, 4, tp_rank)
    assert control_port(65532, 0, 4, 3) == 65535


def test_a_rank_outside_its_engine_has_no_port() -> None:
    with pytest.raises(ValueError, match=r"tp_rank 4 is outside 0\.\.3"):
        control_port(1000, 0, 4, 4)
    with pytest.raises(ValueError, match="dp_rank=-1"):
        control_port(1000, -1, 4, 0)


def test_rank_three_of_eight_feeds_rank_one_of_four_as_its_second_member() -> None:
    topology = Topology(8, 4)
    assert (topology.ratio, topology.consumer_of(3), topology.member_of(3)) == (2, 1, 1)


@pytest.mark.parametrize(("p_tp", "d_tp"), [(4, 8), (8, 3), (0, 1), (1, 0), (-2, -1)])
def test_sizes_that_do_not_divide_are_refused_with_both(p_tp: int, d_tp: int) -> None:
    with pytest.raises(ConfigurationError, match=f"size={p_tp} .*size={d_tp}:"):
        Topology(p_tp, d_tp)


def test_sizes_are_integers() -> None:
    with pytest.raises(TypeError, match="True"):
        Topology(True, 1)


@pytest.mark.parametrize("p_rank", [-1, 8])
def test_a_rank_outside_its_group_is_refused(p_rank: int) -> None:
    with pytest.raises(ValueError, match=rf"prefill rank {p_rank} is outside 0\.\.7"):
        Topology(8, 4).consumer_of(p_rank)
    with pytest.raises(ValueError, match=rf"prefill rank {p_rank} is outside 0\.\.7"):
        Topology(8, 4).member_of(p_rank)


@given(d_tp=st.integers(1, 8), ratio=st.integers(1, 8))
def test_every_prefill_rank_is_one_member_of_one_decode_rank(d_tp: int, ratio: int) -> None:
    topology = Topology(d_tp * ratio, d_tp)
    seen = {(topology.consumer_of(rank), topology.member_of(rank)) for rank in range(topology.p_tp)}
    assert seen == {(consumer, member) for consumer in range(d_tp) for member in range(ratio)}


def test_two_contributors_share_the_indexer_and_the_first_sends_main() -> None:
    assert supplied(MAIN, 0, 2, 10, 14) == [10, 11, 12, 13]
    assert supplied(INDEXER, 0, 2, 10, 14) == [10, 11]
    assert supplied(MAIN, 1, 2, 10, 14) == []
    assert supplied(INDEXER, 1, 2, 10, 14) == [12, 13]


def test_four_members_cover_the_indexer_disjointly() -> None:
    each = [supplied(INDEXER, member, 4, 10, 14) for member in range(4)]
    assert [len(blocks) for blocks in each] == [1, 1, 1, 1]
    assert sorted(block for blocks in each for block in blocks) == [10, 11, 12, 13]


def test_a_member_may_have_nothing_to_send() -> None:
    assert [len(supplied(INDEXER, member, 4, 10, 11)) for member in range(4)] == [0, 0, 1, 0]


@given(
    first=st.integers(0, 50),
    count=st.integers(0, 60),
    cuts=st.lists(st.integers(0, 60), max_size=4),
    topology=st.builds(lambda d, r: Topology(d * r, d), st.integers(1, 4), st.integers(1, 4)),
    is_shared=st.booleans(),
)
def test_all_parts_of_all_members_reach_each_block_once(
    first: int, count: int, cuts: list[int], topology: Topology, is_shared: bool
) -> None:
    end = first + count
    ends = sorted({first, end, *(min(first + cut, end) for cut in cuts)})
    parts = list(itertools.pairwise(ends))
    pool: list[int] = []
    for consumer in range(topology.d_tp):
        main: list[int] = []
        indexer: list[int] = []
        for part in parts:
            for member in range(topology.ratio):
                for component, received in ((MAIN, main), (INDEXER, indexer)):
                    share = member_blocks(
                        component, first, end, member=member, members=topology.ratio,
                        main_rank=consumer if is_shared else 0, main_ranks=topology.d_tp if is_shared else 1,
                    )  # fmt: skip
                    received += blocks_of(overlap(part, share))
        assert sorted(indexer) == list(range(first, end)), "every decode rank needs the whole indexer"
        if not is_shared:
            assert sorted(main) == list(range(first, end))
        pool += main
    if is_shared:
        assert sorted(pool) == list(range(first, end)), "the ranks fill their common pool together"


@pytest.mark.parametrize(
    ("member", "members", "main_rank", "main_ranks"),
    [(2, 2, 0, 1), (-1, 2, 0, 1), (0, 1, 2, 2), (0, 1, -1, 1)],
)
def test_a_member_or_main_rank_outside_its_group_is_refused(
    member: int, members: int, main_rank: int, main_ranks: int
) -> None:
    with pytest.raises(ValueError, match="is outside 0"):
        member_blocks(MAIN, 0, 1, member=member, members=members, main_rank=main_rank, main_ranks=main_ranks)
