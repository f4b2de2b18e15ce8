"""The command behind `kvstrata store serve`: check, start, tell, watch, end."""

from __future__ import annotations

import json
import math
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from kvstrata.config import parse_connector_config
from kvstrata.errors import ConfigurationError
from kvstrata.serve_pd.machine import free_port
from kvstrata.serve_pd.signals import stop_on_signals
from kvstrata.serve_store.plan import GIB, StorePlan, connector_config, default_ports, engine_config
from kvstrata.serve_store.processes import StoreProcesses
from kvstrata.store.local import LocalStore
from kvstrata.store.pool.libraries import library
from kvstrata.store.registry import default_store_path

_LOOK_S = 0.25


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """The command line."""

    backend: str
    size_gb: float
    host: str
    port: int | None
    second_port: int | None
    metrics_port: int
    protocol: str | None
    path: Path | None
    log_dir: Path
    start_deadline_s: float


class _Stopped(Exception):  # noqa: N818 - what happened, not what went wrong
    """A signal came before everything served."""


def serve_store(options: ServeOptions) -> int:
    """Serve until SIGINT, SIGTERM or SIGHUP (return 0), or until a server ends (return 1).

    Call it from the main thread. Raises `ConfigurationError` and what opening a store raises.
    """
    if not math.isfinite(options.size_gb):
        raise ConfigurationError(f"--size-gb {options.size_gb:g} is no size")
    if options.backend == "local":
        return _make_local(options)
    if options.backend not in ("mooncake", "memcache"):
        raise ConfigurationError(
            f"--backend {options.backend!r} is not a store to serve; use mooncake, memcache or local"
        )
    if options.path is not None:
        raise ConfigurationError(f"--path {options.path} has no effect with --backend {options.backend}")
    library(options.backend)  # says what to install, before anything is started
    _check_size(options.size_gb)
    _check_host(options.host)
    plan = _plan(options)
    parse_connector_config(engine_config(plan)["kv_connector_extra_config"])  # what engines would refuse
    with stop_on_signals() as stop:

        def wait(seconds: float) -> None:
            if stop.wait(seconds):
                raise _Stopped

        processes = StoreProcesses(plan, wait=wait)
        try:
            processes.start(deadline_s=options.start_deadline_s)
            _tell(engine_config(plan))
            _say(f"ready; output of the servers is in {plan.log_dir}; Ctrl-C ends them")
            while (why := processes.ended()) is None:
                wait(_LOOK_S)
            _say(why)
            return 1
        except _Stopped:
            return 0
        finally:
            processes.close()


def _check_size(size_gb: float) -> None:
    machine_gb = psutil.virtual_memory().total / GIB
    if size_gb > machine_gb:
        raise ConfigurationError(
            f"--size-gb {size_gb:g} is more than the {machine_gb:.1f} GB of this machine"
        )


def _check_host(host: str) -> None:
    """The libraries take host and port in one word, and Mooncake finds its peers by IPv4 alone."""
    try:
        with socket.socket(socket.AF_INET) as probe:
            probe.bind((host, 0))
            is_any = probe.getsockname()[0] == "0.0.0.0"
    except OSError as error:
        raise ConfigurationError(
            f"--host {host!r} is no IPv4 address that this machine has, nor a name of one: {error}"
        ) from error
    if is_any:
        raise ConfigurationError(
            f"--host {host!r} is no address that engines could be told; name one interface"
        )


def _make_local(options: ServeOptions) -> int:
    for name, value in (
        ("--port", options.port),
        ("--second-port", options.second_port),
        ("--protocol", options.protocol),
    ):
        if value is not None:
            raise ConfigurationError(
                f"{name} {value} has no effect with --backend local, which has no server"
            )
    path = options.path or default_store_path()
    size_bytes = int(options.size_gb * GIB)
    LocalStore.open(path, size_bytes=size_bytes).close()
    _tell(connector_config({"backend": "local", "store_path": str(path), "store_size_GB": options.size_gb}))
    _say(f"made in {path}; a local store needs no server")
    return 0


def _plan(options: ServeOptions) -> StorePlan:
    first, second = default_ports(options.backend)
    return StorePlan(
        backend=options.backend,
        size_bytes=int(options.size_gb * GIB),
        host=options.host,
        port=options.port or first,
        second_port=options.second_port or second,
        metrics_port=options.metrics_port or free_port(options.host),
        protocol=options.protocol,
        log_dir=options.log_dir,
    )


def _tell(config: Mapping[str, Any]) -> None:
    print(json.dumps(config), flush=True)


def _say(text: str) -> None:
    print(f"kvstrata: {text}", file=sys.stderr, flush=True)
