"""libibverbs, which Mooncake's wheels need and do not bring, from a folder beside this Python."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from pathlib import Path

NATIVE_FOLDER = Path(sys.prefix) / "lib" / "kvstrata-native"
"""`make setup` unpacks the system's packages here where they are not installed and nobody is root."""
IBVERBS = ("libnl-3.so.200", "libnl-route-3.so.200", "libibverbs.so.1")
"""In the order in which they need each other."""


def load_ibverbs(folder: Path = NATIVE_FOLDER) -> None:
    """Load it from the folder, unless the system has it or the folder has not. Never raises.

    A library that is loaded later finds it by its name. Programs that are started need the folder in
    LD_LIBRARY_PATH instead.
    """
    with contextlib.suppress(OSError):
        ctypes.CDLL(IBVERBS[-1])
        return
    with contextlib.suppress(OSError):
        for name in IBVERBS:
            ctypes.CDLL(str(folder / name), mode=ctypes.RTLD_GLOBAL)


def library_path(folder: Path = NATIVE_FOLDER) -> dict[str, str]:
    """Environment in which a program that is started finds it; empty without the folder."""
    if not folder.is_dir():
        return {}
    given = os.environ.get("LD_LIBRARY_PATH")
    return {"LD_LIBRARY_PATH": os.pathsep.join([given, str(folder)] if given else [str(folder)])}
