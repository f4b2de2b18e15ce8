"""Opens stores on pools, with a deadline: libraries wait for their servers as long as they like."""

from __future__ import annotations

import time
from collections.abc import Callable

from kvstrata.errors import DeadlineExceeded, StoreUnavailable
from kvstrata.store.base import Store
from kvstrata.store.pool import memcache, mooncake
from kvstrata.store.pool.calls import BoundedCalls
from kvstrata.store.pool.client import PoolClient
from kvstrata.store.pool.memcache import MemcacheClient
from kvstrata.store.pool.mooncake import MooncakeClient
from kvstrata.store.pool.options import PoolOptions
from kvstrata.store.pool.session import PoolLimits
from kvstrata.store.pool.store import PooledStore

OPEN_DEADLINE_S = 30.0


def open_pool(
    backend: str,
    *,
    size_bytes: int,
    address: str | None = None,
    client_address: str | None = None,
    config_address: str | None = None,
    protocol: str | None = None,
    object_bytes: int = 0,
    timeout_s: float = 5.0,
) -> Store:
    """A store on the pool that `kvstrata store serve` or somebody else runs; None stands for the defaults.

    Raises `StoreUnavailable` where the library or its servers are missing, and `ConfigurationError`.
    """
    port = mooncake.PORT if backend == "mooncake" else memcache.PORT
    options = PoolOptions(
        address=address or f"127.0.0.1:{port}",
        client_address=client_address,
        config_address=config_address,
        protocol=protocol,
        size_bytes=size_bytes,
        object_bytes=object_bytes,
        limits=PoolLimits(deadline_s=timeout_s),
    )
    return open_mooncake(options) if backend == "mooncake" else open_memcache(options)


def open_mooncake(options: PoolOptions, *, clock: Callable[[], float] = time.time) -> PooledStore:
    """A store on Mooncake Store. Raises `StoreUnavailable`, `ConfigurationError`."""
    return _opened("Mooncake", lambda: MooncakeClient(options), options, clock)


def open_memcache(options: PoolOptions, *, clock: Callable[[], float] = time.time) -> PooledStore:
    """A store on MemCache. Raises `StoreUnavailable`, `ConfigurationError`."""
    return _opened("MemCache", lambda: MemcacheClient(options), options, clock)


def _opened(
    name: str, connect: Callable[[], PoolClient], options: PoolOptions, clock: Callable[[], float]
) -> PooledStore:
    calls = BoundedCalls(f"the {name} pool at {options.address}", deadline_s=OPEN_DEADLINE_S, rest_s=0.0)

    made: list[PooledStore] = []

    def opened() -> PooledStore:
        client = connect()
        try:
            store = PooledStore(
                client,
                capacity_bytes=options.size_bytes,
                staging_bytes=options.staging_bytes,
                clock=clock,
                limits=options.limits,
            )
        except BaseException:
            client.close()
            raise
        made.append(store)
        return store

    def close_late() -> None:
        for store in made:
            store.close()

    try:
        return calls.run("open", opened, if_late=close_late)
    except DeadlineExceeded as error:
        raise StoreUnavailable(f"store_address={options.address!r}: {error}") from error
    finally:
        calls.close()
