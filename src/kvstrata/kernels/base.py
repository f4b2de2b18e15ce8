"""The kernels a device must bring, and where they are found."""

from __future__ import annotations

from typing import Protocol

import torch

from kvstrata.kernels import attention, indexer, quantise, rows
from kvstrata.kernels.batch import BatchPlan


class AttentionKernels(Protocol):
    """Everything the attention backends call on a device; semantics as in the CPU functions."""

    def write_rows(self, cache: torch.Tensor, rows: torch.Tensor, slot_mapping: torch.Tensor) -> None: ...

    def write_quantised_rows(
        self, cache: torch.Tensor, k: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None: ...

    def dense_mla(
        self,
        q: torch.Tensor,
        cache: torch.Tensor,
        plan: BatchPlan,
        *,
        scale: float,
        kv_lora_rank: int,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor: ...

    def sparse_mla(
        self,
        q: torch.Tensor,
        cache: torch.Tensor,
        plan: BatchPlan,
        topk_indices: torch.Tensor,
        *,
        scale: float,
        kv_lora_rank: int,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor: ...

    def index_topk(
        self,
        q: torch.Tensor,
        weights: torch.Tensor,
        cache: torch.Tensor,
        plan: BatchPlan,
        topk: int,
        out: torch.Tensor,
        *,
        quantised: bool,
    ) -> None: ...


class CpuKernels:
    """The torch and numba kernels of this package."""

    write_rows = staticmethod(rows.write_rows)
    write_quantised_rows = staticmethod(quantise.write_quantised_rows)
    dense_mla = staticmethod(attention.dense_mla)
    sparse_mla = staticmethod(attention.sparse_mla)
    index_topk = staticmethod(indexer.index_topk)


def kernels_for(device_type: str) -> AttentionKernels:
    """The kernels of a torch device type; NotImplementedError names a device that has none yet."""
    if device_type == "cpu":
        return CpuKernels()
    raise NotImplementedError(
        f"kvstrata has no attention kernels for device type {device_type!r}; it runs on 'cpu'"
    )
