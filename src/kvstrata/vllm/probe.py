"""What vLLM in this environment looks like to kvstrata; asked by `kvstrata doctor`."""

from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class VllmProbe:
    """vLLM as it imports here. `error` is set, and the rest empty, if it does not."""

    version: str = ""
    platform: str = ""  # class that vLLM chose, with its module
    plugin_active: bool = False  # that class is kvstrata's
    connector_registered: bool = False
    error: str | None = None


def probe_vllm() -> VllmProbe:
    """Import vLLM (some seconds), load its plugins as an engine would, and report; raises nothing."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # findings are printed, not logged
    try:
        import vllm
        from vllm import LLM  # noqa: F401 - this import is what a broken torchvision breaks
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
        from vllm.platforms import current_platform
        from vllm.plugins import load_general_plugins

        from kvstrata.vllm.platform import KVStrataCpuPlatform

        load_general_plugins()
        chosen = type(current_platform)
        return VllmProbe(
            version=str(vllm.__version__),
            platform=f"{chosen.__module__}.{chosen.__qualname__}",
            plugin_active=issubclass(chosen, KVStrataCpuPlatform),
            connector_registered="KVStrataConnector" in KVConnectorFactory._registry,
        )
    except Exception as error:  # whatever a broken environment raises on import is the finding
        return VllmProbe(error=f"{type(error).__name__}: {error}")
