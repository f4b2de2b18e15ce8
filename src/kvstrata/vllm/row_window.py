"""A layer's attention on the row window: the sparse pipeline in vLLM's terms, and the debugging aid."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kvstrata.errors import TransferFailed
from kvstrata.kernels.base import AttentionKernels
from kvstrata.kernels.batch import BatchPlan
from kvstrata.kernels.rows import gather_rows
from kvstrata.kernels.selection import host_rows
from kvstrata.move.forward_rows import DecodeGroup, ForwardRows, WindowLimits, forward_rows
from kvstrata.move.hot_path import Selection
from kvstrata.move.sparse import Attend, SparsePipeline

from .hooks import FullWindow

if TYPE_CHECKING:
    from .metadata import KVStrataMetadata


class RowHook:
    """A layer's hook on the sparse pipeline: all that must be waited for is what a store brings."""

    def __init__(self, pipeline: SparsePipeline, layer: int) -> None:
        self._pipeline = pipeline
        self._layer = layer

    def acquire(self, metadata: KVStrataMetadata) -> None:
        """Wait until rows from a store are in the layer's home and indexer cache."""
        self._pipeline.acquire(self._layer)

    def release(self, metadata: KVStrataMetadata) -> None:
        """Nothing to save: new rows went home when they were written."""


class RowWindow:
    """Hot rows for decode tokens, the prompt window for all others; vLLM's own cache tensor is not touched.

    `near` [>=T, W] int32 is where this layer's indexer leaves the positions it nearly selected.
    """

    def __init__(
        self,
        pipeline: SparsePipeline,
        layer: int,
        limits: WindowLimits,
        kernels: AttentionKernels,
        near: torch.Tensor | None,
    ) -> None:
        self._pipeline = pipeline
        self._layer = layer
        self._limits = limits
        self._kernels = kernels
        self._near = near

    def write(
        self,
        rows: torch.Tensor,
        cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        metadata: KVStrataMetadata | None,
    ) -> None:
        """Send the new rows home; a dummy run has none."""
        if metadata is not None:
            self._pipeline.write(self._layer, self._forward(metadata), rows)

    def attend(
        self,
        q: torch.Tensor,
        cache: torch.Tensor,
        metadata: KVStrataMetadata,
        topk: torch.Tensor | None,
        scale: float,
        rank: int,
    ) -> torch.Tensor:
        """Attend to the selected rows, wherever they are."""
        assert topk is not None, "start-up refuses sparse offload for dense attention"
        tokens = metadata.num_actual_tokens
        selection = Selection(
            positions=topk[:tokens].numpy(), near=None if self._near is None else self._near[:tokens].numpy()
        )
        forward = self._forward(metadata)

        def attend(
            q: torch.Tensor,
            cache: torch.Tensor,
            plan: BatchPlan,
            selected: torch.Tensor,
            lse: torch.Tensor | None,
        ) -> torch.Tensor:
            return self._kernels.sparse_mla(q, cache, plan, selected, scale=scale, kv_lora_rank=rank, lse=lse)

        watched = self._watched(attend, forward, selection, cache)
        return self._pipeline.attend(self._layer, forward, q, rank, selection, watched)

    def _watched(
        self, attend: Attend, forward: ForwardRows, selection: Selection, device_cache: torch.Tensor
    ) -> Attend:
        """Return the attention to use; a place to look at what it is given."""
        return attend

    def _forward(self, metadata: KVStrataMetadata) -> ForwardRows:
        if metadata.forward is None:
            metadata.forward = self._pipeline.known(
                forward_rows(
                    query_start_loc=metadata.query_start_loc.numpy(),
                    seq_lens=metadata.seq_lens.numpy(),
                    block_table=metadata.block_table.numpy(),
                    slot_mapping=metadata.slot_mapping.numpy(),
                    limits=self._limits,
                )
            )
        return metadata.forward


class ComparedWindow(RowWindow):
    """The debugging aid `keep_device_kv_cache`: a full device cache judges every hot row served."""

    def write(
        self,
        rows: torch.Tensor,
        cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        metadata: KVStrataMetadata | None,
    ) -> None:
        """Write to both."""
        FullWindow(self._kernels).write(rows, cache, slot_mapping, metadata)
        super().write(rows, cache, slot_mapping, metadata)

    def _watched(
        self, attend: Attend, forward: ForwardRows, selection: Selection, device_cache: torch.Tensor
    ) -> Attend:
        """Return attention that raises TransferFailed, naming rows, where a hot row differs."""
        groups = {id(group.plan): group for group in forward.decode}

        def compare(
            q: torch.Tensor,
            cache: torch.Tensor,
            plan: BatchPlan,
            selected: torch.Tensor,
            lse: torch.Tensor | None,
        ) -> torch.Tensor:
            group = groups.get(id(plan))
            if group is not None:  # prompts see no hot rows
                self._compare(forward, group, selection, cache[0], selected, device_cache)
            return attend(q, cache, plan, selected, lse)

        return compare

    def _compare(
        self,
        forward: ForwardRows,
        group: DecodeGroup,
        selection: Selection,
        hot: torch.Tensor,  # [capacity, row]
        slots: torch.Tensor,  # [g, K]
        device_cache: torch.Tensor,  # [B, N, row]
    ) -> None:
        rows = torch.from_numpy(
            host_rows(
                selection.positions[group.at],
                forward.token_request[group.at],
                forward.block_table,
                forward.block_tokens,
            )
        )
        asked = rows >= 0
        rows = rows[asked]
        expected = gather_rows(device_cache, rows).view(torch.uint8)  # bytes: a NaN equals itself
        served = hot[slots[asked].long()].view(torch.uint8)
        wrong = rows[(served != expected).any(dim=1)].unique().tolist()
        if wrong:
            raise TransferFailed(
                f"keep_device_kv_cache: {len(wrong)} hot rows of layer {self._layer} differ from the device "
                f"cache, the first is host row {wrong[0]} (block {wrong[0] // forward.block_tokens})"
            )
