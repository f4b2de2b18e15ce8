"""The kernels a device must bring, and where they are found."""

from __future__ import annotations

from functools import partial
from typing import Protocol

import torch

from kvstrata.kernels import attention, indexer, quantise, rows
from kvstrata.kernels.batch import BatchPlan
from kvstrata.kernels.packed_rows import PackedRows


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
        lse: torch.Tensor | None = None,
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
        near: torch.Tensor | None = None,
    ) -> None: ...


class CpuKernels:
    """The torch and numba kernels of this package."""

    write_rows = staticmethod(rows.write_rows)
    write_quantised_rows = staticmethod(quantise.write_quantised_rows)
    dense_mla = staticmethod(attention.dense_mla)
    sparse_mla = staticmethod(attention.sparse_mla)
    index_topk = staticmethod(indexer.index_topk)


class PackedCpuKernels(CpuKernels):
    """The same, where main caches hold SFA-C8 rows; `write_rows` stores such rows as they are."""

    def __init__(self, packed: PackedRows) -> None:
        self.dense_mla = partial(attention.dense_mla, packed=packed)
        self.sparse_mla = partial(attention.sparse_mla, packed=packed)


def kernels_for(device_type: str, packed: PackedRows | None = None) -> AttentionKernels:
    """The kernels of a torch device type; NotImplementedError names a device that has none yet.

    packed: how main rows are stored where that is not as plain values.
    """
    if device_type == "cpu":
        return CpuKernels() if packed is None else PackedCpuKernels(packed)
    raise NotImplementedError(
        f"kvstrata has no attention kernels for device type {device_type!r}; it runs on 'cpu'"
    )
