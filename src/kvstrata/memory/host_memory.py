"""How many bytes of host memory this process may still take."""

from __future__ import annotations

from pathlib import Path

import psutil


def available_host_bytes(
    *, proc_root: Path = Path("/proc"), cgroup_root: Path = Path("/sys/fs/cgroup")
) -> int:
    """The smaller of the machine's available memory and the room left in each enclosing memory control group.

    An estimate at one moment; nothing is reserved.
    """
    rooms = [int(psutil.virtual_memory().available)]
    for line in _lines(proc_root / "self" / "cgroup"):
        hierarchy, controllers, path = line.split(":", 2)
        if hierarchy == "0":
            rooms += _rooms(cgroup_root, path, limit="memory.max", used="memory.current")
        elif "memory" in controllers.split(","):
            names = {"limit": "memory.limit_in_bytes", "used": "memory.usage_in_bytes"}
            rooms += _rooms(cgroup_root / "memory", path, **names)
    return max(0, min(rooms))


def _rooms(root: Path, path: str, *, limit: str, used: str) -> list[int]:
    group = root / path.lstrip("/")
    rooms = []
    for directory in (group, *group.parents):
        maximum, current = _lines(directory / limit), _lines(directory / used)
        if maximum and current and maximum[0] != "max":
            # Clean page cache counts as used but goes first.
            cache = sum(int(line.split()[1]) for line in _lines(directory / "memory.stat") if _is_cache(line))
            rooms.append(int(maximum[0]) - int(current[0]) + cache)
        if directory == root:
            break
    return rooms


def _is_cache(line: str) -> bool:
    return line.split(" ", 1)[0] == "inactive_file"


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
