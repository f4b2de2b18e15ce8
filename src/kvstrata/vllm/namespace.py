"""The store namespace: everything that must agree before one engine may read another's rows.

A key is namespace / rank / block hash. The namespace covers model and weights, dtypes, block size, cache
layout version and draft model; the rank part covers every rank dimension (field fault: keys without them).
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvstrata.core.ranks import RankIdentity, all_ranks

from .settings import Settings

if TYPE_CHECKING:
    from vllm.config import VllmConfig

LAYOUT_VERSION = 1


def store_namespace(vllm_config: VllmConfig) -> str:
    """Return a digest of all that decides a cached row's bytes, apart from tokens and rank."""
    model, cache = vllm_config.model_config, vllm_config.cache_config
    speculative, additional = vllm_config.speculative_config, Settings.of(vllm_config).additional
    facts = {
        "layout": LAYOUT_VERSION,
        "model": _model_facts(model),
        "load_format": str(vllm_config.load_config.load_format),  # dummy weights are others
        "dtype": str(model.dtype),
        "quantization": str(model.quantization),
        "cache_dtype": cache.cache_dtype,
        "indexer_cache_dtype": additional.indexer_cache_dtype,
        "main_cache_dtype": additional.main_cache_dtype,
        # A rank's object holds the layers that it owns.
        "owners": _owners(vllm_config),
        "block_tokens": cache.block_size,
        # Not what vLLM made of the variable: only the scheduler's process has done that.
        "hash": [cache.prefix_caching_hash_algo, os.environ.get("PYTHONHASHSEED")],
        "draft": _draft_facts(speculative) if speculative is not None else None,
    }
    text = json.dumps(facts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def model_identity(vllm_config: VllmConfig) -> str:
    """Return what two engines must agree on before one reads the other's rows, as far as both can tell.

    Architecture and digest of the configuration, dtypes and draft model; not where the weights lie, which may
    differ from machine to machine.
    """
    model, speculative = vllm_config.model_config, vllm_config.speculative_config
    draft = getattr(speculative, "draft_model_config", None)
    facts = [
        _portable(model.hf_config),
        str(model.dtype),
        str(model.quantization),
        vllm_config.cache_config.cache_dtype,
        speculative.method if speculative is not None else None,
        _portable(draft.hf_config) if draft is not None else None,
    ]
    text = json.dumps(facts, sort_keys=True, default=str)
    architectures = getattr(model.hf_config, "architectures", None) or ["model"]
    return f"{architectures[0]} {model.dtype} {hashlib.sha256(text.encode()).hexdigest()[:12]}"


def rank_identity(vllm_config: VllmConfig, *, tp_rank: int, pp_rank: int) -> RankIdentity:
    """Return the identity under which a rank keeps its blocks.

    To vLLM, data-parallel replicas of a dense model are engines of their own: rank 0 of 1, whatever index.
    """
    parallel = vllm_config.parallel_config
    return RankIdentity(
        tp_rank=tp_rank,
        tp_size=parallel.tensor_parallel_size,
        pp_rank=pp_rank,
        pp_size=parallel.pipeline_parallel_size,
        pcp_rank=0,
        pcp_size=parallel.prefill_context_parallel_size,
        dcp_rank=0,
        dcp_size=parallel.decode_context_parallel_size,
        dp_rank=parallel.data_parallel_rank,
        dp_size=parallel.data_parallel_size,
    )


def all_rank_keys(vllm_config: VllmConfig) -> tuple[str, ...]:
    """Return the keys of all ranks of this engine: a block is a hit only where every rank has it."""
    parallel = vllm_config.parallel_config
    ranks = all_ranks(
        parallel.tensor_parallel_size,
        parallel.pipeline_parallel_size,
        parallel.prefill_context_parallel_size,
        parallel.decode_context_parallel_size,
        parallel.data_parallel_size,
    )
    return tuple(rank.key() for rank in ranks if rank.dp_rank == parallel.data_parallel_rank)


def _owners(vllm_config: VllmConfig) -> int:
    """How many ranks the layers are spread over; 0 where each rank has them all."""
    parallel = vllm_config.parallel_config
    group = parallel.tensor_parallel_size * parallel.prefill_context_parallel_size
    return group if Settings.of(vllm_config).is_kvpp else 0


def _model_facts(model: Any) -> list[Any]:
    """Name one model's weights and configuration; for a model of a hub, its commit."""
    commit = getattr(model.hf_config, "_commit_hash", None)
    return [model.model, model.revision, commit, _weight_files(model.model), _hf_config(model.hf_config)]


def _draft_facts(speculative: Any) -> list[Any]:
    draft = speculative.draft_model_config
    return [speculative.method, str(speculative.model), _model_facts(draft) if draft is not None else None]


def _portable(hf_config: Any) -> dict[str, Any]:
    names = ("_name_or_path", "_commit_hash", "transformers_version")
    return {key: value for key, value in _hf_config(hf_config).items() if key not in names}


def _hf_config(hf_config: Any) -> dict[str, Any]:
    """Return the model's own configuration, equal in all processes of an engine.

    Without ``model_type``: vLLM sets it on the class, for some models in the parent process only. The
    architectures name the model.
    """
    config = dict(json.loads(hf_config.to_json_string(use_diff=False)))
    config.pop("model_type", None)
    return config


def _weight_files(model: str) -> list[tuple[str, int, int]]:
    """Name, size and time of the weight files of a local model: retrained weights make a new namespace."""
    folder = Path(model)
    if not folder.is_dir():
        return []
    files = sorted(p for p in folder.iterdir() if p.suffix in (".safetensors", ".bin", ".pt", ".gguf"))
    return [(p.name, p.stat().st_size, p.stat().st_mtime_ns) for p in files]
