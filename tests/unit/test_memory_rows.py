"""Where rows lie: strides, padding, bounds, 64-bit addresses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from kvstrata.memory.pages import PageView
from kvstrata.memory.rows import RowView


def view(**changes: Any) -> RowView:
    fields = {"address": 4096, "row_bytes": 32, "block_tokens": 4, "block_stride_bytes": 200, "num_blocks": 3}
    return RowView(**{**fields, **changes})


def test_a_row_is_found_behind_the_padding_of_the_blocks_before() -> None:
    rows = np.array([[0, 3], [4, 11]], dtype=np.int32)
    assert view().address_of(rows).tolist() == [[4096, 4096 + 96], [4096 + 200, 4096 + 2 * 200 + 96]]
    assert view().address_of(rows).dtype == np.int64
    assert view().num_rows == 12
    assert not view().is_compact
    assert view(block_stride_bytes=128).is_compact
    assert view(num_blocks=1).is_compact


@pytest.mark.parametrize("row", [-1, 12, 2**40, -(2**63)])
def test_a_row_outside_is_an_error_never_another_row(row: int) -> None:
    with pytest.raises(IndexError, match=rf"row {row} is outside 0..11"):
        view().address_of(np.array([0, row, 1]))


def test_an_unsigned_row_does_not_wrap_to_a_negative_one() -> None:
    with pytest.raises(IndexError, match=str(2**64 - 1)):
        view().address_of(np.array([2**64 - 1], dtype=np.uint64))


def test_rows_are_integers() -> None:
    with pytest.raises(TypeError, match="float64"):
        view().address_of(np.array([1.0]))


def test_no_rows_have_no_addresses() -> None:
    assert view().address_of(np.empty(0, dtype=np.int64)).tolist() == []


def test_rows_and_bytes_beyond_two_to_the_31_stay_exact() -> None:
    far = view(row_bytes=1152, block_tokens=64, block_stride_bytes=64 * 1152 + 256, num_blocks=2**27)
    row = 2**31 + 5
    block, offset = row // 64, row % 64
    assert far.num_rows > 2**32
    assert far.address_of(np.array([row])).tolist() == [4096 + block * (64 * 1152 + 256) + offset * 1152]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"address": 0}, "positive"),
        ({"row_bytes": 0}, "positive"),
        ({"block_tokens": 0}, "positive"),
        ({"num_blocks": 0}, "positive"),
        ({"block_stride_bytes": 127}, "overlap"),
        ({"block_stride_bytes": 2**62}, "beyond 2\\^63"),
    ],
)
def test_what_cannot_be_a_view_is_refused(changes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        view(**changes)


def test_rows_of_pages_start_every_page_and_leave_its_padding() -> None:
    pages = PageView(address=4096, block_stride_bytes=1000, page_bytes=640, num_blocks=3)
    rows = RowView.of_pages(pages, block_tokens=4, row_bytes=150)
    assert rows.address_of(np.array([4, 7])).tolist() == [4096 + 1000, 4096 + 1000 + 450]
    with pytest.raises(ValueError, match=r"644 bytes, but a page has 640"):
        RowView.of_pages(pages, block_tokens=4, row_bytes=161)


def test_tensors_give_the_addresses_of_their_own_rows() -> None:
    memory = torch.zeros(6, 5, 4, 24, dtype=torch.float32)
    paged = memory[:, 2]  # [6, 4, 24], blocks five blocks apart
    hot = memory.view(-1, 24)[:7]
    gaps = memory.view(-1, 48)[:, 24:]  # [n, 24], rows two rows apart
    for tensor in (paged, hot, gaps):
        rows = RowView.of_tensor(tensor)
        flat = [row.data_ptr() for row in (tensor.unbind() if tensor.dim() == 2 else rows_of_blocks(tensor))]
        assert rows.row_bytes == 96
        assert rows.address_of(np.arange(rows.num_rows)).tolist() == flat


def rows_of_blocks(tensor: torch.Tensor) -> list[torch.Tensor]:
    return [row for block in tensor.unbind() for row in block.unbind()]


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(8),
        torch.zeros(2, 0, 8),
        torch.zeros(4, 3, 8, 2),
        torch.zeros(4, 8).t(),
        torch.zeros(4, 3, 8)[:, :, :4],
        torch.zeros(8, 4).expand(3, 8, 4),
    ],
    ids=["flat", "empty", "four dimensions", "transposed", "rows apart in a block", "one block many times"],
)
def test_a_tensor_without_such_rows_is_refused(tensor: torch.Tensor) -> None:
    with pytest.raises(ValueError):
        RowView.of_tensor(tensor)
