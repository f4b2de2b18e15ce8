"""From vLLM's cache specs to slots and tensor placement (A1, A3), on vLLM's own spec classes."""

from __future__ import annotations

import itertools
import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    KVCacheTensor,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    SparseCacheRole,
    UniformTypeKVCacheSpecs,
)

from kvstrata.core.layers import Component
from kvstrata.errors import LayoutError, UnsupportedError
from kvstrata.vllm.layout import check_first_selection, place_tensors, plan_layout, specs_of
from kvstrata.vllm.settings import Settings

BLOCK_TOKENS = 16
MAIN_ROW, INDEX_ROW = 80, 32


def main_spec(
    row: int = MAIN_ROW, dtype: torch.dtype = torch.float32, block: int = BLOCK_TOKENS
) -> KVCacheSpec:
    return MLAAttentionSpec(block_size=block, num_kv_heads=1, head_size=row, dtype=dtype)


def index_spec(row: int = INDEX_ROW) -> KVCacheSpec:
    return MLAAttentionSpec(
        block_size=BLOCK_TOKENS,
        num_kv_heads=1,
        head_size=row,
        dtype=torch.float32,
        cache_role=SparseCacheRole.INDEXER,
    )


def model_specs(layers: int, *, indexers: tuple[int, ...] = (), drafts: int = 0) -> dict[str, KVCacheSpec]:
    """Caches under the names that DeepSeek-V3.2 and its MTP module register in vLLM."""
    specs: dict[str, KVCacheSpec] = {}
    for at in range(layers + drafts):
        block = "mtp_block.self_attn" if at >= layers else "self_attn"
        specs[f"model.layers.{at}.{block}.attn"] = main_spec()
        if at in indexers:
            specs[f"model.layers.{at}.{block}.indexer.k_cache"] = index_spec()
    return specs


def launch(layers: int, **extra: Any) -> tuple[Any, Settings]:
    config = SimpleNamespace(
        model_config=SimpleNamespace(hf_text_config=SimpleNamespace(num_hidden_layers=layers)),
        additional_config=None,
        kv_transfer_config=SimpleNamespace(
            kv_connector="KVStrataConnector",
            kv_connector_extra_config={"use_layerwise": True, **extra},
        ),
    )
    return config, Settings.of(config)


def cache_config(specs: dict[str, KVCacheSpec], blocks: int) -> KVCacheConfig:
    """As vLLM plans it: one group, every layer a region of its own."""
    uniform = UniformTypeKVCacheSpecs(block_size=BLOCK_TOKENS, kv_cache_specs=specs)
    tensors = [
        KVCacheTensor(
            size=spec.page_size_bytes * blocks,
            layers=[name],
            layer_stride=spec.page_size_bytes * blocks,
            block_stride=spec.page_size_bytes,
        )
        for name, spec in specs.items()
    ]
    group = KVCacheGroupSpec(layer_names=list(specs), kv_cache_spec=uniform)
    return KVCacheConfig(num_blocks=blocks, kv_cache_tensors=tensors, kv_cache_groups=[group])


@given(
    layers=st.integers(2, 7),
    drafts=st.integers(0, 2),
    indexers=st.sets(st.integers(0, 8)),
    shared=st.one_of(st.none(), st.integers(1, 4)),
    independent=st.sampled_from([[], [0], [0, -1], "all"]),
    blocks=st.integers(1, 9),
)
def test_A1_tensors_take_the_planned_bytes_and_overlap_only_within_a_slot(  # noqa: N802
    layers: int, drafts: int, indexers: set[int], shared: int | None, independent: Any, blocks: int
):
    specs = model_specs(layers, indexers=tuple(indexers), drafts=drafts)
    extra = {"layerwise_independent_layers": independent}
    if shared is not None:
        extra["layerwise_num_shared_buffers"] = shared
    config, settings = launch(layers, **extra)
    layout = plan_layout(specs, config, settings)
    original = cache_config(specs, blocks)
    placed = place_tensors(original, layout)
    assert len(original.kv_cache_tensors[0].layers) == 1
    assert original.kv_cache_tensors[0].offset == 0, "vLLM's own configuration is left alone"

    size_bytes = blocks * layout.plan.physical_page_bytes
    assert {tensor.size for tensor in placed.kv_cache_tensors} == {size_bytes}
    regions: dict[tuple[int, Component], set[tuple[int, int]]] = {}
    for tensor in placed.kv_cache_tensors:
        (name,) = tensor.layers
        layer = layout.layer_of[name]
        page_bytes = specs[name].page_size_bytes
        assert tensor.block_stride == page_bytes
        key = (layout.plan.slot_of(layer.index), layer.component)
        regions.setdefault(key, set()).add((tensor.offset, tensor.offset + page_bytes * blocks))
    assert all(len(found) == 1 for found in regions.values()), "layers of a slot lie on the same bytes"
    ordered = sorted(region for found in regions.values() for region in found)
    assert ordered[0][0] == 0
    assert ordered[-1][1] == size_bytes
    assert all(a[1] == b[0] for a, b in itertools.pairwise(ordered)), "no gap and no overlap between slots"
    assert {name for tensor in placed.kv_cache_tensors for name in tensor.layers} == set(specs)


def test_a_slots_indexer_pages_follow_its_main_pages():
    """The gate takes what lies between a slot's first and last byte for the slot."""
    specs = model_specs(5, indexers=(0, 2, 4))
    config, settings = launch(5, layerwise_num_shared_buffers=2)
    layout = plan_layout(specs, config, settings)
    placed = place_tensors(cache_config(specs, 3), layout)
    offsets = {tensor.layers[0]: tensor.offset for tensor in placed.kv_cache_tensors}
    main = specs["model.layers.0.self_attn.attn"].page_size_bytes * 3
    for at in (0, 2, 4):
        name = f"model.layers.{at}.self_attn"
        assert offsets[f"{name}.indexer.k_cache"] == offsets[f"{name}.attn"] + main


def test_A3_the_order_of_the_specs_has_no_influence():  # noqa: N802
    specs = model_specs(6, indexers=(0, 3), drafts=1)
    config, settings = launch(6, layerwise_num_shared_buffers=2)
    wanted = plan_layout(specs, config, settings)
    for seed in range(5):
        names = list(specs)
        random.Random(seed).shuffle(names)
        shuffled = {name: specs[name] for name in names}
        assert plan_layout(shuffled, config, settings) == wanted
        placed = place_tensors(cache_config(shuffled, 4), wanted)
        assert {t.layers[0]: t.offset for t in placed.kv_cache_tensors} == {
            t.layers[0]: t.offset for t in place_tensors(cache_config(specs, 4), wanted).kv_cache_tensors
        }


def test_A3_the_plan_from_the_worker_and_from_vllms_configuration_are_one():  # noqa: N802
    specs = model_specs(6, indexers=(0, 3), drafts=1)
    config, settings = launch(6, layerwise_num_shared_buffers=2)
    again = specs_of(cache_config(specs, 4))
    assert plan_layout(again, config, settings) == plan_layout(specs, config, settings)


def test_a_group_with_one_spec_gives_it_to_every_layer():
    names = [f"model.layers.{at}.self_attn.attn" for at in range(3)]
    group = KVCacheGroupSpec(layer_names=names, kv_cache_spec=main_spec())
    config = KVCacheConfig(num_blocks=1, kv_cache_tensors=[], kv_cache_groups=[group])
    assert specs_of(config) == dict.fromkeys(names, main_spec())


@pytest.mark.parametrize(
    "name",
    ["model.layers.4.mtp_block.self_attn.attn", "model.mtp.layers.0.self_attn.attn", "mtp.0.self_attn.attn"],
)
def test_fault_5_draft_layers_are_counted_on_from_the_targets(name: str):
    specs = {**model_specs(4), name: main_spec()}
    config, settings = launch(4, layerwise_num_shared_buffers=1)
    layout = plan_layout(specs, config, settings)
    assert (layout.layer_of[name].index, layout.layer_of[name].is_draft) == (4, True)
    assert layout.plan.main_slots == ((0,), (1, 2, 3, 4)), "a draft layer shares the pool"


def test_layers_that_reuse_another_layers_top_k_have_no_indexer_pages():
    """GLM's IndexShare: slots without an indexer layer get no indexer buffer."""
    specs = model_specs(7, indexers=(0, 3))
    config, settings = launch(7, layerwise_num_shared_buffers=3)
    plan = plan_layout(specs, config, settings).plan
    assert plan.main_slots == ((0,), (1, 4), (2, 5), (3, 6))
    assert plan.indexer_slots == ((0,), (3,))
    assert [slot.indexer_page_bytes for slot in plan.slots] == [2048, 0, 0, 2048]


def test_without_a_knob_nothing_is_shared():
    config, settings = launch(4)
    assert plan_layout(model_specs(4), config, settings).plan.is_reused is False
    plain = Settings(connector=None, additional=settings.additional)
    assert plan_layout(model_specs(4), config, plain).plan.is_reused is False


@pytest.mark.parametrize(
    "spec",
    [
        FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=64, dtype=torch.float32),
        SlidingWindowSpec(
            block_size=16, num_kv_heads=2, head_size=64, dtype=torch.float32, sliding_window=64
        ),
        MambaSpec(block_size=16, shapes=((4, 4),), dtypes=(torch.float32,)),
    ],
    ids=lambda spec: type(spec).__name__,
)
@pytest.mark.parametrize("shared", [{}, {"layerwise_num_shared_buffers": 2}])
def test_a_layer_that_is_not_mla_is_refused_by_name(spec: KVCacheSpec, shared: dict[str, int]):
    specs = {**model_specs(2), "model.layers.2.mixer": spec}
    config, settings = launch(3, **shared)
    with pytest.raises(
        UnsupportedError, match=rf"model\.layers\.2\.mixer.*{type(spec).__name__}.*not MLA.*hybrid"
    ):
        plan_layout(specs, config, settings)


def test_a_second_cache_group_is_refused_as_hybrid():
    mamba = MambaSpec(block_size=16, shapes=((4, 4),), dtypes=(torch.float32,))
    groups = [
        KVCacheGroupSpec(layer_names=["a"], kv_cache_spec=main_spec()),
        KVCacheGroupSpec(layer_names=["b"], kv_cache_spec=mamba),
    ]
    config = KVCacheConfig(num_blocks=1, kv_cache_tensors=[], kv_cache_groups=groups)
    with pytest.raises(
        UnsupportedError, match=r"hybrid KV cache layout \(2 cache groups: MLAAttentionSpec, MambaSpec\)"
    ):
        specs_of(config)


@pytest.mark.parametrize(
    ("other", "differs"),
    [
        (main_spec(block=32), "block_tokens is 16 and 32"),
        (main_spec(dtype=torch.bfloat16, row=MAIN_ROW), None),
        (main_spec(row=MAIN_ROW + 16), None),
    ],
    ids=["block size", "dtype", "row"],
)
def test_layers_of_another_layout_share_no_buffer_or_are_refused(other: KVCacheSpec, differs: str | None):
    specs = {**model_specs(3), "model.layers.3.self_attn.attn": other}
    config, settings = launch(4, layerwise_num_shared_buffers=1)
    if differs is None:
        assert plan_layout(specs, config, settings).plan.main_slots == ((0,), (1, 2), (3,))
        return
    with pytest.raises(LayoutError, match=rf"model\.layers\.\d.*model\.layers\.3.*{differs}"):
        plan_layout(specs, config, settings)


def test_indexers_of_two_layouts_in_one_slot_are_refused_naming_both():
    specs = model_specs(3, indexers=(1,))
    specs["model.layers.2.self_attn.indexer.k_cache"] = index_spec(row=INDEX_ROW + 4)
    config, settings = launch(3, layerwise_num_shared_buffers=1)
    with pytest.raises(
        LayoutError, match=r"layers\.1\.self_attn\.indexer.*layers\.2\.self_attn\.indexer.*page_bytes"
    ):
        plan_layout(specs, config, settings)


def sparse_model(layers: int) -> Any:
    text = SimpleNamespace(num_hidden_layers=layers, index_topk=32)
    return SimpleNamespace(model_config=SimpleNamespace(hf_text_config=text))


def stage(first: int, *, layers: int, indexers: tuple[int, ...], drafts: int = 0) -> dict[str, KVCacheSpec]:
    """Caches of the pipeline stage that begins with layer `first`."""
    specs = model_specs(layers, indexers=indexers, drafts=drafts)
    return {name: spec for name, spec in specs.items() if int(name.split(".")[2]) >= first}


def test_a_pipeline_stage_must_begin_with_a_layer_that_selects_rows():
    """IndexShare over two stages: vLLM does not send a selection along with the hidden states."""
    indexers = (0, 1, 3, 5)
    for first in indexers:
        check_first_selection(stage(first, layers=6, indexers=indexers), sparse_model(6))
    for first, later in ((2, 3), (4, 5)):
        with pytest.raises(
            UnsupportedError, match=rf"begins with layer {first},.*VLLM_PP_LAYER_PARTITION.* layer {later}$"
        ):
            check_first_selection(stage(first, layers=6, indexers=indexers), sparse_model(6))


def test_a_draft_layers_indexer_selects_nothing_for_the_layers_before_it():
    specs = stage(2, layers=3, indexers=(0, 3), drafts=1)
    with pytest.raises(UnsupportedError, match=r"begins with layer 2,.*that has an indexer$"):
        check_first_selection(specs, sparse_model(3))


def test_dense_models_have_no_selection_to_miss():
    config, _ = launch(4)
    check_first_selection(model_specs(4), config)
