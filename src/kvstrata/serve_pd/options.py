"""What `kvstrata serve-pd` is told, checked before anything is started."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvstrata.config import parse_additional_config, parse_connector_config
from kvstrata.core.shares import Topology
from kvstrata.errors import ConfigurationError

# Arguments that the launcher decides on, and what to use instead.
_OURS = {
    "--host": "--host of serve-pd; engines listen on 127.0.0.1",
    "--port": "--port of serve-pd; engines get free ports",
    "--model": "--model",
    "--tensor-parallel-size": "--prefill-tp and --decode-tp",
    "-tp": "--prefill-tp and --decode-tp",
    "--data-parallel-size": "--prefill and --decode, which start engines of their own",
    "-dp": "--prefill and --decode, which start engines of their own",
    "--uvicorn-log-level": "VLLM_LOGGING_LEVEL",
}


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """All engines of one role."""

    count: int = 1
    tp_size: int = 1
    arguments: str = ""  # for vLLM, as written in a shell
    extra_config: Mapping[str, Any] = field(default_factory=dict)  # into kv_connector_extra_config


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """One launch. Raises ConfigurationError with the option, its value and the fix."""

    model: str
    prefill: EngineOptions = EngineOptions()
    decode: EngineOptions = EngineOptions()
    arguments: str = ""  # for both roles
    host: str = "127.0.0.1"  # of the proxy
    port: int = 8000
    kv_port: int | None = None  # first control port; None: a free range
    transfer_backend: str = "auto"
    use_layerwise: bool = True
    num_shared_buffers: int | None = None  # None: every layer has its own buffer
    use_sparse: bool = False
    topk_buffer_size: int | None = None
    dram_size_per_dp_gb: float | None = None
    log_directory: Path = Path("build/serve-pd")
    deadline_s: float = 600.0  # the proxy's

    def __post_init__(self) -> None:
        if self.decode.count < 1:
            raise ConfigurationError(f"--decode={self.decode.count}: at least one decode engine is needed")
        if self.prefill.count < 0:
            raise ConfigurationError(f"--prefill={self.prefill.count}: set 0 or more")
        if self.prefill.count:
            Topology(self.prefill.tp_size, self.decode.tp_size)
        for option, text in (
            ("--engine-args", self.arguments),
            ("--prefill-args", self.prefill.arguments),
            ("--decode-args", self.decode.arguments),
        ):
            _check_arguments(option, text)
        if self.num_shared_buffers is not None and not self.use_layerwise:
            raise ConfigurationError(
                f"--shared-buffers={self.num_shared_buffers} has no effect with --no-layerwise; leave one out"
            )
        if not self.use_sparse and (self.topk_buffer_size, self.dram_size_per_dp_gb) != (None, None):
            raise ConfigurationError(
                "--topk-buffer-size and --dram-gb have no effect without sparse decode offload; add --sparse"
            )

    def prefill_config(self, kv_port: int) -> dict[str, Any]:
        """Return `--kv-transfer-config` of a prefill engine."""
        layerwise: dict[str, Any] = {"use_layerwise": True} if self.use_layerwise else {}
        if self.num_shared_buffers is not None:
            layerwise["layerwise_num_shared_buffers"] = self.num_shared_buffers
        extra = {**self._common_config(kv_port), **layerwise, **self.prefill.extra_config}
        return _connector("kv_producer", extra)

    def decode_config(self, kv_port: int) -> dict[str, Any]:
        """Return `--kv-transfer-config` of a decode engine whose control ports begin at `kv_port`."""
        return _connector("kv_consumer", {**self._common_config(kv_port), **self.decode.extra_config})

    def sparse_config(self) -> dict[str, Any] | None:
        """Return `--additional-config` of a decode engine, if it needs any."""
        if not self.use_sparse:
            return None
        sparse: dict[str, Any] = {"enabled": True}
        if self.topk_buffer_size is not None:
            sparse["topk_buffer_size"] = self.topk_buffer_size
        if self.dram_size_per_dp_gb is not None:
            sparse["dram_size_per_dp_GB"] = self.dram_size_per_dp_gb
        additional = {"sparse_kv_offload_config": sparse}
        parse_additional_config(additional)
        return additional

    def _common_config(self, kv_port: int) -> dict[str, Any]:
        return {"kv_port": kv_port, "transfer_backend": self.transfer_backend}


def _connector(role: str, extra: Mapping[str, Any]) -> dict[str, Any]:
    parse_connector_config(extra)  # the engine would say the same, half a minute later
    return {
        "kv_connector": "KVStrataConnector",
        "kv_role": role,
        "kv_connector_extra_config": dict(extra),
    }


def split_arguments(option: str, text: str) -> list[str]:
    """Split as a shell does; raises ConfigurationError for a quotation without end."""
    try:
        return shlex.split(text)
    except ValueError as error:
        raise ConfigurationError(f"{option}={text!r}: {error}") from error


def parse_object(option: str, text: str | None) -> dict[str, Any]:
    """Return the JSON object in an option's value, {} for None."""
    if text is None:
        return {}
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ConfigurationError(f"{option}={text}: not JSON ({error})") from error
    if not isinstance(value, dict):
        raise ConfigurationError(f"{option}={text}: not a JSON object")
    return value


def has_sparse_attention(model: str) -> bool:
    """Whether a checkpoint in a local directory selects rows with an indexer; False for names of a hub."""
    try:
        config = json.loads((Path(model) / "config.json").read_text())
    except (OSError, ValueError):
        return False
    return isinstance(config, dict) and isinstance(config.get("index_topk"), int)


def _check_arguments(option: str, text: str) -> None:
    for word in split_arguments(option, text):
        name = word.partition("=")[0].replace("_", "-")
        if name in _OURS:
            raise ConfigurationError(f"{option} holds {word}: use {_OURS[name]} instead")
