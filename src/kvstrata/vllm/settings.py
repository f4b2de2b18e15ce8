"""What the launch asked kvstrata for, read once from vLLM's configuration; what it may be combined with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from vllm import envs
from vllm.logger import init_logger

from kvstrata.config import (
    AdditionalConfig,
    ConnectorConfig,
    parse_additional_config,
    parse_connector_config,
)
from kvstrata.config_store import StoreConfig
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
            connector=_parse(*entries[0]) if entries else None,
            additional=parse_additional_config(additional),
        )

    @property
    def is_sparse(self) -> bool:
        """Whether sparse decode offload is on."""
        return self.additional.sparse_offload.enabled

    @property
    def is_kvpp(self) -> bool:
        """Whether each layer's KV persists on one rank of the tensor-parallel group."""
        return self.additional.kvpp.enable_kvpp

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
        _check_match_unit(vllm_config, self.connector.store)
        if self.additional.sparse_offload.keep_device_kv_cache and self.connector.store.backend != "none":
            raise UnsupportedError(
                "sparse_kv_offload_config.keep_device_kv_cache=true beside a store: rows that the store "
                'brings are not in the device cache; set backend to "none", or keep_device_kv_cache to false'
            )
        others = _other_connectors(vllm_config)
        if others and (self.is_sparse or self.is_kvpp):
            raise _refused_beside(self, others[0])
        if self.is_sparse and self.connector.layerwise.use_layerwise:
            logger.info(
                "use_layerwise and its knobs change nothing beside sparse decode offload, which keeps main "
                "KV of every layer in host memory and passes prompts through a window of its own"
            )
        _settle_load_failure_policy(vllm_config)
        _settle_async_scheduling(vllm_config, self.connector.store)


def check_experts(vllm_config: VllmConfig) -> None:
    """Refuse by name what replicas cannot do with experts; called by the platform, whatever the connector.

    Stock fault (vLLM 0.32, deepseek_v2.py): with expert parallelism each rank of a replica takes a part of a
    step's tokens, and the model tells the part from the whole by its rows. Of a step of one token both have
    one. And on CPU torch.compile traces the exchange of tokens, whose numbers it cannot know.
    """
    parallel = vllm_config.parallel_config
    if parallel.use_sequence_parallel_moe:
        raise UnsupportedError(
            f"enable_expert_parallel=True with tensor_parallel_size={parallel.tensor_parallel_size} and "
            f"data_parallel_size={parallel.data_parallel_size}: vLLM 0.32 answers wrongly after steps of one "
            "token; set enable_expert_parallel to false, or one of the sizes to 1"
        )
    replicas = parallel.data_parallel_size
    if replicas > 1 and is_traced(vllm_config) and vllm_config.model_config.is_moe:
        raise UnsupportedError(
            f"data_parallel_size={replicas} of a model with experts and enforce_eager=False: torch.compile "
            "cannot trace on CPU how replicas exchange tokens; set enforce_eager to true"
        )


def is_traced(vllm_config: VllmConfig) -> bool:
    """Whether torch.compile traces the model; breakable graphs, default for DSA models, replace it."""
    from vllm.config import CompilationMode

    mode = vllm_config.compilation_config.mode
    return mode not in (None, CompilationMode.NONE) and not envs.VLLM_USE_BREAKABLE_CUDAGRAPH


def _parse(name: str, extra_config: dict[str, Any]) -> ConnectorConfig:
    """The remote half alone has no store, and nothing to do without a port."""
    if name not in REMOTE_CONNECTORS:
        return parse_connector_config(extra_config)
    config = parse_connector_config({"backend": "none"} | extra_config)
    if not config.transfer.is_on:
        raise ConfigurationError(
            f"kv_port=None with kv_connector={name!r}: it is all about remote read; set kv_port to decode's "
            "first control port"
        )
    return config


def add_connector(vllm_config: VllmConfig, settings: Settings) -> None:
    """Name kvstrata's connector where a feature is asked for without one; called by the platform.

    The connector brings steps, statistics and the way to the workers. Raises UnsupportedError where the
    launch names other connectors only.
    """
    from vllm.config import KVTransferConfig

    if not (settings.is_sparse or settings.is_kvpp) or kvstrata_connectors(vllm_config):
        return
    transfer = vllm_config.kv_transfer_config
    if transfer is not None and transfer.kv_connector is not None:
        raise _refused_beside(settings, transfer.kv_connector)
    vllm_config.kv_transfer_config = KVTransferConfig(
        kv_connector=STORE_CONNECTORS[0],
        kv_role="kv_both",
        kv_connector_extra_config={"backend": "none"},
    )
    logger.info("%s: kv_connector set to %r, without a store", _feature(settings), STORE_CONNECTORS[0])


def _refused_beside(settings: Settings, connector: str) -> UnsupportedError:
    """The caches that vLLM binds to the layers do not hold what they seem to: who saves them is misled."""
    return UnsupportedError(
        f"{_feature(settings)} with kv_connector={connector!r}: {_WHERE_KV_IS[settings.is_sparse]}, "
        "where that connector does not look for it; remove it, also from MultiConnector's list, or name "
        "KVStrataConnector instead, which has a store of its own"
    )


_WHERE_KV_IS = {True: "main KV is in host memory", False: "a layer's KV is on the rank that owns it"}


def _feature(settings: Settings) -> str:
    return "sparse_kv_offload_config.enabled=true" if settings.is_sparse else "enable_kvpp=true"


def _check_match_unit(vllm_config: VllmConfig, store: StoreConfig) -> None:
    """A store's key names a whole block; with finer hashes the n-th one is not the n-th block's."""
    cache = vllm_config.cache_config
    unit = cache.prefix_match_unit
    if store.backend != "none" and unit is not None and unit != cache.block_size:
        raise UnsupportedError(
            f"prefix_match_unit={unit} with block_size={cache.block_size}: the store keeps whole blocks; "
            'remove it, set it to the block size, or set backend to "none"'
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


def _settle_async_scheduling(vllm_config: VllmConfig, store: StoreConfig) -> None:
    """Turn it off where vLLM 0.32 would go wrong with it: it checks neither when it is asked for by name."""
    stages = vllm_config.parallel_config.pipeline_parallel_size
    if not vllm_config.scheduler_config.async_scheduling:
        return
    if store.backend != "none":
        # It recomputes with the placeholders of steps in flight and ends in an index error.
        why = 'vLLM 0.32 cannot recompute a block the store lost; set backend to "none" to keep it'
    elif stages > 1:
        why = f"Model Runner V1 does not support it with pipeline_parallel_size={stages}"
    else:
        return
    vllm_config.scheduler_config.async_scheduling = False
    logger.warning("async_scheduling set to False: with it %s", why)


def _refused(vllm_config: VllmConfig) -> list[tuple[str, Any, str]]:
    parallel, cache = vllm_config.parallel_config, vllm_config.cache_config
    drafts = vllm_config.speculative_config
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
            parallel.enable_expert_parallel and vllm_config.model_config.quantization is not None,
            "enable_expert_parallel",
            True,
            "vLLM's CPU kernels of quantised experts look for other ranks' experts in their own weights; "
            "set it to false, or serve unquantised weights",
        ),
        (
            cache.cache_dtype not in ("auto", "float16", "bfloat16"),
            "kv_cache_dtype",
            cache.cache_dtype,
            "set it to auto; for 8-bit main rows set kvstrata.main_cache_dtype to int8",
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
        (
            drafts is not None and drafts.uses_draft_kv_cache() and parallel.pipeline_parallel_size > 1,
            "speculative_config.method",
            drafts and drafts.method,
            "vLLM 0.32 starts no pipeline stage without the draft layer; set pipeline_parallel_size to 1",
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


def _other_connectors(vllm_config: VllmConfig) -> list[str]:
    """Return the names of the connectors beside kvstrata's, under MultiConnector."""
    transfer = vllm_config.kv_transfer_config
    assert transfer is not None
    if transfer.kv_connector != "MultiConnector":
        return []
    children = transfer.kv_connector_extra_config.get("connectors", [])
    names = [str(child.get("kv_connector")) for child in children if isinstance(child, dict)]
    return [name for name in names if name not in CONNECTOR_NAMES]


def uses_kvstrata_connector(vllm_config: VllmConfig) -> bool:
    """Tell whether the launch names one of kvstrata's connectors."""
    return bool(kvstrata_connectors(vllm_config))


def index_topk(vllm_config: VllmConfig) -> int:
    """Return how many rows the indexer selects for a token; UnsupportedError for a model without one."""
    topk = getattr(vllm_config.model_config.hf_text_config, "index_topk", None)
    if topk is None:
        raise UnsupportedError(
            f"sparse_kv_offload_config.enabled=true: model {vllm_config.model_config.model!r} has no sparse "
            "attention (no index_topk), so every row is needed in every step; set it to false, and use "
            "use_layerwise for long prompts"
        )
    return int(topk)
