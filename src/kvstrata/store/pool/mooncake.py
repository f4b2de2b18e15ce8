"""Mooncake Store. On the master's machines a `mooncake_client` owns memory; engines bring none of their own.

The library talks TCP to whoever owns an object. Where such a client runs on this machine, engines may reach
it through shared memory instead, which is several times as fast; but when that client is started again, this
release of the library may never find it again, so one has to ask for it. See docs/data_plane.md.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
from collections.abc import Sequence
from typing import Any

from kvstrata.errors import StoreUnavailable
from kvstrata.store.base import Status
from kvstrata.store.pool.client import PoolRead
from kvstrata.store.pool.libraries import library
from kvstrata.store.pool.options import PoolOptions, is_listening, own_address_towards, split_address
from kvstrata.store.pool.seldom import SeldomLog

logger = logging.getLogger(__name__)
_log = SeldomLog(logger)

PORT = 50051
CLIENT_PORT = 50052
_NO_METADATA_SERVER = "P2PHANDSHAKE"
_BUFFER_BYTES = 16 << 20
"""Of the library's own, for what does not go through registered memory: here, hardly anything."""
_PROBE_S = 0.5

_UNKNOWN_MEMORY = -600
"""Through shared memory: the client on this machine is another one, and was not told of this process."""

_STATUSES = {
    0: Status.OK,
    -10: Status.FULL,  # no buffer
    -100: Status.PEER_LOST,  # no such segment
    -101: Status.PEER_LOST,
    -200: Status.FULL,
    _UNKNOWN_MEMORY: Status.BACKEND_DOWN,
    -703: Status.MISSING,  # a replica is not complete
    -704: Status.MISSING,
    -705: Status.OK,  # it was there before
    -706: Status.LEASED,
    -707: Status.MISSING,  # the lease ended before the bytes came
    -800: Status.PEER_LOST,  # the transfer failed
    -900: Status.BACKEND_DOWN,
}


class MooncakeClient:
    """Implements `PoolClient`."""

    spares_held = True

    def __init__(self, options: PoolOptions) -> None:
        """Connect; blocks as long as the library likes. Raises `StoreUnavailable`, `ConfigurationError`."""
        self._staging_bytes = options.staging_bytes
        self._mapping: mmap.mmap | None = None
        host, port = split_address("store_address", options.address)
        beside = _client_on_this_host(options)
        if beside is None and options.protocol in (None, "shm", "tcp"):
            os.environ.setdefault("MC_FORCE_TCP", "1")  # read when the library is set up
        self._store: Any = library("mooncake").MooncakeDistributedStore()
        if beside is not None:
            self.name = f"the Mooncake pool of the client at {beside}, through shared memory"
            code = self._store.setup_dummy(2 * options.staging_bytes, _BUFFER_BYTES, beside)
        else:
            protocol = "rdma" if options.protocol == "rdma" else "tcp"
            self.name = f"the Mooncake pool of the master at {host}:{port}, over {protocol}"
            own = own_address_towards(host, port)
            code = self._store.setup(
                own, _NO_METADATA_SERVER, 0, _BUFFER_BYTES, protocol, "", f"{host}:{port}"
            )
        if code != 0:
            raise StoreUnavailable(
                f"store_address={options.address!r}: {self.name} cannot be opened (code {code}); "
                "start it with `kvstrata store serve --backend mooncake`, or set its address"
            )
        self._is_beside = beside is not None
        logger.info("using %s", self.name)

    def memory(self, size_bytes: int) -> int:
        if self._is_beside:
            address = int(self._store.alloc_from_mem_pool(size_bytes))
        else:
            self._mapping = mmap.mmap(-1, size_bytes)
            address = ctypes.addressof(ctypes.c_char.from_buffer(self._mapping))
        if address == 0 or self._store.register_buffer(address, size_bytes) != 0:
            raise StoreUnavailable(f"{self.name} cannot use {size_bytes} bytes of memory of this process")
        return address

    def present(self, keys: Sequence[str]) -> list[Status]:
        answers = {1: Status.OK, 0: Status.MISSING}
        found = self._store.batch_is_exist(list(keys))
        return [answers.get(code, Status.BACKEND_DOWN) for code in found]

    def hold(self, keys: Sequence[str], *, ttl_s: float) -> list[Status]:
        return self.present(keys)  # the master leases what it is asked for, for as long as it was told to

    def put(self, key: str, address: int, size_bytes: int) -> Status:
        return _status(self._store.put_from(key, address, size_bytes))

    def read(self, reads: Sequence[PoolRead], *, lease_s: float) -> list[Status]:
        bases = [min(span.address for span in read.spans) for read in reads]
        sizes = [[[span.size_bytes for span in read.spans]] for read in reads]
        answers = self._store.get_into_ranges(
            bases,
            [[read.key] for read in reads],
            [[[span.address - base for span in read.spans]] for read, base in zip(reads, bases, strict=True)],
            [[[span.offset for span in read.spans]] for read in reads],
            sizes,
        )
        if len(answers) != len(reads):
            return [Status.BACKEND_DOWN] * len(reads)
        return [_read_status(got, wanted) for got, wanted in zip(answers, sizes, strict=True)]

    def remove(self, keys: Sequence[str], *, force: bool) -> list[Status]:
        return [_status(code) for code in self._store.batch_remove(list(keys), force)] if keys else []

    def clear(self, *, force: bool) -> int | None:
        dropped = int(self._store.remove_all(force))
        if dropped < 0:
            raise StoreUnavailable(f"{self.name} was not cleared (code {dropped})")
        return dropped

    def close(self) -> None:
        self._store.close()


def _client_on_this_host(options: PoolOptions) -> str | None:
    """Address of the `mooncake_client` to use through shared memory; None for TCP or RDMA."""
    if options.protocol != "shm":
        return None
    address = options.client_address or f"127.0.0.1:{CLIENT_PORT}"
    host, port = split_address("store_client_address", address)
    if is_listening(host, port, timeout_s=_PROBE_S):
        return f"{host}:{port}"
    raise StoreUnavailable(
        f"store_client_address={address!r}: no mooncake_client answers there; start it with `kvstrata "
        'store serve --backend mooncake --protocol shm`, or set store_protocol to "tcp"'
    )


def _status(code: int) -> Status:
    if code == _UNKNOWN_MEMORY:
        _log.warning(
            code,
            "Mooncake's client on this machine does not know this process's memory: if it was started again, "
            "everything is a miss until this engine is, too",
        )
    elif code not in _STATUSES:
        _log.warning(code, f"Mooncake answered with code {code}")
    return _STATUSES.get(code, Status.BACKEND_DOWN)


def _read_status(got: Any, wanted: Sequence[Sequence[int]]) -> Status:
    """`got` has the shape of `wanted`, bytes where it went well and a code where it did not."""
    if got == wanted:
        return Status.OK
    codes = [code for codes in got for code in codes if code < 0]
    return _status(codes[0]) if codes else Status.MISSING
