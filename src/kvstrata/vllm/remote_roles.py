"""Which ends of remote read an engine is, and what they cannot be combined with."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstrata.core.shares import control_port
from kvstrata.errors import ConfigurationError
from kvstrata.remote.protocol.secret import load_secret

from .halves import remote_role
from .settings import Settings

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def roles_of(vllm_config: VllmConfig, settings: Settings) -> frozenset[str]:
    """Return which ends of remote read this engine is: "producer", "consumer", both or none."""
    connector = settings.connector
    if connector is None or not connector.transfer.is_on:
        return frozenset()
    assert vllm_config.kv_transfer_config is not None
    return remote_role(vllm_config.kv_transfer_config.kv_role, connector.transfer.remote_role)


def check_remote(vllm_config: VllmConfig, settings: Settings) -> None:
    """Refuse at start-up, by name, what remote read cannot be combined with."""
    roles = roles_of(vllm_config, settings)
    if not roles:
        return
    assert settings.connector is not None
    transfer, parallel = settings.connector.transfer, vllm_config.parallel_config
    assert transfer.kv_port is not None
    load_secret(transfer.remote_secret, host=transfer.remote_host)
    last = parallel.tensor_parallel_size - 1
    control_port(transfer.kv_port, parallel.data_parallel_index, parallel.tensor_parallel_size, last)
    stages = parallel.pipeline_parallel_size
    if stages > 1:
        raise ConfigurationError(
            f"kv_port={transfer.kv_port} with pipeline_parallel_size={stages}: remote read knows no stages; "
            "set pipeline_parallel_size to 1, or remove kv_port"
        )
    if "producer" in roles and settings.is_sparse and parallel.tensor_parallel_size > 1:
        raise ConfigurationError(
            "sparse_kv_offload_config.enabled=true on a remote_role of producer with tensor_parallel_size="
            f"{parallel.tensor_parallel_size}: ranks write their pool at different times; "
            "set it to false on the prefill engine"
        )
