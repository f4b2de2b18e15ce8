"""KVPP's ownership cases with known answers, what it refuses, and its budget."""

from __future__ import annotations

import math
import random

import pytest

from kvstrata.core.budget import check_allocation, owner_budget, owner_capacity_formula
from kvstrata.core.bundle import Bundle, ComponentSpec, build_bundles
from kvstrata.core.layers import Component, LayerId
from kvstrata.core.owners import owner_groups, plan_owners
from kvstrata.core.ranks import all_ranks
from kvstrata.errors import BudgetError, ConfigurationError, LayoutError

MIB = 2**20


def bundle(
    index: int, *, main: int = MIB, indexer: int = 0, draft: bool = False, tokens: int = 16
) -> list[ComponentSpec]:
    return [
        ComponentSpec(
            name=f"layers.{index}.{component.value}",
            layer=LayerId(index, component, draft),
            page_bytes=page_bytes,
            block_tokens=tokens,
            layout=str(page_bytes),
        )
        for component, page_bytes in ((Component.MAIN, main), (Component.INDEXER, indexer))
        if page_bytes
    ]


def stage(layers: range, *, drafts: int = 0, main: int = MIB) -> tuple[Bundle, ...]:
    specs = [spec for index in layers for spec in bundle(index, main=main)]
    for index in range(layers.stop, layers.stop + drafts):
        specs += bundle(index, main=main, draft=True)
    return build_bundles(specs)


def test_case_1_a_group_is_all_pcp_and_tp_ranks_of_one_stage_and_replica():
    assert owner_groups(4, tp=2, pcp=2) == ((0, 1, 2, 3),)
    assert owner_groups(8, tp=2, pcp=2) == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert owner_groups(4, tp=2, pcp=1) == ((0, 1), (2, 3))


def test_case_1_the_index_in_a_group_is_pcp_rank_times_tp_plus_tp_rank():
    tp, pcp, pp, dp = 2, 3, 2, 2
    # vLLM numbers ranks dp, pp, pcp, tp, the last varying fastest.
    ranks = sorted(
        all_ranks(tp, pp, pcp, dp_size=dp), key=lambda r: (r.dp_rank, r.pp_rank, r.pcp_rank, r.tp_rank)
    )
    for group in owner_groups(tp * pcp * pp * dp, tp=tp, pcp=pcp):
        assert [ranks[at].pcp_rank * tp + ranks[at].tp_rank for at in group] == list(range(tp * pcp))
        assert len({(ranks[at].dp_rank, ranks[at].pp_rank) for at in group}) == 1


@pytest.mark.parametrize(("world", "tp", "pcp"), [(6, 2, 2), (4, 0, 1), (0, 1, 1), (4, 3, 1)])
def test_ranks_that_do_not_divide_into_groups_are_refused_by_name(world, tp, pcp):
    with pytest.raises(ConfigurationError, match=rf"{world} ranks.*tensor_parallel_size={tp} x .*={pcp}"):
        owner_groups(world, tp=tp, pcp=pcp)


def test_case_1_layers_in_contiguous_balanced_parts_and_the_draft_is_nobodys():
    bundles = list(stage(range(9, 17), drafts=1))
    plan = plan_owners(bundles, group_size=3)
    assert [plan.owner_of(layer) for layer in range(9, 17)] == [0, 0, 0, 1, 1, 1, 2, 2]
    assert plan.drafts == (17,)
    with pytest.raises(KeyError):
        plan.owner_of(17)
    for member in range(3):
        assert 17 not in plan.owned(member)
        assert (17,) in plan.buffer_plan(member).main_slots
    random.Random(5).shuffle(bundles)
    assert plan_owners(bundles, group_size=3) == plan


def test_case_2_a_block_takes_owned_bundles_drafts_and_twice_the_largest_target():
    specs = [
        *bundle(0, main=100, indexer=7),
        *bundle(1, main=50),
        *bundle(2, main=60, indexer=9),
        *bundle(3, main=500, indexer=1, draft=True),
    ]
    plan = plan_owners(build_bundles(specs), group_size=2)
    assert plan.largest_bundle_bytes == 107, "a draft's size is no matter"
    assert plan.physical_page_bytes(0) == (107 + 50) + 501 + 2 * 107
    assert plan.physical_page_bytes(1) == 69 + 501 + 2 * 107
    assert plan.logical_page_bytes == 107 + 50 + 69 + 501
    assert owner_budget(plan, member=1, available_bytes=784 * 10 - 1).num_blocks == 9


def test_case_2_without_target_layers_there_is_no_scratch():
    plan = plan_owners(build_bundles(bundle(3, main=500, draft=True)), group_size=2)
    assert plan.physical_page_bytes(0) == 500
    assert plan.buffer_plan(1).main_slots == ((3,),)


def test_case_3_78_layers_over_8_ranks():
    plan = plan_owners(stage(range(78), drafts=1), group_size=8)
    assert sorted(len(plan.owned(member)) for member in range(8)) == [9, 9, 10, 10, 10, 10, 10, 10]
    budgets = [owner_budget(plan, member=member, available_bytes=1300 * MIB) for member in range(8)]
    fewest = min(budgets, key=lambda budget: budget.reported_bytes)
    assert (fewest.physical_page_bytes, fewest.num_blocks) == (13 * MIB, 100)
    assert fewest.reported_bytes == 7900 * MIB
    assert min(budget.num_blocks for budget in budgets) == 100


def test_case_4_scratch_alternates_by_ordinal_and_owned_layers_advance_it():
    plan = plan_owners(stage(range(10, 17)), group_size=3)
    assert [plan.scratch_of(layer) for layer in range(10, 17)] == [0, 1, 0, 1, 0, 1, 0]
    assert plan.owned(1) == (13, 14)
    assert plan.buffer_plan(1).main_slots == ((13,), (14,), (10, 12, 16), (11, 15))


def test_scratch_buffers_are_as_large_as_the_largest_target_even_where_it_does_not_pass():
    specs = [*bundle(0, main=100, indexer=7), *bundle(1, main=50), *bundle(2, main=60, indexer=9)]
    plan = plan_owners(build_bundles(specs), group_size=3)
    slots = plan.buffer_plan(0).slots
    assert [(slot.layers, slot.page_bytes, slot.independent) for slot in slots] == [
        ((0,), 107, True),
        ((2,), 107, False),
        ((1,), 107, False),
    ]


def test_a_scratch_buffer_that_nothing_passes_is_still_counted():
    plan = plan_owners(stage(range(2)), group_size=2)
    buffers = plan.buffer_plan(0)
    assert buffers.main_slots == ((0,), (), (1,))
    assert buffers.physical_page_bytes == plan.physical_page_bytes(0) == 3 * MIB


def test_a_layers_indexer_pages_follow_its_own_main_pages_directly():
    specs = [*bundle(0, main=100, indexer=8), *bundle(1, main=52, indexer=4), *bundle(2, main=60)]
    buffers = plan_owners(build_bundles(specs), group_size=3).buffer_plan(2)
    assert buffers.main_slots == ((2,), (0,), (1,))
    blocks = 10
    offsets = {
        (layer, component): buffers.offset_bytes(layer, component, blocks)
        for layer in (0, 1)
        for component in Component
    }
    assert offsets == {
        (0, Component.MAIN): 600,
        (0, Component.INDEXER): 1600,
        (1, Component.MAIN): 600 + 1080,
        (1, Component.INDEXER): 600 + 1080 + 520,
    }


@pytest.mark.parametrize("group_size", [0, 1])
def test_a_group_of_one_is_refused_by_its_knobs(group_size):
    with pytest.raises(ConfigurationError, match=r"enable_kvpp.*set tensor_parallel_size to at least 2"):
        plan_owners(stage(range(4)), group_size=group_size)


def test_caches_of_different_block_sizes_are_refused():
    specs = [*bundle(0, tokens=16), *bundle(1, tokens=32)]
    with pytest.raises(LayoutError, match=r"layers\.0\.main.*layers\.1\.main.*block_tokens is 16 and 32"):
        plan_owners(build_bundles(specs), group_size=2)


@pytest.mark.parametrize("member", [-1, 3])
def test_a_member_outside_the_group_is_an_error(member):
    plan = plan_owners(stage(range(4)), group_size=3)
    with pytest.raises(ValueError, match=rf"member {member} is outside 0\.\.2"):
        plan.owned(member)


def test_one_block_that_does_not_fit_is_refused_with_both_numbers_and_the_knobs():
    plan = plan_owners(stage(range(8)), group_size=2)
    with pytest.raises(
        BudgetError, match=r"needs 6291456 bytes.* 6291455 are.*tensor_parallel_size$"
    ) as told:
        owner_budget(plan, member=0, available_bytes=6 * MIB - 1)
    assert (told.value.needed, told.value.available) == (6 * MIB, 6 * MIB - 1)


def test_a_model_too_shallow_to_gain_is_told_that_plain_needs_less():
    plan = plan_owners(stage(range(2)), group_size=2)
    with pytest.raises(BudgetError, match=r"enable_kvpp to false \(a block then needs 2097152\)"):
        owner_budget(plan, member=0, available_bytes=3 * MIB - 1)


def test_planner_and_allocator_must_agree_on_the_bytes():
    plan = plan_owners(stage(range(8), drafts=1), group_size=2)
    budget = owner_budget(plan, member=1, available_bytes=70 * MIB)
    assert budget.num_blocks == 10
    check_allocation(9, 9 * plan.buffer_plan(1).physical_page_bytes, budget)
    with pytest.raises(BudgetError, match=r"take 66060288 bytes, but 66060287 were allocated"):
        check_allocation(9, 9 * 7 * MIB - 1, budget)


@pytest.mark.parametrize(("layers", "ranks"), [(8, 2), (27, 4), (78, 8), (61, 16)])
def test_capacity_of_equal_bundles_is_n_over_ceil_n_by_r_plus_2(layers, ranks):
    plan = plan_owners(stage(range(layers)), group_size=ranks)
    worst = min(owner_capacity_formula(plan, member) for member in range(ranks))
    assert worst == pytest.approx(layers / (math.ceil(layers / ranks) + 2))


def test_the_log_table_names_every_members_layers_and_what_is_gained():
    table = plan_owners(stage(range(7), drafts=1), group_size=3).describe(1)
    lines = [line.split() for line in table.splitlines()]
    assert lines[1:4] == [
        ["0", "0,1,2", str(6 * MIB)],
        ["1", "3,4", str(5 * MIB)],
        ["2", "5,6", str(5 * MIB)],
    ]
    assert "drafts 7 on each member" in table
    assert f"{5 * MIB} of {8 * MIB} bytes per block" in table
    assert "1.33 x the blocks of plain vLLM" in table, "the fullest member decides"
