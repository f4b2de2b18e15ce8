"""Page views: addresses of blocks, and refusal of ids that are not there."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvstrata.memory.pages import PageView


def view(**changes: int) -> PageView:
    values = {"address": 1 << 20, "block_stride_bytes": 128, "page_bytes": 100, "num_blocks": 10}
    return PageView(**(values | changes))


def test_addresses_follow_the_stride_not_the_page() -> None:
    addresses = view().page_address(np.array([0, 9, 3], dtype=np.int32))
    assert addresses.dtype == np.int64
    assert addresses.tolist() == [1 << 20, (1 << 20) + 9 * 128, (1 << 20) + 3 * 128]


@pytest.mark.parametrize("bad", [-1, -10, 10, 1 << 31, 1 << 62])
def test_an_id_outside_is_an_error_never_another_block(bad: int) -> None:
    with pytest.raises(IndexError, match=str(bad)):
        view().page_address(np.array([0, bad]))


def test_an_unsigned_id_that_would_wrap_is_an_error() -> None:
    with pytest.raises(IndexError):
        view().page_address(np.array([2**64 - 1], dtype=np.uint64))


@pytest.mark.parametrize(
    "ids", [np.array([1.0]), np.array([True]), np.array([[1]])], ids=["float", "bool", "2-D"]
)
def test_ids_of_another_kind_are_refused(ids: np.ndarray) -> None:
    with pytest.raises(TypeError, match="block ids"):
        view().page_address(ids)


def test_no_ids_give_no_addresses() -> None:
    assert view().page_address(np.array([], dtype=np.int64)).tolist() == []


def test_far_pages_do_not_overflow() -> None:
    far = view(block_stride_bytes=1 << 20, page_bytes=1 << 20, num_blocks=1 << 15)
    assert far.page_address(np.array([(1 << 15) - 1], dtype=np.int32)).tolist() == [
        (1 << 20) + ((1 << 15) - 1) * (1 << 20)
    ]


def test_span_ends_with_the_last_page_not_its_stride() -> None:
    assert view().span_bytes == 9 * 128 + 100


def test_compact_means_no_gap() -> None:
    assert not view().is_compact
    assert view(page_bytes=128).is_compact


@pytest.mark.parametrize(
    "changes",
    [{"address": 0}, {"page_bytes": 0}, {"num_blocks": 0}, {"page_bytes": 129}, {"address": -8}],
    ids=str,
)
def test_impossible_views_are_refused(changes: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="page"):
        view(**changes)


def test_view_of_a_tensor() -> None:
    tensor = torch.zeros(7, 16, 576, dtype=torch.bfloat16)
    found = PageView.of_tensor(tensor)
    assert found == PageView(
        address=tensor.data_ptr(), block_stride_bytes=18432, page_bytes=18432, num_blocks=7
    )


def test_view_of_interleaved_components_keeps_the_gap_and_the_offset() -> None:
    blocks = torch.zeros(7, 1000, dtype=torch.uint8)
    indexer = blocks[:, 600:864]
    found = PageView.of_tensor(indexer)
    assert found == PageView(
        address=blocks.data_ptr() + 600, block_stride_bytes=1000, page_bytes=264, num_blocks=7
    )
    found_address = found.page_address(np.array([5])).tolist()
    assert found_address == [indexer[5].data_ptr()]


def test_view_of_one_block_ignores_its_meaningless_stride() -> None:
    one = torch.zeros(4, 8, dtype=torch.uint8)[:1].as_strided((1, 8), (3, 1))
    assert PageView.of_tensor(one).block_stride_bytes == 8


@pytest.mark.parametrize(
    "tensor",
    [torch.zeros(4, 6, 8).transpose(1, 2), torch.zeros(4), torch.zeros(0, 8), torch.zeros(1, 8).expand(4, 8)],
    ids=["block not contiguous", "no page dimension", "no blocks", "all blocks one"],
)
def test_tensors_without_separate_contiguous_pages_are_refused(tensor: torch.Tensor) -> None:
    with pytest.raises(ValueError, match=r"pages|contiguous"):
        PageView.of_tensor(tensor)
