"""Sparse offload at start-up: sizes, refusals, budget, and where vLLM's tensors go (A1, A2)."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import (
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MLAAttentionSpec,
    SparseCacheRole,
    UniformTypeKVCacheSpecs,
)

from kvstrata.core.budget import SparseBudget, check_allocation, prompt_window_blocks, stage_host_bytes
from kvstrata.core.layers import Component
from kvstrata.errors import BudgetError, ConfigurationError, UnsupportedError
from kvstrata.memory.allocator import SharedMemoryAllocator
from kvstrata.memory.host_pool import MAIN_ONLY, HostPool
from kvstrata.memory.hot_rows import HotRows
from kvstrata.vllm.layout import plan_layout
from kvstrata.vllm.settings import Settings, index_topk
from kvstrata.vllm.sparse_plan import (
    SparsePlan,
    budget_of,
    place_sparse_tensors,
    plan_sparse,
    total_layers,
)

TOKENS, MAIN_ROW, INDEX_ROW = 16, 80, 32
DEVICE_BYTES = 8 << 20
SPARSE: dict[str, Any] = {"enabled": True}


def main_spec(
    row: int = MAIN_ROW, dtype: torch.dtype = torch.float32, padded: int | None = None
) -> KVCacheSpec:
    return MLAAttentionSpec(
        block_size=TOKENS, num_kv_heads=1, head_size=row, dtype=dtype, page_size_padded=padded
    )


def index_spec(dtype: torch.dtype = torch.float32) -> KVCacheSpec:
    return MLAAttentionSpec(
        block_size=TOKENS,
        num_kv_heads=1,
        head_size=INDEX_ROW,
        dtype=dtype,
        cache_role=SparseCacheRole.INDEXER,
    )


def model_specs(
    layers: Any, *, indexers: tuple[int, ...] = (0,), drafts: int = 0, dtype: torch.dtype = torch.float32
) -> dict[str, KVCacheSpec]:
    numbers = list(layers) if not isinstance(layers, int) else list(range(layers))
    specs: dict[str, KVCacheSpec] = {}
    for at in [*numbers, *range(numbers[-1] + 1, numbers[-1] + 1 + drafts)]:
        inner = "self_attn" if at <= numbers[-1] else "mtp_block.self_attn"
        specs[f"model.layers.{at}.{inner}.attn"] = main_spec(dtype=dtype)
        if at in indexers:
            specs[f"model.layers.{at}.{inner}.indexer.k_cache"] = index_spec(dtype)
    return specs


def launch(
    layers: int,
    *,
    sparse: dict[str, Any] = SPARSE,
    own: dict[str, Any] | None = None,
    topk: int | None = 64,
    sequences: int = 3,
    speculative_tokens: int = 0,
    draft_layers: int | None = None,
    longest: int = 1 << 20,
) -> tuple[Any, Settings]:
    text = SimpleNamespace(num_hidden_layers=layers)
    if topk is not None:
        text.index_topk = topk
    speculative = None
    if speculative_tokens:
        draft = SimpleNamespace(hf_config=SimpleNamespace(n_predict=draft_layers))
        speculative = SimpleNamespace(draft_model_config=draft, target_model_config=None)
    config = SimpleNamespace(
        model_config=SimpleNamespace(hf_text_config=text, model="some/model", max_model_len=longest),
        scheduler_config=SimpleNamespace(max_num_seqs=sequences),
        speculative_config=speculative,
        num_speculative_tokens=speculative_tokens,
        additional_config={"sparse_kv_offload_config": sparse, "kvstrata": own or {}},
        kv_transfer_config=SimpleNamespace(
            kv_connector="KVStrataConnector", kv_connector_extra_config={"backend": "none"}
        ),
    )
    return config, Settings.of(config)


def planned(
    specs: dict[str, KVCacheSpec], layers: int, device_bytes: int = DEVICE_BYTES, **more: Any
) -> tuple[SparsePlan, Any, Settings]:
    config, settings = launch(layers, **more)
    layout = plan_layout(specs, config, settings)
    return plan_sparse(layout, specs, config, settings, device_bytes=device_bytes), config, settings


def cache_config(specs: dict[str, KVCacheSpec], blocks: int) -> KVCacheConfig:
    uniform = UniformTypeKVCacheSpecs(block_size=TOKENS, kv_cache_specs=specs)
    group = KVCacheGroupSpec(layer_names=list(specs), kv_cache_spec=uniform)
    return KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=[group])


def test_a_plan_takes_its_sizes_from_model_scheduler_and_knobs():
    specs = model_specs(4, indexers=(0, 2, 4), drafts=1)
    plan, _, _ = planned(specs, 4, speculative_tokens=2, draft_layers=1, own={"prompt_window_tokens": 50})
    limits = plan.limits
    assert (limits.block_tokens, limits.topk, limits.decode_tokens) == (TOKENS, 64, 3)
    assert limits.capacity == 3 * 2 * 64, "twice the top-k for each sequence"
    assert limits.window_blocks == 4, "50 tokens, rounded up"
    assert plan.groups == ((0, 1), (2, 3), (4,))
    assert (plan.layers, plan.drafts) == ((0, 1, 2, 3, 4), frozenset({4}))
    assert plan.row_bytes == MAIN_ROW * 4
    assert plan.window_bytes == 2 * 4 * TOKENS * MAIN_ROW * 4


@pytest.mark.parametrize(
    ("knob", "policy"),
    [(None, "frequency"), ("auto", "frequency"), ("lru", "lru"), ("frequency", "frequency")],
)
def test_the_policy_knob_names_a_policy_of_the_tables(knob: str | None, policy: str):
    plan, _, _ = planned(model_specs(2), 2, own={} if knob is None else {"hot_row_policy": knob})
    assert plan.policy == policy


def test_the_buffer_knob_counts_per_sequence():
    plan, _, _ = planned(model_specs(2), 2, sparse={**SPARSE, "topk_buffer_size": 80}, sequences=5)
    assert plan.limits.capacity == 5 * 80


@pytest.mark.parametrize(("size", "words"), [(48, "=48 is less than the 64"), (72, "multiple of the block")])
def test_R5_a_buffer_that_cannot_hold_a_selection_is_refused_by_knob_and_value(  # noqa: N802
    size: int, words: str
):
    with pytest.raises(ConfigurationError, match=f"topk_buffer_size.*{words}"):
        planned(model_specs(2), 2, sparse={**SPARSE, "topk_buffer_size": size})


def test_the_window_is_a_share_of_the_device_and_no_longer_than_a_context():
    both = 2 * TOKENS * MAIN_ROW * 4
    share = prompt_window_blocks(None, device_bytes=DEVICE_BYTES, block_tokens=TOKENS, page_bytes=both)
    plan, _, _ = planned(model_specs(2), 2)
    assert plan.limits.window_blocks == share > 4
    assert plan.window_bytes == share * both, "a share of both buffers together"
    short, _, _ = planned(model_specs(2), 2, longest=3 * TOKENS + 1)
    assert short.limits.window_blocks == 4
    tiny, _, _ = planned(model_specs(2), 2, device_bytes=10)
    assert tiny.limits.window_blocks == 1


def test_a_model_without_sparse_attention_is_refused_by_name():
    config, _ = launch(2, topk=None)
    with pytest.raises(UnsupportedError, match=r"enabled=true: model 'some/model' has no sparse attention"):
        index_topk(config)
    with pytest.raises(UnsupportedError, match="no sparse attention"):
        planned(model_specs(2), 2, topk=None)


def test_a_rank_without_an_indexer_is_refused():
    with pytest.raises(UnsupportedError, match="none of the 3 layers here has an indexer"):
        planned(model_specs(3, indexers=()), 3)


@pytest.mark.parametrize("other", [main_spec(row=96), main_spec(dtype=torch.bfloat16)])
def test_main_caches_that_differ_are_refused(other: KVCacheSpec):
    specs = {**model_specs(2), "model.layers.1.self_attn.attn": other}
    with pytest.raises(UnsupportedError, match=r"different main caches.*hot rows of different sizes"):
        planned(specs, 2)


def test_padded_pages_are_refused_with_both_sizes():
    padded = 2 * TOKENS * MAIN_ROW * 4
    specs = {**model_specs(1), "model.layers.0.self_attn.attn": main_spec(padded=padded)}
    with pytest.raises(
        UnsupportedError, match=rf"pages of {padded} bytes are longer than their 16 rows of 80"
    ):
        planned(specs, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("blocks", [1, 7, 40])
def test_A1_placed_and_other_bytes_are_the_budget(  # noqa: N802
    dtype: torch.dtype, keeps: bool, blocks: int
):
    specs = model_specs(4, indexers=(0, 2), dtype=dtype)
    plan, config, settings = planned(specs, 4, sparse={**SPARSE, "keep_device_kv_cache": keeps})
    budget = budget_of(plan, config, settings, device_bytes=DEVICE_BYTES)
    assert budget.num_blocks >= 40
    placed = place_sparse_tensors(cache_config(specs, blocks), plan)
    taken = placed.kv_cache_tensors[0].size + plan.bytes_beside_caches(blocks)
    check_allocation(blocks, taken, budget)
    with pytest.raises(BudgetError):
        check_allocation(blocks, taken + 1, budget)
    whole = budget.fixed_bytes + budget.num_blocks * budget.physical_page_bytes
    assert DEVICE_BYTES - budget.physical_page_bytes < whole <= DEVICE_BYTES
    assert budget.reported_bytes == budget.num_blocks * sum(spec.page_size_bytes for spec in specs.values())
    hot = HotRows(
        dict.fromkeys(plan.layers, plan.row_elements), capacity_rows=plan.limits.capacity, dtype=dtype
    )
    assert hot.size_bytes == plan.hot_rows_bytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("blocks", [1, 9])
def test_A1_spare_pages_overlap_only_each_other_and_stay_inside(  # noqa: N802
    dtype: torch.dtype, blocks: int
):
    specs = model_specs(4, indexers=(0, 2), drafts=1, dtype=dtype)
    plan, _, _ = planned(specs, 4)
    original = cache_config(specs, blocks)
    placed = place_sparse_tensors(original, plan)
    assert original.kv_cache_tensors == [], "vLLM's own configuration is left alone"
    regions: dict[Component, list[tuple[int, int]]] = {Component.MAIN: [], Component.INDEXER: []}
    for tensor in placed.kv_cache_tensors:
        (name,) = tensor.layers
        page = specs[name].page_size_bytes
        component = plan.layout.layer_of[name].component
        regions[component].append((tensor.offset, tensor.offset + (blocks - 1) * tensor.block_stride + page))
        assert tensor.block_stride % 4 == 0, "whole words, as vLLM wants them"
        assert tensor.block_stride % dtype.itemsize == 0
        if component is Component.INDEXER:
            assert tensor.block_stride == page
    assert {name for tensor in placed.kv_cache_tensors for name in tensor.layers} == set(specs)
    (spare,) = set(regions[Component.MAIN])
    ordered = [spare, *sorted(regions[Component.INDEXER])]
    assert spare[0] == 0
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(ordered)), "no page in another's"
    assert ordered[-1][1] == placed.kv_cache_tensors[0].size
    assert {tensor.size for tensor in placed.kv_cache_tensors} == {ordered[-1][1]}


def test_a_kept_device_cache_has_all_its_pages():
    specs = model_specs(3, indexers=(0,))
    plan, _, _ = planned(specs, 3, sparse={**SPARSE, "keep_device_kv_cache": True})
    placed = place_sparse_tensors(cache_config(specs, 5), plan)
    ordered = sorted(
        (tensor.offset, tensor.offset + 5 * specs[tensor.layers[0]].page_size_bytes)
        for tensor in placed.kv_cache_tensors
    )
    assert ordered[0][0] == 0
    assert all(a[1] == b[0] for a, b in itertools.pairwise(ordered))
    assert (
        ordered[-1][1]
        == placed.kv_cache_tensors[0].size
        == 5 * sum(s.page_size_bytes for s in specs.values())
    )


def host_limited(specs: dict[str, KVCacheSpec], layers: int, gigabytes: float, **more: Any) -> SparseBudget:
    plan, config, settings = planned(
        specs, layers, 1 << 30, sparse={**SPARSE, "dram_size_per_dp_GB": gigabytes}, **more
    )
    return budget_of(plan, config, settings, device_bytes=1 << 30)


def test_A2_the_host_limit_is_of_the_data_parallel_rank_and_a_stage_gets_its_layers_share():  # noqa: N802
    gigabytes = 1 / 64
    whole = host_limited(model_specs(8, indexers=(0, 4)), 8, gigabytes)
    first = host_limited(model_specs(3, indexers=(0,)), 8, gigabytes)
    last = host_limited(model_specs(range(3, 8), indexers=(4,)), 8, gigabytes)
    page = TOKENS * MAIN_ROW * 4
    assert whole.host_bytes == (1 << 30) // 64
    assert first.host_bytes == stage_host_bytes((1 << 30) // 64, [page] * 3, [page] * 8)
    assert first.host_bytes + last.host_bytes <= (1 << 30) // 64
    for budget in (whole, first, last):
        assert budget.num_blocks == budget.host_blocks
        assert budget.host_pool_bytes <= budget.host_bytes


def test_A2_draft_layers_take_their_share_of_the_host():  # noqa: N802
    specs = model_specs(4, indexers=(0, 4), drafts=1)
    more = {"speculative_tokens": 3, "draft_layers": 1}
    config, _ = launch(4, **more)
    assert total_layers(config) == 5, "however many tokens are drafted"
    budget = host_limited(specs, 4, 1 / 64, **more)
    assert budget.host_bytes == (1 << 30) // 64, "all layers are here"
    stage = {name: spec for name, spec in specs.items() if ".0." in name or ".1." in name}
    assert host_limited(stage, 4, 1 / 64, **more).host_bytes == (1 << 30) // 64 * 2 // 5


def test_A2_drafts_without_a_model_take_no_share_of_the_host():  # noqa: N802
    """With n-grams vLLM names the target model as the draft model; it has no layers of its own."""
    config, _ = launch(4, speculative_tokens=3)
    config.speculative_config.draft_model_config = config.speculative_config.target_model_config = object()
    assert total_layers(config) == 4


def test_A2_the_pool_of_the_planned_blocks_fits_the_host_limit():  # noqa: N802
    specs = model_specs(4, indexers=(0,))
    plan, config, settings = planned(specs, 4, 1 << 30, sparse={**SPARSE, "dram_size_per_dp_GB": 1 / 1024})
    budget = budget_of(plan, config, settings, device_bytes=1 << 30)
    pool = HostPool(
        plan.bundles,
        budget.num_blocks,
        SharedMemoryAllocator(limit_bytes=1 << 20),
        layers=plan.layers,
        components=MAIN_ONLY,
    )
    assert pool.size_bytes <= budget.host_pool_bytes <= 1 << 20
    pool.close()


def test_without_a_host_limit_the_device_decides():
    specs = model_specs(4, indexers=(0,))
    plan, config, settings = planned(specs, 4)
    budget = budget_of(plan, config, settings, device_bytes=DEVICE_BYTES)
    assert (budget.host_blocks, budget.num_blocks) == (None, budget.device_blocks)


def test_a_device_too_small_for_the_hot_rows_is_refused_with_the_knobs():
    plan, config, settings = planned(model_specs(4), 4, 100_000)
    with pytest.raises(BudgetError, match=r"max_num_seqs.*topk_buffer_size"):
        budget_of(plan, config, settings, device_bytes=100_000)
