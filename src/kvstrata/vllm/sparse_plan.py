"""Sparse decode offload as start-up decides it: sizes, groups, budget, and where vLLM's tensors go.

Planned on the specs a worker reports, before vLLM counts blocks; the placement must come to the same bytes.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from vllm.v1.kv_cache_interface import KVCacheTensor

from kvstrata.core.budget import SparseBudget, prompt_window_blocks, sparse_budget, stage_host_bytes
from kvstrata.core.bundle import Bundle
from kvstrata.core.eviction import DEFAULT_POLICY
from kvstrata.core.hot_row_plan import check_topk_buffer, share_groups
from kvstrata.core.layers import Component
from kvstrata.errors import UnsupportedError
from kvstrata.kernels.packed_rows import PackedRows
from kvstrata.kernels.residency import table_bytes
from kvstrata.memory.host_pool import MAIN_ONLY, host_pool_overhead_bytes
from kvstrata.memory.hot_rows import hot_rows_bytes
from kvstrata.move.forward_rows import WindowLimits

from .layout import Layout, specs_of
from .packed_cache import packed_rows
from .settings import Settings, index_topk

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec

WINDOW_BUFFERS = 2
_WORD_BYTES = 4  # vLLM zeroes blocks in words of this size
_FRESH_ENTRY_BYTES = 4  # one table over all host rows, see move/forward_rows.py


@dataclass(frozen=True, kw_only=True)
class SparsePlan:
    """What one rank's sparse offload consists of, whatever the number of blocks."""

    layout: Layout
    limits: WindowLimits
    groups: tuple[tuple[int, ...], ...]
    policy: str
    dtype: torch.dtype
    row_elements: int
    packed: PackedRows | None
    main_page_bytes: int
    keeps_device_cache: bool

    @property
    def bundles(self) -> tuple[Bundle, ...]:
        """This rank's layers."""
        return self.layout.plan.bundles

    @property
    def layers(self) -> tuple[int, ...]:
        """This rank's layers in execution order."""
        return self.layout.plan.execution_order

    @property
    def drafts(self) -> frozenset[int]:
        """The draft layers among them."""
        return frozenset(bundle.index for bundle in self.bundles if bundle.is_draft)

    @property
    def row_bytes(self) -> int:
        """Bytes of a main row."""
        return self.row_elements * self.dtype.itemsize

    @property
    def hot_rows_bytes(self) -> int:
        """Device bytes of all layers' hot buffers."""
        return hot_rows_bytes([self.row_bytes] * len(self.layers), self.limits.capacity)

    @property
    def window_bytes(self) -> int:
        """Device bytes of the prompt window."""
        return WINDOW_BUFFERS * self.limits.window_blocks * self.main_page_bytes

    def spare_bytes(self, num_blocks: int) -> int:
        """Device bytes of what is bound to main caches that are not there: see `place_sparse_tensors`."""
        return 0 if self.keeps_device_cache else self.main_page_bytes + num_blocks * self.spare_stride_bytes

    @property
    def spare_stride_bytes(self) -> int:
        """Bytes from one spare page to the next: whole elements, and whole 32-bit words as vLLM requires."""
        return max(self.dtype.itemsize, _WORD_BYTES)

    def residency_bytes(self, num_blocks: int) -> int:
        """Bytes of the tables that say where rows are; on the CPU they lie beside the device's memory."""
        rows = num_blocks * self.limits.block_tokens
        one = table_bytes(host_rows=rows, capacity=self.limits.capacity, policy=self.policy)
        return len(self.groups) * one + rows * _FRESH_ENTRY_BYTES

    def bytes_beside_caches(self, num_blocks: int) -> int:
        """Device bytes that vLLM does not allocate: all but the indexer caches and the spare page."""
        return self.hot_rows_bytes + self.window_bytes + self.residency_bytes(num_blocks)


def plan_sparse(
    layout: Layout,
    specs: Mapping[str, KVCacheSpec],
    vllm_config: VllmConfig,
    settings: Settings,
    *,
    device_bytes: int,
) -> SparsePlan:
    """Plan one worker's sparse offload in `device_bytes` of device KV memory.

    Raises ConfigurationError for topk_buffer_size, UnsupportedError for models without sparse attention or
    with main caches that differ.
    """
    groups = share_groups(layout.plan.bundles)
    main = {
        (spec.dtype, int(spec.head_size), int(spec.block_size), int(spec.page_size_bytes))
        for name, spec in specs.items()
        if layout.layer_of[name].component is Component.MAIN
    }
    if len(main) > 1:
        raise UnsupportedError(
            f"sparse_kv_offload_config.enabled=true: layers with different main caches "
            f"({sorted(map(str, main))}) would need hot rows of different sizes; set it to false for this one"
        )
    ((dtype, row_elements, block_tokens, page_bytes),) = main
    if page_bytes != block_tokens * row_elements * dtype.itemsize:
        raise UnsupportedError(
            f"sparse_kv_offload_config.enabled=true: pages of {page_bytes} bytes are longer than their "
            f"{block_tokens} rows of {row_elements} x {dtype}; set it to false for this cache layout"
        )
    topk = index_topk(vllm_config)
    sparse = settings.additional.sparse_offload
    per_sequence = check_topk_buffer(sparse.topk_buffer_size, index_topk=topk, block_tokens=block_tokens)
    window = prompt_window_blocks(
        settings.additional.prompt_window_tokens,
        device_bytes=device_bytes,
        block_tokens=block_tokens,
        page_bytes=WINDOW_BUFFERS * page_bytes,
    )
    policy = settings.additional.hot_row_policy
    longest = -(-int(vllm_config.model_config.max_model_len) // block_tokens)
    return SparsePlan(
        layout=layout,
        limits=WindowLimits(
            block_tokens=block_tokens,
            window_blocks=min(window, longest),
            capacity=per_sequence * int(vllm_config.scheduler_config.max_num_seqs),
            topk=topk,
            decode_tokens=1 + int(vllm_config.num_speculative_tokens),
        ),
        groups=groups,
        policy=DEFAULT_POLICY if policy == "auto" else policy,
        dtype=dtype,
        row_elements=row_elements,
        packed=packed_rows(vllm_config, settings),
        main_page_bytes=page_bytes,
        keeps_device_cache=sparse.keep_device_kv_cache,
    )


def budget_of(
    plan: SparsePlan, vllm_config: VllmConfig, settings: Settings, *, device_bytes: int
) -> SparseBudget:
    """Count the blocks; raises BudgetError with both numbers and the knobs to change."""
    host_bytes = settings.additional.sparse_offload.dram_bytes_per_dp
    if host_bytes is not None:
        host_bytes = stage_host_bytes(
            host_bytes,
            [plan.main_page_bytes] * len(plan.layers),
            [plan.main_page_bytes] * total_layers(vllm_config),
        )

    def bookkeeping_bytes(num_blocks: int) -> int:
        return plan.residency_bytes(num_blocks) + plan.spare_bytes(num_blocks)

    return sparse_budget(
        plan.bundles,
        available_bytes=device_bytes,
        host_bytes=host_bytes,
        host_overhead_bytes=host_pool_overhead_bytes(plan.bundles, plan.layers, components=MAIN_ONLY),
        hot_rows_bytes=plan.hot_rows_bytes,
        residency_bytes=bookkeeping_bytes(0),
        residency_page_bytes=bookkeeping_bytes(1) - bookkeeping_bytes(0),
        prompt_window_bytes=plan.window_bytes,
        keep_device_kv_cache=plan.keeps_device_cache,
    )


def total_layers(vllm_config: VllmConfig) -> int:
    """Return the layers of the whole model, draft layers included, over all pipeline stages."""
    drafts = 0
    speculative = vllm_config.speculative_config
    draft = speculative.draft_model_config if speculative is not None else None
    if draft is not None and draft is not speculative.target_model_config:  # as with n-grams: no draft model
        drafts = int(getattr(draft.hf_config, "n_predict", None) or 1)
    return int(vllm_config.model_config.hf_text_config.num_hidden_layers) + drafts


def place_sparse_tensors(kv_cache_config: KVCacheConfig, plan: SparsePlan) -> KVCacheConfig:
    """Return a copy of ``kv_cache_config`` with indexer caches only on the device.

    vLLM must bind something to the main caches: pages of one spare region, a few bytes apart, which nobody
    writes or reads. With the device cache kept they are full, as in plain vLLM.
    """
    blocks = kv_cache_config.num_blocks
    specs = specs_of(kv_cache_config)
    offset_bytes = plan.spare_bytes(blocks)
    placed: list[dict[str, Any]] = []
    for name, layer in plan.layout.layer_of.items():
        page_bytes = specs[name].page_size_bytes
        is_spare = layer.component is Component.MAIN and not plan.keeps_device_cache
        block_stride = plan.spare_stride_bytes if is_spare else page_bytes
        placed.append(
            {
                "layers": [name],
                "layer_stride": block_stride * blocks,
                "block_stride": block_stride,
                "offset": 0 if is_spare else offset_bytes,
            }
        )
        offset_bytes += 0 if is_spare else page_bytes * blocks
    result = copy.copy(kv_cache_config)
    result.kv_cache_tensors = [KVCacheTensor(size=offset_bytes, **entry) for entry in placed]
    return result
