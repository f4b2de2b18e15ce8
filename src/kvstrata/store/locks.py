"""Locks between processes that the kernel drops when their holder dies, and waits that end."""

from __future__ import annotations

import fcntl
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvstrata.errors import DeadlineExceeded

_SHORTEST_NAP_S = 0.00005
_LONGEST_NAP_S = 0.005


class FileLock:
    """One holder at a time among all threads of all processes that use the file.

    lmdb has a writer lock of its own, but waits for it without end: a stopped process (SIGSTOP, a
    debugger) would hang every engine of the host. Here a wait has a name and a deadline.
    """

    def __init__(self, path: Path) -> None:
        """Open or create the lock file; raises `OSError`."""
        self._path = path
        self._threads = threading.Lock()
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    @contextmanager
    def hold(self, waiting_to: str, timeout_s: float) -> Iterator[None]:
        """Hold the lock; `DeadlineExceeded` when others keep it for `timeout_s`."""
        end_s = time.monotonic() + timeout_s
        if not self._threads.acquire(timeout=timeout_s):
            raise self._late(waiting_to, timeout_s)
        try:
            nap_s = _SHORTEST_NAP_S
            while not try_lock(self._descriptor, exclusive=True):
                if time.monotonic() >= end_s:
                    raise self._late(waiting_to, timeout_s)
                time.sleep(nap_s)
                nap_s = min(2 * nap_s, _LONGEST_NAP_S)
            try:
                yield
            finally:
                fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        finally:
            self._threads.release()

    def close(self) -> None:
        os.close(self._descriptor)

    def _late(self, waiting_to: str, timeout_s: float) -> DeadlineExceeded:
        return DeadlineExceeded(
            f"store lock {self._path}, to {waiting_to} (another process holds it; fix: end any stopped "
            "kvstrata process on this host)",
            timeout_s,
        )


def try_lock(descriptor: int, *, exclusive: bool) -> bool:
    """Lock an open file until it is closed or unlocked; False when somebody else's lock forbids it."""
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
