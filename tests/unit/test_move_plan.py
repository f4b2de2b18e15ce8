"""Copy plans: which byte ranges a list of blocks becomes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstrata.memory.pages import PageView
from kvstrata.move.plan import CopyPlan, concat, merge_adjacent, plan_block_copies, plan_page_copies


def view(address: int, *, page: int = 100, stride: int | None = None, blocks: int = 16) -> PageView:
    return PageView(
        address=address,
        block_stride_bytes=page if stride is None else stride,
        page_bytes=page,
        num_blocks=blocks,
    )


def ranges(plan: CopyPlan) -> list[tuple[int, int, int]]:
    return list(zip(plan.dst.tolist(), plan.src.tolist(), plan.size.tolist(), strict=True))


def plan_of(*triples: tuple[int, int, int]) -> CopyPlan:
    dst, src, size = (np.array(column, dtype=np.int64) for column in zip(*triples, strict=True))
    return CopyPlan(dst=dst, src=src, size=size)


def test_neighbours_become_one_range_when_both_sides_are_compact() -> None:
    plan = plan_block_copies(view(1000), view(9000), np.array([2, 3, 4, 8]))
    assert ranges(plan) == [(1200, 9200, 300), (1800, 9800, 100)]
    assert plan.total_bytes == 400


@pytest.mark.parametrize(
    ("dst", "src"), [(view(1000, stride=128), view(9000)), (view(1000), view(9000, stride=128))]
)
def test_neighbours_stay_apart_when_a_side_has_gaps(dst: PageView, src: PageView) -> None:
    plan = plan_block_copies(dst, src, np.array([2, 3]))
    assert [size for _, _, size in ranges(plan)] == [100, 100]
    assert plan.dst.tolist() == [1000 + 2 * dst.block_stride_bytes, 1000 + 3 * dst.block_stride_bytes]
    assert plan.src.tolist() == [9000 + 2 * src.block_stride_bytes, 9000 + 3 * src.block_stride_bytes]


def test_equal_strides_with_gaps_do_not_merge_either() -> None:
    plan = plan_block_copies(view(1000, stride=128), view(9000, stride=128), np.array([0, 1]))
    assert len(plan) == 2


def test_order_and_repetition_of_ids_do_not_matter() -> None:
    expected = ranges(plan_block_copies(view(1000), view(9000), np.array([2, 3, 4, 8])))
    assert ranges(plan_block_copies(view(1000), view(9000), np.array([8, 4, 2, 3, 2]))) == expected


def test_no_blocks_is_an_empty_plan() -> None:
    plan = plan_block_copies(view(1000), view(9000), np.array([], dtype=np.int64))
    assert (len(plan), plan.total_bytes) == (0, 0)


@pytest.mark.parametrize("bad", [-1, 12, 1 << 40])
def test_an_id_that_one_side_lacks_is_refused(bad: int) -> None:
    with pytest.raises(IndexError, match=str(bad)):
        plan_block_copies(view(1000, blocks=16), view(9000, blocks=12), np.array([1, bad]))


def test_pages_of_different_size_are_refused() -> None:
    with pytest.raises(ValueError, match=r"96.*100"):
        plan_block_copies(view(1000, page=100), view(9000, page=96), np.array([0]))


def test_far_blocks_are_addressed_in_64_bits() -> None:
    page = 656 * 64
    plan = plan_block_copies(
        view(1 << 40, page=page, blocks=1 << 20),
        view(1 << 41, page=page, blocks=1 << 20),
        np.array([(1 << 20) - 1], dtype=np.int32),
    )
    offset = ((1 << 20) - 1) * page
    assert offset > 1 << 35
    assert ranges(plan) == [((1 << 40) + offset, (1 << 41) + offset, page)]


@pytest.mark.parametrize(("dst", "src", "size"), [(0, 5, 1), (5, 0, 1), (5, 5, 0), (-4, 5, 1), (5, 5, -1)])
def test_null_addresses_and_empty_ranges_are_refused(dst: int, src: int, size: int) -> None:
    with pytest.raises(ValueError, match="positive"):
        plan_of((10, 20, 5), (dst, src, size))


def test_narrow_integers_are_refused() -> None:
    good = np.array([1], dtype=np.int64)
    with pytest.raises(TypeError, match="src"):
        CopyPlan(dst=good, src=good.astype(np.int32), size=good)


def test_strided_arrays_are_refused() -> None:
    good = np.arange(1, 5, dtype=np.int64)
    with pytest.raises(TypeError, match="dst"):
        CopyPlan(dst=np.arange(1, 9, dtype=np.int64)[::2], src=good, size=good)


def test_arrays_of_different_length_are_refused() -> None:
    with pytest.raises(ValueError, match="sources"):
        CopyPlan(dst=np.array([1, 2]), src=np.array([1]), size=np.array([1, 2]))


def test_concat_keeps_order_and_does_not_merge() -> None:
    first, second = plan_of((100, 500, 10)), plan_of((110, 510, 10), (50, 60, 1))
    assert ranges(concat([first, CopyPlan.empty(), second])) == [(100, 500, 10), (110, 510, 10), (50, 60, 1)]
    assert len(concat([])) == 0


def test_merge_needs_both_sides_to_continue() -> None:
    merged = merge_adjacent(
        plan_of((100, 500, 10), (110, 510, 5), (115, 600, 5), (130, 605, 5), (135, 610, 1), (136, 611, 4))
    )
    assert ranges(merged) == [(100, 500, 15), (115, 600, 5), (130, 605, 10)]
    assert len(merge_adjacent(CopyPlan.empty())) == 0


@settings(deadline=None)
@given(
    page=st.integers(1, 40),
    dst_gap=st.sampled_from([0, 3]),
    src_gap=st.sampled_from([0, 5]),
    ids=st.lists(st.integers(0, 11), max_size=20),
)
def test_a_plan_moves_exactly_the_bytes_of_its_blocks(
    page: int, dst_gap: int, src_gap: int, ids: list[int]
) -> None:
    source = torch.arange(12 * (page + src_gap)).remainder(251).to(torch.uint8).view(12, -1)
    target = torch.full((12, page + dst_gap), 255, dtype=torch.uint8)
    expected = target.clone()
    expected[ids, :page] = source[ids, :page]
    plan = plan_block_copies(
        PageView.of_tensor(target[:, :page]),
        PageView.of_tensor(source[:, :page]),
        np.array(ids, dtype=np.int64),
    )
    base_dst, base_src = target.data_ptr(), source.data_ptr()
    flat_dst, flat_src = target.view(-1), source.view(-1)
    for dst, src, size in ranges(plan):
        flat_dst[dst - base_dst : dst - base_dst + size] = flat_src[src - base_src : src - base_src + size]
    assert torch.equal(target, expected)
    assert plan.total_bytes == len(set(ids)) * page


def pages(*ids: int) -> np.ndarray:
    return np.array(ids, dtype=np.int64)


def test_pages_go_to_other_places_and_neighbours_on_both_sides_are_one_range() -> None:
    plan = plan_page_copies(view(1000), pages(0, 1, 2, 3, 4), view(9000), pages(5, 6, 2, 9, 10))
    assert ranges(plan) == [(1000, 9500, 200), (1200, 9200, 100), (1300, 9900, 200)]


def test_page_order_is_kept_and_a_page_may_be_copied_twice() -> None:
    plan = plan_page_copies(view(1000), pages(0, 1, 2), view(9000), pages(7, 7, 3))
    assert ranges(plan) == [(1000, 9700, 100), (1100, 9700, 100), (1200, 9300, 100)]


@pytest.mark.parametrize(
    ("dst", "src"), [(view(1000, stride=128), view(9000)), (view(1000), view(9000, stride=128))]
)
def test_neighbouring_pages_stay_apart_when_a_side_has_gaps(dst: PageView, src: PageView) -> None:
    plan = plan_page_copies(dst, pages(0, 1), src, pages(4, 5))
    assert [size for _, _, size in ranges(plan)] == [100, 100]


def test_no_pages_is_an_empty_plan() -> None:
    assert len(plan_page_copies(view(1000), pages(), view(9000), pages())) == 0


@pytest.mark.parametrize("bad", [-1, 4, 1 << 40])
def test_a_page_that_its_side_lacks_is_refused(bad: int) -> None:
    few, many = view(1000, blocks=4), view(9000, blocks=1 << 41)
    for dst_ids, src_ids, dst, src in ((pages(0), pages(bad), many, few), (pages(bad), pages(0), few, many)):
        with pytest.raises(IndexError, match=str(bad)):
            plan_page_copies(dst, dst_ids, src, src_ids)


def test_page_counts_and_sizes_that_differ_are_refused() -> None:
    with pytest.raises(ValueError, match="2 pages to copy to 1 places"):
        plan_page_copies(view(1000), pages(0), view(9000), pages(0, 1))
    with pytest.raises(ValueError, match=r"96.*100"):
        plan_page_copies(view(1000, page=100), pages(0), view(9000, page=96), pages(0))


def test_far_pages_are_addressed_in_64_bits() -> None:
    page, last = 656 * 64, (1 << 20) - 1
    far = view(1 << 41, page=page, blocks=1 << 20)
    assert ranges(plan_page_copies(view(1 << 40, page=page), pages(3), far, pages(last))) == [
        ((1 << 40) + 3 * page, (1 << 41) + last * page, page)
    ]
