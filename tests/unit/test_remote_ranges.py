"""From blocks of two engines to the byte ranges of a read."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.core.layers import Component
from kvstrata.errors import TransferFailed
from kvstrata.memory.pages import PageView
from kvstrata.remote.protocol.messages import ComponentLayout, Hello, Place
from kvstrata.remote.ranges import Pages, RangeRefused, Source, plan_pages, plan_reads, sources_of
from kvstrata.remote.transports.base import ReadPlan

MAIN, INDEXER = Component.MAIN, Component.INDEXER


def source(offset: int, page: int, *, stride: int = 0, blocks: int = 16, region: int = 0) -> Source:
    place = Place(region=region, offset=offset, block_stride_bytes=stride or page, num_blocks=blocks)
    return place, page


def view(address: int, page: int, *, stride: int = 0, blocks: int = 16) -> PageView:
    return PageView(address=address, block_stride_bytes=stride or page, page_bytes=page, num_blocks=blocks)


def ranges(plan: ReadPlan) -> list[tuple[int, int, int]]:
    return list(zip(plan.dst.tolist(), plan.offset.tolist(), plan.size.tolist(), strict=True))


# K base 1000 len 10, V base 2000 len 20, indexer base 7000 len 5; decode K 3000, V 4000, indexer 8000.
MAIN_PAGES = [
    Pages(
        name=name,
        source=source(base, page),
        source_blocks=[1, 2],
        destination=view(here, page),
        blocks=[3, 4],
    )
    for name, base, page, here in [("K", 1000, 10, 3000), ("V", 2000, 20, 4000)]
]
INDEXER_PAGES = Pages(
    name="indexer", source=source(7000, 5), source_blocks=[7], destination=view(8000, 5), blocks=[8]
)


def test_adjacent_blocks_of_k_v_and_indexer_become_one_range_each() -> None:
    plan = plan_pages([*MAIN_PAGES, INDEXER_PAGES])
    assert plan.dst.tolist() == [3030, 4060, 8040]
    assert plan.offset.tolist() == [1010, 2020, 7035]
    assert plan.size.tolist() == [20, 40, 5]
    assert plan.total_bytes == 65


def test_main_only_or_indexer_only_or_neither() -> None:
    assert ranges(plan_pages(MAIN_PAGES)) == [(3030, 1010, 20), (4060, 2020, 40)]
    assert ranges(plan_pages([INDEXER_PAGES])) == [(8040, 7035, 5)]
    assert len(plan_pages([])) == 0
    assert plan_pages([]).total_bytes == 0


SOURCES = {(5, MAIN): source(1000, 30), (5, INDEXER): source(7000, 5, region=1), (6, MAIN): source(9000, 30)}
DESTINATIONS = {(5, MAIN): view(3000, 30), (5, INDEXER): view(8000, 5), (6, MAIN): view(5000, 30)}


def test_a_layer_with_main_and_indexer() -> None:
    plan = plan_reads(
        components=SOURCES,
        destinations=DESTINATIONS,
        layer=5,
        blocks={INDEXER: ([7], [8]), MAIN: ([1, 2], [3, 4])},
    )
    assert ranges(plan) == [(3090, 1030, 60), (8040, 7035, 5)]
    assert plan.region.tolist() == [0, 1]


@pytest.mark.parametrize(
    ("blocks", "expected"),
    [
        ({MAIN: ([1, 2], [3, 4])}, [(3090, 1030, 60)]),
        ({INDEXER: ([7], [8])}, [(8040, 7035, 5)]),
        ({MAIN: ([], []), INDEXER: ([7], [8])}, [(8040, 7035, 5)]),
        ({MAIN: ([], []), INDEXER: ([], [])}, []),
        ({}, []),
    ],
)
def test_a_layer_read_in_part_or_not_at_all(blocks, expected) -> None:
    plan = plan_reads(components=SOURCES, destinations=DESTINATIONS, layer=5, blocks=blocks)
    assert ranges(plan) == expected
    for array in (plan.region, plan.offset, plan.dst, plan.size):
        assert array.dtype == np.int64
        assert array.flags.c_contiguous


def refusal(components=SOURCES, destinations=DESTINATIONS, layer=5, blocks=None) -> str:
    given_blocks = {MAIN: ([1, 2], [3, 4])} if blocks is None else blocks
    with pytest.raises(RangeRefused) as refused:
        plan_reads(components=components, destinations=destinations, layer=layer, blocks=given_blocks)
    assert isinstance(refused.value, TransferFailed)
    assert isinstance(refused.value, IndexError)
    return str(refused.value)


def test_a_layout_that_was_never_announced_is_refused() -> None:
    assert refusal(components={}) == "layer 5: prefill has no cache of it, decode has main and indexer"


def test_an_unknown_layer_is_refused() -> None:
    assert "layer 9: prefill has no cache of it, decode has no cache of it" in refusal(layer=9)


def test_an_indexer_on_one_side_only_is_refused() -> None:
    without = {key: value for key, value in SOURCES.items() if key != (5, INDEXER)}
    assert "prefill has main, decode has main and indexer" in refusal(components=without)
    missing = {key: value for key, value in DESTINATIONS.items() if key != (5, INDEXER)}
    assert "prefill has main and indexer, decode has main" in refusal(destinations=missing)


def test_a_cache_that_the_layer_lacks_is_refused() -> None:
    assert "asked for indexer, there is main" in refusal(layer=6, blocks={INDEXER: ([1], [1])})


def test_other_block_bytes_are_refused_with_both() -> None:
    other = DESTINATIONS | {(5, MAIN): view(3000, 32)}
    assert "layer 5 main: pages of 30 bytes at prefill, of 32 at decode" in refusal(destinations=other)


@pytest.mark.parametrize(("theirs", "ours"), [([1, 2], [3]), ([1], [3, 4]), ([], [3]), ([1], [])])
def test_counts_that_differ_are_refused(theirs, ours) -> None:
    assert f"{len(theirs)} blocks at prefill, {len(ours)} at decode" in refusal(blocks={MAIN: (theirs, ours)})


@pytest.mark.parametrize("block", [-1, 16, 1 << 40, 1 << 70])
def test_a_block_outside_either_side_is_refused(block: int) -> None:
    # Field fault: an invalid index turned into 0 and copied.
    assert "layer 5 main at prefill" in refusal(blocks={MAIN: ([1, block], [3, 4])})
    assert "layer 5 main at decode" in refusal(blocks={MAIN: ([1, 2], [3, block])})


def test_a_destination_too_small_for_its_block_is_refused() -> None:
    small = DESTINATIONS | {(5, MAIN): view(3000, 30, blocks=4)}
    assert "block id 4 is outside 0..3" in refusal(destinations=small)


def test_one_block_for_two_is_refused() -> None:
    assert "prefill: a block id is given twice" in refusal(blocks={MAIN: ([1, 1], [3, 4])})
    assert "decode: a block id is given twice" in refusal(blocks={MAIN: ([1, 2], [3, 3])})


@pytest.mark.parametrize("ids", [[1.5], [[1]], [None], ["1"]])
def test_ids_that_are_no_integers_are_refused(ids) -> None:
    assert "prefill" in refusal(blocks={MAIN: (ids, [3])})


@pytest.mark.parametrize(
    "place",
    [
        Place(region=0, offset=0, block_stride_bytes=29, num_blocks=16),
        Place(region=0, offset=(1 << 62) - 1, block_stride_bytes=30, num_blocks=16),
        Place(region=0, offset=0, block_stride_bytes=1 << 61, num_blocks=16),
        Place(region=0, offset=0, block_stride_bytes=30, num_blocks=1 << 61),
    ],
)
def test_a_place_that_cannot_exist_is_refused(place: Place) -> None:
    # The product of block and stride must not wrap around into somebody's memory.
    assert "is no place for pages of 30 bytes" in refusal(components=SOURCES | {(5, MAIN): (place, 30)})


def test_offsets_beyond_32_bits() -> None:
    big = 40_000
    plan = plan_reads(
        components={(0, MAIN): source(1 << 40, 1 << 20, blocks=big)},
        destinations={(0, MAIN): view(1 << 45, 1 << 20, blocks=big)},
        layer=0,
        blocks={MAIN: ([big - 1], [big - 2])},
    )
    mib = 1 << 20
    assert ranges(plan) == [((1 << 45) + (big - 2) * mib, (1 << 40) + (big - 1) * mib, mib)]


def test_pages_with_gaps_stay_apart() -> None:
    gaps = SOURCES | {(5, MAIN): source(1000, 30, stride=64)}
    plan = plan_reads(components=gaps, destinations=DESTINATIONS, layer=5, blocks={MAIN: ([1, 2], [3, 4])})
    assert ranges(plan) == [(3090, 1064, 30), (3120, 1128, 30)]


def test_block_tables_that_run_backwards_are_merged_too() -> None:
    plan = plan_reads(
        components=SOURCES, destinations=DESTINATIONS, layer=5, blocks={MAIN: ([3, 2, 1], [9, 8, 7])}
    )
    assert ranges(plan) == [(3210, 1030, 90)]


def test_neighbours_in_different_caches_stay_apart() -> None:
    first = Pages(name="a", source=source(0, 10), source_blocks=[0], destination=view(500, 10), blocks=[0])
    second = Pages(name="b", source=source(10, 10), source_blocks=[0], destination=view(510, 10), blocks=[0])
    assert len(plan_pages([first, second])) == 2


ids = st.lists(st.integers(0, 15), unique=True, max_size=16)


@given(
    theirs=ids, ours=st.permutations(range(16)), stride=st.sampled_from([3, 4]), own=st.sampled_from([3, 5])
)
def test_a_merged_plan_copies_what_single_blocks_would(
    theirs: list[int], ours: list[int], stride: int, own: int
) -> None:
    here = ours[: len(theirs)]
    pages = Pages(
        name="x",
        source=source(7, 3, stride=stride),
        source_blocks=np.array(theirs, dtype=np.uint32),
        destination=view(11, 3, stride=own),
        blocks=here,
    )
    plan = plan_pages([pages])
    memory = np.arange(1, 101, dtype=np.uint8)
    merged, single = np.zeros(120, dtype=np.uint8), np.zeros(120, dtype=np.uint8)
    for dst, offset, size in ranges(plan):
        assert not merged[dst : dst + size].any(), "no byte is written twice"
        merged[dst : dst + size] = memory[offset : offset + size]
    for block, to in zip(theirs, here, strict=True):
        at, start = 11 + to * own, 7 + block * stride
        single[at : at + 3] = memory[start : start + 3]
    assert (merged == single).all()
    assert plan.total_bytes == 3 * len(theirs)
    if stride == own == 3:
        pairs = set(zip(theirs, here, strict=True))
        joined = sum((block + 1, to + 1) in pairs for block, to in pairs)
        assert len(plan) == len(pairs) - joined, "every pair of neighbours is merged"


def test_a_hello_says_where_each_cache_lies() -> None:
    def layout(layer: int, component: str, page_bytes: int) -> ComponentLayout:
        return ComponentLayout(
            layer=layer,
            component=component,
            is_draft=False,
            page_bytes=page_bytes,
            block_tokens=16,
            layout="x",
        )

    hello = Hello(
        epoch="e",
        version=1,
        rank=0,
        tp_size=1,
        components=(layout(5, "main", 30), layout(5, "indexer", 5), layout(6, "main", 30)),
        places=tuple(place for place, _ in SOURCES.values()),
        offers=(),
        lease_s=1.0,
    )
    assert sources_of(hello) == SOURCES
