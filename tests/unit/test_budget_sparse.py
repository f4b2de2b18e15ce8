"""Sparse decode offload: bytes to blocks, what the account holds, and the errors' numbers and knobs."""

import re
from fractions import Fraction

import pytest

from kvstrata.core.budget import (
    SparseBudget,
    check_allocation,
    prompt_window_blocks,
    sparse_budget,
    sparse_capacity_formula,
    stage_host_bytes,
)
from kvstrata.core.bundle import ComponentSpec, build_bundles
from kvstrata.core.layers import Component, LayerId
from kvstrata.errors import BudgetError

# Three layers of 100 bytes of main KV a block; layers 0 and 2 have an indexer of 20: main 300, indexer 40.
BUNDLES = build_bundles(
    ComponentSpec(
        name=f"{n} {component.value}",
        layer=LayerId(n, component, False),
        page_bytes=page_bytes,
        block_tokens=16,
        layout="x",
    )
    for component, page_bytes, layers in ((Component.MAIN, 100, range(3)), (Component.INDEXER, 20, (0, 2)))
    for n in layers
)


def budget_of(available, host=None, **given) -> SparseBudget:
    """Fixed: hot rows 500, residency 60, prompt window 40; a block: indexer 40, residency 5."""
    numbers = {
        "host_overhead_bytes": 30,
        "hot_rows_bytes": 500,
        "residency_bytes": 60,
        "residency_page_bytes": 5,
        "prompt_window_bytes": 40,
    }
    return sparse_budget(BUNDLES, available_bytes=available, host_bytes=host, **(numbers | given))


@pytest.mark.parametrize(
    ("available", "host", "device_blocks", "host_blocks", "blocks"),
    [
        (645, None, 1, None, 1),
        (689, None, 1, None, 1),
        (690, None, 2, None, 2),
        (1050, 330, 10, 1, 1),
        (1050, 3029, 10, 9, 9),
        (1050, 3030, 10, 10, 10),
        (1050, 1 << 50, 10, ((1 << 50) - 30) // 300, 10),
        (1 << 50, 3030, ((1 << 50) - 600) // 45, 10, 10),
    ],
)
def test_A2_the_scarcer_of_device_and_host_decides(available, host, device_blocks, host_blocks, blocks):  # noqa: N802
    budget = budget_of(available, host)
    assert (budget.device_blocks, budget.host_blocks, budget.num_blocks) == (
        device_blocks,
        host_blocks,
        blocks,
    )
    # vLLM's planner divides by the logical bytes of a block and must come to the same count.
    assert budget.reported_bytes // (300 + 40) == blocks
    assert budget.reported_bytes % (300 + 40) == 0


def test_the_account_holds_every_number():
    budget = budget_of(1050, 3029)
    assert budget == SparseBudget(
        available_bytes=1050,
        physical_page_bytes=45,
        logical_page_bytes=340,
        num_blocks=9,
        reported_bytes=9 * 340,
        fixed_bytes=600,
        hot_rows_bytes=500,
        residency_bytes=60,
        prompt_window_bytes=40,
        indexer_page_bytes=40,
        residency_page_bytes=5,
        kept_main_page_bytes=0,
        main_page_bytes=300,
        host_bytes=3029,
        host_overhead_bytes=30,
        device_blocks=10,
        host_blocks=9,
    )
    assert budget.plain_blocks == 3
    assert budget.host_pool_bytes == 9 * 300 + 30


def test_a_kept_device_cache_is_counted_on_the_device_and_in_the_host():
    budget = budget_of(600 + 345 * 4, 930, keep_device_kv_cache=True)
    assert (budget.physical_page_bytes, budget.device_blocks, budget.host_blocks) == (345, 4, 3)
    assert "main KV kept to compare 300" in budget.describe()


@pytest.mark.parametrize("available", [644, 600, 100, 0, -5])
def test_a_device_too_small_names_both_numbers_the_parts_and_the_knobs(available):
    with pytest.raises(BudgetError) as caught:
        budget_of(available)
    assert (caught.value.needed, caught.value.available) == (645, available)
    message = str(caught.value)
    for part in ("needs 645 bytes of device", f" {available} are available", "hot rows take 500"):
        assert part in message
    for knob in ("max_num_seqs", "topk_buffer_size", "prompt_window_tokens", "device KV budget"):
        assert knob in message


@pytest.mark.parametrize("host", [329, 30, 0])
def test_a_host_too_small_names_both_numbers_and_the_knob(host):
    with pytest.raises(BudgetError, match=r"330 bytes of host.*dram_size_per_dp_GB") as caught:
        budget_of(1050, host)
    assert (caught.value.needed, caught.value.available) == (330, host)


def test_the_log_says_both_candidates_what_decides_and_plain_vllms_blocks():
    by_host = budget_of(20 << 20, 30 << 20, hot_rows_bytes=3 << 20).describe()
    device, host = (17 * (1 << 20) - 100) // 45, ((30 << 20) - 30) // 300
    lines = by_host.splitlines()
    assert re.match(
        rf"sparse decode offload: {host} blocks, as the host decides; plain vLLM: 61680$", lines[0]
    )
    assert f"device: {device} blocks in 20.0 MiB, less hot rows 3.0 MiB" in lines[1]
    assert "takes 45 device bytes instead of 340: indexer 40, residency 5" in lines[2]
    assert f"host: {host} blocks in 30.0 MiB, 300 bytes of main KV a block" in lines[3]
    by_device = budget_of(1050).describe()
    assert "10 blocks, as the device decides; plain vLLM: 3" in by_device
    assert "no limit set; 10 blocks take 0.0 MiB" in by_device


@pytest.mark.parametrize("planned", [1, 9, 10])
def test_A1_blocks_and_what_is_fixed_make_up_the_allocation(planned):  # noqa: N802
    budget = budget_of(1050)
    check_allocation(planned, 600 + planned * 45, budget)
    for allocated in (planned * 45, 600 + planned * 45 + 1, 600 + planned * 40):
        words = rf"take {600 + planned * 45} bytes \(600 of them.*but {allocated} were"
        with pytest.raises(BudgetError, match=words):
            check_allocation(planned, allocated, budget)


def test_A3_a_plan_beyond_the_scarcer_memory_is_refused():  # noqa: N802
    with pytest.raises(BudgetError, match=r"planned 10 blocks.*memory for 9"):
        check_allocation(10, 600 + 450, budget_of(1050, 3029))


def test_the_formula_is_the_ratio_of_blocks_after_the_hot_rows():
    # 6 layers, 2304 + 512 bytes a token and layer: 5.5x, and less what the hot rows take.
    assert sparse_capacity_formula(
        device_bytes=1000, hot_rows_bytes=0, indexer_bytes=512, logical_bytes=2816
    ) == pytest.approx(5.5)
    assert sparse_capacity_formula(
        device_bytes=1000, hot_rows_bytes=100, indexer_bytes=6 * 512, logical_bytes=6 * 2816
    ) == pytest.approx(0.9 * 5.5)


@pytest.mark.parametrize("device_bytes", [10_000, 123_457, 1 << 40])
def test_the_planned_blocks_come_to_the_formula(device_bytes):
    budget = budget_of(device_bytes, residency_bytes=0, residency_page_bytes=0, prompt_window_bytes=0)
    blocks = Fraction(device_bytes - 500, 40)  # written out, not asked from the formula
    assert budget.num_blocks == int(blocks)
    assert budget.capacity_ratio_formula == pytest.approx(float(blocks / Fraction(device_bytes, 340)))


def test_no_32_bit_limit():
    budget = budget_of(1 << 50)
    assert budget.num_blocks == ((1 << 50) - 600) // 45
    assert budget.reported_bytes == budget.num_blocks * 340


@pytest.mark.parametrize(
    ("tokens", "device_bytes", "blocks"),
    [(1, 0, 1), (16, 0, 1), (17, 0, 2), (4096, 0, 256), (None, 100_000, 30), (None, 2499, 1), (None, 0, 1)],
)
def test_the_prompt_window_has_whole_blocks_and_at_least_one(tokens, device_bytes, blocks):
    made = prompt_window_blocks(tokens, device_bytes=device_bytes, block_tokens=16, page_bytes=100)
    assert made == blocks


def test_pipeline_stages_share_the_host_by_their_main_bytes():
    everything = [100] * 7 + [30]
    stages = [everything[:3], everything[3:6], everything[6:]]
    shares = [stage_host_bytes(1000, stage, everything) for stage in stages]
    assert shares == [410, 410, 178]  # 300, 300 and 130 of 730
    assert sum(shares) <= 1000
    assert stage_host_bytes(1000, everything, everything) == 1000
    assert stage_host_bytes(1 << 50, [1 << 20], [1 << 20] * 4) == 1 << 48
