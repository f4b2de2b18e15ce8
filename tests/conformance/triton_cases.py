"""What the Triton kernels must do beyond `test_residency`; run by `test_triton_kernels`, apart."""

from __future__ import annotations

import ctypes
import mmap
import os
from typing import Any

import numpy as np
import pytest
import torch
from test_residency import Both
from test_row_gather import check, patterned
from triton_member import Interpreted

from kvstrata.core.eviction import POLICIES
from kvstrata.kernels import triton_residency
from kvstrata.kernels.triton_gather import gather_rows
from kvstrata.memory.allocator import SharedMemoryAllocator
from kvstrata.memory.rows import RowView


def test_this_process_interprets() -> None:
    assert os.environ["TRITON_INTERPRET"] == "1"
    assert "Interpreted" in type(triton_residency.resolve_kernel).__name__


def on_device(dst: RowView, dst_rows: Any, src: RowView, src_rows: Any) -> None:
    wrong = torch.zeros(1, dtype=torch.int32)
    gather_rows(dst, torch.from_numpy(dst_rows), src, torch.from_numpy(src_rows), wrong)
    assert int(wrong) == 0


@pytest.mark.parametrize("row_bytes", [352, 576, 656, 1152, 2304, 8, 1, 33, 1151, 9000])
def test_rows_land_in_their_slots_and_no_other_byte_changes(row_bytes: int) -> None:
    home = patterned((11, 5 * row_bytes + 96), salt=1)
    source = home[:, : 5 * row_bytes].unflatten(1, (5, row_bytes))  # padded pages
    memory = patterned((3, 4 * row_bytes + 24), salt=2)
    target = memory[:, : 4 * row_bytes].unflatten(1, (4, row_bytes))
    check(on_device, memory, target, source, [11, 0, 5, 7, 8], [54, 0, 20, 20, 4])


@pytest.mark.parametrize("shift", [1, 4, 8])
def test_any_alignment(shift: int) -> None:
    home = patterned((4096 + shift,), salt=3)[shift:].view(16, 256)
    memory = patterned((1024 + shift,), salt=4)
    check(on_device, memory, memory[shift:].view(4, 256), home, [3, 0, 1], [15, 2, 7])


def test_pairs_with_a_negative_row_are_padding() -> None:
    home, memory = patterned((9, 64), salt=5), patterned((9, 64), salt=6)
    want = memory.clone()
    want[4] = home[8]
    to, of = np.array([-1, 4, 5, -1]), np.array([3, 8, -1, -7])
    on_device(RowView.of_tensor(memory), to, RowView.of_tensor(home), of)
    assert torch.equal(memory, want)


@pytest.mark.parametrize("side", ["destination", "source"])
@pytest.mark.parametrize("row", [12, 2**31, 2**40])
def test_a_row_outside_is_counted_and_touches_no_memory(side: str, row: int) -> None:
    home, memory = patterned((12, 64), salt=7), patterned((3, 4, 64), salt=8)
    rows = {"destination": torch.tensor([0, 1]), "source": torch.tensor([3, 4])}
    rows[side][1] = row
    want = memory.clone()
    want[0, 0] = home[3]
    wrong = torch.zeros(1, dtype=torch.int32)
    gather_rows(
        RowView.of_tensor(memory), rows["destination"], RowView.of_tensor(home), rows["source"], wrong
    )
    assert int(wrong) == 1
    assert torch.equal(memory, want)
    whole = RowView.of_tensor(home)
    with pytest.raises(ValueError, match="64 bytes cannot go into rows of 32"):
        gather_rows(RowView.of_tensor(home.view(24, 32)), rows["source"], whole, rows["source"], wrong)
    with pytest.raises(TypeError, match="int32"):
        gather_rows(whole, rows["source"].int(), whole, rows["source"], wrong)
    with pytest.raises(ValueError, match="2 source rows for 1 destinations"):
        gather_rows(whole, rows["source"][:1], whole, rows["source"], wrong)


@pytest.mark.parametrize("block_tokens", [1, 48])
def test_rows_and_addresses_beyond_two_to_the_31(block_tokens: int) -> None:
    stride = 64 * block_tokens + 32 * (block_tokens > 1)
    num_blocks = (2**31 + 4096) // block_tokens
    region = SharedMemoryAllocator(available_bytes=lambda: 1 << 62, huge_pages=False).alloc(
        stride * num_blocks, "far"
    )
    far = RowView(
        address=region.address,
        row_bytes=64,
        block_tokens=block_tokens,
        block_stride_bytes=stride,
        num_blocks=num_blocks,
    )
    rows = np.array([2**31 + 7, 5, 2**26 + 3])
    near = patterned((3, 64), salt=11)
    on_device(far, rows, RowView.of_tensor(near), np.arange(3))
    for row, want in zip(rows.tolist(), near, strict=True):
        place = row // block_tokens * stride + row % block_tokens * 64
        assert torch.equal(region.tensor()[place : place + 64], want)
    back = torch.zeros(3, 64, dtype=torch.uint8)
    on_device(RowView.of_tensor(back), np.arange(3), far, rows)
    assert torch.equal(back, near)


@pytest.mark.parametrize("row_bytes", [33, 656])
def test_no_byte_outside_the_last_row_is_read(row_bytes: int) -> None:
    page = mmap.PAGESIZE
    memory = torch.frombuffer(mmap.mmap(-1, 2 * page), dtype=torch.uint8)
    protect = ctypes.CDLL(None).mprotect
    assert protect(ctypes.c_void_p(memory.data_ptr() + page), ctypes.c_size_t(page), 0) == 0
    source = memory[page - 2 * row_bytes : page].view(2, row_bytes)
    source.copy_(patterned((2, row_bytes), salt=12))
    target = torch.zeros_like(source)
    on_device(RowView.of_tensor(target), np.array([0, 1]), RowView.of_tensor(source), np.array([0, 1]))
    assert torch.equal(target, source)


def test_a_resolved_selection_goes_to_the_gather_as_it_is() -> None:
    """No count comes back to the host between the two."""
    home, hot = patterned((50, 48), salt=13), torch.zeros(8, 48, dtype=torch.uint8)
    table = triton_residency.TritonResidencyTable(host_rows=50, capacity=8, max_entries=8, device="cpu")
    wrong = torch.zeros(1, dtype=torch.int32)
    for rows in ([[9, 3, -1, 30], [3, 49, 9, -1]], [[10, 11, 12, 13], [14, 49, 3, -1]]):
        found = table.resolve(torch.tensor(rows))
        gather_rows(RowView.of_tensor(hot), found.load_slots, RowView.of_tensor(home), found.load_rows, wrong)
        for row, slot in zip(rows[0] + rows[1], found.slots.flatten().tolist(), strict=True):
            assert (slot == -1) == (row == -1)
            assert row == -1 or torch.equal(hot[slot], home[row])
    assert int(wrong) == 0


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize(("block", "capacity"), [(8, 13), (16, 16), (1024, 33)])
def test_whatever_is_looked_at_at_a_time_and_however_many_calls_were_before(
    monkeypatch: pytest.MonkeyPatch, policy: str, block: int, capacity: int
) -> None:
    """Lists longer than a block, priorities beyond 2^32, all selected rows in the table or none."""
    monkeypatch.setattr(triton_residency, "_BLOCK", block)
    random = np.random.default_rng(block)
    host_rows = 4 * capacity
    both = Both(Interpreted, policy, capacity=capacity, host_rows=host_rows, max_entries=3 * capacity)
    started = 2**40 + 3
    both.reference._counts["resolves"] = started
    if policy == "lru":
        both.reference._policy._step = started
    both.member.table._totals[triton_residency.RESOLVES] = started
    for step in range(10):
        both.invalidate(random.integers(-1, host_rows, step % 4 * 3).tolist())
        fresh = np.full(host_rows, -1, np.int32)
        fresh[random.permutation(host_rows)[:capacity]] = np.arange(capacity)
        distinct = random.permutation(host_rows)[: random.integers(1, capacity + 1)]
        rows = random.choice(np.append(distinct, -1), (3, capacity))
        both.resolve(rows, fresh if step % 3 else None, random.integers(-1, host_rows, step).tolist())
        both.check()


def test_what_a_table_cannot_take_is_refused() -> None:
    with pytest.raises(ValueError, match="sorts at most 8192"):
        triton_residency.TritonResidencyTable(host_rows=9, capacity=8193, max_entries=8, device="cpu")
    table = triton_residency.TritonResidencyTable(host_rows=9, capacity=4, max_entries=4, device="cpu")
    with pytest.raises(ValueError, match="5 entries; the table was made for 4"):
        table.resolve(torch.arange(5)[None])
    with pytest.raises(TypeError, match="int32"):
        table.resolve(torch.arange(4, dtype=torch.int32)[None])
    with pytest.raises(TypeError, match="int32"):
        table.invalidate(torch.arange(4, dtype=torch.int32))
    with pytest.raises(ValueError, match=r"fresh must be int32 \[9\]"):
        table.resolve(torch.arange(4)[None], torch.zeros(8, dtype=torch.int32))
