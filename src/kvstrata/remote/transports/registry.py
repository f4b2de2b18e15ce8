"""Transports by the names that the knob `transfer_backend` gives them."""

from __future__ import annotations

from collections.abc import Callable

from kvstrata.errors import ConfigurationError
from kvstrata.remote.transports.base import Transport
from kvstrata.remote.transports.shm import ShmTransport
from kvstrata.remote.transports.tcp import TcpTransport

AUTO = "auto"
# In the order in which `auto` prefers them.
_TRANSPORTS: dict[str, Callable[[], Transport]] = {"shm": ShmTransport, "tcp": TcpTransport}


def transport_for(name: str) -> Transport:
    """Make the transport of that name; raises ConfigurationError for one that this version does not have."""
    if name not in _TRANSPORTS:
        known = ", ".join((AUTO, *_TRANSPORTS))
        raise ConfigurationError(f"transfer_backend={name!r} is not a transport here. Fix: one of: {known}.")
    return _TRANSPORTS[name]()


def usable_transports() -> tuple[Transport, ...]:
    """Those that this process can use, best first; each has then to ask whether it `reaches` its peer."""
    made = [make() for make in _TRANSPORTS.values()]
    return tuple(transport for transport in made if transport.usable() is None)


def transports_for(transfer_backend: str) -> tuple[Transport, ...]:
    """What a process with that setting offers and reads with, best first.

    Raises ConfigurationError for an unknown name, and for one that cannot be used here, saying why.
    """
    if transfer_backend == AUTO:
        return usable_transports()
    transport = transport_for(transfer_backend)
    reason = transport.usable()
    if reason is not None:
        raise ConfigurationError(f"transfer_backend={transfer_backend!r} cannot be used here: {reason}")
    return (transport,)
