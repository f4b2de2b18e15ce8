"""The client libraries, imported when a backend is chosen; a missing one is a line saying what to install."""

from __future__ import annotations

import importlib
from types import ModuleType

from kvstrata.errors import StoreUnavailable
from kvstrata.memory.native import load_ibverbs

_MODULES = {"mooncake": "mooncake.store", "memcache": "memcache_hybrid"}
_EXTRAS = {"mooncake": "kvstrata[mooncake]", "memcache": "kvstrata[ascend]"}


def library(backend: str) -> ModuleType:
    """The module behind a backend; raises `StoreUnavailable`."""
    name = _MODULES[backend]
    if backend == "mooncake":
        load_ibverbs()
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise StoreUnavailable(
            f"backend={backend!r} needs the module {error.name!r}, which is not installed; "
            f"pip install '{_EXTRAS[backend]}'"
        ) from error
    except (ImportError, OSError) as error:  # it is there, but something of the system it links to is not
        hint = "; on Debian: apt-get install libibverbs1" if "libibverbs" in str(error) else ""
        raise StoreUnavailable(f"backend={backend!r}: {name} does not load here: {error}{hint}") from error
    except Exception as error:  # a package that is half there raises whatever it likes
        raise StoreUnavailable(
            f"backend={backend!r}: {name} does not load here: {type(error).__name__}: {error}; "
            f"reinstall it: pip install '{_EXTRAS[backend]}'"
        ) from error
