"""The host home: where each layer's pages are, and that nothing is written between them."""

from __future__ import annotations

import itertools
import pickle
import subprocess
import sys
from collections.abc import Collection

import numpy as np
import pytest
import torch

from kvstrata.core.bundle import Bundle, ComponentSpec, build_bundles
from kvstrata.core.layers import Component, LayerId
from kvstrata.errors import BudgetError
from kvstrata.memory.allocator import SharedMemoryAllocator
from kvstrata.memory.host_pool import (
    ALL_COMPONENTS,
    MAIN_ONLY,
    HostPool,
    host_page_bytes,
    host_pool_bytes,
    host_pool_overhead_bytes,
)
from kvstrata.memory.pages import PageView
from kvstrata.memory.region import HostRegion, open_region
from kvstrata.move.memcpy import copy_ranges
from kvstrata.move.plan import plan_block_copies

MAIN_BYTES = 1152 * 16
INDEXER_BYTES = 132 * 16
NUM_BLOCKS = 12


def bundles() -> tuple[Bundle, ...]:
    """Five layers, the last a draft; layers 1 and 4 have an indexer."""

    def spec(index: int, component: Component, page_bytes: int) -> ComponentSpec:
        return ComponentSpec(
            name=f"layers.{index}.{component.value}",
            layer=LayerId(index, component, index == 4),
            page_bytes=page_bytes,
            block_tokens=16,
            layout=component.value,
        )

    main = [spec(index, Component.MAIN, MAIN_BYTES) for index in range(5)]
    return build_bundles([*main, *(spec(index, Component.INDEXER, INDEXER_BYTES) for index in (1, 4))])


@pytest.fixture
def allocator() -> SharedMemoryAllocator:
    return SharedMemoryAllocator()


@pytest.fixture
def pool(allocator: SharedMemoryAllocator) -> HostPool:
    return HostPool(bundles(), NUM_BLOCKS, allocator, layers=[4, 1, 2])


def region_of(pool: HostPool) -> torch.Tensor:
    """All bytes of the pool, guards included."""
    return open_region(pool.handle).tensor()


def places(pool: HostPool) -> dict[tuple[int, Component], PageView]:
    wanted = [(1, Component.MAIN), (1, Component.INDEXER), (2, Component.MAIN)]
    wanted += [(4, Component.MAIN), (4, Component.INDEXER)]
    return {place: pool.view(*place) for place in wanted}


def test_pages_are_compact_and_of_their_components_size(pool: HostPool) -> None:
    for (_, component), view in places(pool).items():
        expected = MAIN_BYTES if component is Component.MAIN else INDEXER_BYTES
        assert (view.page_bytes, view.block_stride_bytes, view.num_blocks) == (expected, expected, NUM_BLOCKS)
        assert view.address % 4096 == 0


def test_no_two_layers_overlap_or_touch(pool: HostPool) -> None:
    spans = sorted((view.address, view.address + view.span_bytes) for view in places(pool).values())
    for (_, end), (start, _) in itertools.pairwise(spans):
        assert end + 64 <= start


@pytest.mark.parametrize("place", [(0, Component.MAIN), (2, Component.INDEXER), (9, Component.MAIN)], ids=str)
def test_what_has_no_home_here_is_an_error(pool: HostPool, place: tuple[int, Component]) -> None:
    with pytest.raises(KeyError, match=f"layer {place[0]}"):
        pool.view(*place)


def test_sizes_agree_with_what_was_planned(allocator: SharedMemoryAllocator, pool: HostPool) -> None:
    per_block = 3 * MAIN_BYTES + 2 * INDEXER_BYTES
    assert host_page_bytes(bundles(), [1, 2, 4]) == host_page_bytes(bundles(), [4, 2, 1, 1]) == per_block
    counts = pool.statistics()
    assert (counts.num_blocks, counts.layers, counts.page_bytes) == (NUM_BLOCKS, 3, per_block)
    assert pool.size_bytes == counts.size_bytes == host_pool_bytes(bundles(), NUM_BLOCKS, [1, 2, 4])
    assert allocator.statistics().allocated_bytes == pool.size_bytes
    assert NUM_BLOCKS * per_block < pool.size_bytes <= NUM_BLOCKS * per_block + 6 * (4096 + 64)


@pytest.mark.parametrize("num_blocks", [1, 2, 3, 17, 100])
@pytest.mark.parametrize("components", [ALL_COMPONENTS, MAIN_ONLY], ids=["all", "main"])
def test_guards_and_alignment_stay_within_what_is_set_aside_for_them(
    num_blocks: int, components: Collection[Component]
) -> None:
    layers = {1, 2}
    pages = num_blocks * host_page_bytes(bundles(), layers, components=components)
    extra = host_pool_bytes(bundles(), num_blocks, layers, components=components) - pages
    assert 0 < extra <= host_pool_overhead_bytes(bundles(), layers, components=components)


def test_a_pool_of_main_kv_has_no_indexer_pages(allocator: SharedMemoryAllocator) -> None:
    layers = [1, 2, 4]
    pool = HostPool(bundles(), NUM_BLOCKS, allocator, layers=layers, components=MAIN_ONLY)
    assert host_page_bytes(bundles(), layers, components=MAIN_ONLY) == 3 * MAIN_BYTES
    assert pool.statistics().page_bytes == 3 * MAIN_BYTES
    assert pool.size_bytes == host_pool_bytes(bundles(), NUM_BLOCKS, layers, components=MAIN_ONLY)
    assert pool.size_bytes < NUM_BLOCKS * 3 * MAIN_BYTES + 4 * (4096 + 64)
    with pytest.raises(KeyError, match="layer 1 indexer"):
        pool.view(1, Component.INDEXER)
    pool.check_integrity()


def test_a_pool_of_no_component_is_refused(allocator: SharedMemoryAllocator) -> None:
    with pytest.raises(ValueError, match="host pool"):
        HostPool(bundles(), NUM_BLOCKS, allocator, layers=[1], components=())


def test_rows_written_through_the_tensor_are_the_pages_bytes(pool: HostPool) -> None:
    rows = pool.tensor(4, Component.MAIN, width=576, dtype=torch.bfloat16)
    assert (rows.shape, rows.dtype) == ((NUM_BLOCKS, 16, 576), torch.bfloat16)
    assert rows.data_ptr() == pool.view(4, Component.MAIN).address
    # Host row 7 * 16 + 3, as whoever saves new rows names it.
    rows.view(-1, 576)[115] = torch.arange(576, dtype=torch.bfloat16) + 1
    window = torch.zeros(NUM_BLOCKS, MAIN_BYTES, dtype=torch.uint8)
    whole = np.arange(NUM_BLOCKS)
    copy_ranges(plan_block_copies(PageView.of_tensor(window), pool.view(4, Component.MAIN), whole))
    expected = torch.zeros(NUM_BLOCKS * 16, 576, dtype=torch.bfloat16)
    expected[115] = torch.arange(576, dtype=torch.bfloat16) + 1
    assert torch.equal(window.view(torch.bfloat16).view(-1, 576), expected)
    assert not pool.tensor(2, Component.MAIN, width=576, dtype=torch.bfloat16).any()
    pool.check_integrity()


def test_rows_of_a_padded_page_leave_the_padding_alone(pool: HostPool) -> None:
    rows = pool.tensor(1, Component.INDEXER, width=128, dtype=torch.uint8)
    rows.fill_(7)
    pages = pool.tensor(1, Component.INDEXER, width=132, dtype=torch.uint8).flatten(1)
    assert bool((pages[:, : 16 * 128] == 7).all())
    assert not pages[:, 16 * 128 :].any()
    pool.check_integrity()


def test_the_last_row_of_the_last_block_stays_inside_the_guards(pool: HostPool) -> None:
    for (layer, component), view in places(pool).items():
        width = view.page_bytes // 16
        pool.tensor(layer, component, width=width, dtype=torch.uint8).fill_(255)
    pool.check_integrity()


@pytest.mark.parametrize(
    ("width", "dtype"), [(577, torch.bfloat16), (0, torch.uint8), (-4, torch.uint8), (289, torch.float32)]
)
def test_rows_that_do_not_fit_a_page_are_refused(pool: HostPool, width: int, dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match=f"rows of {width} elements.* do not fit a page of layer 2 main"):
        pool.tensor(2, Component.MAIN, width=width, dtype=dtype)


def test_a_row_type_that_does_not_divide_a_page_is_refused(allocator: SharedMemoryAllocator) -> None:
    odd = ComponentSpec(
        name="odd", layer=LayerId(0, Component.MAIN, False), page_bytes=30, block_tokens=2, layout="x"
    )
    pool = HostPool(build_bundles([odd]), 3, allocator, layers=[0])
    with pytest.raises(ValueError, match="do not fit"):
        pool.tensor(0, Component.MAIN, width=3, dtype=torch.float32)
    assert pool.tensor(0, Component.MAIN, width=7, dtype=torch.int16).shape == (3, 2, 7)


def test_layers_that_were_not_planned_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\[7\]"):
        host_page_bytes(bundles(), [1, 7])


@pytest.mark.parametrize(("num_blocks", "layers"), [(0, [1]), (5, [])])
def test_an_empty_pool_is_refused(
    allocator: SharedMemoryAllocator, num_blocks: int, layers: list[int]
) -> None:
    with pytest.raises(ValueError, match="host pool"):
        HostPool(bundles(), num_blocks, allocator, layers=layers)
    assert allocator.statistics().regions == 0


def test_too_little_memory_names_the_knob() -> None:
    with pytest.raises(BudgetError, match="host_memory_GB"):
        HostPool(bundles(), NUM_BLOCKS, SharedMemoryAllocator(limit_bytes=4096), layers=[1])


def test_saved_pages_come_back_and_no_other_page_changes(pool: HostPool) -> None:
    windows = {
        place: torch.randint(0, 256, (NUM_BLOCKS, view.page_bytes), dtype=torch.uint8)
        for place, view in places(pool).items()
    }
    blocks = np.array([1, 2, 3, 11])
    for place, window in windows.items():
        copy_ranges(plan_block_copies(pool.view(*place), PageView.of_tensor(window), blocks))
    pool.check_integrity()
    for place, window in windows.items():
        back = torch.zeros_like(window)
        everything = np.arange(NUM_BLOCKS)
        copy_ranges(plan_block_copies(PageView.of_tensor(back), pool.view(*place), everything))
        assert torch.equal(back[blocks], window[blocks])
        others = np.setdiff1d(everything, blocks)
        assert not back[others].any()


@pytest.mark.parametrize(
    "place", [(1, Component.MAIN), (1, Component.INDEXER), (4, Component.INDEXER)], ids=str
)
def test_one_byte_past_a_layers_end_is_found(pool: HostPool, place: tuple[int, Component]) -> None:
    pool.check_integrity()
    view = pool.view(*place)
    everything = region_of(pool)
    offset = view.address - places(pool)[1, Component.MAIN].address + 4096 + view.span_bytes
    everything[offset] ^= 1
    with pytest.raises(AssertionError, match=rf"after layer {place[0]} {place[1].value}.*offset {offset}"):
        pool.check_integrity()
    everything[offset] ^= 1
    pool.check_integrity()


def test_one_byte_before_the_first_layer_is_found(pool: HostPool) -> None:
    region_of(pool)[4095] ^= 1
    with pytest.raises(AssertionError, match="start"):
        pool.check_integrity()


def test_one_byte_before_a_later_layer_is_found(pool: HostPool) -> None:
    first, later = pool.view(1, Component.MAIN), pool.view(4, Component.MAIN)
    offset = later.address - first.address + 4096
    region_of(pool)[offset - 1] ^= 1
    with pytest.raises(AssertionError, match=f"offset {offset - 1}"):
        pool.check_integrity()


def test_a_guard_moved_over_another_is_found(pool: HostPool) -> None:
    """A copy that takes whole strides too many carries guard bytes along: they must not fit elsewhere."""
    everything = region_of(pool)
    first = places(pool)[1, Component.MAIN]
    after_first = 4096 + first.span_bytes
    everything[after_first : after_first + 64] = everything[0:64].clone()
    with pytest.raises(AssertionError, match="after layer 1 main"):
        pool.check_integrity()


def test_views_end_with_the_pool(allocator: SharedMemoryAllocator, pool: HostPool) -> None:
    pool.close()
    pool.close()
    with pytest.raises(ValueError, match="closed"):
        pool.view(1, Component.MAIN)
    with pytest.raises(ValueError, match="closed"):
        pool.tensor(1, Component.MAIN, width=576, dtype=torch.bfloat16)
    assert pool.statistics().resident_bytes == 0
    assert allocator.statistics().regions == 0


class RefusingAllocator(SharedMemoryAllocator):
    """Pins nothing, as a driver without lockable memory."""

    def register(self, region: HostRegion) -> bool:
        return False


class PinningAllocator(SharedMemoryAllocator):
    def register(self, region: HostRegion) -> bool:
        return True


@pytest.mark.parametrize(("kind", "pinned"), [(RefusingAllocator, False), (PinningAllocator, True)])
def test_statistics_say_whether_the_pool_is_pinned(kind: type[SharedMemoryAllocator], pinned: bool) -> None:
    assert HostPool(bundles(), 2, kind(), layers=[1]).statistics().pinned is pinned


OTHER_PROCESS = """
import pickle, sys
import numpy as np, torch
from kvstrata.core.layers import Component
from kvstrata.memory.host_pool import HostPool
from kvstrata.memory.pages import PageView
from kvstrata.move.memcpy import copy_ranges
from kvstrata.move.plan import plan_block_copies

bundles, num_blocks, handle = pickle.loads(bytes.fromhex(sys.argv[1]))
pool = HostPool.open(bundles, num_blocks, handle, layers=[1, 2, 4])
view = pool.view(4, Component.INDEXER)
window = torch.zeros(num_blocks, view.page_bytes, dtype=torch.uint8)
copy_ranges(plan_block_copies(PageView.of_tensor(window), view, np.array([7])))
window[8] = window[7] + 1
copy_ranges(plan_block_copies(view, PageView.of_tensor(window), np.array([8])))
pool.check_integrity()
pool.close()
"""


def test_a_second_process_shares_the_pool(pool: HostPool) -> None:
    view = pool.view(4, Component.INDEXER)
    window = torch.arange(NUM_BLOCKS * INDEXER_BYTES).remainder(199).to(torch.uint8).view(NUM_BLOCKS, -1)
    copy_ranges(plan_block_copies(view, PageView.of_tensor(window), np.array([7])))
    arguments = pickle.dumps((bundles(), NUM_BLOCKS, pool.handle)).hex()
    child = subprocess.run(
        [sys.executable, "-c", OTHER_PROCESS, arguments], capture_output=True, text=True, timeout=120
    )
    assert child.returncode == 0, child.stderr
    back = torch.zeros_like(window)
    copy_ranges(plan_block_copies(PageView.of_tensor(back), view, np.arange(NUM_BLOCKS)))
    assert torch.equal(back[7], window[7])
    assert torch.equal(back[8], window[7] + 1)
    assert not back[:7].any()
    assert not back[9:].any()
    pool.check_integrity()


def test_two_processes_that_planned_differently_are_told(pool: HostPool) -> None:
    with pytest.raises(ValueError, match="planned differently"):
        HostPool.open(bundles(), NUM_BLOCKS + 1, pool.handle, layers=[1, 2, 4])
    with pytest.raises(ValueError, match="planned differently"):
        HostPool.open(bundles(), NUM_BLOCKS, pool.handle, layers=[1, 2, 4], components=MAIN_ONLY)


def test_ranks_that_share_a_pool_of_main_kv_see_one_anothers_rows(allocator: SharedMemoryAllocator) -> None:
    made = HostPool(bundles(), NUM_BLOCKS, allocator, layers=[1, 2], components=MAIN_ONLY)
    handle = pickle.loads(pickle.dumps(made.handle))
    opened = HostPool.open(bundles(), NUM_BLOCKS, handle, layers=[1, 2], components=MAIN_ONLY)
    made.tensor(2, Component.MAIN, width=576, dtype=torch.bfloat16)[NUM_BLOCKS - 1, 15] = 3
    seen = opened.tensor(2, Component.MAIN, width=576, dtype=torch.bfloat16)
    assert bool((seen[NUM_BLOCKS - 1, 15] == 3).all())
    assert int(seen.count_nonzero()) == 576
    opened.check_integrity()
    opened.close()
