"""Any stage and any group: ownership, buffers and budget against the seed's rule worked out by hand."""

from __future__ import annotations

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from kvstrata.core.budget import check_allocation, owner_budget
from kvstrata.core.bundle import Bundle, ComponentSpec, build_bundles
from kvstrata.core.layers import Component, LayerId
from kvstrata.core.owners import OwnerPlan, plan_owners
from kvstrata.errors import BudgetError


@st.composite
def stages(draw: st.DrawFn) -> tuple[list[Bundle], int]:
    """Return bundles in any order, the last few of them drafts, and a group size."""
    layers = sorted(draw(st.sets(st.integers(0, 200), min_size=1, max_size=24)))
    drafts = draw(st.integers(0, min(2, len(layers))))
    specs = []
    for at, layer in enumerate(layers):
        is_draft = at >= len(layers) - drafts
        sizes = {Component.MAIN: draw(st.integers(1, 2000)), Component.INDEXER: draw(st.integers(0, 300))}
        specs += [
            ComponentSpec(
                name=f"{layer}.{component.value}",
                layer=LayerId(layer, component, is_draft),
                page_bytes=page_bytes,
                block_tokens=16,
                layout=str(page_bytes),
            )
            for component, page_bytes in sizes.items()
            if page_bytes
        ]
    return draw(st.permutations(build_bundles(specs))), draw(st.integers(2, 9))


def planned(stage: tuple[list[Bundle], int]) -> OwnerPlan:
    return plan_owners(stage[0], group_size=stage[1])


@settings(deadline=None)
@given(stages())
def test_every_target_has_one_owner_parts_are_contiguous_and_differ_by_one_at_most(stage):
    bundles, size = stage
    plan = planned(stage)
    parts = [plan.owned(member) for member in range(size)]
    targets = sorted(bundle.index for bundle in bundles if not bundle.is_draft)
    assert [layer for part in parts for layer in part] == targets
    lengths = [len(part) for part in parts]
    assert max(lengths) - min(lengths) <= 1
    assert lengths == sorted(lengths, reverse=True)
    assert {plan.owner_of(layer) for layer in parts[0]} <= {0}
    assert plan_owners(sorted(bundles, key=lambda b: -b.index), group_size=size) == plan


@settings(deadline=None)
@given(stages())
def test_buffers_hold_every_layer_once_without_overlap_and_take_the_planned_bytes(stage):
    bundles, size = stage
    plan = planned(stage)
    by_layer = {bundle.index: bundle for bundle in bundles}
    targets = [bundle.page_bytes for bundle in bundles if not bundle.is_draft]
    for member in range(size):
        buffers = plan.buffer_plan(member)
        own = [n for n, b in by_layer.items() if b.is_draft or plan.owner_of(n) == member]
        by_hand = sum(by_layer[n].page_bytes for n in own) + 2 * max(targets, default=0)
        assert buffers.physical_page_bytes == plan.physical_page_bytes(member) == by_hand
        assert sorted(n for slot in buffers.slots for n in slot.layers) == sorted(by_layer)
        end = 0
        for slot in buffers.slots:
            for layer in slot.layers:
                assert buffers.offset_bytes(layer, Component.MAIN, 3) == end
                assert by_layer[layer].page_bytes <= slot.page_bytes
                assert slot.independent == (layer in own)
            assert not slot.independent or len(slot.layers) == 1
            end += 3 * slot.page_bytes
        scratch = [slot.layers for slot in buffers.slots if not slot.independent]
        others = [n for n in plan.targets if n not in own]
        assert sorted(n for layers in scratch for n in layers) == others
        for now, then in zip(plan.targets, plan.targets[1:], strict=False):
            if now in others and then in others:
                assert buffers.slot_of(now) != buffers.slot_of(then), "the next layer arrives beside this one"


@settings(deadline=None)
@given(stages(), st.data())
def test_the_budget_is_exact_both_ways(stage, data):
    plan = planned(stage)
    member = data.draw(st.integers(0, plan.group_size - 1))
    available = data.draw(st.integers(0, 40 * plan.physical_page_bytes(member)))
    physical = plan.physical_page_bytes(member)
    if available < physical:
        with pytest.raises(BudgetError):
            owner_budget(plan, member=member, available_bytes=available)
        return
    budget = owner_budget(plan, member=member, available_bytes=available)
    assert budget.num_blocks * physical <= available < (budget.num_blocks + 1) * physical
    assert budget.reported_bytes == budget.num_blocks * plan.logical_page_bytes
    assert budget.reported_bytes // plan.logical_page_bytes == budget.num_blocks, "the planner divides again"
    check_allocation(budget.num_blocks, budget.num_blocks * physical, budget)
    assume(budget.num_blocks > 1)
    with pytest.raises(BudgetError):
        check_allocation(budget.num_blocks, (budget.num_blocks - 1) * physical, budget)
