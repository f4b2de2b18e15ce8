"""What an endpoint of remote read is told once: where it listens, whom it trusts, how long it waits."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from kvstrata.errors import ConfigurationError

MEMFABRIC_PROTOCOLS = ("sdma", "device_rdma", "device_urma")
MAX_READERS = 64


@dataclass(frozen=True, kw_only=True)
class EndpointOptions:
    """Options of a producer's or a consumer's endpoint; both sides of a pair should have equal ones.

    `host` is the only address that is bound to, and the one named to the other side. Raises
    ConfigurationError naming the option, its value and the range.
    """

    host: str
    secret: bytes = field(repr=False)
    """Authenticates the control and the data plane; from `secret.load_secret`."""
    lease_s: float = 10.0
    """A peer not heard of for so long is taken for dead, and what it held is freed."""
    resend_s: float = 0.5
    """Messages that need an answer are repeated after so long without one."""
    open_wait_s: float = 60.0
    """How long prefill waits for decode to accept a transfer."""
    wait_s: float = 300.0
    """How long decode waits for prefill to open a transfer that it expects."""
    read_deadline_s: float = 30.0
    """Bound of one read, of one connection to read through, and of the wait for a save before publishing."""
    read_attempts: int = 3
    """How often a part is read before its transfer fails."""
    readers: int = 2
    """Threads that read; one peer never has more than one."""
    memfabric_protocol: str = "sdma"
    """Must be equal on both sides."""
    model: str = ""
    """Names what decides the meaning of a row beside its layout; must be equal on both sides."""

    def __post_init__(self) -> None:
        if not self.host:
            raise ConfigurationError("host is empty; it must be the address to bind to, as 127.0.0.1")
        if not self.secret:
            raise ConfigurationError("secret is empty; set remote_secret")
        for name in ("lease_s", "resend_s", "open_wait_s", "wait_s", "read_deadline_s"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ConfigurationError(f"{name}={value!r} must be a positive number of seconds")
        if self.resend_s > self.lease_s / 2:
            raise ConfigurationError(
                f"resend_s={self.resend_s:g} must be at most half of lease_s={self.lease_s:g}, or one "
                "lost message ends a transfer"
            )
        if self.read_attempts < 1:
            raise ConfigurationError(f"read_attempts={self.read_attempts} must be at least 1")
        if not 1 <= self.readers <= MAX_READERS:
            raise ConfigurationError(f"readers={self.readers} must be in 1..{MAX_READERS}")
        if self.memfabric_protocol not in MEMFABRIC_PROTOCOLS:
            raise ConfigurationError(
                f"memfabric_protocol={self.memfabric_protocol!r} must be one of "
                f"{', '.join(MEMFABRIC_PROTOCOLS)}"
            )
