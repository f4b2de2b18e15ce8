"""The knobs of the store: KV kept across requests and engines."""

# ruff: noqa: N815 - the knobs keep the seeds' spelling, `_GB` included.

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvstrata.config_values import GB, GIGABYTES, SECONDS, Knobs, Line, Optional, Path, Word, knob
from kvstrata.errors import ConfigurationError

_MOONCAKE_PROTOCOLS = ("shm", "tcp", "rdma")
_MEMCACHE_PROTOCOLS = (
    "host_shm",
    "host_tcp",
    "host_rdma",
    "host_urma",
    "device_sdma",
    "device_rdma",
    "device_urma",
)
_POOLS = ("mooncake", "memcache")
_ONLY_WITH = {
    "store_path": ("local",),
    "store_spill_path": ("local",),
    "store_spill_size_GB": ("local",),
    "store_address": _POOLS,
    "store_client_address": ("mooncake",),
    "store_config_address": ("memcache",),
    "store_protocol": _POOLS,
    "store_timeout_s": _POOLS,
}
"""Knobs of a store and the backends that read them."""


@dataclass(frozen=True, kw_only=True)
class StoreConfig(Knobs):
    """KV kept across requests and engines."""

    backend: Literal["none", "local", "mooncake", "memcache"] = knob(
        Word(("none", "local", "mooncake", "memcache")),
        "local",
        'Which store; "none": no store; "mooncake" and "memcache": a pool that `kvstrata store serve` runs.',
    )
    store_path: str | None = knob(
        Optional(Path()), None, "Directory of the local store; null: one in shared memory for this user."
    )
    store_size_GB: float = knob(
        GIGABYTES, 1.0, "Memory of the store: what a local one may take, what a pool was given."
    )
    store_spill_path: str | None = knob(
        Optional(Path()), None, "Directory on disk for what no longer fits; null: it is dropped."
    )
    store_spill_size_GB: float = knob(GIGABYTES, 8.0, "Most that store_spill_path may take.")
    store_lease_s: float = knob(SECONDS, 30.0, "Seconds a reader's hold on a stored block lasts.")

    store_address: str | None = knob(
        Optional(Line("host:port")),
        None,
        "Mooncake's master or MemCache's MetaService; null: 127.0.0.1 at port 50051 or 5000.",
    )
    store_client_address: str | None = knob(
        Optional(Line("host:port")),
        None,
        "Mooncake's client on this machine, used through shared memory; null: 127.0.0.1:50052.",
    )
    store_config_address: str | None = knob(
        Optional(Line("host:port")),
        None,
        "MemCache's config store; null: port 6000 beside store_address.",
    )
    store_protocol: (
        Literal[
            "shm",
            "tcp",
            "rdma",
            "host_shm",
            "host_tcp",
            "host_rdma",
            "host_urma",
            "device_sdma",
            "device_rdma",
            "device_urma",
        ]
        | None
    ) = knob(
        Optional(Word((*_MOONCAKE_PROTOCOLS, *_MEMCACHE_PROTOCOLS))),
        None,
        'How bytes travel. Mooncake: "shm", "tcp" or "rdma"; null: "tcp"; "shm" only with a client on this '
        'machine. MemCache: the others, its servers\' own; null: "host_shm".',
    )
    store_timeout_s: float = knob(
        SECONDS, 5.0, "Longest that one call to a pool may take; the blocks are computed again then."
    )

    @property
    def store_size_bytes(self) -> int:
        """Size of the store in bytes."""
        return int(self.store_size_GB * GB)

    @property
    def store_spill_size_bytes(self) -> int:
        """Size of the spill in bytes; 0 without a spill path."""
        return int(self.store_spill_size_GB * GB) if self.store_spill_path else 0

    def _check_together(self) -> None:
        for name, backends in _ONLY_WITH.items():
            value = getattr(self, name)
            if value != getattr(type(self), name) and self.backend not in backends:
                words = " or ".join(f'"{backend}"' for backend in backends)
                raise ConfigurationError(
                    f"{name}={value!r} has no effect with backend={self.backend!r}; "
                    f"set backend to {words}, or remove {name}"
                )
        if self.store_client_address is not None and self.store_protocol != "shm":
            raise ConfigurationError(
                f"store_client_address={self.store_client_address!r} has no effect with store_protocol="
                f'{self.store_protocol!r}; set store_protocol to "shm", or remove store_client_address'
            )
        protocols = {"mooncake": _MOONCAKE_PROTOCOLS, "memcache": _MEMCACHE_PROTOCOLS}.get(self.backend)
        if protocols and self.store_protocol is not None and self.store_protocol not in protocols:
            words = ", ".join(f'"{word}"' for word in protocols)
            raise ConfigurationError(
                f"store_protocol={self.store_protocol!r} is none of backend={self.backend!r}: set {words}"
            )
        default = type(self).store_spill_size_GB
        if self.store_spill_path is None and self.store_spill_size_GB != default:
            raise ConfigurationError(
                f"store_spill_size_GB={self.store_spill_size_GB:g} has no effect without store_spill_path; "
                "set store_spill_path, or remove store_spill_size_GB"
            )
