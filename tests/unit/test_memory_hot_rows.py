"""The device buffers of hot rows: their sizes, that they are apart, and that they stay where they are."""

from __future__ import annotations

import itertools

import pytest
import torch

from kvstrata.memory.hot_rows import HotRows, hot_rows_bytes

WIDTHS = {0: 576, 3: 576, 7: 88}


def hot_rows(dtype: torch.dtype = torch.bfloat16, capacity_rows: int = 5) -> HotRows:
    return HotRows(WIDTHS, capacity_rows=capacity_rows, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8], ids=str)
@pytest.mark.parametrize("capacity_rows", [1, 5, 96])
def test_A1_as_many_bytes_are_allocated_as_were_planned(dtype: torch.dtype, capacity_rows: int) -> None:  # noqa: N802
    made = hot_rows(dtype, capacity_rows)
    planned = hot_rows_bytes([width * dtype.itemsize for width in WIDTHS.values()], capacity_rows)
    assert made.size_bytes == planned
    storages = {made.buffer(layer).untyped_storage() for layer in WIDTHS}
    assert {storage.nbytes() for storage in storages} == {planned}, "all memory, and no other"
    rows = sum(made.buffer(layer).nbytes for layer in WIDTHS)
    assert rows <= planned < rows + 64 * len(WIDTHS)


def test_a_buffer_has_its_layers_shape_and_is_zero() -> None:
    made = hot_rows()
    for layer, width in WIDTHS.items():
        buffer = made.buffer(layer)
        assert (buffer.shape, buffer.dtype, buffer.is_contiguous()) == ((5, width), torch.bfloat16, True)
        assert not buffer.any()
    assert made.layers == (0, 3, 7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8], ids=str)
def test_buffers_are_aligned_and_apart(dtype: torch.dtype) -> None:
    made = hot_rows(dtype)
    spans = []
    for layer in WIDTHS:
        buffer = made.buffer(layer)
        assert buffer.data_ptr() % 64 == 0
        spans.append((buffer.data_ptr(), buffer.data_ptr() + buffer.nbytes))
    for (_, end), (start, _) in itertools.pairwise(sorted(spans)):
        assert end <= start


def test_a_row_written_to_one_layer_is_in_no_other() -> None:
    made = hot_rows(torch.uint8)
    for layer in WIDTHS:
        made.buffer(layer).fill_(layer + 1)
    for layer in WIDTHS:
        assert bool((made.buffer(layer) == layer + 1).all())


def test_addresses_are_fixed() -> None:
    made = hot_rows()
    before = [made.buffer(layer).data_ptr() for layer in WIDTHS]
    made.buffer(3).fill_(1)
    assert [made.buffer(layer).data_ptr() for layer in WIDTHS] == before
    assert made.buffer(3) is made.buffer(3)


def test_a_layer_without_hot_rows_is_an_error() -> None:
    with pytest.raises(KeyError, match=r"layer 4 .*\[0, 3, 7\]"):
        hot_rows().buffer(4)


@pytest.mark.parametrize(("widths", "capacity_rows"), [({}, 4), ({0: 8}, 0), ({0: 0}, 4)])
def test_nothing_to_hold_is_refused(widths: dict[int, int], capacity_rows: int) -> None:
    with pytest.raises(ValueError, match="hot rows need"):
        HotRows(widths, capacity_rows=capacity_rows, dtype=torch.float32)


def test_no_32_bit_limit_in_the_plan() -> None:
    assert hot_rows_bytes([1152] * 61, 1 << 26) == 61 * 1152 << 26
