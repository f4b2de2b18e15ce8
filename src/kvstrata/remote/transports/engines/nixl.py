"""NIXL over UCX: reads another process's memory (CMA) on one host, RDMA or TCP across.

The bindings below NIXL's Python class are used: that class makes an owner's thread spin, here it sleeps until
something arrives. The reader has no thread: its own waiting moves the bytes.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from typing import Any

import msgspec
import numpy as np

from kvstrata.errors import ConfigurationError, DeadlineExceeded, TransferFailed
from kvstrata.remote.transports.base import Destination, Int64Array
from kvstrata.remote.transports.engines.base import Patience
from kvstrata.remote.transports.engines.hosts import is_loopback
from kvstrata.remote.transports.engines.loading import cannot_load

_WHEELS = ("nixl_cu12", "nixl_cu13")
_INSTALL = "pip install 'kvstrata[nixl]'"
_BACKEND = "UCX"
_OWNER_LOOKS_US = 10_000  # at the latest; traffic wakes its thread at once
_SPIN_S = 0.002
_PAUSE_S = 20e-6
_TOLD = b"kvstrata read"
_DEVICES_VARIABLE = "UCX_NET_DEVICES"
_environment_lock = threading.Lock()


class _Peer(msgspec.Struct, frozen=True, kw_only=True):
    metadata: bytes
    is_loopback: bool


class NixlLibrary:
    """See `base.EngineLibrary`."""

    name = "nixl"
    options: Mapping[str, str] = {}

    def unusable(self) -> str | None:
        try:
            bindings = _bindings()
        except ConfigurationError as error:
            return str(error)
        plugins = bindings.nixlAgent(_new_name(), bindings.nixlAgentConfig()).getAvailPlugins()
        if _BACKEND not in plugins:
            return f"NIXL has no {_BACKEND} plugin here, only {sorted(plugins)}; see NIXL_PLUGIN_DIR"
        return None

    def serve(self, memory: Sequence[Destination], *, host: str) -> NixlOwner:
        return NixlOwner(memory, is_loopback=is_loopback(host))

    def open(self, peer: bytes, writable: Sequence[Destination], patience: Patience) -> NixlEngine:
        try:
            found = msgspec.msgpack.decode(peer, type=_Peer)
        except msgspec.MsgspecError as error:
            raise TransferFailed(f"{patience.wait}: the ticket is of no NIXL agent ({error})") from error
        return NixlEngine(found, writable, patience)


class NixlOwner:
    """See `base.Owner`."""

    def __init__(self, memory: Sequence[Destination], *, is_loopback: bool) -> None:
        self._bindings = _bindings()
        self._agent = _new_agent(self._bindings, has_thread=True, is_loopback=is_loopback)
        _register(self._bindings, self._agent, memory)
        self._told = 0
        peer = _Peer(metadata=self._agent.getLocalMD(), is_loopback=is_loopback)
        self.peer = msgspec.msgpack.encode(peer)

    def told(self) -> int:
        if self._agent is not None:
            for messages in self._agent.getNotifs({}, []).values():
                self._told += messages.count(_TOLD)
        return self._told

    def close(self) -> None:
        self.told()
        self._agent = None


class NixlEngine:
    """See `base.Engine`."""

    def __init__(self, peer: _Peer, writable: Sequence[Destination], patience: Patience) -> None:
        self._bindings = _bindings()
        self._unfinished: int | None = None
        self._agent = _new_agent(self._bindings, has_thread=False, is_loopback=peer.is_loopback)
        try:
            _register(self._bindings, self._agent, writable)
            self._owner = self._agent.loadRemoteMD(peer.metadata)
        except Exception as error:
            self._agent = None
            raise TransferFailed(f"{patience.wait}: the producer cannot be reached ({error})") from error

    def read(self, local: Int64Array, remote: Int64Array, size: Int64Array, patience: Patience) -> None:
        nixl, agent = self._bindings, self._agent
        try:
            handle = agent.createXferReq(
                nixl.NIXL_READ, self._list(local, size), self._list(remote, size), self._owner, b""
            )
            self._unfinished = handle
            status = agent.postXferReq(handle, b"")
            spin_until_s = time.monotonic() + _SPIN_S
            while status == nixl.NIXL_IN_PROG:
                patience.check()
                time.sleep(0 if time.monotonic() < spin_until_s else _PAUSE_S)
                status = agent.getXferStatus(handle)
            agent.releaseXferReq(handle)
            self._unfinished = None
        except (TransferFailed, DeadlineExceeded):
            raise
        except Exception as error:
            raise TransferFailed(f"{patience.wait}: NIXL says {error}") from error
        if status != nixl.NIXL_SUCCESS:
            raise TransferFailed(f"{patience.wait}: NIXL says {status}")

    def tell(self) -> None:
        try:
            self._agent.genNotif(self._owner, _TOLD)
        except Exception:  # it only counts
            return

    def close(self) -> None:
        """Close the endpoint by force, then its worker: nothing is left that could write."""
        agent, self._agent = self._agent, None
        if agent is None:
            return
        if self._unfinished is not None:
            _quietly(agent.releaseXferReq, self._unfinished)
        _quietly(agent.invalidateRemoteMD, self._owner)
        # The last reference: its destructor waits for the library's own end.
        del agent

    def _list(self, address: Int64Array, size: Int64Array) -> Any:
        rows = np.stack((address, size, np.zeros_like(size)), axis=1).astype(np.uint64)
        return self._bindings.nixlXferDList(self._bindings.DRAM_SEG, rows)


def _bindings() -> Any:
    """The library's module; ConfigurationError in one line if it is not there or does not load."""
    problem: ConfigurationError | None = None
    for wheel in _WHEELS:
        try:
            return import_module(f"{wheel}._bindings")
        except Exception as error:  # a wheel that is half there raises whatever it likes
            is_missing = isinstance(error, ModuleNotFoundError) and error.name == wheel
            if problem is None or not is_missing:
                problem = cannot_load(error, library="NIXL", package=wheel, fix=_INSTALL)
    assert problem is not None
    raise problem


def _new_agent(bindings: Any, *, has_thread: bool, is_loopback: bool) -> Any:
    config = bindings.nixlAgentConfig()
    config.useProgThread = has_thread
    config.pthrDelay = _OWNER_LOOKS_US
    agent = bindings.nixlAgent(_new_name(), config)
    with _on_loopback_only() if is_loopback else contextlib.nullcontext():
        agent.createBackend(_BACKEND, {})
    return agent


@contextlib.contextmanager
def _on_loopback_only() -> Iterator[None]:
    """UCX listens on every interface that it may use, and asks nobody who he is.

    It takes this from the environment only, while a backend is made. What the operator has set stays.
    """
    with _environment_lock:
        if _DEVICES_VARIABLE in os.environ:
            yield
            return
        os.environ[_DEVICES_VARIABLE] = "lo"
        try:
            yield
        finally:
            del os.environ[_DEVICES_VARIABLE]


def _register(bindings: Any, agent: Any, memory: Sequence[Destination]) -> None:
    rows = [(one.address, one.size_bytes, 0, b"") for one in memory]
    agent.registerMem(bindings.nixlRegDList(bindings.DRAM_SEG, rows), [])


def _new_name() -> str:
    return f"kvstrata-{secrets.token_hex(8)}"


def _quietly(call: Any, *arguments: Any) -> None:
    try:
        call(*arguments)
    except Exception:  # the connection is given up anyway
        return
