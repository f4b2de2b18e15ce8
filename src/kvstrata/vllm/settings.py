"""What the launch asked kvstrata for, read once from vLLM's configuration; what it may be combined with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from vllm.logger import init_logger

from kvstrata.config import AdditionalConfig, ConnectorConfig, parse_additional_config, parse_connector_config
from kvstrata.errors import ConfigurationError, UnsupportedError

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger("vllm.kvstrata.settings")

STORE_CONNECTORS = ("KVStrataConnector", "AscendStoreConnector")
REMOTE_CONNECTORS = ("SfaRemoteD2HConnector",)
CONNECTOR_NAMES = STORE_CONNECTORS + REMOTE_CONNECTORS


@dataclass(frozen=True, kw_only=True)
class Settings:
    """kvstrata's share of a launch: the connector's configuration, if one is named, and the additional."""

    connector: ConnectorConfig | None
    additional: AdditionalConfig

    @classmethod
    def of(cls, vllm_config: VllmConfig) -> Settings:
        """Parse and validate; raises a ConfigurationError that names the knob."""
        additional = vllm_config.additional_config
        if additional is not None and not isinstance(additional, dict):
            additional = None  # a platform's own configuration object, not ours
        entries = kvstrata_connectors(vllm_config)
        if len(entries) > 1:
            names = [name for name, _ in entries]
            raise ConfigurationError(
                f"kv_transfer_config lists kvstrata's connectors {names}: one of them owns the data path; "
                "list exactly one of them"
            )
        return cls(
            connector=parse_connector_config(entries[0][1]) if entries else None,
            additional=parse_additional_config(additional),
        )

    def refuse_model(self, vllm_config: VllmConfig, why: str) -> None:
        """Refuse a model that the connector cannot serve, naming the model and the way out."""
        model = vllm_config.model_config
        name = getattr(model, "model", None)
        raise UnsupportedError(
            f"kvstrata's connector cannot serve model {name!r}: {why}; "
            "serve an MLA or DSA model, or remove kv_connector from --kv-transfer-config"
        )

    def check_combination(self, vllm_config: VllmConfig) -> None:
        """Refuse by name what cannot be combined, and settle what vLLM leaves open; logs what it decided."""
        if self.connector is None:
            return
        for knob, value, why in _refused(vllm_config):
            raise UnsupportedError(f"kvstrata's connector cannot be combined with {knob}={value}: {why}")
        _settle_load_failure_policy(vllm_config)
        if self.connector.store.backend != "none" and vllm_config.scheduler_config.async_scheduling:
            # vLLM 0.32 recomputes with the placeholders of steps in flight and ends in an index error.
            vllm_config.scheduler_config.async_scheduling = False
            logger.warning(
                "async_scheduling set to False: with it vLLM %s cannot recompute a block the store lost; "
                'set backend to "none" to keep it',
                "0.32",
            )


def _settle_load_failure_policy(vllm_config: VllmConfig) -> None:
    """Recompute what the store lost; with pipeline stages, fail the request that it concerns.

    With several stages vLLM may have scheduled a later chunk of the request, or another request on the same
    blocks, before the loss is reported, and would sample from rows computed from it.
    """
    transfer = vllm_config.kv_transfer_config
    assert transfer is not None
    stages = vllm_config.parallel_config.pipeline_parallel_size
    policy: Literal["fail", "recompute"] = "recompute" if stages == 1 else "fail"
    if transfer.kv_load_failure_policy != policy:
        transfer.kv_load_failure_policy = policy
        logger.info(
            "kv_load_failure_policy set to %r with pipeline_parallel_size=%d, for requests whose blocks the "
            "store loses",
            policy,
            stages,
        )


def _refused(vllm_config: VllmConfig) -> list[tuple[str, Any, str]]:
    parallel, cache = vllm_config.parallel_config, vllm_config.cache_config
    table: list[tuple[bool, str, Any, str]] = [
        (
            parallel.decode_context_parallel_size > 1,
            "decode_context_parallel_size",
            parallel.decode_context_parallel_size,
            "a rank would hold part of a block; set it to 1",
        ),
        (
            parallel.prefill_context_parallel_size > 1,
            "prefill_context_parallel_size",
            parallel.prefill_context_parallel_size,
            "vLLM refuses it on CPU; set it to 1",
        ),
        (
            cache.cache_dtype not in ("auto", "float16", "bfloat16"),
            "kv_cache_dtype",
            cache.cache_dtype,
            "quantised main rows are not in this version; set it to auto",
        ),
        (
            bool(cache.kv_sharing_fast_prefill),
            "kv_sharing_fast_prefill",
            True,
            "layers that share another layer's KV are not planned for; turn it off",
        ),
        (
            bool(vllm_config.use_v2_model_runner),
            "VLLM_USE_V2_MODEL_RUNNER",
            1,
            "the layer hooks need Model Runner V1; unset it",
        ),
    ]
    return [(knob, value, why) for refused, knob, value, why in table if refused]


def kvstrata_connectors(vllm_config: VllmConfig) -> list[tuple[str, dict[str, Any]]]:
    """Return (name, extra configuration) of kvstrata's connectors, alone or under MultiConnector."""
    transfer = vllm_config.kv_transfer_config
    if transfer is None or transfer.kv_connector is None:
        return []
    extra = transfer.kv_connector_extra_config
    if transfer.kv_connector in CONNECTOR_NAMES:
        return [(transfer.kv_connector, dict(extra))]
    if transfer.kv_connector != "MultiConnector":
        return []
    children = extra.get("connectors", [])
    return [
        (child["kv_connector"], dict(child.get("kv_connector_extra_config", {})))
        for child in children
        if isinstance(child, dict) and child.get("kv_connector") in CONNECTOR_NAMES
    ]


def uses_kvstrata_connector(vllm_config: VllmConfig) -> bool:
    """Tell whether the launch names one of kvstrata's connectors."""
    return bool(kvstrata_connectors(vllm_config))
