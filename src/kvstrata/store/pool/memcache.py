"""MemCache (memcache_hybrid): a MetaService knows the keys, LocalServices own memory and are its clients.

Every engine process is a LocalService that brings no memory. The library keeps one client a process, so
scheduler and worker of one process share it. Facts about the library: docs/data_plane.md.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvstrata.errors import ConfigurationError, StoreUnavailable
from kvstrata.store.base import Status
from kvstrata.store.pool.client import PoolRead
from kvstrata.store.pool.libraries import library
from kvstrata.store.pool.options import PoolOptions, is_listening, split_address
from kvstrata.store.pool.seldom import SeldomLog

logger = logging.getLogger(__name__)
_log = SeldomLog(logger)

PORT = 5000
CONFIG_PORT = 6000
PROTOCOL = "host_shm"
WORLD_SIZE = 256
GIB = 1 << 30

_POOL_TO_HOST, _HOST_TO_POOL = 2, 3
_LOOK_ONLY = 0  # the default leases once more, and nothing ends that lease
_TRACK_S = 0.3
_TRACK_PAUSE_S = 0.02
"""The library copies only from what this process has a lease on, and keeps the place of an object until that
lease ends, also when it was told to end it or the object is gone. It refuses a lease on a new object in that
place (code -1): we ask again, this often and for so long. Hence leases are short, are renewed, and are never
ended early: then a place is not used again before its lease is over here, too."""
_PROBE_S = 2.0

_STATUSES = {
    0: Status.OK,
    -1: Status.PEER_LOST,
    -2: Status.PEER_LOST,  # the copy failed
    -3014: Status.BACKEND_DOWN,  # the MetaService is not connected
    -3102: Status.MISSING,
    -3106: Status.MISSING,  # the lease ended
}


class MemcacheClient:
    """Implements `PoolClient`."""

    spares_held = False

    def __init__(self, options: PoolOptions) -> None:
        """Connect; blocks as long as the library likes. Raises `StoreUnavailable`, `ConfigurationError`."""
        self._settings = _settings(options)
        self.name = f"the MemCache pool of the MetaService at {options.address}"
        self._store = _shared.enter(self._settings, self.name)
        self._mapping: mmap.mmap | None = None
        self._memory = (0, 0)
        self._leases = _shared.leases
        logger.info("using %s", self.name)

    def memory(self, size_bytes: int) -> int:
        self._mapping = mmap.mmap(-1, size_bytes)
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._mapping))
        if self._store.register_buffer(address, size_bytes) != 0:
            raise StoreUnavailable(f"{self.name} cannot use {size_bytes} bytes of memory of this process")
        self._memory = (address, size_bytes)
        return address

    def present(self, keys: Sequence[str]) -> list[Status]:
        answers = {1: Status.OK, 0: Status.MISSING}
        found = self._store.batch_is_exist(list(keys))
        return [answers.get(code, Status.BACKEND_DOWN) for code in _filled(found, len(keys))]

    def hold(self, keys: Sequence[str], *, ttl_s: float) -> list[Status]:
        ends_s = time.monotonic() + _TRACK_S
        until_s, codes = self._lease(keys, ttl_s)
        while (again := [at for at, code in enumerate(codes) if code == -1]) and time.monotonic() < ends_s:
            time.sleep(_TRACK_PAUSE_S)
            for at, code in zip(again, self._lease([keys[at] for at in again], ttl_s)[1], strict=True):
                codes[at] = code
        self._leases.note([key for key, code in zip(keys, codes, strict=True) if code == 0], until_s)
        return [Status.MISSING if code == -1 else _status(code, "leasing") for code in codes]

    def put(self, key: str, address: int, size_bytes: int) -> Status:
        code = self._store.put_from(key, address, size_bytes, _HOST_TO_POOL)
        # A pool without room and an owner that just died answer alike: both may have room in a moment.
        return Status.FULL if code in (-1, -2, -3102) else _status(code, "putting")

    def read(self, reads: Sequence[PoolRead], *, lease_s: float) -> list[Status]:
        statuses = self._read(reads, lease_s)
        # A lease may be on an object that is gone, with another one under its key: then once more.
        again = [at for at, status in enumerate(statuses) if status is Status.MISSING]
        if again:
            self._leases.forget([reads[at].key for at in again])
            for at, status in zip(again, self._read([reads[at] for at in again], lease_s), strict=True):
                statuses[at] = status
        return statuses

    def remove(self, keys: Sequence[str], *, force: bool) -> list[Status]:
        if not keys:
            return []
        codes = _filled(self._store.remove_batch(list(keys)), len(keys))
        return [_status(code, "removing") for code in codes]

    def clear(self, *, force: bool) -> int | None:
        code = self._store.remove_all()
        if code != 0:
            raise StoreUnavailable(f"{self.name} was not cleared (code {code})")
        time.sleep(self._leases.remaining_s())  # or new objects could not be read in the places of the old
        return None

    def close(self) -> None:
        if self._memory[0]:
            self._store.unregister_buffer(*self._memory)
        _shared.leave()

    def _read(self, reads: Sequence[PoolRead], lease_s: float) -> list[Status]:
        keys = [read.key for read in reads]
        self._lease_for_reading(keys, lease_s)
        infos = self._store.batch_get_key_info(keys, _LOOK_ONLY)
        if len(infos) != len(reads):
            return [Status.BACKEND_DOWN] * len(reads)
        statuses = []
        for read, info in zip(reads, infos, strict=True):
            places = info.gva_list()
            end = max(span.offset + span.size_bytes for span in read.spans)
            statuses.append(
                self._copied(read, places[0]) if places and end <= info.size() else Status.MISSING
            )
        return statuses

    def _lease(self, keys: Sequence[str], ttl_s: float) -> tuple[float, list[int]]:
        """Until when on the monotonic clock, and the library's code a key."""
        until_s = time.monotonic() + ttl_s
        return until_s, _filled(
            self._store.batch_add_lease(list(keys), max(1, round(ttl_s * 1000))), len(keys)
        )

    def _lease_for_reading(self, keys: Sequence[str], lease_s: float) -> None:
        ending = self._leases.ending(keys, lease_s / 2)
        if ending:
            self.hold(ending, ttl_s=lease_s)

    def _copied(self, read: PoolRead, place: int) -> Status:
        spans = [span for span in read.spans if span.size_bytes]
        code = self._store.batch_copy(
            [place + span.offset for span in spans],
            [span.address for span in spans],
            [span.size_bytes for span in spans],
            _POOL_TO_HOST,
        )
        return _status(code, "reading")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Settings:
    address: str
    config_address: str
    protocol: str
    pool_bytes: int
    own_bytes: int = 0
    timeout_s: int


class _Leases:
    """What the library has leases on in this process, and until when on the monotonic clock. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ends: dict[str, float] = {}
        self._latest_s = 0.0

    def note(self, keys: Sequence[str], until_s: float) -> None:
        """A lease was got or renewed."""
        with self._lock:
            for key in keys:
                self._ends[key] = max(until_s, self._ends.get(key, 0.0))
            self._latest_s = max(until_s, self._latest_s)

    def forget(self, keys: Sequence[str]) -> None:
        """The leases are good for nothing, but the library keeps them until they end."""
        with self._lock:
            for key in keys:
                self._ends.pop(key, None)

    def ending(self, keys: Sequence[str], within_s: float) -> list[str]:
        """Those of the keys, each once, whose lease is over within so many seconds."""
        now_s = time.monotonic()
        with self._lock:
            for key in [key for key, until_s in self._ends.items() if until_s <= now_s]:
                del self._ends[key]
            return [key for key in dict.fromkeys(keys) if self._ends.get(key, 0.0) < now_s + within_s]

    def remaining_s(self) -> float:
        """Until all leases are over."""
        with self._lock:
            return max(0.0, self._latest_s - time.monotonic())


class _SharedClient:
    """The library's one client of this process, and how many use it."""

    def __init__(self) -> None:
        self.leases = _Leases()
        self._lock = threading.Lock()
        self._users = 0
        self._settings: _Settings | None = None
        self._store: Any = None

    def enter(self, settings: _Settings, name: str) -> Any:
        """The client, opened by its first user; `ConfigurationError` if it was opened for another pool."""
        with self._lock:
            if self._users and settings != self._settings:
                raise ConfigurationError(
                    f"store_address={settings.address!r}: memcache_hybrid has one client a process, and this "
                    f"one uses {self._settings}; use the same store everywhere in a process"
                )
            if not self._users:
                self._store = _opened(settings, name)
                self._settings = settings
            self._users += 1
            return self._store

    def leave(self) -> None:
        with self._lock:
            self._users -= 1
            if self._users == 0:
                self._store.close()
                self._store = None


_shared = _SharedClient()


def open_local_service(options: PoolOptions, *, own_bytes: int) -> Any:
    """A LocalService that brings `own_bytes` of memory to the pool, for a process that does nothing else."""
    settings = _settings(options)
    settings = _Settings(
        address=settings.address,
        config_address=settings.config_address,
        protocol=settings.protocol,
        pool_bytes=settings.pool_bytes,
        own_bytes=own_bytes,
        timeout_s=settings.timeout_s,
    )
    return _opened(settings, f"the MemCache pool of the MetaService at {options.address}")


def _settings(options: PoolOptions) -> _Settings:
    host, port = split_address("store_address", options.address)
    config = split_address("store_config_address", options.config_address or f"{host}:{CONFIG_PORT}")
    return _Settings(
        address=f"{host}:{port}",
        config_address=f"{config[0]}:{config[1]}",
        protocol=options.protocol or PROTOCOL,
        pool_bytes=options.size_bytes,
        timeout_s=max(1, round(options.limits.deadline_s)),
    )


def _opened(settings: _Settings, name: str) -> Any:
    memcache = library("memcache")
    host, port = split_address("store_address", settings.address)
    if not is_listening(host, port, timeout_s=_PROBE_S):
        raise StoreUnavailable(
            f"store_address={settings.address!r}: no MetaService answers there; start one with "
            "`kvstrata store serve --backend memcache`, or set its address"
        )
    config = memcache.LocalConfig()
    config.meta_service_url = f"tcp://{settings.address}"
    config.config_store_url = f"tcp://{settings.config_address}"
    config.log_level = "error"
    config.protocol = settings.protocol
    config.world_size = WORLD_SIZE
    config.dram_size = str(settings.own_bytes)
    config.max_dram_size = str(settings.pool_bytes)  # address space: the same in all processes of a pool
    config.hbm_size = "0"
    config.client_timeout_seconds = settings.timeout_s
    store = memcache.DistributedObjectStore()
    for step, code in (("setup", store.setup(config)), ("init", store.init(0, True))):
        if code != 0:
            raise StoreUnavailable(
                f"{name} cannot be opened: {step} answered {code}. With store_protocol="
                f"{settings.protocol!r} memcache_hybrid needs an Ascend driver on this machine"
            )
    return store


def _filled(codes: Sequence[int], count: int) -> list[int]:
    """One code a key: a MetaService that does not answer gives fewer."""
    codes = list(codes)
    return codes if len(codes) == count else [codes[0] if codes and codes[0] < 0 else -3014] * count


def _status(code: int, doing: str) -> Status:
    if code not in _STATUSES:
        _log.warning(code, f"MemCache answered {code} to {doing}")
    return _STATUSES.get(code, Status.BACKEND_DOWN)
