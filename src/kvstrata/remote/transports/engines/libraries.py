"""The libraries by the names that `transfer_backend` gives them. Nothing is imported before its use."""

from __future__ import annotations

from importlib import import_module

from kvstrata.remote.transports.engines.base import EngineLibrary

_CLASSES = {"nixl": "NixlLibrary", "mooncake": "MooncakeLibrary", "memfabric": "MemFabricLibrary"}
LIBRARIES = tuple(_CLASSES)


def library_for(name: str, **options: str) -> EngineLibrary:
    """Make one; the name is one of LIBRARIES. Only MemFabric has options: `protocol`."""
    module = import_module(f"kvstrata.remote.transports.engines.{name}")
    library: EngineLibrary = getattr(module, _CLASSES[name])(**options)
    return library
