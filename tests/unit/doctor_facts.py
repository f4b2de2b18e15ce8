"""Facts of a machine where everything works, and variations of it."""

import dataclasses
from typing import Any

from kvstrata.doctor import GIB, Facts
from kvstrata.probes import LibraryFinding

HEALTHY = Facts(
    python=(3, 11, 7),
    vllm_version="0.32.0",
    vllm_error=None,
    vllm_platform="kvstrata.vllm.platform.KVStrataCpuPlatform",
    plugin_active=True,
    connector_registered=True,
    torch_version="2.13.0+cpu",
    unwanted_packages=(),
    shared_memory_free_bytes=8 * GIB,
    memory_available_bytes=16 * GIB,
    cores=8,
    omp_threads_bind="0-3|4-7",
    lmdb_error=None,
    unusable_transports={},
    libraries=(
        LibraryFinding(name="NIXL", feature="prefill and decode over nixl", version="1.5.1", why=None),
        LibraryFinding(
            name="MemFabric", feature="prefill and decode over memfabric", version="1.3.0", why=None
        ),
    ),
)


def replaced(**changes: Any) -> Facts:
    """The healthy machine with some facts changed."""
    return dataclasses.replace(HEALTHY, **changes)
