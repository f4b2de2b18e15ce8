"""Where a layer's attention meets the data path: what runs around it, and the memory it writes and reads.

Hooks are called from inside opaque custom ops, so they run in eager and in compiled mode alike, and they
are silent without attention metadata (profiling, warm-up, dummy runs): no caller calls them then.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

from kvstrata.kernels.base import AttentionKernels

if TYPE_CHECKING:
    from .metadata import KVStrataMetadata


class LayerHook(Protocol):
    """One layer's side of the layer lifecycle (main and indexer cache together)."""

    def acquire(self, metadata: KVStrataMetadata) -> None:
        """Make the layer's window safe to write and its prefix present.

        Called before the first access to either cache of the layer in a forward, by whichever op comes
        first (indexer or main KV write); further calls in the same forward change nothing.
        """

    def release(self, metadata: KVStrataMetadata) -> None:
        """Save the layer's new rows and prefetch a later layer; called once attention has read the window."""


class NoHook:
    """The hook of a layer whose home is its window: plain vLLM."""

    def acquire(self, metadata: KVStrataMetadata) -> None:
        """Nothing to wait for."""

    def release(self, metadata: KVStrataMetadata) -> None:
        """Nothing to save."""


class Window(Protocol):
    """The device memory that one layer's attention writes and reads."""

    def write(
        self,
        rows: torch.Tensor,  # [T, row]
        cache: torch.Tensor,  # [B, N, row], the tensor that vLLM bound to the layer
        slot_mapping: torch.Tensor,  # [T], -1 = skip
        metadata: KVStrataMetadata | None,  # None in dummy runs
    ) -> None:
        """Store the new rows of this forward."""

    def attend(
        self,
        q: torch.Tensor,  # [>=T, H, row]
        cache: torch.Tensor,
        metadata: KVStrataMetadata,
        topk: torch.Tensor | None,  # [>=T, K], None for dense attention
        scale: float,
        rank: int,
    ) -> torch.Tensor:
        """Return the latent attention output [len(q), H, rank]."""


class FullWindow:
    """The layer's whole paged cache: its own, or a buffer that it has to itself while it computes."""

    def __init__(self, kernels: AttentionKernels) -> None:
        self._kernels = kernels

    def write(
        self,
        rows: torch.Tensor,
        cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        metadata: KVStrataMetadata | None,
    ) -> None:
        """Write into the cache, in dummy runs too."""
        self._kernels.write_rows(cache, rows, slot_mapping)

    def attend(
        self,
        q: torch.Tensor,
        cache: torch.Tensor,
        metadata: KVStrataMetadata,
        topk: torch.Tensor | None,
        scale: float,
        rank: int,
    ) -> torch.Tensor:
        """Attend to the selected rows of the cache, or to all of them."""
        if topk is None:
            return self._kernels.dense_mla(q, cache, metadata.plan, scale=scale, kv_lora_rank=rank)
        return self._kernels.sparse_mla(q, cache, metadata.plan, topk, scale=scale, kv_lora_rank=rank)
