"""The command behind `kvstrata store serve`: check, start, tell, watch, end."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
    if options.backend == "local":
        return _make_local(options)
    if options.backend not in ("mooncake", "memcache"):
        raise ConfigurationError(
            f"--backend {options.backend!r} is not a store to serve; use mooncake, memcache or local"
        )
    if options.path is not None:
        raise ConfigurationError(f"--path {options.path} has no effect with --backend {options.backend}")
    library(options.backend)  # says what to install, before anything is started
    plan = _plan(options)
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


def _make_local(options: ServeOptions) -> int:
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
