"""Store backends by the name that the knob `backend` gives them."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from kvstrata.errors import ConfigurationError
from kvstrata.store.base import Store
from kvstrata.store.local import LocalStore


def _open_pool(backend: str, **options: Any) -> Store:
    from kvstrata.store.pool.opening import open_pool  # nothing of a pool is imported until one is chosen

    return open_pool(backend, **options)


_BACKENDS: dict[str, Callable[..., Store]] = {
    "local": LocalStore.open,
    "mooncake": partial(_open_pool, "mooncake"),
    "memcache": partial(_open_pool, "memcache"),
}


def open_store(backend: str, **options: Any) -> Store:
    """Open a store; `options` are those of the backend: see `LocalStore.open`, and `open_pool` for pools.

    Raises `ConfigurationError` for a backend that this version does not have, and what the backend raises.
    """
    if backend not in _BACKENDS:
        known = ", ".join(sorted(_BACKENDS))
        raise ConfigurationError(f"backend={backend!r} is not a store. Fix: use one of: {known}.")
    return _BACKENDS[backend](**options)


def default_store_path() -> Path:
    """The local store's directory where nobody names one: this user's, in shared memory."""
    return Path("/dev/shm") / f"kvstrata-{os.getuid()}"
