"""The buffer plan's cases with known answers, one test each, and what it refuses."""

import itertools

import pytest

from kvstrata.core.budget import capacity_ratio_formula, layerwise_budget
from kvstrata.core.buffers import (
    BufferPlan,
    SlotId,
    check_reuse_supported,
    default_prefetch_layers,
    plan_buffers,
)
from kvstrata.core.bundle import ComponentSpec, build_bundles
from kvstrata.core.layers import Component, LayerId, resolve_layer
from kvstrata.errors import KVStrataError, LayoutError, UnsupportedError

MAIN_BYTES, INDEXER_BYTES = 1152 * 16, 132 * 16


def main_spec(
    index: int, *, draft: bool = False, layout: str = "bf16 x 576", **changes: int
) -> ComponentSpec:
    sizes = {"page_bytes": MAIN_BYTES, "block_tokens": 16} | changes
    layer = LayerId(index, Component.MAIN, draft)
    return ComponentSpec(name=f"model.layers.{index}.attn", layer=layer, layout=layout, **sizes)


def indexer_spec(
    index: int, *, draft: bool = False, layout: str = "u8 x 132", **changes: int
) -> ComponentSpec:
    sizes = {"page_bytes": INDEXER_BYTES, "block_tokens": 16} | changes
    layer = LayerId(index, Component.INDEXER, draft)
    return ComponentSpec(name=f"model.layers.{index}.indexer", layer=layer, layout=layout, **sizes)


def plan_of(specs, shared, independent=(0,)) -> BufferPlan:
    return plan_buffers(build_bundles(specs), num_shared_buffers=shared, independent_layers=independent)


def uniform(num_layers, shared, independent=(0,)) -> BufferPlan:
    return plan_of([main_spec(n) for n in range(num_layers)], shared, independent)


def test_case_1_nothing_set_reuses_nothing():
    plan = uniform(27, None)
    assert plan.main_slots == tuple((n,) for n in range(27))
    assert not plan.is_reused
    assert all(slot.independent for slot in plan.slots)
    assert all(plan.previous_owner(n) is None for n in range(27))
    assert plan.physical_page_bytes == plan.logical_page_bytes == 27 * MAIN_BYTES


@pytest.mark.parametrize(("shared", "ahead"), [(1, 1), (6, 6), (8, 8), (9, 8), (27, 8), (None, 8)])
def test_case_1_prefetch_defaults_to_the_shared_buffers_but_at_most_8(shared, ahead):
    assert default_prefetch_layers(shared) == ahead


def test_case_2_round_robin_over_six():
    plan = uniform(27, 6)
    assert plan.main_slots == (
        (0,),
        (1, 7, 13, 19, 25),
        (2, 8, 14, 20, 26),
        (3, 9, 15, 21),
        (4, 10, 16, 22),
        (5, 11, 17, 23),
        (6, 12, 18, 24),
    )
    assert plan.previous_owner(7) == 1
    assert plan.previous_owner(8) == 2
    assert plan.previous_owner(25) == 19
    assert plan.previous_owner(1) is None
    assert plan.slot_of(13) == plan.slot_of(1) == SlotId(1)
    assert plan.slot_of(0) == SlotId(0)
    assert [slot.independent for slot in plan.slots] == [True] + [False] * 6
    assert plan.is_reused
    with pytest.raises(KeyError):
        plan.slot_of(27)


def test_case_3_small():
    assert uniform(6, 2).main_slots == ((0,), (1, 3, 5), (2, 4))


def test_case_3_another_spec_never_shares():
    specs = [main_spec(n) for n in (0, 1, 3)] + [main_spec(2, layout="u8 x 656", page_bytes=656 * 16)]
    plan = plan_of(specs, 1)
    assert plan.main_slots == ((0,), (1, 3), (2,))
    assert [slot.main_page_bytes for slot in plan.slots] == [MAIN_BYTES, MAIN_BYTES, 656 * 16]
    assert not plan.slots[2].independent


def test_case_3_more_buffers_than_layers_are_not_made():
    plan = uniform(4, 100)
    assert plan.main_slots == ((0,), (1,), (2,), (3,))
    assert not plan.is_reused


def test_case_4_the_draft_layer_takes_part():
    names = [f"model.layers.{n}.self_attn.attn" for n in range(4)] + ["model.mtp.0.self_attn.attn"]
    layers = [resolve_layer(name, Component.MAIN, num_base_layers=4) for name in names]
    specs = [
        ComponentSpec(name=name, layer=layer, page_bytes=64, block_tokens=16, layout="x")
        for name, layer in zip(names, layers, strict=True)
    ]
    plan = plan_of(specs, 2)
    assert plan.main_slots == ((0,), (1, 3), (2, 4))
    assert [bundle.is_draft for bundle in plan.bundles] == [False] * 4 + [True]
    assert plan.following(2, 5) == (3, 4)
    assert plan.following(0, 2) == (1, 2)
    assert plan.following(4, 3) == ()
    assert plan.following(1, 0) == ()


def test_case_5_independent_layers_are_kept():
    plan = uniform(12, 2, (3, 5, 10))
    assert {slot.layers for slot in plan.slots if slot.independent} == {(3,), (5,), (10,)}
    assert {slot.layers for slot in plan.slots if not slot.independent} == {(0, 2, 6, 8, 11), (1, 4, 7, 9)}


def test_case_5_minus_one_is_the_last_layer():
    plan = uniform(6, 2, (-1,))
    assert plan.main_slots == ((0, 2, 4), (1, 3), (5,))
    assert plan.slots[2].independent


def test_case_5_all_makes_every_layer_independent():
    plan = uniform(6, 2, "all")
    assert plan.main_slots == tuple((n,) for n in range(6))
    assert all(slot.independent for slot in plan.slots)


def test_case_5_entries_are_positions_in_the_sorted_layers():
    # A pipeline stage that holds layers 10, 12, 14 and 16: position 1 is layer 12.
    plan = plan_of([main_spec(n) for n in (16, 10, 14, 12)], 1, (1,))
    assert plan.main_slots == ((10, 14, 16), (12,))
    assert plan.slots[plan.slot_of(12)].independent


def test_case_5_naming_a_layer_twice_counts_once():
    assert uniform(6, 2, (0, -6, 0)).main_slots == uniform(6, 2, (0,)).main_slots


@pytest.mark.parametrize("shared", [True, False, 2.0, "2", [2]])
def test_case_6_shared_buffers_of_a_wrong_type(shared):
    with pytest.raises(TypeError, match="layerwise_num_shared_buffers.*" + repr(shared).replace("[", r"\[")):
        uniform(4, shared)


@pytest.mark.parametrize("shared", [0, -1])
def test_case_6_shared_buffers_out_of_range(shared):
    with pytest.raises(ValueError, match=f"layerwise_num_shared_buffers={shared}"):
        uniform(4, shared)


@pytest.mark.parametrize("independent", [27, "1,4", None, ("1",), (True,), (1.0,), "ALL"])
def test_case_6_independent_layers_of_a_wrong_type(independent):
    with pytest.raises(TypeError, match="layerwise_independent_layers"):
        uniform(27, 2, independent)


@pytest.mark.parametrize("entry", [27, -28, 1000])
def test_case_6_independent_layers_out_of_range_name_the_range(entry):
    with pytest.raises(ValueError, match=f"holds {entry}.*from -27 to 26"):
        uniform(27, 2, (0, entry))


def test_case_6_the_ends_of_the_range_are_legal():
    assert {s.layers for s in uniform(27, 2, (-27, 26)).slots if s.independent} == {(0,), (26,)}


def test_case_7_order_of_the_specs_does_not_matter():
    specs = [main_spec(n) for n in range(4)] + [indexer_spec(2)]
    plans = {plan_of(order, 2) for order in itertools.permutations(specs)}
    assert len(plans) == 1
    bundles = build_bundles(specs)
    reversed_plan = plan_buffers(bundles[::-1], num_shared_buffers=2, independent_layers=(0,))
    assert reversed_plan in plans


def test_case_7_two_main_specs_on_one_layer():
    twin = ComponentSpec(
        name="twin", layer=LayerId(1, Component.MAIN, False), page_bytes=64, block_tokens=16, layout="x"
    )
    with pytest.raises(ValueError, match=r"model\.layers\.1\.attn.*twin.*layer 1"):
        build_bundles([main_spec(0), main_spec(1), twin])


def test_case_7_the_same_spec_given_twice_is_two_specs():
    spec = main_spec(1)
    with pytest.raises(ValueError, match="main cache of layer 1"):
        build_bundles([spec, spec])


def test_case_7_a_lone_indexer_counts_as_main():
    plan = plan_of([main_spec(0), main_spec(1), indexer_spec(2)], 2)
    assert plan.main_slots == ((0,), (1,), (2,))
    assert plan.indexer_slots == ()
    assert plan.slots[2].main_page_bytes == INDEXER_BYTES
    assert plan.slots[2].indexer_page_bytes == 0


def test_case_8_reuse_is_refused_for_other_caches_than_attention():
    kinds = {"model.layers.0.attn": "attention", "model.layers.1.mixer": "mamba"}
    with pytest.raises(NotImplementedError, match=r"model\.layers\.1\.mixer.*mamba") as caught:
        check_reuse_supported(kinds, reuse=True)
    assert isinstance(caught.value, UnsupportedError)
    check_reuse_supported(kinds, reuse=False)
    check_reuse_supported({"model.layers.0.attn": "attention"}, reuse=True)


def test_case_8_without_reuse_layouts_pass_unvalidated():
    odd = [
        main_spec(0),
        main_spec(1, page_bytes=8),
        main_spec(2, block_tokens=64),
        indexer_spec(2, layout="y"),
    ]
    plan = plan_of(odd, None)
    assert plan.main_slots == ((0,), (1,), (2,))
    assert capacity_ratio_formula(plan) == 1.0


def test_case_9_an_indexer_follows_its_main_layer():
    specs = [main_spec(n) for n in range(6)] + [main_spec(6, draft=True), indexer_spec(1), indexer_spec(4)]
    plan = plan_of(specs, 2)
    assert plan.main_slots == ((0,), (1, 3, 5), (2, 4, 6))
    assert plan.indexer_slots == ((1,), (4,))
    assert [slot.indexer_page_bytes for slot in plan.slots] == [0, INDEXER_BYTES, INDEXER_BYTES]


def test_case_9_an_indexer_shared_by_layers_is_counted_once_per_slot():
    specs = [spec(n) for n in range(6) for spec in (main_spec, indexer_spec)]
    plan = plan_of(specs, 2)
    assert plan.indexer_slots == plan.main_slots == ((0,), (1, 3, 5), (2, 4))
    assert plan.physical_page_bytes == 3 * (MAIN_BYTES + INDEXER_BYTES)


def test_case_10_budget_factor():
    specs = [main_spec(n) for n in range(6)] + [indexer_spec(n) for n in (1, 2, 4)]
    plan = plan_of(specs, 2)
    assert plan.logical_page_bytes == 6 * MAIN_BYTES + 3 * INDEXER_BYTES
    assert plan.physical_page_bytes == 3 * MAIN_BYTES + 2 * INDEXER_BYTES
    expected = (6 * MAIN_BYTES + 3 * INDEXER_BYTES) / (3 * MAIN_BYTES + 2 * INDEXER_BYTES)
    assert capacity_ratio_formula(plan) == expected
    budget = layerwise_budget(plan, available_bytes=1 << 30, host_bytes=None, host_page_bytes=0)
    assert budget.reported_bytes / budget.available_bytes == pytest.approx(expected, rel=1e-4)


def test_case_10_no_reuse_is_factor_one():
    assert capacity_ratio_formula(uniform(6, None)) == 1.0
    assert capacity_ratio_formula(uniform(6, 2, "all")) == 1.0
    assert capacity_ratio_formula(uniform(6, 6)) == 1.0
    assert capacity_ratio_formula(plan_of([], 2)) == 1.0


REFUSED = {
    "main page bytes": (main_spec(3, page_bytes=MAIN_BYTES + 64), "page_bytes", MAIN_BYTES + 64),
    "main block": (main_spec(3, block_tokens=32), "block_tokens", 32),
    "main block of another layout": (main_spec(3, layout="u8", block_tokens=32), "block_tokens", 32),
    "indexer page bytes": (indexer_spec(3, page_bytes=2048), "page_bytes", 2048),
    "indexer layout": (indexer_spec(3, layout="i8 x 128 + f32"), "layout", "i8 x 128 + f32"),
    "indexer block": (indexer_spec(3, block_tokens=32), "block_tokens", 32),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_layout_that_cannot_share_is_refused_naming_both_layers_and_the_difference(case):
    odd, what, value = REFUSED[case]
    specs = {(s.layer.index, s.layer.component): s for n in range(4) for s in (main_spec(n), indexer_spec(n))}
    assert plan_of(specs.values(), 1).main_slots == ((0,), (1, 2, 3))
    specs[odd.layer.index, odd.layer.component] = odd
    with pytest.raises(LayoutError) as caught:
        plan_of(specs.values(), 1)
    message = str(caught.value)
    assert odd.name in message
    assert "layer 3" in message
    assert "layer 0" in message or "layer 1" in message
    assert what in message
    assert str(value) in message


def test_indexers_that_share_no_slot_may_differ():
    specs = [main_spec(n) for n in range(3)] + [
        indexer_spec(1),
        indexer_spec(2, layout="other", page_bytes=64),
    ]
    plan = plan_of(specs, 2)
    assert [slot.indexer_page_bytes for slot in plan.slots] == [0, INDEXER_BYTES, 64]


def test_a_rank_without_layers_has_an_empty_plan():
    assert plan_of([], 2).slots == ()
    assert plan_of([], None).slots == ()


def test_every_refusal_is_one_of_ours():
    for shared, independent in ((0, (0,)), (True, (0,)), (2, 27), (2, (99,))):
        with pytest.raises(KVStrataError):
            uniform(27, shared, independent)


def test_following_runs_drafts_last():
    specs = [main_spec(n) for n in range(3)] + [main_spec(n, draft=True) for n in (3, 4)]
    plan = plan_of(specs, 1)
    assert plan.execution_order == (0, 1, 2, 3, 4)
    assert plan.following(0, 99) == (1, 2, 3, 4)


def test_drafts_run_last_whatever_their_number():
    plan = plan_of([main_spec(0, draft=True), main_spec(1), main_spec(2)], None)
    assert plan.execution_order == (1, 2, 0)
    assert plan.following(2, 5) == (0,)


def test_an_independent_layer_of_another_block_size_is_a_hybrid_layout():
    specs = [main_spec(0, block_tokens=64), main_spec(1), main_spec(2)]
    with pytest.raises(LayoutError, match=r"layer 0.*layer 1.*block_tokens is 64 and 16"):
        plan_of(specs, 1)
    assert not plan_of(specs, 1, "all").is_reused


def test_describe_lists_every_slot_and_the_sums():
    plan = plan_of([main_spec(n) for n in range(4)] + [indexer_spec(2)], 1)
    lines = plan.describe().splitlines()
    assert lines[1].split() == ["0", "0", str(MAIN_BYTES), "0", "independent"]
    assert lines[2].split() == ["1", "1,2,3", str(MAIN_BYTES), str(INDEXER_BYTES), "shared"]
    assert f"{2 * MAIN_BYTES + INDEXER_BYTES} of {4 * MAIN_BYTES + INDEXER_BYTES}" in lines[3]
