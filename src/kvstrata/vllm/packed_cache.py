"""SFA-C8 main caches in vLLM's terms: who asks for them, what the planner is told, which layers keep them.

To vLLM such a cache is one of bytes, and its kv_cache_dtype stays "auto": rows are quantised here.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch

from kvstrata.errors import ConfigurationError, UnsupportedError
from kvstrata.kernels.packed_rows import PackedRows

from .settings import Settings

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import MLAAttentionSpec

_KNOB = "kvstrata.main_cache_dtype"


def packed_rows(vllm_config: VllmConfig, settings: Settings) -> PackedRows | None:
    """Return how this launch's main rows are packed; None for rows of the model's dtype."""
    if settings.additional.main_cache_dtype == "auto":
        return None
    text = vllm_config.model_config.hf_text_config
    return PackedRows(
        kv_lora_rank=int(text.kv_lora_rank),
        rope=int(text.qk_rope_head_dim),
        rope_dtype=vllm_config.model_config.dtype,
    )


def packed_spec(spec: MLAAttentionSpec, packed: PackedRows) -> MLAAttentionSpec:
    """Return vLLM's spec of a plain main cache as one of packed rows; its dtype word tells layouts apart."""
    return dataclasses.replace(
        spec, head_size=packed.row_bytes, dtype=torch.uint8, cache_dtype_str=packed.name
    )


def pack_main_cache(attention: Any, vllm_config: VllmConfig) -> None:
    """Let an MLA attention layer of vLLM keep packed rows, where the launch asks for them.

    Called while the model is built: caches are planned from what the layer then says of its own.
    """
    packed = packed_rows(vllm_config, Settings.of(vllm_config))
    if packed is None:
        return
    plain_spec = attention.get_kv_cache_spec
    assert attention.head_size == packed.width

    def get_kv_cache_spec(vllm_config: VllmConfig) -> MLAAttentionSpec:
        return packed_spec(plain_spec(vllm_config), packed)

    attention.get_kv_cache_spec = get_kv_cache_spec
    attention.impl.store_packed(packed)


def check_main_cache(vllm_config: VllmConfig, settings: Settings) -> None:
    """Raise ConfigurationError where kv_cache_dtype says something else about main rows."""
    value, theirs = settings.additional.main_cache_dtype, vllm_config.cache_config.cache_dtype
    if value != "auto" and theirs != "auto":
        raise ConfigurationError(
            f"{_KNOB}={value!r} with kv_cache_dtype={theirs!r}: both say how main rows are kept; set "
            f'kv_cache_dtype to "auto", or {_KNOB} to "auto"'
        )


def refuse_without_mla(vllm_config: VllmConfig, settings: Settings) -> None:
    """Raise UnsupportedError where packed rows are asked for and the model has no MLA cache to pack."""
    value = settings.additional.main_cache_dtype
    if value != "auto":
        model = getattr(vllm_config.model_config, "model", None)
        raise UnsupportedError(
            f'{_KNOB}={value!r}: model {model!r} has no MLA layers; set it to "auto", or see vLLM\'s '
            "kv_cache_dtype"
        )
