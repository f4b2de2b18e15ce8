"""kvstrata's MLA layer: vLLM's own, with the lightning indexer replaced by one that runs on CPU.

The indexer cache holds rows of the model's dtype, or LI-C8 rows (int8 values and one float32 scale); the main
cache rows of the model's dtype, or SFA-C8 rows (see `packed_cache`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from vllm.config import get_current_vllm_config
from vllm.forward_context import get_forward_context
from vllm.model_executor.custom_op import PluggableLayer, op_registry_oot
from vllm.model_executor.layers.attention.attention import get_attention_context
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.layers.mla import MultiHeadLatentAttentionWrapper
from vllm.platforms import current_platform
from vllm.utils.torch_utils import (
    LayerNameType,
    _encode_layer_name,
    _resolve_layer_name,
    direct_register_custom_op,
)
from vllm.v1.kv_cache_interface import MLAAttentionSpec, SparseCacheRole

from kvstrata.kernels.base import kernels_for
from kvstrata.kernels.quantise import SCALE_BYTES

from .backend import KVStrataIndexerBackend
from .hooks import LayerHook, NoHook
from .packed_cache import pack_main_cache
from .settings import Settings

_WRAPPER = "MultiHeadLatentAttentionWrapper"


class IndexerCache(nn.Module, AttentionLayerBase):
    """The cache of one layer's indexer keys; takes over the entry that vLLM's float8 cache registered.

    Rows are ``head_dim`` values of the model's dtype, or with LI-C8 ``head_dim`` int8 values followed by
    their float32 scale. Pages are opaque to everything that moves them.
    """

    def __init__(self, head_dim: int, dtype: torch.dtype, quantised: bool, prefix: str, cache_config: Any):
        super().__init__()
        self.kv_cache = torch.tensor([])
        self.quantised = quantised
        self.row_width = head_dim + SCALE_BYTES if quantised else head_dim
        self.dtype = torch.uint8 if quantised else dtype
        self.prefix = prefix
        self.cache_config = cache_config
        self.kernels = kernels_for(current_platform.device_type)
        self.hook: LayerHook = NoHook()
        self.near: torch.Tensor | None = None
        get_current_vllm_config().compilation_config.static_forward_context[prefix] = self

    def bind_kv_cache(self, kv_cache: torch.Tensor) -> None:
        """Take [B, 1, N, row] as [B, N, row]."""
        self.kv_cache = kv_cache.squeeze(1)

    def get_kv_cache_spec(self, vllm_config: Any) -> MLAAttentionSpec:
        """Describe the cache to vLLM's planner."""
        return MLAAttentionSpec(
            block_size=self.cache_config.block_size,
            num_kv_heads=1,
            max_tp_shards=1,
            head_size=self.row_width,
            dtype=self.dtype,
            cache_role=SparseCacheRole.INDEXER,
        )

    def get_attn_backend(self) -> type[KVStrataIndexerBackend]:
        """The backend whose builder makes this cache's metadata."""
        return KVStrataIndexerBackend

    def bind(self, layer_name: str, hook: LayerHook, near: torch.Tensor | None = None) -> None:
        """Attach the data path of this layer; called by the worker once caches are bound.

        near [max tokens, W] receives the positions just below each selection's cut, if the path asks.
        """
        self.hook = hook
        self.near = near

    def forward(self) -> None:
        """vLLM never calls a cache."""


def kvstrata_indexer(
    q: torch.Tensor,  # [T, index heads, head_dim]
    k: torch.Tensor,  # [T, head_dim]
    weights: torch.Tensor,  # [T, index heads] float32
    topk_indices: torch.Tensor,  # [max tokens, top-k] int32, written
    layer_name: LayerNameType,
    topk_tokens: int,
) -> None:
    """Write the new indexer rows, score the prefix and write each token's top-k positions, -1 padded."""
    if get_forward_context().attn_metadata is None:
        return
    metadata, cache_layer, cache, slot_mapping = get_attention_context(_resolve_layer_name(layer_name))
    cache_layer.hook.acquire(metadata)
    tokens = slot_mapping.numel()
    if cache_layer.quantised:
        cache_layer.kernels.write_quantised_rows(cache, k[:tokens], slot_mapping)
    else:
        cache_layer.kernels.write_rows(cache, k[:tokens], slot_mapping)
    actual = metadata.num_actual_tokens
    cache_layer.kernels.index_topk(
        q[:actual],
        weights[:actual],
        cache,
        metadata.plan,
        topk_tokens,
        topk_indices,
        quantised=cache_layer.quantised,
        near=cache_layer.near,
    )


def _kvstrata_indexer_fake(
    q: torch.Tensor,
    k: torch.Tensor,
    weights: torch.Tensor,
    topk_indices: torch.Tensor,
    layer_name: LayerNameType,
    topk_tokens: int,
) -> None:
    return None


def kvstrata_after_indexer(q: torch.Tensor, topk_indices: torch.Tensor) -> None:
    """Do nothing, in between: reads what the indexer op writes, and claims to write what attention reads.

    vLLM's attention op finds the top-k buffer by itself. Without this op nothing tells inductor that the
    indexer comes first, and it does move attention ahead of it.
    """


def run_indexer(
    indexer: Any, hidden: torch.Tensor, qr: torch.Tensor, positions: torch.Tensor, rope: Any
) -> None:
    """Project, rotate and hand over to the indexer op (DeepSeek-V3.2, lightning indexer)."""
    head_dim, rope_dim, heads = indexer.head_dim, indexer.rope_dim, indexer.n_head
    q = indexer.wq_b(qr)[0].view(-1, heads, head_dim)
    projected = indexer.wk_weights_proj(hidden)[0]  # [T, head_dim + heads]
    k = indexer.k_norm(projected[:, :head_dim])
    q_pe, k_pe = rope(positions, q[..., :rope_dim].contiguous(), k[:, None, :rope_dim].contiguous())
    q = torch.cat([q_pe.reshape(-1, heads, rope_dim), q[..., rope_dim:]], dim=-1)
    k = torch.cat([k_pe.reshape(-1, rope_dim), k[:, rope_dim:]], dim=-1).to(hidden.dtype)
    weights = projected[:, head_dim:].float() * (indexer.softmax_scale * heads**-0.5)
    torch.ops.vllm.kvstrata_indexer(
        q,
        k,
        weights,
        indexer.topk_indices_buffer,
        _encode_layer_name(indexer.k_cache.prefix),
        indexer.topk_tokens,
    )


class KVStrataMLALayer(MultiHeadLatentAttentionWrapper):
    """vLLM's outer MLA layer with kvstrata's indexer in place of the float8 one, where it has an indexer,

    and with the main cache that the launch asks for.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        modules = kwargs.get("mla_modules") or next(a for a in args if hasattr(a, "indexer_rotary_emb"))
        if modules.indexer is not None:
            _replace_indexer(modules.indexer)
        super().__init__(*args, **kwargs)
        pack_main_cache(self.mla_attn, get_current_vllm_config())
        if modules.indexer is not None and not self.skip_topk:
            self.mla_attn.register_forward_pre_hook(_OrderAfterIndexer(modules.indexer.topk_indices_buffer))


class _OrderAfterIndexer:
    """Forward pre-hook of an attention layer: in a compiled graph it runs after the indexer of its layer."""

    def __init__(self, topk_indices: torch.Tensor) -> None:
        self.topk_indices = topk_indices

    def __call__(self, attention: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        if torch.compiler.is_compiling():
            torch.ops.vllm.kvstrata_after_indexer(args[0], self.topk_indices)


def _replace_indexer(indexer: Any) -> None:
    old = indexer.k_cache
    settings = Settings.of(get_current_vllm_config())
    indexer.k_cache = IndexerCache(
        indexer.head_dim,
        torch.get_default_dtype(),
        settings.additional.indexer_cache_dtype == "int8",
        old.prefix,
        old.cache_config,
    )

    def forward(hidden: torch.Tensor, qr: torch.Tensor, positions: torch.Tensor, rope: Any) -> None:
        run_indexer(indexer, hidden, qr, positions, rope)

    indexer.forward = forward


def register_mla_layer() -> None:
    """Put kvstrata's MLA layer and indexer op in place; safe to call again."""
    if _WRAPPER in op_registry_oot:
        return
    direct_register_custom_op(
        "kvstrata_indexer",
        kvstrata_indexer,
        mutates_args=["topk_indices"],
        fake_impl=_kvstrata_indexer_fake,
    )
    direct_register_custom_op(
        "kvstrata_after_indexer",
        kvstrata_after_indexer,
        mutates_args=["q"],
        fake_impl=kvstrata_after_indexer,
    )
    PluggableLayer.register_oot(name=_WRAPPER)(KVStrataMLALayer)
