"""Where a pool is and how to reach it, as the knobs say."""

from __future__ import annotations

import socket
from dataclasses import dataclass, field

from kvstrata.errors import ConfigurationError
from kvstrata.store.pool.envelope import LONGEST_HEAD_BYTES
from kvstrata.store.pool.session import PoolLimits

_LEAST_STAGING_BYTES = 64 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolOptions:
    """`address`, `config_address`, `client_address`: host:port each, as in the knobs of those names.

    `size_bytes`: of the pool. `object_bytes`: the largest object of this process, 0 if it writes none.
    """

    address: str
    size_bytes: int
    protocol: str | None = None
    client_address: str | None = None
    config_address: str | None = None
    object_bytes: int = 0
    limits: PoolLimits = field(default_factory=PoolLimits)

    @property
    def staging_bytes(self) -> int:
        """Memory between this process and the library: enough for eight objects, taken page by page."""
        return max(_LEAST_STAGING_BYTES, 8 * (self.object_bytes + LONGEST_HEAD_BYTES))


def split_address(knob: str, address: str) -> tuple[str, int]:
    """Host and port; raises `ConfigurationError` naming the knob."""
    host, colon, port = address.removeprefix("tcp://").rpartition(":")
    if not (colon and host and port.isdecimal() and 0 < int(port) < 1 << 16):
        raise ConfigurationError(f"{knob}={address!r} is no address; set host:port, such as 127.0.0.1:50051")
    return host.strip("[]"), int(port)


def is_listening(host: str, port: int, *, timeout_s: float) -> bool:
    """Whether something accepts connections there."""
    try:
        with socket.create_connection((host, port), timeout=timeout_s):
            return True
    except OSError:
        return False


def own_address_towards(host: str, port: int) -> str:
    """The address of this machine that packets to `host` leave from; nothing is sent."""
    family, kind, protocol, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])
