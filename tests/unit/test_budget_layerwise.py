"""Bytes to blocks, and the start-up checks A1 and A3."""

import pytest

from kvstrata.core.budget import Budget, check_allocation, layerwise_budget
from kvstrata.core.buffers import plan_buffers
from kvstrata.core.bundle import ComponentSpec, build_bundles
from kvstrata.core.layers import Component, LayerId
from kvstrata.errors import BudgetError

# Four layers of 100 bytes a block in two slots: 200 physical, 400 logical.
PLAN = plan_buffers(
    build_bundles(
        ComponentSpec(
            name=str(n), layer=LayerId(n, Component.MAIN, False), page_bytes=100, block_tokens=16, layout="x"
        )
        for n in range(4)
    ),
    num_shared_buffers=1,
    independent_layers=(0,),
)


def budget_of(available, host=None, host_page=400) -> Budget:
    return layerwise_budget(PLAN, available_bytes=available, host_bytes=host, host_page_bytes=host_page)


@pytest.mark.parametrize(
    ("available", "host", "blocks"),
    [(200, None, 1), (399, None, 1), (400, None, 2), (2099, None, 10), (2000, 400, 1), (2000, 1999, 4)],
)
def test_the_scarcer_of_device_and_host_decides(available, host, blocks):
    budget = budget_of(available, host)
    assert budget == Budget(
        available_bytes=available,
        physical_page_bytes=200,
        logical_page_bytes=400,
        num_blocks=blocks,
        reported_bytes=blocks * 400,
    )


@pytest.mark.parametrize(("available", "needed"), [(199, 200), (0, 200), (-5, 200)])
def test_a_device_too_small_for_one_block(available, needed):
    with pytest.raises(BudgetError, match=f"{needed} bytes of device.* {available} are available") as caught:
        budget_of(available)
    assert (caught.value.needed, caught.value.available) == (needed, available)


def test_a_host_too_small_for_one_block_names_the_knob():
    with pytest.raises(BudgetError, match=r"400 bytes of host.* 399 are available.*host_memory_GB") as caught:
        budget_of(1000, 399)
    assert (caught.value.needed, caught.value.available) == (400, 399)


@pytest.mark.parametrize(("host", "blocks"), [(430, 1), (829, 1), (830, 2)])
def test_what_the_host_home_takes_beside_its_blocks_is_set_aside(host, blocks):
    def budget_with_overhead(host_bytes: int) -> Budget:
        return layerwise_budget(
            PLAN, available_bytes=2000, host_bytes=host_bytes, host_page_bytes=400, host_overhead_bytes=30
        )

    assert budget_with_overhead(host).num_blocks == blocks
    with pytest.raises(BudgetError, match=r"430 bytes of host.* 429 are available"):
        budget_with_overhead(429)


def test_no_32_bit_limit():
    budget = budget_of(1 << 50)
    assert budget.num_blocks == (1 << 50) // 200
    assert budget.reported_bytes == budget.num_blocks * 400


@pytest.mark.parametrize("planned", [1, 9, 10])
def test_an_allocation_of_the_planned_blocks_passes(planned):
    check_allocation(planned, planned * 200, budget_of(2000))


@pytest.mark.parametrize("planned", [0, 11])
def test_a_plan_beyond_this_rank_names_both_counts(planned):
    with pytest.raises(BudgetError, match=f"planned {planned} blocks.*memory for 10") as caught:
        check_allocation(planned, planned * 200, budget_of(2000))
    assert (caught.value.needed, caught.value.available) == (planned, 10)


@pytest.mark.parametrize("allocated", [1999, 2001, 0, 4000])
def test_other_bytes_than_planned_name_both(allocated):
    with pytest.raises(BudgetError, match=f"take 2000 bytes, but {allocated}") as caught:
        check_allocation(10, allocated, budget_of(2000))
    assert (caught.value.needed, caught.value.available) == (2000, allocated)
