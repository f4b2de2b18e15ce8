"""Names of hosts, as libraries take them: `host:port`."""

from __future__ import annotations

import contextlib
import ipaddress
import socket

_MAX_ADDRESS_BYTES = 300


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach it."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def split_address(address: bytes) -> tuple[str, int]:
    """Return host and port; ValueError for what is no address."""
    if len(address) > _MAX_ADDRESS_BYTES:
        raise ValueError(f"{len(address)} bytes is no address")
    host, _, port = address.decode().rpartition(":")
    if not host:
        raise ValueError(f"{address!r} names no host")
    return host, int(port)


def address_towards(host: str, port: int) -> str:
    """This machine's address on the way to another; nothing is sent."""
    with contextlib.suppress(OSError):
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.socket(family, socket.SOCK_DGRAM) as sock:
            sock.connect((host.strip("[]"), port))
            return str(sock.getsockname()[0])
    return "127.0.0.1"
