"""One metadata object a forward, shared by all MLA layers: the batch plan and where its rows live.

Every query token, of a prompt or of a decode, goes through the weight-absorbed form (one latent row a
cached token), so chunked prefill, prefix hits and verification of drafts are one and the same case.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from vllm.v1.attention.backend import (
    AttentionCGSupport,
    AttentionMetadata,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)

from kvstrata.kernels.batch import BatchPlan, plan_batch
from kvstrata.move.forward_rows import ForwardRows
from kvstrata.move.step import StepBlocks


@dataclass
class KVStrataMetadata(AttentionMetadata):
    """What all MLA layers of one forward share: the batch plan and where its rows live.

    ``num_decodes`` and its siblings are what vLLM's MLA layer asks for: all tokens count as decode tokens.
    """

    plan: BatchPlan
    num_reqs: int
    num_actual_tokens: int
    query_start_loc: torch.Tensor  # [R + 1]
    seq_lens: torch.Tensor  # [R], new tokens included
    block_table: torch.Tensor  # [R, blocks]
    slot_mapping: torch.Tensor  # [T], -1 = skip
    num_decodes: int
    num_decode_tokens: int
    num_prefills: int = 0
    prefill: None = None
    decode: bool = True
    blocks: StepBlocks | None = None  # worked out when a layer first needs it
    forward: ForwardRows | None = None  # likewise, with sparse decode offload


class KVStrataMetadataBuilder(AttentionMetadataBuilder[KVStrataMetadata]):
    """Build the batch plan once a step for all layers of an attention group."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.NEVER
    reorder_batch_threshold = None

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device, **_: Any
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.block_tokens = int(kv_cache_spec.block_size)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> KVStrataMetadata:
        """Return the metadata of one forward; host tensors are copied, for vLLM reuses their buffers."""
        common = common_attn_metadata
        reqs = common.num_reqs
        query_start_loc = common.query_start_loc_cpu[: reqs + 1].clone()
        seq_lens = common.seq_lens[:reqs].to("cpu", copy=True)
        block_table = common.block_table_tensor[:reqs].clone()
        return KVStrataMetadata(
            plan=plan_batch(query_start_loc, seq_lens, block_table, self.block_tokens),
            num_reqs=reqs,
            num_actual_tokens=common.num_actual_tokens,
            query_start_loc=query_start_loc,
            seq_lens=seq_lens,
            block_table=block_table,
            slot_mapping=common.slot_mapping,
            num_decodes=reqs,
            num_decode_tokens=common.num_actual_tokens,
        )

    def build_for_drafting(
        self, common_attn_metadata: CommonAttentionMetadata, draft_index: int
    ) -> KVStrataMetadata:
        """Draft steps read the same cache in the same way."""
        return self.build(0, common_attn_metadata)
