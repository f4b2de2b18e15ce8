"""Who holds something in the store, and whether it still lives.

A process is named by its id, its start time (ids are reused) and its pid namespace (ids mean nothing
in another container that shares the same /dev/shm).
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

_HOLDER = struct.Struct("<QQQ")
HOLDER_BYTES = _HOLDER.size


@dataclass(frozen=True, kw_only=True, slots=True)
class Holder:
    """A process, so that no later process is taken for it before the machine restarts."""

    pid: int
    start_ticks: int
    pid_namespace: int

    def pack(self) -> bytes:
        return _HOLDER.pack(self.pid, self.start_ticks, self.pid_namespace)

    @classmethod
    def unpack(cls, data: bytes) -> Holder:
        pid, start_ticks, pid_namespace = _HOLDER.unpack(data)
        return cls(pid=pid, start_ticks=start_ticks, pid_namespace=pid_namespace)


def current_holder() -> Holder:
    """The calling process."""
    found = _read_stat(os.getpid())
    assert found is not None, "a running process has an entry in /proc"
    return Holder(pid=os.getpid(), start_ticks=found[1], pid_namespace=_pid_namespace())


def may_be_alive(holder: Holder) -> bool:
    """False only when the process can no longer touch memory.

    One of another pid namespace cannot be looked up from here and counts as alive: its memory stays
    quarantined rather than being handed to a second writer (M3).
    """
    if holder.pid_namespace != _pid_namespace():
        return True
    found = _read_stat(holder.pid)
    if found is None or found[1] != holder.start_ticks:
        return False
    if found[0] not in "ZXx":
        return True
    # A zombie's main thread has ended, but other threads may still be inside a copy until the kill
    # reaches them; the process is over when only the main thread's entry is left.
    try:
        return len(os.listdir(f"/proc/{holder.pid}/task")) > 1
    except OSError:
        return False


class Liveness:
    """`may_be_alive`, asked once per holder: for the length of one transaction."""

    def __init__(self, probe: Callable[[Holder], bool] = may_be_alive) -> None:
        self._probe = probe
        self._known: dict[Holder, bool] = {}

    def __call__(self, holder: Holder) -> bool:
        if holder not in self._known:
            self._known[holder] = self._probe(holder)
        return self._known[holder]


def boot_id() -> str:
    """Changes when the machine restarts: after that neither processes nor unsynced pages are left."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _pid_namespace() -> int:
    return os.stat("/proc/self/ns/pid").st_ino


def _read_stat(pid: int) -> tuple[str, int] | None:
    """(state, start time in clock ticks since boot), None without such a process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The second field is the command in brackets and may itself hold spaces and brackets.
    fields = text[text.rindex(")") + 2 :].split()
    return fields[0], int(fields[19])
