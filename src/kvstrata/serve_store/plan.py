"""Which processes a backend needs, how they are started, and what engines are told of them."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvstrata.errors import UnsupportedError
from kvstrata.memory.native import library_path
from kvstrata.store.pool import memcache, mooncake

GIB = 1 << 30
_MIB = 1 << 20
READY_LINE = "kvstrata: serving"


@dataclass(frozen=True, kw_only=True)
class StorePlan:
    """What to serve. Ports are of this machine; the ones that engines do not use may be any free ones.

    `lease_s`: for how long a pool keeps what was asked for. `silence_s`: after how much silence an owner of
    memory counts as gone.
    """

    backend: str
    size_bytes: int
    log_dir: Path
    port: int  # Mooncake's master, MemCache's MetaService
    second_port: int  # Mooncake's same-host client, MemCache's config store
    metrics_port: int
    host: str = "127.0.0.1"
    protocol: str | None = None
    lease_s: float = 2.0
    silence_s: float = 10.0
    environment: Mapping[str, str] = field(default_factory=dict)  # on top of this process's own

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"

    @property
    def second_address(self) -> str:
        return f"{self.host}:{self.second_port}"


@dataclass(frozen=True, kw_only=True)
class Server:
    """One process. It serves once `port` accepts connections, or without one once its log says so."""

    name: str
    argv: tuple[str, ...]
    environment: Mapping[str, str]
    log: Path
    port: int | None


def servers(plan: StorePlan) -> tuple[Server, ...]:
    """The processes, in the order in which they start. Raises `UnsupportedError` for another backend."""
    if plan.backend == "mooncake":
        return _mooncake(plan)
    if plan.backend == "memcache":
        return _memcache(plan)
    raise UnsupportedError(f"backend={plan.backend!r} needs no servers")


def engine_config(plan: StorePlan) -> dict[str, Any]:
    """What engines on this machine are started with: the object for `--kv-transfer-config`."""
    knobs: dict[str, Any] = {
        "backend": plan.backend,
        "store_address": plan.address,
        "store_size_GB": plan.size_bytes / GIB,
    }
    if plan.backend == "mooncake":
        if plan.protocol == "shm":
            knobs["store_client_address"] = plan.second_address
        if plan.protocol is not None:
            knobs["store_protocol"] = plan.protocol
    else:
        knobs["store_config_address"] = plan.second_address
        knobs["store_protocol"] = plan.protocol or memcache.PROTOCOL
    return connector_config(knobs)


def connector_config(knobs: Mapping[str, Any]) -> dict[str, Any]:
    """The object around a connector's knobs."""
    return {
        "kv_connector": "KVStrataConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": dict(knobs),
    }


def default_ports(backend: str) -> tuple[int, int]:
    """The first and the second port where nobody names them: the libraries' own."""
    if backend == "mooncake":
        return mooncake.PORT, mooncake.CLIENT_PORT
    return memcache.PORT, memcache.CONFIG_PORT


def _mooncake(plan: StorePlan) -> tuple[Server, ...]:
    # The data ports of the library cannot be told to bind to one address in this release; see the docs.
    environment = {"MC_TCP_BIND_ADDRESS": plan.host, **library_path(), **plan.environment}
    if plan.protocol != "rdma":
        environment["MC_FORCE_TCP"] = "1"
    master = (
        "mooncake.cli",
        f"--rpc_port={plan.port}",
        f"--rpc_address={plan.host}",
        f"--metrics_host={plan.host}",
        f"--metrics_port={plan.metrics_port}",
        f"--default_kv_lease_ttl={round(plan.lease_s * 1000)}",
        f"--client_ttl={max(1, round(plan.silence_s))}",
        "--logtostderr",
    )
    owner = (
        "mooncake.cli_client",
        f"--host={plan.host}",
        f"--port={plan.second_port}",
        f"--master_server_address={plan.address}",
        "--metadata_server=P2PHANDSHAKE",
        f"--global_segment_size={max(1, plan.size_bytes // _MIB)} MB",
        f"--local_buffer_size={max(64, plan.size_bytes // _MIB // 8)} MB",
        f"--protocol={'rdma' if plan.protocol == 'rdma' else 'tcp'}",
        "--threads=4",
        "--logtostderr",
    )
    return (
        _server(plan, "master", master, environment, plan.port),
        _server(plan, "owner", owner, environment, plan.second_port),
    )


def _memcache(plan: StorePlan) -> tuple[Server, ...]:
    service = "kvstrata.serve_store.memcache_service"
    meta = (
        service,
        "meta",
        plan.address,
        plan.second_address,
        f"{plan.host}:{plan.metrics_port}",
        str(round(plan.lease_s * 1000)),
        str(plan.log_dir / "memcache"),
    )
    owner = (
        service,
        "owner",
        plan.address,
        plan.second_address,
        plan.protocol or memcache.PROTOCOL,
        str(plan.size_bytes),
    )
    return (
        _server(plan, "meta", meta, plan.environment, plan.port),
        _server(plan, "owner", owner, plan.environment, None),
    )


def _server(
    plan: StorePlan, name: str, module: tuple[str, ...], environment: Mapping[str, str], port: int | None
) -> Server:
    return Server(
        name=name,
        argv=(sys.executable, "-m", *module),
        environment=environment,
        log=plan.log_dir / f"{plan.backend}-{name}.log",
        port=port,
    )
