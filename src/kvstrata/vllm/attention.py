"""The attention implementations that vLLM's MLA layer calls: write rows, then attend in absorbed form."""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.attention.sparse_mla_attention import SharedTopkIndicesBuffer
from vllm.platforms import current_platform
from vllm.v1.attention.backend import MLAAttentionImpl

from kvstrata.kernels.base import kernels_for
from kvstrata.kernels.packed_rows import PackedRows

from .hooks import FullWindow, LayerHook, NoHook, Window
from .metadata import KVStrataMetadata


class KVStrataMLAImpl(MLAAttentionImpl[KVStrataMetadata], SharedTopkIndicesBuffer):
    """Dense MLA over every position up to the query's own.

    ``is_sparse`` tells vLLM's MLA layer to send all tokens through ``forward_mqa``: there is no separate
    multi-head path for prompts.
    """

    is_sparse = True
    supports_dense_mha_prefill = False
    masked_mha_available = False
    can_return_lse_for_decode = False

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None,
        attn_type: str,
        kv_sharing_target_layer_name: str | None,
        *,
        kv_lora_rank: int,
        indexer: object | None = None,
        topk_indices_buffer: torch.Tensor | None = None,
        **_: Any,
    ) -> None:
        if sliding_window is not None or logits_soft_cap is not None or alibi_slopes is not None:
            raise NotImplementedError(
                "kvstrata's MLA backend has no sliding window, logits soft cap or ALiBi; "
                "serve this model without the kvstrata plugin (VLLM_PLUGINS='')"
            )
        self.num_heads, self.head_size, self.num_kv_heads = num_heads, head_size, num_kv_heads
        self.scale = float(scale)
        self.kv_cache_dtype = kv_cache_dtype
        self.kv_lora_rank = kv_lora_rank
        self.hook: LayerHook = NoHook()
        self.window: Window = FullWindow(kernels_for(current_platform.device_type))
        self._packed: PackedRows | None = None
        self.init_topk_indices_buffer(indexer, topk_indices_buffer)

    def store_packed(self, packed: PackedRows) -> None:
        """Keep SFA-C8 rows from now on; called while the model is built, before caches and windows are."""
        self._packed = packed
        self.window = FullWindow(kernels_for(current_platform.device_type, packed))

    def record_logical_topk_ready(self) -> None:
        """Called by vLLM once the top-k is known; rows are resolved where they are used."""

    def do_kv_cache_update(
        self,
        kv_c_normed: torch.Tensor,  # [T, kv_lora_rank]
        k_pe: torch.Tensor,  # [T, 1, rope]
        kv_cache: torch.Tensor,  # [B, N, row], or [B, N, row bytes] where rows are packed
        slot_mapping: torch.Tensor,  # [T]
        kv_cache_dtype: str,
        k_scale: torch.Tensor,
    ) -> None:
        """Write the new rows, once the layer's window is safe to write.

        vLLM calls this without metadata of its own; profiling and dummy runs have no bound cache.
        """
        if kv_cache.numel() == 0:
            return
        metadata = self._metadata()
        if metadata is not None:
            self.hook.acquire(metadata)
        tokens = slot_mapping.numel()
        rows = self._rows(kv_c_normed[:tokens], k_pe[:tokens].squeeze(1))
        self.window.write(rows, kv_cache, slot_mapping, metadata)

    def forward_mqa(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],  # [T, H, row], or its latent and rope parts
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: KVStrataMetadata,
        layer: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the latent attention output [T, H, kv_lora_rank]; then release the layer's window."""
        if isinstance(q, tuple):
            q = torch.cat(q, dim=-1)
        out = self.window.attend(
            q, kv_c_and_k_pe_cache, attn_metadata, self._selected(), self.scale, self.kv_lora_rank
        )
        self.hook.release(attn_metadata)
        return out, None

    def _rows(self, latent: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
        """The new rows as the cache, home and window of this layer hold them."""
        if self._packed is None:
            return torch.cat([latent, rope], -1)
        return self._packed.pack(latent, rope)

    def _selected(self) -> torch.Tensor | None:
        """The positions to attend to; None for all."""
        return None

    def bind(self, layer_name: str, hook: LayerHook, window: Window | None = None) -> None:
        """Attach the data path of ``layer_name``; called by the worker once caches are bound."""
        self._layer_name = layer_name
        self.hook = hook
        if window is not None:
            self.window = window

    def _metadata(self) -> KVStrataMetadata | None:
        if isinstance(self.hook, NoHook):
            return None
        return forward_metadata(self._layer_name)


class KVStrataSparseMLAImpl(KVStrataMLAImpl):
    """MLA over the rows that the indexer of this layer, or of an earlier one, selected."""

    def _selected(self) -> torch.Tensor | None:
        assert self.topk_indices_buffer is not None, "vLLM gives every sparse layer the shared top-k buffer"
        return self.topk_indices_buffer


def forward_metadata(layer_name: str) -> KVStrataMetadata | None:
    """Return this forward's metadata of ``layer_name``; None while profiling or in a dummy run."""
    from vllm.forward_context import get_forward_context

    metadata = get_forward_context().attn_metadata
    if isinstance(metadata, list):
        metadata = metadata[0]
    if metadata is None:
        return None
    found = metadata.get(layer_name)
    return found if isinstance(found, KVStrataMetadata) else None
