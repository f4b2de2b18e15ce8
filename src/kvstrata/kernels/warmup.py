"""Compile the kernels before the first request: from scratch it takes seconds, from the cache half of one."""

from __future__ import annotations

import numpy as np
import torch

from kvstrata.kernels import gather
from kvstrata.kernels.base import AttentionKernels
from kvstrata.kernels.batch import plan_batch
from kvstrata.kernels.residency import ResidencyTable
from kvstrata.kernels.selection import host_rows, select_fresh, select_piece

_TOKENS = 4
_ROW = 16


def warm_up(kernels: AttentionKernels) -> None:
    """Call every kernel once on a batch of a few tokens; one specialisation serves all shapes and dtypes."""
    plan = plan_batch(
        torch.tensor([0, _TOKENS]), torch.tensor([_TOKENS]), torch.zeros(1, 1, dtype=torch.int32), _TOKENS
    )
    cache = torch.zeros(1, _TOKENS, _ROW)
    slots = torch.arange(_TOKENS)
    kernels.write_rows(cache, torch.ones(_TOKENS, _ROW), slots)
    q = torch.ones(_TOKENS, 2, _ROW)
    topk = torch.full((_TOKENS, 2), -1, dtype=torch.int32)
    kernels.index_topk(q, torch.ones(_TOKENS, 2), cache, plan, 2, topk, quantised=False)
    kernels.sparse_mla(q, cache, plan, topk, scale=1.0, kv_lora_rank=8)
    kernels.dense_mla(q, cache, plan, scale=1.0, kv_lora_rank=8)


def warm_up_hot_rows() -> None:
    """Call what finds and copies hot rows once, on tables of a few rows."""
    gather.prepare()
    selected, requests = np.zeros((1, 2), np.int32), np.zeros(1, np.int64)
    rows = host_rows(selected, requests, np.zeros((1, 1), np.int32), _TOKENS)
    fresh = np.full(_TOKENS, -1, np.int32)
    select_fresh(rows, fresh)
    select_piece(selected, rows, fresh, requests, requests, requests)
    table = ResidencyTable(host_rows=_TOKENS, capacity=2)
    table.resolve(rows, fresh, near_rows=rows)
    table.invalidate(rows[0])
