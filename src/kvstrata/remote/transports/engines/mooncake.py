"""Mooncake's TransferEngine over TCP: peers find each other by address, without a metadata server.

A read blocks until the library gives it up, half a minute later, so it goes through a buffer of its own
(`engines.staged`). The library listens on every interface and asks for no credential; see the docs.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvstrata.errors import ConfigurationError, TransferFailed
from kvstrata.memory.native import load_ibverbs
from kvstrata.remote.transports.base import Destination
from kvstrata.remote.transports.engines.base import Patience
from kvstrata.remote.transports.engines.hosts import address_towards, split_address
from kvstrata.remote.transports.engines.loading import cannot_load

if TYPE_CHECKING:
    from kvstrata.remote.transports.engines.staged import GivenUp, StagedEngine

PROTOCOL_VARIABLE = "MOONCAKE_PROTOCOL"
DEVICE_VARIABLE = "MOONCAKE_DEVICE"
_NO_METADATA_SERVER = "P2PHANDSHAKE"
_TOLD = "kvstrata read"
_LOCATION = "cpu:0"  # else the library looks at every page to find its NUMA node


class MooncakeLibrary:
    """See `base.EngineLibrary`."""

    name = "mooncake"
    options: Mapping[str, str] = {}

    def __init__(self) -> None:
        self._given_up: GivenUp | None = None

    def unusable(self) -> str | None:
        try:
            _transfer_engine()
        except ConfigurationError as error:
            return str(error)
        return None

    def serve(self, memory: Sequence[Destination], *, host: str) -> MooncakeOwner:
        return MooncakeOwner(memory, host=host)

    def open(self, peer: bytes, writable: Sequence[Destination], patience: Patience) -> StagedEngine:
        """`writable` is not shown to the library: it writes to a buffer of its own."""
        # The process that serves memory has no need of it, nor of the compiler that it loads.
        from kvstrata.remote.transports.engines.staged import GivenUp, StagedEngine

        self._given_up = self._given_up or GivenUp()
        try:
            host, port = split_address(peer)
        except ValueError as error:
            raise TransferFailed(f"{patience.wait}: the ticket is of no Mooncake engine") from error
        where = f"{host}:{port}"
        return StagedEngine(
            self.name,
            lambda buffer: MooncakeCalls(where, buffer, here=address_towards(host, port)),
            self._given_up,
            patience,
        )


class MooncakeOwner:
    """See `base.Owner`."""

    def __init__(self, memory: Sequence[Destination], *, host: str) -> None:
        self._engine = _new_engine(host)
        self._memory = memory
        self._told = 0
        for one in memory:
            if self._engine.register_memory(one.address, one.size_bytes, _LOCATION) != 0:
                raise ConfigurationError(f"Mooncake does not register {one}")
        self.peer = f"{host}:{self._engine.get_rpc_port()}".encode()

    def told(self) -> int:
        if self._engine is not None:
            self._told += sum(note.name == _TOLD for note in self._engine.get_notifies())
        return self._told

    def close(self) -> None:
        self.told()
        engine, self._engine = self._engine, None
        if engine is not None:
            for one in self._memory:
                engine.unregister_memory(one.address)


class MooncakeCalls:
    """See `staged.BlockingCalls`."""

    def __init__(self, peer: str, buffer: Destination, *, here: str) -> None:
        self._peer = peer
        self._buffer = buffer
        self._last_remote = 0
        self._engine = _new_engine(here)
        if self._engine.register_memory(buffer.address, buffer.size_bytes, _LOCATION) != 0:
            raise TransferFailed(f"Mooncake does not register a buffer of {buffer.size_bytes} bytes")

    def read(self, local: Sequence[int], remote: Sequence[int], size: Sequence[int]) -> None:
        self._last_remote = remote[-1]
        status = self._engine.batch_transfer_sync_read(self._peer, local, remote, size)
        if status != 0:
            raise TransferFailed(
                f"Mooncake could not read {len(size)} ranges from {self._peer} (status {status})"
            )

    def tell(self) -> None:
        """A notification travels with a read: of a byte that was read before."""
        from mooncake.engine import TransferNotify, TransferOpcode

        self._engine.batch_transfer_sync(
            self._peer,
            [self._buffer.address],
            [self._last_remote],
            [1],
            TransferOpcode.Read,
            TransferNotify(_TOLD, ""),
        )

    def close(self) -> None:
        """Its destructor ends its threads; then the buffer is free."""
        self._engine.unregister_memory(self._buffer.address)
        self._engine = None


def _transfer_engine() -> Any:
    """The library's class; ConfigurationError in one line if it is not there or does not load."""
    _set_up_environment()
    load_ibverbs()
    try:
        from mooncake.engine import TransferEngine
    except ImportError as error:
        fix = "pip install 'kvstrata[mooncake]', and libibverbs1 of the system"
        if not isinstance(error, ModuleNotFoundError):
            fix = "install libibverbs1 of the system, or name its folder in LD_LIBRARY_PATH"
        raise cannot_load(error, library="Mooncake", package="mooncake", fix=fix) from error
    except Exception as error:  # a package that is half there raises whatever it likes
        fix = "reinstall: pip install 'kvstrata[mooncake]'"
        raise cannot_load(error, library="Mooncake", package="mooncake", fix=fix) from error
    return TransferEngine


def _new_engine(host: str) -> Any:
    engine = _transfer_engine()()
    protocol = os.environ.get(PROTOCOL_VARIABLE, "tcp")
    status = engine.initialize(host, _NO_METADATA_SERVER, protocol, os.environ.get(DEVICE_VARIABLE, ""))
    if status != 0:
        raise ConfigurationError(f"Mooncake does not start on host {host!r} over {protocol!r} ({status})")
    return engine


def _set_up_environment() -> None:
    """What the library reads when it is loaded or started; what the operator has set stays."""
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
    if os.environ.get(PROTOCOL_VARIABLE, "tcp") == "tcp":
        os.environ.setdefault("MC_FORCE_TCP", "1")
