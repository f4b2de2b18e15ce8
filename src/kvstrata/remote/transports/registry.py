"""Transports by the names that the knob `transfer_backend` gives them."""

from __future__ import annotations

from collections.abc import Callable

from kvstrata.errors import ConfigurationError
from kvstrata.remote.transports.base import Transport
from kvstrata.remote.transports.engines.libraries import LIBRARIES, library_for
from kvstrata.remote.transports.engines.transport import EngineTransport
from kvstrata.remote.transports.shm import ShmTransport
from kvstrata.remote.transports.tcp import TcpTransport

AUTO = "auto"
# In the order in which `auto` prefers them. What a library serves, anybody on its network can read: such a
# transport is used where it was asked for, never because it happens to be installed.
_OWN: dict[str, Callable[[], Transport]] = {"shm": ShmTransport, "tcp": TcpTransport}


TRANSPORTS = (*_OWN, *LIBRARIES)


def transport_for(name: str, *, memfabric_protocol: str = "sdma") -> Transport:
    """Make the transport of that name; raises ConfigurationError for one that this version does not have."""
    if name in _OWN:
        return _OWN[name]()
    if name not in LIBRARIES:
        known = ", ".join((AUTO, *TRANSPORTS))
        raise ConfigurationError(f"transfer_backend={name!r} is not a transport here. Fix: one of: {known}.")
    options = {"protocol": memfabric_protocol} if name == "memfabric" else {}
    return EngineTransport(library_for(name, **options))


def usable_transports() -> tuple[Transport, ...]:
    """Those of `auto` that this process can use, best first; each is then asked if it `reaches` its peer."""
    made = [make() for make in _OWN.values()]
    return tuple(transport for transport in made if transport.usable() is None)


def transports_for(transfer_backend: str, *, memfabric_protocol: str = "sdma") -> tuple[Transport, ...]:
    """What a process with that setting offers and reads with, best first.

    Raises ConfigurationError for an unknown name, and for one that cannot be used here, saying why.
    """
    if transfer_backend == AUTO:
        return usable_transports()
    transport = transport_for(transfer_backend, memfabric_protocol=memfabric_protocol)
    reason = transport.usable()
    if reason is not None:
        raise ConfigurationError(f"transfer_backend={transfer_backend!r} cannot be used here: {reason}")
    return (transport,)
