"""Engine arguments by the support matrix's own words, so that a test's mark is what its engines run."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

from engines import engine_arguments
from models import Model
from rank_extension import EXTENSION

CHUNK_TOKENS = 96
EXPERTS = 8  # in a layer of the models that have any
COMPILED = {"VLLM_USE_BREAKABLE_CUDAGRAPH": "0", "VLLM_CPU_CI_ENV": "1"}
"""Environment in which a DSA model is traced, and the traced graph is run as it is."""

_OWN = {"li-c8": {"indexer_cache_dtype": "int8"}, "sfa-c8": {"main_cache_dtype": "int8"}}
_VLLM: dict[str, dict[str, Any]] = {
    "tp": {"tensor_parallel_size": 2},
    "pp": {"pipeline_parallel_size": 2},
    "dp": {"data_parallel_size": 2},
    "ep": {"enable_expert_parallel": True},
    "mtp": {"speculative_config": {"method": "mtp", "num_speculative_tokens": 2}},
    "chunked": {"max_num_batched_tokens": CHUNK_TOKENS},
    "prefix": {"enable_prefix_caching": True},
    "async": {"async_scheduling": True},
    "compiled": {"enforce_eager": False},
    "bf16": {"dtype": "bfloat16"},
}
_CONNECTOR: dict[str, dict[str, Any]] = {
    "layerwise": {"use_layerwise": True, "layerwise_num_shared_buffers": 2},
    "store": {"backend": "local", "store_size_GB": 0.2},
}
_ROLES = {"prefill": "kv_producer", "decode": "kv_consumer"}
_REMOTE = {"remote_lease_s": 30, "remote_wait_s": 120}  # no test of deadlines: the machine may be busy

COUNTERS = {
    "layerwise": ("loaded_bytes", "saved_bytes"),
    "sparse": ("missed_rows", "written_rows"),
    "kvpp": ("broadcast_bytes",),
    "store": ("put_blocks + fetched_blocks",),  # another engine may have put them; a consumer puts none
    "prefill": ("sends_done",),
    "decode": ("pulled_bytes",),
}
"""Feature -> statistics, or sums of them, that are above zero once it has done something."""


def arguments_with(
    features: Iterable[str],
    model: Model,
    *,
    store: Path | None = None,
    port: int = 1,
    in_halves: bool = False,
    **more: Any,
) -> dict[str, Any]:
    """Return `vllm.LLM` arguments of an engine with exactly these features; `more` goes to vLLM.

    Ranks can be asked what `rank_extension` lets them say.

    `store` is where the one of "store" lives, `port` what "decode" listens on. `in_halves`: name
    the seeds' two connectors under vLLM's MultiConnector instead of one.
    """
    wanted = set(features)
    connector: dict[str, Any] = {"backend": "none"}
    own: dict[str, Any] = {}
    arguments: dict[str, Any] = {}
    for feature in wanted:
        connector |= _CONNECTOR.get(feature, {})
        own |= _OWN.get(feature, {})
        arguments |= _VLLM.get(feature, {})
    if "store" in wanted:
        assert store is not None, "a store needs a directory"
        connector["store_path"] = str(store)
    if "pp" in wanted and "layerwise" in wanted:
        connector["layerwise_num_shared_buffers"] = 1  # a stage has half of the layers
    roles = [role for feature, role in _ROLES.items() if feature in wanted]
    role = roles[0] if len(roles) == 1 else "kv_both"
    remote = _REMOTE | {"kv_port": port} if roles else {}
    if in_halves:
        halves = [
            _connector("SfaRemoteD2HConnector", role, remote),
            _connector("AscendStoreConnector", "kv_both", connector),
        ]
        arguments["kv_transfer_config"] = _connector("MultiConnector", role, {"connectors": halves})
    elif roles or wanted & set(_CONNECTOR):
        arguments["kv_transfer_config"] = _connector("KVStrataConnector", role, connector | remote)
    additional: dict[str, Any] = {"kvstrata": own}
    if "sparse" in wanted:
        additional["sparse_kv_offload_config"] = {"enabled": True, "topk_buffer_size": 64}
    if "kvpp" in wanted:
        additional["enable_kvpp"] = True
    return engine_arguments(model, additional_config=additional, **EXTENSION, **arguments, **more)


def _connector(name: str, role: str, extra: dict[str, Any]) -> dict[str, Any]:
    return {"kv_connector": name, "kv_role": role, "kv_connector_extra_config": extra}


def idle(features: Iterable[str], statistics: Iterable[dict[str, Any]]) -> list[str]:
    """Return the counters of these features that no rank has moved: empty if each feature was at work."""
    ranks = list(statistics)
    return [
        counter
        for feature in features
        for counter in COUNTERS.get(feature, ())
        if not any(rank.get(name, 0) for rank in ranks for name in counter.split(" + "))
    ]


def misplaced_experts(features: Collection[str], held: Iterable[dict[str, Any]]) -> list[str]:
    """Return the layers whose experts are not where the features put them: empty if all of them are.

    `held` is what `held_experts` says on every rank of all replicas. With "ep" each rank of a layer has the
    weights of an equal share of its experts, and no expert is on two; without it, a part of every expert's.
    """
    of_layers: dict[str, list[list[int]]] = {}
    misplaced = set()
    for rank in held:
        for layer, ids in rank["ids"].items():
            of_layers.setdefault(layer, []).append(ids)
            if rank["counts"][layer] != len(ids):
                misplaced.add(layer)
    assert of_layers, "no rank has a layer with experts"
    every = list(range(EXPERTS))
    for layer, ranks in of_layers.items():
        if "ep" in features:
            is_right = sorted(itertools.chain(*ranks)) == every and len(set(map(len, ranks))) == 1 < len(
                ranks
            )
        else:
            is_right = all(ids == every for ids in ranks)
        if not is_right:
            misplaced.add(layer)
    return sorted(misplaced)
