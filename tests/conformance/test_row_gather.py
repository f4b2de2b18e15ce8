"""What every row gather must do; a member line makes another one pass it too."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from kvstrata.kernels import gather
from kvstrata.kernels.gather import gather_rows, gather_rows_shared
from kvstrata.memory.allocator import SharedMemoryAllocator
from kvstrata.memory.rows import RowView

Gather = Callable[..., None]


def shared_by_three(*arguments: Any) -> None:
    """As `gather_rows_shared` with enough to do for three threads, whatever the size."""

    def all_workers(kernel: Callable[..., None], plan: tuple[Any, ...], **_: int) -> None:
        for worker in (2, 0, 1):
            kernel(worker, 3, *plan)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gather, "worth_threads", lambda work: True)
        patch.setattr(gather, "run_shares", all_workers)
        gather_rows_shared(*arguments)


def streamed(*arguments: Any) -> None:
    """As `gather_rows`, past the cache wherever the alignment allows it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gather, "_STREAM_FROM_BYTES", 0)
        gather_rows(*arguments)


MEMBERS = [gather_rows, gather_rows_shared, shared_by_three, streamed]
ROW_SIZES = [352, 576, 656, 1152, 2304, 64, 65, 1, 15, 33, 100, 1151]


@pytest.fixture(params=MEMBERS, ids=lambda member: member.__name__)
def member(request: pytest.FixtureRequest) -> Gather:
    return request.param


def patterned(shape: tuple[int, ...], salt: int) -> torch.Tensor:
    """Bytes that depend on their place: one that lands elsewhere, or comes from elsewhere, shows."""
    count = int(np.prod(shape))
    places = np.arange(count, dtype=np.uint64) + np.uint64(salt * 1_000_003)
    bits = (places * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(40)
    return torch.from_numpy(bits.astype(np.uint8).reshape(shape))


def check(
    member: Gather, memory: torch.Tensor, target: torch.Tensor, source: torch.Tensor, to: Any, of: Any
) -> None:
    """Gather and compare all of `memory`, gaps included; `target` is a view of it."""
    offsets = torch.arange(memory.numel()).view(memory.shape)
    offset = target.storage_offset() - memory.storage_offset()
    places = offsets.flatten().as_strided(target.shape, target.stride(), offset)
    places = places.reshape(-1, target.shape[-1])
    want = memory.clone().flatten()
    rows = source.reshape(-1, source.shape[-1])
    for slot, row in zip(to, of, strict=True):
        want[places[int(slot)]] = rows[int(row)]
    member(
        RowView.of_tensor(target),
        np.asarray(to, np.int64),
        RowView.of_tensor(source),
        np.asarray(of, np.int64),
    )
    assert torch.equal(memory.flatten(), want)


@pytest.mark.parametrize("row_bytes", ROW_SIZES)
@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 16, 29])
def test_rows_land_in_their_slots_and_no_other_byte_changes(
    member: Gather, row_bytes: int, count: int
) -> None:
    home = patterned((11, 5 * row_bytes + 96), salt=1)
    source = home[:, : 5 * row_bytes].unflatten(1, (5, row_bytes))  # padded pages
    memory = patterned((40 * row_bytes + 64,), salt=2)
    start = -memory.data_ptr() % 32
    target = memory[start : start + 40 * row_bytes].view(40, row_bytes)
    generator = np.random.default_rng(row_bytes + count)
    check(
        member,
        memory,
        target,
        source,
        generator.permutation(40)[:count],
        generator.integers(0, 55, count),
    )


@pytest.mark.parametrize("shift", [0, 1, 8, 16, 32])
def test_any_alignment_and_gaps_on_both_sides(member: Gather, shift: int) -> None:
    home = patterned((4096 + shift,), salt=3)[shift:].view(16, 256)
    memory = patterned((32 * 192 + shift,), salt=4)
    target = memory[shift:].view(8, 4 * 192)[:, : 3 * 192].unflatten(1, (3, 192))
    check(
        member,
        memory,
        target,
        home[:, :192],
        [23, 0, 5, 6, 7, 20, 1, 2, 3, 4],
        [15, 0, 3, 3, 3, 9, 1, 2, 7, 8],
    )


def test_of_a_destination_named_twice_the_last_row_stays(member: Gather) -> None:
    home = patterned((40, 96), salt=5)
    memory = patterned((4, 96), salt=6)
    to = [0, 1, 2, 1, 1, 3, 0, 2, 1, 1, 3, 3, 3, 2, 2, 0, 1]
    check(member, memory, memory, home, to, range(len(to)))


@pytest.mark.parametrize("wrong", [-1, 12, 2**31, 2**40, -(2**63)])
@pytest.mark.parametrize("side", ["destination", "source"])
def test_a_row_outside_is_refused_before_a_byte_moves(member: Gather, side: str, wrong: int) -> None:
    home, memory = patterned((12, 64), salt=7), patterned((3, 4, 64), salt=8)
    before = memory.clone()
    rows = {"destination": np.array([0, 1, 2]), "source": np.array([3, 4, 5])}
    rows[side] = np.array([0, 1, wrong])
    with pytest.raises(IndexError, match=f"{side} row {wrong} is outside 0..11"):
        member(RowView.of_tensor(memory), rows["destination"], RowView.of_tensor(home), rows["source"])
    assert torch.equal(memory, before)


def test_what_does_not_fit_together_is_refused(member: Gather) -> None:
    home, memory = patterned((12, 64), salt=9), patterned((12, 65), salt=10)
    whole, other = RowView.of_tensor(home), RowView.of_tensor(memory)
    two = np.array([0, 1])
    with pytest.raises(ValueError, match="64 bytes cannot go into rows of 65"):
        member(other, two, whole, two)
    with pytest.raises(ValueError, match="1 source rows for 2 destinations"):
        member(whole, two, whole, two[:1])
    with pytest.raises(TypeError, match="int32"):
        member(whole, two.astype(np.int32), whole, two)
    with pytest.raises(TypeError, match=r"\(1, 2\)"):
        member(whole, two[None], whole, two)


@pytest.mark.parametrize("block_tokens", [1, 48])
def test_rows_and_addresses_beyond_two_to_the_31(member: Gather, block_tokens: int) -> None:
    """2^31 rows of 64 bytes and more: 137 GB of addresses, of which a few pages are ever touched."""
    stride = 64 * block_tokens + 32 * (block_tokens > 1)
    num_blocks = (2**31 + 4096) // block_tokens
    allocator = SharedMemoryAllocator(available_bytes=lambda: 1 << 62, huge_pages=False)
    region = allocator.alloc(stride * num_blocks, "far")
    far = RowView(
        address=region.address,
        row_bytes=64,
        block_tokens=block_tokens,
        block_stride_bytes=stride,
        num_blocks=num_blocks,
    )
    rows = np.array([2**31 + 7, 5, 2**26 + 3, 2**31 - 1])
    places = [int(row) // block_tokens * stride + int(row) % block_tokens * 64 for row in rows]
    near = patterned((4, 64), salt=11)
    member(far, rows, RowView.of_tensor(near), np.arange(4))
    memory = region.tensor()
    for place, row in zip(places, near, strict=True):
        assert torch.equal(memory[place : place + 64], row)
        # Where 32-bit arithmetic would have put it.
        truncated = place & 0xFFFFFFFF
        assert truncated in places or not memory[truncated : truncated + 64].any()
    back = torch.zeros(4, 64, dtype=torch.uint8)
    member(RowView.of_tensor(back), np.arange(4), far, rows)
    assert torch.equal(back, near)
    allocator.free(region)


def test_no_byte_outside_the_last_row_is_read(member: Gather) -> None:
    """The rows end where memory may no longer be read: one byte further would end the process."""
    page = mmap.PAGESIZE
    mapping = mmap.mmap(-1, 2 * page)
    memory = torch.frombuffer(mapping, dtype=torch.uint8)
    protect = ctypes.CDLL(None, use_errno=True).mprotect
    beyond = ctypes.c_void_p(memory.data_ptr() + page)
    assert protect(beyond, ctypes.c_size_t(page), 0) == 0, os.strerror(ctypes.get_errno())
    memory = memory[:page]
    memory.copy_(patterned((page,), salt=12))
    for row_bytes in (33, 100, 656, 704):
        rows = page // row_bytes
        source = memory[page - rows * row_bytes :].view(rows, row_bytes)
        target = torch.zeros_like(source)
        ids = np.arange(rows)[::-1].copy()
        member(RowView.of_tensor(target), ids, RowView.of_tensor(source), ids)
        assert torch.equal(target, source)
