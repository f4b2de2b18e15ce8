"""Every knob: frozen, checked once where it enters, documented where it is defined.

The names are the seeds' own, so that a launch command written for their system starts here unchanged.
`docs/configuration.md` is rendered from this module by `python -m kvstrata.config_docs`.
"""

# ruff: noqa: N815 - the knobs keep the seeds' spelling, `_GB` included.

import dataclasses
import difflib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from kvstrata.config_kvpp import KvppConfig
from kvstrata.config_store import StoreConfig
from kvstrata.config_transfer import TransferConfig
from kvstrata.config_values import (
    GB,
    GIGABYTES,
    SECONDS,
    Flag,
    Knobs,
    Optional,
    Path,
    Positions,
    Whole,
    Word,
    knob,
    knob_path,
)
from kvstrata.core.buffers import default_prefetch_layers
from kvstrata.errors import ConfigurationError, ConfigurationTypeError, UnsupportedError

_SPARSE = "sparse_kv_offload_config"
_OWN = "kvstrata"


@dataclass(frozen=True, kw_only=True)
class LayerwiseConfig(Knobs):
    """Layerwise prefill offload: many layers share a few layer buffers."""

    use_layerwise: bool = knob(Flag(), False, "Keep KV in host memory and move it layer by layer.")
    layerwise_num_shared_buffers: int | None = knob(
        Optional(Whole(1)), None, "Buffers that the layers not independent share; null: no sharing."
    )
    layerwise_independent_layers: tuple[int, ...] | Literal["all"] = knob(
        Positions(), (0,), 'Positions of layers with a buffer of their own, -1 the last; "all": no sharing.'
    )
    layerwise_prefetch_layers: int | None = knob(
        Optional(Whole(0)), None, "How many layers ahead to load; null: min(layerwise_num_shared_buffers, 8)."
    )
    host_memory_GB: float | None = knob(
        Optional(GIGABYTES), None, "Host memory of running requests per rank; null: what the blocks need."
    )

    @property
    def reuses_buffers(self) -> bool:
        """Whether layers are asked to share buffers; the plan says whether any do."""
        shared = self.layerwise_num_shared_buffers is not None
        return self.use_layerwise and shared and self.layerwise_independent_layers != "all"

    @property
    def prefetch_layers(self) -> int:
        """How many layers ahead to load, the default applied."""
        if self.layerwise_prefetch_layers is None:
            return default_prefetch_layers(self.layerwise_num_shared_buffers)
        return self.layerwise_prefetch_layers

    @property
    def host_memory_bytes(self) -> int | None:
        """Limit of the host home in bytes, None for none."""
        return None if self.host_memory_GB is None else int(self.host_memory_GB * GB)

    def _check_together(self) -> None:
        if self.use_layerwise:
            return
        for name in ("layerwise_num_shared_buffers", "layerwise_prefetch_layers"):
            value = getattr(self, name)
            if value is not None:
                raise ConfigurationError(
                    f"{name}={value} has no effect with use_layerwise=false; "
                    f"set use_layerwise to true, or remove {name}"
                )


@dataclass(frozen=True, kw_only=True)
class ConnectorConfig(Knobs):
    """All of `kv_connector_extra_config`."""

    layerwise: LayerwiseConfig = field(default_factory=LayerwiseConfig)
    store: StoreConfig = field(default_factory=StoreConfig)
    transfer: TransferConfig = field(default_factory=TransferConfig)
    deadline_s: float = knob(SECONDS, 60.0, "Longest that any wait inside kvstrata may take.")


@dataclass(frozen=True, kw_only=True)
class SparseOffloadConfig(Knobs):
    """Sparse decode offload: main KV in host memory, the rows that attention picks on the device."""

    enabled: bool = knob(
        Flag(),
        False,
        "Keep main KV in host memory, the indexer cache and hot rows on the device.",
        section=_SPARSE,
    )
    topk_buffer_size: int | None = knob(
        Optional(Whole(1)),
        None,
        "Hot rows per sequence and layer: a multiple of the block size, at least the model's top-k; "
        "null: 2 x top-k.",
        section=_SPARSE,
    )
    dram_size_per_dp_GB: float | None = knob(
        Optional(GIGABYTES),
        None,
        "Host memory for main KV of one data-parallel rank; null: what the blocks need.",
        section=_SPARSE,
    )
    keep_device_kv_cache: bool = knob(
        Flag(),
        False,
        "Debugging aid: keep the full device cache too, and compare every row served with it.",
        section=_SPARSE,
    )

    @property
    def dram_bytes_per_dp(self) -> int | None:
        """Limit of the host home of one data-parallel rank in bytes, None for none."""
        return None if self.dram_size_per_dp_GB is None else int(self.dram_size_per_dp_GB * GB)

    def _check_together(self) -> None:
        if not self.enabled:
            _refuse_without_sparse(self, [item for item in self.knobs() if item.name != "enabled"])


@dataclass(frozen=True, kw_only=True)
class AdditionalConfig(Knobs):
    """kvstrata's part of vLLM's `additional_config`."""

    sparse_offload: SparseOffloadConfig = field(default_factory=SparseOffloadConfig)
    kvpp: KvppConfig = field(default_factory=KvppConfig)
    indexer_cache_dtype: Literal["auto", "int8"] = knob(
        Word(("auto", "int8")),
        "auto",
        'Indexer cache: "auto", the model\'s dtype; "int8", with a scale per row.',
        section=_OWN,
    )
    main_cache_dtype: Literal["auto", "int8"] = knob(
        Word(("auto", "int8")),
        "auto",
        'Main MLA cache: "auto", the model\'s dtype; "int8", the latent part with a scale per 128 values, '
        "the rope part as it is.",
        section=_OWN,
    )
    hot_row_policy: Literal["auto", "lru", "frequency"] = knob(
        Word(("auto", "lru", "frequency")),
        "auto",
        'Which hot row makes room: "lru", the one unused longest; "frequency", the one selected or nearly '
        'selected least of late; "auto", the one with fewer misses in our measurements.',
        section=_OWN,
    )
    prompt_window_tokens: int | None = knob(
        Optional(Whole(1)),
        None,
        "Tokens of one layer that a prompt chunk's context passes through at a time; "
        "null: 3 % of the device budget.",
        section=_OWN,
    )
    topk_trace_path: str | None = knob(
        Optional(Path("the path of a file")),
        None,
        "Test and tuning aid: record the selected rows in this file; see kvstrata trace. null: no record.",
        section=_OWN,
    )
    fault: Literal["none", "skip_loads", "stale_rows"] = knob(
        Word(("none", "skip_loads", "stale_rows")),
        "none",
        'Test aid: "skip_loads" drops every load from host memory, "stale_rows" serves what a hot slot held '
        "before instead of copying the missed row, so that answers must go wrong.",
        section=_OWN,
    )

    def _check_together(self) -> None:
        if self.sparse_offload.enabled and self.kvpp.enable_kvpp:
            raise UnsupportedError(
                f"enable_kvpp=true with {_SPARSE}.enabled=true: main KV of all ranks lies in one host pool "
                "then, so there is nothing to spread over them; set one of the two to false"
            )
        if self.sparse_offload.enabled:
            return
        only_sparse = ("hot_row_policy", "prompt_window_tokens", "topk_trace_path")
        _refuse_without_sparse(self, [item for item in self.knobs() if item.name in only_sparse])
        if self.fault == "stale_rows":
            raise ConfigurationError(
                f"{_OWN}.fault={self.fault!r} has no effect with {_SPARSE}.enabled=false; "
                f'set {_SPARSE}.enabled to true, or {_OWN}.fault to "none"'
            )


def _refuse_without_sparse(group: Knobs, items: Collection[dataclasses.Field[Any]]) -> None:
    """Refuse a knob that only sparse offload reads: its user believes that something is on which is not."""
    for item in items:
        value, path = getattr(group, item.name), knob_path(item)
        if value != item.default:
            raise ConfigurationError(
                f"{path}={value!r} has no effect with {_SPARSE}.enabled=false; "
                f"set {_SPARSE}.enabled to true, or remove {path}"
            )


def parse_connector_config(extra_config: Mapping[str, object]) -> ConnectorConfig:
    """Check `kv_connector_extra_config` as vLLM hands it over.

    Raises ConfigurationTypeError, ConfigurationError (also for an unknown key, with the closest known one)
    or UnsupportedError; each names the knob, its value and what to set.
    """
    where = "kv_connector_extra_config"
    sections = {"": _require_mapping(where, extra_config)}
    groups = (LayerwiseConfig, StoreConfig, TransferConfig, ConnectorConfig)
    _refuse_unknown(where, sections[""], [item.name for group in groups for item in group.knobs()])
    return ConnectorConfig(
        layerwise=LayerwiseConfig(**_pick(LayerwiseConfig, sections)),
        store=StoreConfig(**_pick(StoreConfig, sections)),
        transfer=TransferConfig(**_pick(TransferConfig, sections)),
        **_pick(ConnectorConfig, sections),
    )


def parse_additional_config(additional: Mapping[str, object] | None) -> AdditionalConfig:
    """Check kvstrata's keys of `additional_config`; other top-level keys belong to others and are ignored.

    Raises as `parse_connector_config` does.
    """
    if additional is None:
        return AdditionalConfig()
    sections = {"": _require_mapping("additional_config", additional)}
    for section in (_SPARSE, _OWN):
        sections[section] = _require_mapping(section, additional.get(section, {}))
        groups = (SparseOffloadConfig, KvppConfig, AdditionalConfig)
        items = [item for group in groups for item in group.knobs()]
        known = [item.name for item in items if item.metadata["section"] == section]
        _refuse_unknown(section, sections[section], known)
    return AdditionalConfig(
        sparse_offload=SparseOffloadConfig(**_pick(SparseOffloadConfig, sections)),
        kvpp=KvppConfig(**_pick(KvppConfig, sections)),
        **_pick(AdditionalConfig, sections),
    )


def _pick(group: type[Knobs], sections: Mapping[str, Mapping[str, object]]) -> dict[str, Any]:
    """Return the group's knobs that were given, each looked up in the section it belongs to."""
    placed = [(item.name, sections[item.metadata["section"]]) for item in group.knobs()]
    return {name: given[name] for name, given in placed if name in given}


def _require_mapping(name: str, value: object) -> Mapping[str, object]:
    if not isinstance(value, Mapping):
        raise ConfigurationTypeError(f"{name}={value!r} is of type {type(value).__name__}; set a JSON object")
    return value


def _refuse_unknown(where: str, given: Mapping[str, object], known: Collection[str]) -> None:
    for name in given:
        if name in known:
            continue
        close = difflib.get_close_matches(str(name), known, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"known are {', '.join(sorted(known))}"
        raise ConfigurationError(f"{where} holds the unknown key {name!r}; {hint}")
