"""Opens the store that the launch asked for; scheduler and workers of one host open the same one."""

from __future__ import annotations

import os
from pathlib import Path

from kvstrata.config import StoreConfig
from kvstrata.store.base import Store
from kvstrata.store.registry import open_store


def open_configured_store(config: StoreConfig) -> Store | None:
    """Open the configured store; None where the launch wants none."""
    if config.backend == "none":
        return None
    return open_store(
        config.backend,
        path=config.store_path or default_store_path(),
        size_bytes=config.store_size_bytes,
        spill_path=config.store_spill_path,
        spill_size_bytes=config.store_spill_size_bytes,
    )


def default_store_path() -> Path:
    """Return the store directory of this user in shared memory."""
    return Path("/dev/shm") / f"kvstrata-{os.getuid()}"
