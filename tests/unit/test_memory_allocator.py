"""Shared host memory: budget, sharing, pinning, and what survives which order of closing."""

from __future__ import annotations

import dataclasses
import gc
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kvstrata.errors import BudgetError, StoreUnavailable
from kvstrata.memory.allocator import SharedMemoryAllocator
from kvstrata.memory.region import open_region

MIB = 1 << 20
OTHER_PROCESS = """
import pickle, sys
from kvstrata.memory.region import open_region
region = open_region(pickle.loads(bytes.fromhex(sys.argv[1])))
seen = region.tensor()[:4].tolist()
region.tensor()[-4:] = region.tensor()[:4] + 100
print(seen)
"""


def mapped(label: str) -> bool:
    return label in Path("/proc/self/maps").read_text()


def test_memory_is_zeroed_aligned_and_taken_only_when_touched() -> None:
    region = SharedMemoryAllocator(huge_pages=False).alloc(64 * MIB, "pool")
    assert region.address % 4096 == 0
    assert region.size_bytes == region.tensor().numel() == 64 * MIB
    assert region.resident_bytes == 0
    region.tensor()[40 * MIB] = 7
    assert 0 < region.resident_bytes <= 2 * MIB
    assert region.tensor()[40 * MIB] == 7
    assert not region.tensor()[: 1 * MIB].any()


def test_prefault_takes_everything_and_keeps_contents() -> None:
    region = SharedMemoryAllocator(prefault=True).alloc(8 * MIB, "pool")
    assert region.resident_bytes == 8 * MIB
    region.tensor()[5] = 9
    region.prefault()
    assert region.tensor()[5] == 9


def test_more_than_the_machine_has_is_refused_before_anything_is_taken() -> None:
    allocator = SharedMemoryAllocator(available_bytes=lambda: 10 * MIB)
    with pytest.raises(BudgetError, match=rf"{11 * MIB}.*{10 * MIB}.*host_memory_GB") as caught:
        allocator.alloc(11 * MIB, "pool")
    assert (caught.value.needed, caught.value.available) == (11 * MIB, 10 * MIB)
    assert allocator.statistics().regions == 0


def test_the_real_machine_does_not_have_a_pebibyte() -> None:
    with pytest.raises(BudgetError, match="host_memory_GB"):
        SharedMemoryAllocator().alloc(1 << 50, "pool")


def test_promised_memory_counts_before_it_is_touched() -> None:
    allocator = SharedMemoryAllocator(available_bytes=lambda: 10 * MIB, huge_pages=False)
    first = allocator.alloc(6 * MIB, "first")
    with pytest.raises(BudgetError):
        allocator.alloc(6 * MIB, "second")
    # Touched memory is missing from what the machine reports; it must not be counted a second time.
    first.prefault()
    allocator.alloc(6 * MIB, "second")


def test_the_users_limit_covers_all_regions_together() -> None:
    allocator = SharedMemoryAllocator(limit_bytes=10 * MIB)
    first = allocator.alloc(6 * MIB, "first")
    with pytest.raises(BudgetError, match=rf"{5 * MIB}.*host_memory_GB leaves {4 * MIB}"):
        allocator.alloc(5 * MIB, "second")
    allocator.free(first)
    allocator.alloc(5 * MIB, "second")


def test_errors_name_the_knob_that_the_limit_came_from() -> None:
    limited = SharedMemoryAllocator(limit_bytes=MIB, limit_knob="a.knob_GB")
    with pytest.raises(
        BudgetError, match=rf"{2 * MIB} bytes and a\.knob_GB leaves {MIB} .*raise a\.knob_GB$"
    ):
        limited.alloc(2 * MIB, "pool")
    small = SharedMemoryAllocator(limit_knob="a.knob_GB", available_bytes=lambda: MIB)
    with pytest.raises(BudgetError, match=r"available; lower a\.knob_GB, or"):
        small.alloc(2 * MIB, "pool")


@pytest.mark.parametrize("size", [0, -1])
def test_sizes_without_sense_are_refused(size: int) -> None:
    with pytest.raises(ValueError, match="pool"):
        SharedMemoryAllocator().alloc(size, "pool")


def test_names_are_unique_until_freed() -> None:
    allocator = SharedMemoryAllocator()
    region = allocator.alloc(MIB, "pool")
    with pytest.raises(ValueError, match="exists already"):
        allocator.alloc(MIB, "pool")
    allocator.free(region)
    allocator.alloc(MIB, "pool")


def test_a_tensor_outlives_its_region() -> None:
    allocator = SharedMemoryAllocator()
    region = allocator.alloc(MIB, "pool")
    label = region.handle.label
    row = region.tensor()[100:104]
    row.fill_(5)
    allocator.free(region)
    with pytest.raises(ValueError, match="freed"):
        _ = region.address
    del region
    gc.collect()
    assert mapped(label)
    assert row.tolist() == [5, 5, 5, 5]
    del row
    gc.collect()
    assert not mapped(label)


def test_freeing_twice_is_an_error() -> None:
    allocator = SharedMemoryAllocator()
    region = allocator.alloc(MIB, "pool")
    allocator.free(region)
    with pytest.raises(ValueError, match="freed"):
        allocator.free(region)


def test_nothing_is_left_in_the_file_system() -> None:
    before = set(os.listdir("/dev/shm"))
    region = SharedMemoryAllocator().alloc(MIB, "pool")
    region.tensor()[0] = 1
    assert set(os.listdir("/dev/shm")) <= before
    assert "kvstrata-pool" in region.handle.label


def test_nobody_can_cut_the_region_short() -> None:
    region = SharedMemoryAllocator().alloc(MIB, "pool")
    with pytest.raises(PermissionError):
        os.truncate(f"/proc/self/fd/{region.handle.fd}", 4096)


def test_another_process_reads_and_writes_the_same_bytes() -> None:
    allocator = SharedMemoryAllocator()
    region = allocator.alloc(MIB, "pool")
    region.tensor()[:4] = torch.tensor([1, 2, 3, 4], dtype=torch.uint8)
    handle = pickle.dumps(allocator.shared("pool")).hex()
    child = subprocess.run(
        [sys.executable, "-c", OTHER_PROCESS, handle], capture_output=True, text=True, timeout=120, check=True
    )
    assert child.stdout.strip() == "[1, 2, 3, 4]"
    assert region.tensor()[-4:].tolist() == [101, 102, 103, 104]
    assert not region.tensor()[4:-4].any()


def test_an_opened_region_outlives_its_maker() -> None:
    allocator = SharedMemoryAllocator()
    region = allocator.alloc(MIB, "pool")
    region.tensor()[0] = 42
    opened = open_region(region.handle)
    allocator.free(region)
    assert opened.tensor()[0] == 42
    opened.close()
    opened.close()


def test_a_freed_region_cannot_be_opened() -> None:
    allocator = SharedMemoryAllocator()
    region = allocator.alloc(MIB, "pool")
    allocator.free(region)
    with pytest.raises(StoreUnavailable, match="pool"):
        open_region(region.handle)


def test_a_recycled_descriptor_is_not_taken_for_the_region() -> None:
    allocator = SharedMemoryAllocator()
    first, second = allocator.alloc(MIB, "first"), allocator.alloc(MIB, "second")
    stale = dataclasses.replace(first.handle, fd=second.handle.fd)
    with pytest.raises(StoreUnavailable, match="first"):
        open_region(stale)


def test_a_dead_maker_is_named() -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait(60)
    handle = dataclasses.replace(SharedMemoryAllocator().alloc(MIB, "pool").handle, pid=child.pid)
    with pytest.raises(StoreUnavailable, match=str(child.pid)):
        open_region(handle)


def test_shared_knows_only_living_names() -> None:
    with pytest.raises(KeyError):
        SharedMemoryAllocator().shared("pool")


class RecordingPinner:
    """Pins like a driver with a limit on the bytes of one registration."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.pinned: dict[int, int] = {}

    def pin(self, address: int, size_bytes: int) -> None:
        if size_bytes > self.limit_bytes:
            raise RuntimeError("out of lockable memory")
        assert address not in self.pinned
        self.pinned[address] = size_bytes

    def unpin(self, address: int) -> None:
        del self.pinned[address]


def test_without_a_device_nothing_is_pinned() -> None:
    allocator = SharedMemoryAllocator()
    region = allocator.alloc(MIB, "pool")
    assert allocator.register(region) is False
    allocator.unregister(region)
    assert allocator.statistics().pinned_bytes == 0


def test_pinning_ends_before_the_memory_goes() -> None:
    pinner = RecordingPinner(limit_bytes=4 * MIB)
    allocator = SharedMemoryAllocator(pinner=pinner)
    region = allocator.alloc(MIB, "pool")
    assert allocator.register(region)
    assert allocator.register(region)
    assert pinner.pinned == {region.address: MIB}
    assert allocator.statistics().pinned_bytes == MIB
    allocator.check_integrity()
    allocator.free(region)
    assert pinner.pinned == {}
    assert allocator.statistics().pinned_bytes == 0


def test_a_refused_pin_goes_on_unpinned_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    allocator = SharedMemoryAllocator(pinner=RecordingPinner(limit_bytes=1))
    region = allocator.alloc(MIB, "pool")
    assert allocator.register(region) is False
    assert any("pool" in m and "out of lockable memory" in m for m in caplog.messages)
    assert allocator.statistics().pin_failures == 1
    region.tensor()[0] = 1
    allocator.free(region)


def test_statistics_agree_with_the_regions() -> None:
    allocator = SharedMemoryAllocator(huge_pages=False)
    first, second = allocator.alloc(MIB, "first"), allocator.alloc(2 * MIB, "second")
    second.prefault()
    counts = allocator.statistics()
    assert (counts.regions, counts.allocated_bytes, counts.resident_bytes) == (2, 3 * MIB, 2 * MIB)
    allocator.free(first)
    assert allocator.statistics().allocated_bytes == 2 * MIB


def test_integrity_finds_a_region_closed_behind_the_allocators_back() -> None:
    allocator = SharedMemoryAllocator()
    region = allocator.alloc(MIB, "pool")
    allocator.check_integrity()
    region.close()
    with pytest.raises(ValueError, match="pool"):
        allocator.check_integrity()
