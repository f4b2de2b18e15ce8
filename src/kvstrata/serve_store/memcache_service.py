"""`python -m kvstrata.serve_store.memcache_service meta|owner ...`: MemCache's servers, which are calls.

meta: ADDRESS CONFIG_ADDRESS METRICS_ADDRESS LEASE_MS LOG_DIR. owner: ADDRESS CONFIG_ADDRESS PROTOCOL BYTES.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path

from kvstrata.errors import KVStrataError
from kvstrata.serve_store.plan import READY_LINE
from kvstrata.store.pool.libraries import library
from kvstrata.store.pool.memcache import open_local_service
from kvstrata.store.pool.options import PoolOptions


def meta(address: str, config_address: str, metrics_address: str, lease_ms: str, log_dir: str) -> int:
    """Run a MetaService until it ends; its status."""
    memcache = library("memcache")
    Path(log_dir).mkdir(parents=True, exist_ok=True)
    config = memcache.MetaConfig()
    config.meta_service_url = f"tcp://{address}"
    config.config_store_url = f"tcp://{config_address}"
    config.metrics_url = f"http://{metrics_address}"
    config.lease_ttl_ms = int(lease_ms)
    config.log_level = "warn"
    config.log_path = log_dir
    if memcache.MetaService.setup(config) != 0:
        return 1
    return int(memcache.MetaService.main())


def owner(address: str, config_address: str, protocol: str, size_bytes: str) -> int:
    """Run a LocalService that brings memory, until SIGTERM or SIGINT."""
    options = PoolOptions(
        address=address, config_address=config_address, protocol=protocol, size_bytes=int(size_bytes)
    )
    signals = {signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)  # in the library's threads too, which come now
    service = open_local_service(options, own_bytes=int(size_bytes))
    print(READY_LINE, flush=True)
    signal.sigwait(signals)
    service.close()
    return 0


def main(arguments: list[str]) -> int:
    """Run what the first word says."""
    try:
        kind, *rest = arguments
        return meta(*rest) if kind == "meta" else owner(*rest)
    except KVStrataError as error:
        print(f"kvstrata: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
