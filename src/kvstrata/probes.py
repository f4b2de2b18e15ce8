"""What optional libraries are there, and whether they can be used on this machine.

One row a library in `PROBES`. Each is tried in a process of its own: a native library that crashes, prints or
hangs while it is loaded is a finding then, not the end of the doctor.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from kvstrata.bench.machine import package_version

PROBE_S = 60.0
_MODULE = "kvstrata.probes"


@dataclass(frozen=True, kw_only=True)
class LibraryProbe:
    """How one library is looked at."""

    name: str  # for people, unique
    feature: str  # what of kvstrata needs it
    distributions: tuple[str, ...]  # that it comes in, any one of them
    unusable: Callable[[], str | None]  # imports it; None, or in one line why not, and what mends it


@dataclass(frozen=True, kw_only=True)
class LibraryFinding:
    """What was found. `why` is None if it can be used here; it may end in "Fix: ..."."""

    name: str
    feature: str
    version: str | None
    why: str | None


def _transport(name: str) -> str | None:
    from kvstrata.remote.transports.registry import transport_for

    return transport_for(name).usable()


def _store(backend: str) -> str | None:
    from kvstrata.errors import StoreUnavailable
    from kvstrata.store.pool.libraries import library

    try:
        library(backend)
    except StoreUnavailable as error:
        return str(error)
    return None


PROBES: tuple[LibraryProbe, ...] = (
    LibraryProbe(
        name="NIXL",
        feature="prefill and decode over nixl",
        distributions=("nixl-cu12", "nixl-cu13"),
        unusable=partial(_transport, "nixl"),
    ),
    LibraryProbe(
        name="Mooncake TransferEngine",
        feature="prefill and decode over mooncake",
        distributions=("mooncake-transfer-engine-non-cuda", "mooncake-transfer-engine"),
        unusable=partial(_transport, "mooncake"),
    ),
    LibraryProbe(
        name="MemFabric TransferEngine",
        feature="prefill and decode over memfabric",
        distributions=("memfabric_hybrid",),
        unusable=partial(_transport, "memfabric"),
    ),
    LibraryProbe(
        name="Mooncake Store",
        feature="store: mooncake",
        distributions=("mooncake-transfer-engine-non-cuda", "mooncake-transfer-engine"),
        unusable=partial(_store, "mooncake"),
    ),
    LibraryProbe(
        name="MemCache",
        feature="store: memcache",
        distributions=("memcache_hybrid",),
        unusable=partial(_store, "memcache"),
    ),
)


def probe_libraries(probes: Sequence[LibraryProbe] = PROBES) -> tuple[LibraryFinding, ...]:
    """Try each; takes a second or two a library, at most PROBE_S."""
    return tuple(
        LibraryFinding(
            name=probe.name,
            feature=probe.feature,
            version=next((v for name in probe.distributions if (v := package_version(name))), None),
            why=_try_apart(probe.name),
        )
        for probe in probes
    )


def _try_apart(name: str) -> str | None:
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-m", _MODULE, name],
            capture_output=True,
            text=True,
            errors="replace",  # libraries print what they like
            timeout=PROBE_S,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        )
    except subprocess.TimeoutExpired:
        return f"it had not loaded after {PROBE_S:g} s"
    try:
        why: str | None = json.loads(done.stdout.splitlines()[-1])["why"]
    except (IndexError, ValueError, KeyError, TypeError):
        last = (done.stderr.strip().splitlines() or ["nothing was said"])[-1]
        return f"loading it ended the process with code {done.returncode}: {last}"
    return why


def _main(name: str) -> None:
    (probe,) = [probe for probe in PROBES if probe.name == name]
    try:
        why = probe.unusable()
    except Exception as error:  # whatever it is, it is the finding
        why = f"{type(error).__name__}: {error}"
    print("\n" + json.dumps({"why": why}), flush=True)  # on a line of its own, whatever was printed before
    os._exit(0)  # what a library does at the end of an interpreter is not asked


if __name__ == "__main__":
    _main(sys.argv[1])
