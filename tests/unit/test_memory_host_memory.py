"""How much host memory is left, inside and outside control groups."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from kvstrata.memory.host_memory import available_host_bytes

MIB = 1 << 20


def write(directory: Path, **files: str) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (directory / name.replace("__", ".")).write_text(text)


@pytest.fixture
def roots(tmp_path: Path) -> tuple[Path, Path]:
    proc, groups = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    groups.mkdir()
    return proc, groups


def available(roots: tuple[Path, Path]) -> int:
    return available_host_bytes(proc_root=roots[0], cgroup_root=roots[1])


def test_without_control_groups_the_machine_decides(roots: tuple[Path, Path]) -> None:
    found = available(roots)
    assert 0 < found <= psutil.virtual_memory().total


def test_a_groups_limit_counts_less_what_is_used_and_not_reclaimable(roots: tuple[Path, Path]) -> None:
    proc, groups = roots
    (proc / "self" / "cgroup").write_text("0::/pod/engine\n")
    write(
        groups / "pod" / "engine",
        memory__max=f"{50 * MIB}\n",
        memory__current=f"{30 * MIB}\n",
        memory__stat=f"anon {20 * MIB}\ninactive_file {5 * MIB}\nactive_file {MIB}\n",
    )
    assert available(roots) == 25 * MIB


def test_the_tightest_enclosing_group_decides(roots: tuple[Path, Path]) -> None:
    proc, groups = roots
    (proc / "self" / "cgroup").write_text("0::/pod/engine\n")
    write(groups / "pod" / "engine", memory__max="max\n", memory__current="0\n")
    write(groups / "pod", memory__max=f"{9 * MIB}\n", memory__current=f"{2 * MIB}\n")
    assert available(roots) == 7 * MIB


def test_a_container_sees_its_group_as_the_root(roots: tuple[Path, Path]) -> None:
    proc, groups = roots
    (proc / "self" / "cgroup").write_text("0::/\n")
    write(groups, memory__max=f"{9 * MIB}\n", memory__current=f"{2 * MIB}\n")
    assert available(roots) == 7 * MIB


def test_first_version_of_control_groups(roots: tuple[Path, Path]) -> None:
    proc, groups = roots
    (proc / "self" / "cgroup").write_text("5:cpu,cpuacct:/x\n4:memory:/pod\n1:name=systemd:/\n")
    write(
        groups / "memory" / "pod",
        memory__limit_in_bytes=f"{8 * MIB}\n",
        memory__usage_in_bytes=f"{3 * MIB}\n",
    )
    assert available(roots) == 5 * MIB


def test_an_overdrawn_group_leaves_nothing(roots: tuple[Path, Path]) -> None:
    proc, groups = roots
    (proc / "self" / "cgroup").write_text("0::/\n")
    write(groups, memory__max=f"{2 * MIB}\n", memory__current=f"{3 * MIB}\n")
    assert available(roots) == 0
