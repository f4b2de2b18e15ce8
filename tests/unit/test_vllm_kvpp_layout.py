"""Where KVPP places a rank's caches, on vLLM's own spec classes: the formula, to the byte (A1, A3)."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_vllm_layout import cache_config, model_specs

from kvstrata.core.budget import check_allocation
from kvstrata.core.layers import Component
from kvstrata.errors import BudgetError
from kvstrata.vllm.layout import kvpp_member, place_tensors, plan_layout
from kvstrata.vllm.settings import Settings
from kvstrata.vllm.worker import describe_budget, layer_budget


def launch(layers: int, *, tp: int, rank: int, pp: int = 1, **extra: Any) -> tuple[Any, Settings]:
    config = SimpleNamespace(
        model_config=SimpleNamespace(hf_text_config=SimpleNamespace(num_hidden_layers=layers)),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=tp, prefill_context_parallel_size=1, pipeline_parallel_size=pp, rank=rank
        ),
        additional_config={"enable_kvpp": True},
        kv_transfer_config=SimpleNamespace(
            kv_connector="KVStrataConnector", kv_connector_extra_config={"backend": "none", **extra}
        ),
    )
    return config, Settings.of(config)


@given(
    layers=st.integers(1, 9),
    drafts=st.integers(0, 2),
    indexers=st.sets(st.integers(0, 10)),
    tp=st.integers(2, 4),
    blocks=st.integers(1, 9),
    data=st.data(),
)
def test_A1_a_rank_has_its_own_layers_its_drafts_and_two_scratch_buffers(  # noqa: N802
    layers: int, drafts: int, indexers: set[int], tp: int, blocks: int, data: Any
):
    rank = data.draw(st.integers(0, tp - 1))
    specs = model_specs(layers, indexers=tuple(indexers), drafts=drafts)
    config, settings = launch(layers, tp=tp, rank=rank)
    layout = plan_layout(specs, config, settings)
    assert layout.owners is not None
    placed = place_tensors(cache_config(specs, blocks), layout)
    (size_bytes,) = {tensor.size for tensor in placed.kv_cache_tensors}

    # Out of the specs alone: what the seed's formula gives.
    bundle_bytes: dict[int, int] = {}
    for name, layer in layout.layer_of.items():
        bundle_bytes[layer.index] = bundle_bytes.get(layer.index, 0) + specs[name].page_size_bytes
    own = [layer for layer in range(layers) if layout.owners.owner_of(layer) == rank]
    kept = [*own, *range(layers, layers + drafts)]
    largest = max(bundle_bytes[layer] for layer in range(layers))
    assert size_bytes == blocks * (sum(bundle_bytes[layer] for layer in kept) + 2 * largest)

    places: dict[int, list[tuple[int, int]]] = {layer: [] for layer in bundle_bytes}
    for tensor in placed.kv_cache_tensors:
        (name,) = tensor.layers
        layer = layout.layer_of[name]
        end = tensor.offset + specs[name].page_size_bytes * blocks
        places[layer.index].insert(0 if layer.component is Component.MAIN else 1, (tensor.offset, end))
        assert end <= size_bytes
    for found in places.values():
        assert all(one[1] == other[0] for one, other in itertools.pairwise(found)), "a bundle is one piece"
    spans = {layer: (found[0][0], found[-1][1]) for layer, found in places.items()}
    for one in kept:
        for other in set(spans) - {one}:
            apart = spans[one][1] <= spans[other][0] or spans[other][1] <= spans[one][0]
            assert apart, f"layer {other} lies in the home of layer {one}"
    passing = [layer for layer in range(layers) if layer not in own]
    for one, other in itertools.pairwise(passing):
        if other == one + 1:
            assert spans[one][1] <= spans[other][0] or spans[other][1] <= spans[one][0], (
                "one arrives, one computes"
            )


def test_A3_the_planner_is_told_what_the_formula_gives_and_more_is_refused() -> None:  # noqa: N802
    specs = model_specs(6, indexers=tuple(range(6)))
    config, settings = launch(6, tp=2, rank=1)
    layout = plan_layout(specs, config, settings)
    page_bytes = sum(spec.page_size_bytes for spec in specs.values()) // 6
    available = 100 * page_bytes
    budget = layer_budget(layout, settings, available_bytes=available)
    assert budget.num_blocks == 100 // (3 + 2)
    assert budget.reported_bytes == budget.num_blocks * 6 * page_bytes
    described = describe_budget(budget, layout)
    assert "plain vLLM: 16 blocks" in described
    assert "member 1 of 2" in described
    placed = place_tensors(cache_config(specs, 20), layout)
    check_allocation(20, placed.kv_cache_tensors[0].size, budget)
    with pytest.raises(BudgetError, match=r"planned 21 blocks.*has memory for 20"):
        check_allocation(21, placed.kv_cache_tensors[0].size, budget)


@pytest.mark.parametrize("rank", [0, 1])
def test_with_layer_buffers_only_the_owner_has_a_layer_in_its_host_pool(rank: int) -> None:
    specs = model_specs(6)
    config, settings = launch(
        6,
        tp=2,
        rank=rank,
        use_layerwise=True,
        layerwise_num_shared_buffers=2,
        layerwise_independent_layers=[0],
    )
    layout = plan_layout(specs, config, settings)
    assert layout.hosted == {1, 2, 3, 4, 5}
    assert layout.own_hosted == ({1, 2} if rank == 0 else {3, 4, 5})
    plain, without = launch(6, tp=2, rank=rank, use_layerwise=True, layerwise_num_shared_buffers=2)
    plain.additional_config = None
    assert layout.plan == plan_layout(specs, plain, Settings.of(plain)).plan
    assert without.is_kvpp


@pytest.mark.parametrize(("shared", "hosted"), [(1, {1, 2, 3}), (2, {1, 3})])
def test_with_layer_buffers_a_draft_layer_has_its_own(shared: int, hosted: set[int]) -> None:
    """Nobody owns it, so nobody could bring its rows back into a buffer that it shared."""
    specs = model_specs(4, drafts=2)
    config, settings = launch(4, tp=2, rank=0, use_layerwise=True, layerwise_num_shared_buffers=shared)
    layout = plan_layout(specs, config, settings)
    alone = [slot.layers for slot in layout.plan.slots if len(slot.layers) == 1]
    assert (4,) in alone
    assert (5,) in alone
    assert layout.hosted == hosted


@pytest.mark.parametrize("layers", [1, 2, 6])
def test_layer_buffers_that_no_two_layers_share_leave_plain_kvpp(layers: int) -> None:
    specs = model_specs(layers)
    config, settings = launch(layers, tp=2, rank=1, use_layerwise=True, layerwise_num_shared_buffers=8)
    layout = plan_layout(specs, config, settings)
    plain, without = launch(layers, tp=2, rank=1)
    assert layout == plan_layout(specs, plain, without)
    page_bytes = next(iter(specs.values())).page_size_bytes
    budget = layer_budget(layout, settings, available_bytes=100 * page_bytes)
    placed = place_tensors(cache_config(specs, budget.num_blocks), layout)
    check_allocation(budget.num_blocks, placed.kv_cache_tensors[0].size, budget)


@pytest.mark.parametrize(("rank", "member"), [(0, 0), (1, 1), (2, 0), (3, 1)])
def test_every_pipeline_stage_is_a_group_of_its_own(rank: int, member: int) -> None:
    config, _ = launch(6, tp=2, pp=2, rank=rank)
    assert kvpp_member(config) == (member, 2)
