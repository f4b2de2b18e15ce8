"""Any plan and any budget, against the seed's rule worked out layer by layer."""

from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstrata.core.budget import capacity_ratio_formula, check_allocation, layerwise_budget
from kvstrata.core.buffers import plan_buffers
from kvstrata.core.bundle import ComponentSpec, build_bundles
from kvstrata.core.layers import Component, LayerId
from kvstrata.errors import BudgetError

MAIN_BYTES = {"a": 1152, "b": 656}


@st.composite
def models(draw):
    """Return (specs in any order, layouts by layer, layers with an indexer, indexer bytes)."""
    layers = sorted(draw(st.sets(st.integers(0, 200), min_size=1, max_size=24)))
    drafts = draw(st.integers(0, min(2, len(layers))))
    layouts = {n: draw(st.sampled_from("aab")) for n in layers}
    indexed = draw(st.sets(st.sampled_from(layers)))
    indexer_bytes = draw(st.integers(1, 500))
    specs = []
    for at, n in enumerate(layers):
        draft = at >= len(layers) - drafts
        specs.append(
            ComponentSpec(
                name=f"{n}.main",
                layer=LayerId(n, Component.MAIN, draft),
                page_bytes=MAIN_BYTES[layouts[n]],
                block_tokens=16,
                layout=layouts[n],
            )
        )
        if n in indexed:
            specs.append(
                ComponentSpec(
                    name=f"{n}.indexer",
                    layer=LayerId(n, Component.INDEXER, draft),
                    page_bytes=indexer_bytes,
                    block_tokens=16,
                    layout="i",
                )
            )
    return draw(st.permutations(specs)), layouts, indexed, indexer_bytes


@st.composite
def requests(draw):
    """Return a model with the knobs of its plan."""
    specs, layouts, indexed, indexer_bytes = draw(models())
    shared = draw(st.none() | st.integers(1, 30))
    position = st.integers(-len(layouts), len(layouts) - 1)
    independent = draw(st.just("all") | st.lists(position, max_size=4).map(tuple))
    return specs, layouts, indexed, indexer_bytes, shared, independent


def expected_slots(layouts, shared, independent):
    """Deal the layers out one by one, like cards."""
    layers = sorted(layouts)
    alone = set(layers)
    if shared is not None and independent != "all":
        alone = {layers[position] for position in independent}
    hands, dealt, group_size = defaultdict(list), defaultdict(int), defaultdict(int)
    for n in layers:
        group_size[layouts[n]] += n not in alone
    for n in layers:
        if n in alone:
            hands[n].append(n)
            continue
        group = layouts[n]
        hands[group, dealt[group] % min(shared, group_size[group])].append(n)
        dealt[group] += 1
    return sorted(tuple(hand) for hand in hands.values()), alone, group_size


@settings(deadline=None)
@given(requests())
def test_the_plan_is_the_seeds_plan(request_):
    specs, layouts, indexed, indexer_bytes, shared, independent = request_
    plan = plan_buffers(build_bundles(specs), num_shared_buffers=shared, independent_layers=independent)
    slots, alone, group_size = expected_slots(layouts, shared, independent)

    assert list(plan.main_slots) == slots
    assert {n for slot in plan.slots if slot.independent for n in slot.layers} == alone
    assert len(plan.slots) == len(alone) + sum(min(shared or 0, size) for size in group_size.values())
    assert plan.is_reused == (len(plan.slots) < len(layouts))

    main = sum(MAIN_BYTES[layouts[slot[0]]] for slot in slots)
    with_indexer = [slot for slot in slots if indexed & set(slot)]
    assert plan.physical_page_bytes == main + indexer_bytes * len(with_indexer)
    assert plan.logical_page_bytes == sum(spec.page_bytes for spec in specs)
    assert list(plan.indexer_slots) == [tuple(n for n in slot if n in indexed) for slot in with_indexer]


@settings(deadline=None)
@given(requests())
def test_walking_the_previous_owners_gives_the_slots_back(request_):
    specs, layouts, _, _, shared, independent = request_
    plan = plan_buffers(build_bundles(specs), num_shared_buffers=shared, independent_layers=independent)
    chains = {}
    for n in sorted(layouts):
        before = plan.previous_owner(n)
        chain = (n,) if before is None else (*chains.pop(before), n)
        chains[n] = chain
        assert plan.slots[plan.slot_of(n)].layers[: len(chain)] == chain
    assert sorted(chains.values()) == list(plan.main_slots)


@settings(deadline=None)
@given(requests(), st.integers(0, 30))
def test_following_layers_are_the_rest_of_the_step(request_, ahead):
    specs, layouts, _, _, shared, independent = request_
    plan = plan_buffers(build_bundles(specs), num_shared_buffers=shared, independent_layers=independent)
    for n in layouts:
        later = tuple(sorted(m for m in layouts if m > n))  # drafts have the highest numbers
        assert plan.following(n, ahead) == later[:ahead]


@settings(deadline=None)
@given(requests(), st.integers(0, 1 << 45), st.none() | st.integers(0, 1 << 45), st.integers(1, 100_000))
def test_the_budget_is_the_largest_that_fits_and_the_planner_agrees(request_, available, host, host_page):
    specs, _, _, _, shared, independent = request_
    plan = plan_buffers(build_bundles(specs), num_shared_buffers=shared, independent_layers=independent)

    def fits(blocks):
        on_host = host is None or blocks * host_page <= host
        return blocks * plan.physical_page_bytes <= available and on_host

    if not fits(1):
        with pytest.raises(BudgetError):
            layerwise_budget(plan, available_bytes=available, host_bytes=host, host_page_bytes=host_page)
        return
    budget = layerwise_budget(plan, available_bytes=available, host_bytes=host, host_page_bytes=host_page)
    assert fits(budget.num_blocks)
    assert not fits(budget.num_blocks + 1)
    assert budget.reported_bytes // plan.logical_page_bytes == budget.num_blocks
    assert budget.reported_bytes % plan.logical_page_bytes == 0
    check_allocation(budget.num_blocks, budget.num_blocks * plan.physical_page_bytes, budget)
    if host is None:
        assert budget.num_blocks >= available // plan.logical_page_bytes, "never fewer than plain vLLM"
        most = available * capacity_ratio_formula(plan)
        assert budget.reported_bytes <= most * (1 + 1e-12)
        assert budget.reported_bytes > most * (1 - 1e-12) - plan.logical_page_bytes
