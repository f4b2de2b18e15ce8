"""Attention backends for MLA on CPU, dense and sparse: any row width, any block size, three dtypes."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from vllm.v1.attention.backend import AttentionBackend, MultipleOf

from .attention import KVStrataMLAImpl, KVStrataSparseMLAImpl
from .metadata import KVStrataMetadata, KVStrataMetadataBuilder


class KVStrataMLABackend(AttentionBackend):
    """Dense MLA: any row width, any block size, float32, bfloat16 and float16."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float32, torch.bfloat16, torch.float16]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto", "float16", "bfloat16"]

    @staticmethod
    def get_name() -> str:
        """vLLM's name for a backend that is not one of its own."""
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[Any]:
        """Dense attention over the whole prefix."""
        return KVStrataMLAImpl

    @staticmethod
    def get_metadata_cls() -> type[KVStrataMetadata]:
        """The metadata that this backend's builder makes."""
        return KVStrataMetadata

    @staticmethod
    def get_builder_cls() -> type[KVStrataMetadataBuilder]:
        """The builder that vLLM calls once a step and attention group."""
        return KVStrataMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        """Any block size: rows are addressed one by one."""
        return [MultipleOf(1)]

    @classmethod
    def is_mla(cls) -> bool:
        """One latent row a token, no separate value cache."""
        return True


class KVStrataSparseMLABackend(KVStrataMLABackend):
    """DSA: attention over the rows that the lightning indexer selected."""

    @staticmethod
    def get_impl_cls() -> type[Any]:
        """Attention over the selected rows."""
        return KVStrataSparseMLAImpl

    @classmethod
    def is_sparse(cls) -> bool:
        """Tells vLLM's selector that this backend serves top-k models."""
        return True


class KVStrataIndexerBackend(KVStrataMLABackend):
    """The indexer cache's group: same metadata; its rows are read by the indexer op, not by an impl."""
