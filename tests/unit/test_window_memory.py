"""A cache that is allocated inside the context can be read by another process; nothing else changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvstrata.errors import BudgetError
from kvstrata.memory.allocator import SharedMemoryAllocator
from kvstrata.memory.region import open_region
from kvstrata.memory.window_memory import MIN_BYTES, SharedWindowMemory

SIZE = MIN_BYTES + 4096


@pytest.fixture
def allocator() -> SharedMemoryAllocator:
    return SharedMemoryAllocator(huge_pages=False)


@pytest.fixture
def memory(allocator: SharedMemoryAllocator) -> Any:
    memory = SharedWindowMemory(allocator)
    yield memory
    memory.close()
    assert allocator.statistics().regions == 0


@pytest.mark.parametrize("device", [torch.device("cpu"), "cpu", None])
def test_a_cache_lies_in_a_region_that_another_mapping_sees(memory: SharedWindowMemory, device: Any) -> None:
    with memory:
        cache = torch.zeros(SIZE, dtype=torch.int8, device=device)
    assert (cache.shape, cache.dtype, cache.device.type) == ((SIZE,), torch.int8, "cpu")
    assert not cache.any()
    (region,) = memory.regions
    assert region.address == cache.data_ptr()
    cache[17] = -3
    other = open_region(region.handle, huge_pages=False)
    assert other.tensor().view(torch.int8)[17] == -3
    other.close()


def test_every_cache_has_a_region_of_its_own_in_order(memory: SharedWindowMemory) -> None:
    with memory:
        caches = [torch.zeros((SIZE,), dtype=torch.int8), torch.zeros(size=(SIZE,), dtype=torch.int8)]
    assert [region.address for region in memory.regions] == [cache.data_ptr() for cache in caches]
    assert all(region.size_bytes >= SIZE for region in memory.regions)


def test_memory_from_outside_the_context_is_in_no_region(memory: SharedWindowMemory) -> None:
    private = torch.zeros(SIZE, dtype=torch.int8)
    assert memory.regions == ()
    with memory:
        torch.zeros(SIZE, dtype=torch.int8)
    (region,) = memory.regions
    assert not region.address <= private.data_ptr() < region.address + region.size_bytes


def test_any_other_call_is_left_alone(memory: SharedWindowMemory) -> None:
    with memory:
        torch.zeros(MIN_BYTES - 1, dtype=torch.int8)
        torch.zeros(SIZE)
        torch.zeros(SIZE, dtype=torch.uint8)
        torch.zeros(2, SIZE, dtype=torch.int8)
        torch.zeros((2, SIZE), dtype=torch.int8)
        torch.zeros(SIZE, dtype=torch.int8, device="meta")
        torch.zeros(SIZE, dtype=torch.int8, requires_grad=False)
        torch.ones(SIZE, dtype=torch.int8)
        torch.empty(SIZE, dtype=torch.int8)
    torch.zeros(SIZE, dtype=torch.int8)
    assert memory.regions == ()


def test_a_default_device_that_is_no_cpu_is_respected(memory: SharedWindowMemory) -> None:
    with memory, torch.device("meta"):
        assert torch.zeros(SIZE, dtype=torch.int8).device.type == "meta"
    with torch.device("meta"), memory:
        assert torch.zeros(SIZE, dtype=torch.int8).device.type == "meta"
    assert memory.regions == ()


def test_a_cache_outlives_the_memory_object(allocator: SharedMemoryAllocator) -> None:
    memory = SharedWindowMemory(allocator)
    with memory:
        cache = torch.zeros(SIZE, dtype=torch.int8)
    memory.close()
    memory.close()
    cache.fill_(5)
    assert int(cache.sum(dtype=torch.int64)) == 5 * SIZE


def test_a_cache_that_does_not_fit_is_refused_before_it_is_taken() -> None:
    allocator = SharedMemoryAllocator(limit_bytes=MIN_BYTES)
    memory = SharedWindowMemory(allocator)
    with memory, pytest.raises(BudgetError):
        torch.zeros(SIZE, dtype=torch.int8)
    assert memory.regions == ()
    allocator.check_integrity()
