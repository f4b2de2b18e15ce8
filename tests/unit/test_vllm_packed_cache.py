"""SFA-C8 main caches as vLLM's planner, stores and peers see them; what they cannot be combined with."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import KVCacheSpec, MLAAttentionSpec, SparseCacheRole
from vllm.v1.kv_cache_interface import UniformTypeKVCacheSpecs as UniformSpecs

from kvstrata.core.bundle import Bundle, layout_digest
from kvstrata.errors import ConfigurationError, UnsupportedError
from kvstrata.kernels.packed_rows import PackedRows
from kvstrata.remote.protocol.handshake import Mismatch, _check_components, component_layouts
from kvstrata.vllm import platform as platform_module
from kvstrata.vllm.attention import KVStrataMLAImpl
from kvstrata.vllm.layout import plan_layout
from kvstrata.vllm.packed_cache import check_main_cache, pack_main_cache, packed_rows, packed_spec
from kvstrata.vllm.platform import KVStrataCpuPlatform
from kvstrata.vllm.settings import Settings
from kvstrata.vllm.sparse_plan import plan_sparse

TOKENS, RANK, ROPE, LAYERS = 16, 512, 64, 3
INT8 = {"main_cache_dtype": "int8"}


def launch(*, dtype: torch.dtype = torch.bfloat16, cache_dtype: str = "auto", **additional: Any) -> Any:
    text = SimpleNamespace(
        kv_lora_rank=RANK, qk_rope_head_dim=ROPE, num_hidden_layers=LAYERS, index_topk=TOKENS
    )
    return SimpleNamespace(
        additional_config=additional,
        kv_transfer_config=None,
        cache_config=SimpleNamespace(cache_dtype=cache_dtype),
        model_config=SimpleNamespace(
            hf_text_config=text, dtype=dtype, model="some/model", max_model_len=1024, use_mla=False
        ),
        scheduler_config=SimpleNamespace(max_num_seqs=2),
        num_speculative_tokens=0,
    )


class Attention:
    """What is read and written of vLLM's MLA attention layer."""

    head_size = RANK + ROPE

    def __init__(self) -> None:
        self.impl = KVStrataMLAImpl(
            2, self.head_size, 0.5, 1, None, None, "auto", None, "decoder", None, kv_lora_rank=RANK
        )

    def get_kv_cache_spec(self, vllm_config: Any) -> MLAAttentionSpec:
        return MLAAttentionSpec(
            block_size=TOKENS,
            num_kv_heads=1,
            head_size=self.head_size,
            dtype=vllm_config.model_config.dtype,
            cache_dtype_str="auto",
        )


def specs_of(config: Any) -> dict[str, KVCacheSpec]:
    """What a worker reports for the layers of this launch."""
    specs: dict[str, KVCacheSpec] = {}
    for at in range(LAYERS):
        attention = Attention()
        pack_main_cache(attention, config)
        specs[f"model.layers.{at}.self_attn.attn"] = attention.get_kv_cache_spec(config)
    specs["model.layers.0.self_attn.indexer.k_cache"] = MLAAttentionSpec(
        block_size=TOKENS,
        num_kv_heads=1,
        head_size=132,
        dtype=torch.uint8,
        cache_role=SparseCacheRole.INDEXER,
    )
    return specs


def bundles_of(config: Any) -> tuple[Bundle, ...]:
    return plan_layout(specs_of(config), config, Settings.of(config)).plan.bundles


@pytest.mark.parametrize(
    ("dtype", "row_bytes"), [(torch.bfloat16, 656), (torch.float16, 656), (torch.float32, 784)], ids=str
)
def test_A1_the_planner_is_told_the_bytes_that_packed_rows_take(dtype: torch.dtype, row_bytes: int):  # noqa: N802
    config = launch(dtype=dtype, kvstrata=INT8)
    specs = specs_of(config)
    spec = specs["model.layers.1.self_attn.attn"]
    assert (spec.dtype, spec.head_size) == (torch.uint8, row_bytes)
    assert spec.page_size_bytes == TOKENS * row_bytes
    assert {bundle.main.page_bytes for bundle in bundles_of(config)} == {TOKENS * row_bytes}
    assert UniformSpecs.is_uniform_type(specs), "vLLM keeps all caches in one group"


def test_without_the_knob_vllms_own_spec_stays():
    config = launch()
    plain = Attention()
    assert specs_of(config)["model.layers.1.self_attn.attn"] == plain.get_kv_cache_spec(config)
    assert packed_rows(config, Settings.of(config)) is None


def test_rows_of_another_kind_are_another_layout_to_stores_and_peers():
    """float16 and bfloat16 rope parts take the same bytes; the int8 indexer's bytes are others again."""
    launches = [
        launch(),
        launch(kvstrata=INT8),
        launch(dtype=torch.float16, kvstrata=INT8),
        launch(dtype=torch.float32, kvstrata=INT8),
    ]
    found = [bundles_of(config) for config in launches]
    assert len({layout_digest(bundles) for bundles in found}) == len(found)
    assert layout_digest(found[1]) == layout_digest(bundles_of(launch(kvstrata=INT8)))
    layouts = [component_layouts(bundles) for bundles in found]
    _check_components(layouts[1], layouts[1])
    for prefill, decode in ((0, 1), (1, 0), (1, 2)):
        with pytest.raises(Mismatch, match=r"layout .* at prefill, .* at decode"):
            _check_components(layouts[prefill], layouts[decode])


def test_a_layer_that_packs_writes_the_bytes_of_its_layout_and_attends_to_them():
    config = launch(dtype=torch.float32, kvstrata=INT8)
    attention = Attention()
    pack_main_cache(attention, config)
    layout = PackedRows(kv_lora_rank=RANK, rope=ROPE, rope_dtype=torch.float32)
    latent, rope = torch.randn(3, RANK), torch.randn(3, 1, ROPE)
    cache = torch.zeros(2, 4, layout.row_bytes, dtype=torch.uint8)
    slots = torch.tensor([1, -1, 6])
    attention.impl.do_kv_cache_update(latent, rope, cache, slots, "auto", torch.ones(1))
    written = layout.pack(latent, rope[:, 0])
    assert torch.equal(cache[0, 1], written[0])
    assert torch.equal(cache[1, 2], written[2])
    cache[0, 1] = cache[1, 2] = 0
    assert not cache.any()


def test_a_plain_layer_writes_plain_rows():
    attention = Attention()
    pack_main_cache(attention, launch())
    latent, rope = torch.randn(1, RANK), torch.randn(1, 1, ROPE)
    cache = torch.zeros(1, 4, RANK + ROPE)
    attention.impl.do_kv_cache_update(latent, rope, cache, torch.tensor([2]), "auto", torch.ones(1))
    assert torch.equal(cache[0, 2], torch.cat([latent[0], rope[0, 0]]))


@pytest.mark.parametrize("own", [{}, INT8], ids=["plain", "int8"])
def test_sparse_offload_plans_with_the_bytes_and_the_layout_of_the_rows(own: dict[str, str]):
    sparse = {"enabled": True, "topk_buffer_size": 2 * TOKENS}
    config = launch(sparse_kv_offload_config=sparse, kvstrata=own)
    settings = Settings.of(config)
    specs = specs_of(config)
    layout = plan_layout(specs, config, settings)
    plan = plan_sparse(layout, specs, config, settings, device_bytes=1 << 22)
    assert plan.packed == packed_rows(config, settings)
    assert (plan.packed is not None) == bool(own)
    assert plan.row_bytes == (656 if own else 2 * (RANK + ROPE))
    assert plan.main_page_bytes == TOKENS * plan.row_bytes


def test_a_spec_of_vllms_keeps_all_else():
    config = launch()
    plain = Attention().get_kv_cache_spec(config)
    layout = PackedRows(kv_lora_rank=RANK, rope=ROPE, rope_dtype=torch.bfloat16)
    packed = packed_spec(plain, layout)
    assert (packed.block_size, packed.num_kv_heads, packed.cache_role) == (
        plain.block_size,
        plain.num_kv_heads,
        plain.cache_role,
    )
    assert packed.kv_quant_mode == plain.kv_quant_mode


@pytest.mark.parametrize("theirs", ["bfloat16", "float16"])
def test_two_answers_to_how_main_rows_are_kept_are_refused(theirs: str):
    both = launch(cache_dtype=theirs, kvstrata=INT8)
    with pytest.raises(ConfigurationError, match=rf"main_cache_dtype='int8' with kv_cache_dtype='{theirs}'"):
        check_main_cache(both, Settings.of(both))
    for one in (launch(cache_dtype=theirs), launch(kvstrata=INT8), launch()):
        check_main_cache(one, Settings.of(one))


def test_packed_rows_of_a_model_without_mla_are_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(
        platform_module.CpuPlatform, "check_and_update_config", classmethod(lambda cls, config: None)
    )
    KVStrataCpuPlatform.check_and_update_config(launch())
    with pytest.raises(UnsupportedError, match=r"main_cache_dtype='int8'.*some/model.*no MLA layers.*auto"):
        KVStrataCpuPlatform.check_and_update_config(launch(kvstrata=INT8))
