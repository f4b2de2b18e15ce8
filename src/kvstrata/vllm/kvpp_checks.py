"""What KVPP cannot be combined with, refused at start-up by name.

Source: seed, KVPP, Support and Constraints. Hybrid models and context parallelism are refused for every
feature of kvstrata, see `settings.py` and `layout.py`.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from kvstrata.core.owners import OwnerPlan
from kvstrata.errors import ConfigurationError, UnsupportedError

from .remote_roles import roles_of
from .settings import Settings

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def check_kvpp(vllm_config: VllmConfig, settings: Settings) -> None:
    """Raise ConfigurationError or UnsupportedError naming the knob, its value and what to set instead."""
    if not settings.is_kvpp:
        return
    parallel, speculative = vllm_config.parallel_config, vllm_config.speculative_config
    ranks = parallel.tensor_parallel_size * parallel.prefill_context_parallel_size
    if ranks == 1:
        raise ConfigurationError(
            "enable_kvpp=true with tensor_parallel_size=1: there is no other rank to keep layers on; set "
            "tensor_parallel_size to 2 or more, or enable_kvpp to false"
        )
    if speculative is not None and speculative.uses_dynamic_speculative_decoding():
        raise UnsupportedError(
            "enable_kvpp=true with num_speculative_tokens_per_batch_size="
            f"{speculative.num_speculative_tokens_per_batch_size}: a forward must draft the same number of "
            "tokens on every rank; set num_speculative_tokens alone"
        )
    roles = roles_of(vllm_config, settings)
    if "consumer" in roles:
        raise UnsupportedError(
            "enable_kvpp=true on an engine that pulls prompts (remote_role or kv_role of consumer): every "
            "rank would fill the owner's layers; set it to false there, and to true on the prefill engine"
        )
    check_transport(settings.additional.kvpp.kvpp_transport, roles)
    graphs = vllm_config.compilation_config.cudagraph_mode
    if graphs is not None and graphs.has_full_cudagraphs():
        raise UnsupportedError(
            f"enable_kvpp=true with cudagraph_mode={graphs.name}: a full graph is replayed without the hooks "
            "that wait for a layer; set it to PIECEWISE or NONE"
        )


def check_transport(transport: str, roles: Collection[str]) -> None:
    """Refuse a prefill engine whose ranks cannot reach one another's memory. Raises UnsupportedError.

    Called at start-up with the knob, and by the worker with what "auto" has come to.
    """
    if roles and transport == "collective":
        raise UnsupportedError(
            'kvstrata.kvpp_transport="collective" on a prefill engine with kv_port: decode reads a layer out '
            'of its owner\'s shared memory; set it to "auto" or "shm", with all ranks on one host'
        )


def check_stored_layers(owners: OwnerPlan, backend: str) -> None:
    """Refuse a store where a rank would have nothing to save: no block would ever be a hit on every rank."""
    layers = len(owners.targets)
    if backend != "none" and not owners.drafts and layers < owners.group_size:
        raise UnsupportedError(
            f"enable_kvpp=true with backend={backend!r} and {owners.group_size} ranks for {layers} layers: "
            'some ranks own none; lower tensor_parallel_size, or set backend to "none"'
        )


def check_own_caches(vllm_config: VllmConfig, settings: Settings) -> None:
    """Refuse a model whose layers read another layer's cache: who reads it could not wait for it.

    Called by the worker once the model is loaded. Raises UnsupportedError naming both layers.
    """
    if not settings.is_kvpp:
        return
    for name, layer in vllm_config.compilation_config.static_forward_context.items():
        target = getattr(layer, "kv_sharing_target_layer_name", None)
        if target is not None:
            raise UnsupportedError(
                f"enable_kvpp=true with a model whose layer {name!r} uses the KV cache of {target!r}; set it "
                "to false, or serve without that draft model"
            )
