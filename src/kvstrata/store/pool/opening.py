"""Opens stores on pools, with a deadline: libraries wait for their servers as long as they like."""

from __future__ import annotations

import time
from collections.abc import Callable

from kvstrata.errors import DeadlineExceeded, StoreUnavailable
from kvstrata.store.pool.calls import BoundedCalls
from kvstrata.store.pool.client import PoolClient
from kvstrata.store.pool.memcache import MemcacheClient
from kvstrata.store.pool.mooncake import MooncakeClient
from kvstrata.store.pool.options import PoolOptions
from kvstrata.store.pool.store import PooledStore

OPEN_DEADLINE_S = 30.0


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
