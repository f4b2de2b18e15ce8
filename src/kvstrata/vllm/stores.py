"""Opens the store that the launch asked for; scheduler and workers of one host open the same one."""

from __future__ import annotations

from kvstrata.config_store import StoreConfig
from kvstrata.errors import ConfigurationError
from kvstrata.store.base import Store
from kvstrata.store.registry import default_store_path, open_store


def open_configured_store(config: StoreConfig, *, object_bytes: int = 0) -> Store | None:
    """Open the configured store; None where the launch wants none.

    Raises what the store raises, and ConfigurationError where one object of ``object_bytes`` can never fit.
    """
    if config.backend == "none":
        return None
    if config.backend == "local":
        store = open_store(
            config.backend,
            path=config.store_path or default_store_path(),
            size_bytes=config.store_size_bytes,
            spill_path=config.store_spill_path,
            spill_size_bytes=config.store_spill_size_bytes,
        )
    else:
        store = open_store(
            config.backend,
            address=config.store_address,
            client_address=config.store_client_address,
            config_address=config.store_config_address,
            protocol=config.store_protocol,
            size_bytes=config.store_size_bytes,
            object_bytes=object_bytes,
            timeout_s=config.store_timeout_s,
        )
    capacity_bytes = store.statistics().capacity_bytes
    if object_bytes > capacity_bytes:
        store.close()
        raise ConfigurationError(
            f"store_size_GB={config.store_size_GB:g} gives the store {capacity_bytes} bytes, and one block "
            f'of a rank takes {object_bytes}; raise store_size_GB, or set backend to "none"'
        )
    return store
