"""The pools that the tests of stores run: the real servers of each backend, small ones, with short times."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvstrata.errors import StoreUnavailable
from kvstrata.serve_pd.machine import free_port
from kvstrata.serve_store.plan import StorePlan
from kvstrata.serve_store.processes import StoreProcesses
from kvstrata.store.base import Status
from kvstrata.store.pool.libraries import library
from kvstrata.store.pool.opening import open_memcache, open_mooncake
from kvstrata.store.pool.options import PoolOptions
from kvstrata.store.pool.session import PoolLimits
from kvstrata.store.pool.store import PooledStore

MIB = 1 << 20
POOL_BYTES = 16 * MIB
LIMITS = PoolLimits(deadline_s=15.0, rest_s=0.3, full_wait_s=0.3, keep_every_s=0.1)
"""The servers lease for a second and forget a silent owner after three."""

KINDS: dict[str, tuple[str, str | None]] = {
    "mooncake-tcp": ("mooncake", "tcp"),
    "mooncake-shm": ("mooncake", "shm"),
    "memcache": ("memcache", None),
}
"""Name -> backend, and the protocol that a store of it speaks where there is a choice."""

LOST = (Status.MISSING, Status.PEER_LOST, Status.BACKEND_DOWN)
"""What a reader may be told when a pool has trouble, instead of bytes."""

START_DEADLINE_S = 60.0
WAIT_DEADLINE_S = 30.0
_AID = Path(__file__).with_name("memcache_without_ascend.c")


class Pool:
    """Running servers, and stores on them."""

    def __init__(self, backend: str, directory: Path) -> None:
        host = "127.0.0.1"
        self.backend = backend
        self.plan = StorePlan(
            backend=backend,
            size_bytes=POOL_BYTES,
            log_dir=directory,
            port=free_port(host),
            second_port=free_port(host),
            metrics_port=free_port(host),
            lease_s=1.0,
            silence_s=3.0,
            environment=_without_ascend(directory) if backend == "memcache" else {},
        )
        self.processes = StoreProcesses(self.plan)
        self._janitor: PooledStore | None = None

    def open(
        self,
        *,
        clock: Callable[[], float] = time.time,
        protocol: str | None = None,
        limits: PoolLimits = LIMITS,
    ) -> PooledStore:
        """A store of this process; `protocol` is Mooncake's."""
        where = self.where(protocol, limits)
        opened = open_mooncake if self.backend == "mooncake" else open_memcache
        return opened(where.options, clock=clock)

    def where(self, protocol: str | None, limits: PoolLimits) -> Where:
        """For a store of another process, with that environment; picklable."""
        return Where(
            backend=self.backend,
            aid=self.plan.environment.get("LD_PRELOAD"),
            options=PoolOptions(
                address=self.plan.address,
                size_bytes=POOL_BYTES,
                protocol=protocol,
                client_address=self.plan.second_address if protocol == "shm" else None,
                config_address=self.plan.second_address,
                limits=limits,
            ),
        )

    def empty(self) -> None:
        """Drop every object."""
        if self._janitor is None:
            self._janitor = self.open()
        self._janitor.clear(force=True)

    def close(self) -> None:
        """End what `empty` uses, and the servers."""
        try:
            if self._janitor is not None:
                self._janitor.close()
        finally:
            self.processes.close()


@dataclass(frozen=True, kw_only=True)
class Where:
    """What another process opens a pool with."""

    backend: str
    aid: str | None
    options: PoolOptions

    def open(self) -> PooledStore:
        """A store of this process."""
        if self.aid is not None:
            ctypes.CDLL(self.aid, mode=ctypes.RTLD_GLOBAL)
        return (open_mooncake if self.backend == "mooncake" else open_memcache)(self.options)


@contextmanager
def running(backend: str, directory: Path) -> Iterator[Pool]:
    """A pool with servers of its own; skips the test where the library is missing."""
    pool = Pool(backend, directory)  # loads the aid, which has to come before the library
    try:
        library(backend)
    except StoreUnavailable as error:
        pytest.skip(f"{error}")
    try:
        pool.processes.start(deadline_s=START_DEADLINE_S)
        yield pool
    finally:
        pool.close()


def eventually(what: Callable[[], object], *, deadline_s: float = WAIT_DEADLINE_S) -> None:
    """Wait until something holds; pools evict, notice deaths and end leases in their own time."""
    ends_s = time.monotonic() + deadline_s
    while not what():
        assert time.monotonic() < ends_s, f"not within {deadline_s:g} s"
        time.sleep(0.02)


_loaded: dict[Path, ctypes.CDLL] = {}  # for the life of the process: the libraries keep pointing into it


def _without_ascend(directory: Path) -> dict[str, str]:
    """Build and load the test aid here; return what loads it into the servers."""
    for aid in _loaded:
        return {"LD_PRELOAD": str(aid), "ASCEND_HOME_PATH": os.environ["ASCEND_HOME_PATH"]}
    if os.environ.get("ASCEND_HOME_PATH"):
        return {}  # a machine with a driver needs no aid
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler: memcache_hybrid asks for an Ascend driver, and the aid has to be built")
    home = directory / "ascend"
    (home / "lib64").mkdir(parents=True, exist_ok=True)
    aid = directory / "memcache_without_ascend.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", aid, _AID, "-ldl"], check=True)
    os.environ["ASCEND_HOME_PATH"] = str(home)
    _loaded[aid] = ctypes.CDLL(str(aid), mode=ctypes.RTLD_GLOBAL)
    return {"LD_PRELOAD": str(aid), "ASCEND_HOME_PATH": str(home)}
