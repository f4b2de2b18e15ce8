"""MemFabric's TransferEngine: untested on real hardware, since it needs an Ascend NPU.

Written against the signatures of memfabric_hybrid 1.3.0, and tested with a fake of that contract, which is
compared with the wheel's own bindings. Engines find each other through a config store, whose address both
sides have in MF_CONFIG_STORE_URL. A call cannot be bounded, so reads go through a buffer (`engines.staged`).
"""

from __future__ import annotations

import glob
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvstrata.errors import ConfigurationError, TransferFailed
from kvstrata.remote.transports.base import Destination
from kvstrata.remote.transports.engines.base import Patience
from kvstrata.remote.transports.engines.hosts import address_towards, split_address
from kvstrata.remote.transports.engines.loading import cannot_load

if TYPE_CHECKING:
    from kvstrata.remote.transports.engines.staged import GivenUp, StagedEngine

STORE_VARIABLE = "MF_CONFIG_STORE_URL"
PROTOCOLS = {"sdma": "SDMA", "device_rdma": "DEVICE_RDMA", "device_urma": "DEVICE_URMA"}
"""`memfabric_transfer_protocol` -> the library's TransDataOpType."""
_DEVICES = "/dev/davinci[0-9]*"
_FIRST_VISIBLE_DEVICE = 0  # of ASCEND_RT_VISIBLE_DEVICES


class MemFabricLibrary:
    """See `base.EngineLibrary`."""

    name = "memfabric"

    def __init__(self, *, protocol: str = "sdma") -> None:
        if protocol not in PROTOCOLS:
            raise ConfigurationError(
                f"memfabric_transfer_protocol={protocol!r} is unknown; set one of {', '.join(PROTOCOLS)}"
            )
        self.options: Mapping[str, str] = {"protocol": protocol}
        self._given_up: GivenUp | None = None

    def unusable(self) -> str | None:
        try:
            _module()
        except ConfigurationError as error:
            return str(error)
        if not glob.glob(_DEVICES):
            return f"MemFabric needs an Ascend NPU and its driver: there is no {_DEVICES}"
        if not os.environ.get(STORE_VARIABLE):
            return f"MemFabric needs a config store: set {STORE_VARIABLE}=tcp://host:port on both sides"
        return None

    def serve(self, memory: Sequence[Destination], *, host: str) -> MemFabricOwner:
        return MemFabricOwner(memory, host=host, protocol=self.options["protocol"])

    def open(self, peer: bytes, writable: Sequence[Destination], patience: Patience) -> StagedEngine:
        """`writable` is not shown to the library: it writes to a buffer of its own."""
        # The process that serves memory has no need of it, nor of the compiler that it loads.
        from kvstrata.remote.transports.engines.staged import GivenUp, StagedEngine

        self._given_up = self._given_up or GivenUp()
        protocol = self.options["protocol"]
        try:
            host, port = split_address(peer)
        except ValueError as error:
            raise TransferFailed(f"{patience.wait}: the ticket is of no MemFabric engine") from error
        return StagedEngine(
            self.name,
            lambda buffer: MemFabricCalls(
                f"{host}:{port}", buffer, here=address_towards(host, port), protocol=protocol
            ),
            self._given_up,
            patience,
        )


class MemFabricOwner:
    """See `base.Owner`."""

    def __init__(self, memory: Sequence[Destination], *, host: str, protocol: str) -> None:
        self._engine, session = _new_engine(host, role="Prefill", protocol=protocol)
        self._memory = memory
        for one in memory:
            if self._engine.register_memory(one.address, one.size_bytes) != 0:
                raise ConfigurationError(f"MemFabric does not register {one}")
        self.peer = session.encode()

    def told(self) -> int:
        """The library has no notifications."""
        return 0

    def close(self) -> None:
        engine, self._engine = self._engine, None
        if engine is not None:
            for one in self._memory:
                engine.unregister_memory(one.address)
            engine.destroy()


class MemFabricCalls:
    """See `staged.BlockingCalls`."""

    def __init__(self, peer: str, buffer: Destination, *, here: str, protocol: str) -> None:
        self._peer = peer
        self._buffer = buffer
        self._engine, _ = _new_engine(here, role="Decode", protocol=protocol)
        if self._engine.register_memory(buffer.address, buffer.size_bytes) != 0:
            raise TransferFailed(f"MemFabric does not register a buffer of {buffer.size_bytes} bytes")

    def read(self, local: Sequence[int], remote: Sequence[int], size: Sequence[int]) -> None:
        status = self._engine.batch_transfer_sync_read(self._peer, local, remote, size)
        if status != 0:
            raise TransferFailed(
                f"MemFabric could not read {len(size)} ranges from {self._peer} (status {status})"
            )

    def tell(self) -> None:
        """The library has no notifications."""

    def close(self) -> None:
        self._engine.unregister_memory(self._buffer.address)
        self._engine.destroy()


def _module() -> Any:
    """The library; ConfigurationError in one line if it is not there or does not load."""
    try:
        import memfabric_hybrid
    except Exception as error:  # a package that is half there raises whatever it likes
        fix = "pip install 'kvstrata[ascend]'"
        raise cannot_load(error, library="MemFabric", package="memfabric_hybrid", fix=fix) from error
    return memfabric_hybrid


def _new_engine(host: str, *, role: str, protocol: str) -> tuple[Any, str]:
    """Return an engine and the name of its session."""
    module = _module()
    engine = module.TransferEngine()
    session = f"{host}:{engine.get_rpc_port()}"
    kind = getattr(module.TransDataOpType, PROTOCOLS[protocol])
    status = engine.initialize(os.environ.get(STORE_VARIABLE, ""), session, role, _FIRST_VISIBLE_DEVICE, kind)
    if status != 0:
        raise ConfigurationError(
            f"MemFabric does not start as {role} on {session} over {protocol} (status {status}); "
            f"is {STORE_VARIABLE} the same on both sides?"
        )
    return engine, session
