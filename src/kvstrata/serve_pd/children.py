"""One process of the launch: how it is started, watched, ended; what its log says last."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

import httpx
import psutil

from kvstrata.serve_pd.plan import Launch

_TAIL_BYTES = 64 << 10
_KILL_ROUNDS = 5


class Process(Protocol):
    """The part of a process that the supervisor uses; a test has its own."""

    def status(self) -> int | None:
        """Return the exit status, negative for a signal; None while it runs."""

    def end(self, how: signal.Signals) -> None:
        """Send a signal to the process and all its children; no-op when they are gone."""

    def is_gone(self) -> bool:
        """Whether neither the process nor any child of it is left."""


Start = Callable[[Launch], Process]


class ChildProcess:
    """A process in a group of its own: Ctrl-C at the terminal reaches the launcher, which ends the rest.

    Its output is appended to its log. It also ends when the launcher is killed.
    """

    def __init__(self, launch: Launch) -> None:
        launch.log.parent.mkdir(parents=True, exist_ok=True)
        guard = (sys.executable, "-m", "kvstrata.serve_pd.guarded", str(os.getpid()))
        with launch.log.open("ab") as output:
            self._process = subprocess.Popen(
                [*guard, *launch.argv],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **launch.environment},
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """Process id of the first process of the group."""
        return self._process.pid

    def status(self) -> int | None:
        """Return the exit status, negative for a signal; None while it runs."""
        return self._process.poll()

    def end(self, how: signal.Signals) -> None:
        """Send a signal to the whole group: workers may outlive the process that started them.

        SIGKILL spares Python's resource trackers: they unlink the shared memory that killed workers leave,
        and end by themselves once those are gone.
        """
        if how is not signal.SIGKILL:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, how)
            return
        for _ in range(_KILL_ROUNDS):  # one that was just being started is seen the next time
            doomed = [process for process in self._group() if not _is_tracker(process)]
            for process in doomed:
                with suppress(psutil.Error):
                    process.kill()
            if not doomed:
                break

    def is_gone(self) -> bool:
        """Whether neither the process nor any child of it is left."""
        return self.status() is not None and not self._group()

    def _group(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error, OSError):
                is_ours = os.getpgid(process.pid) == self._process.pid
                if is_ours and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found


def _is_tracker(process: psutil.Process) -> bool:
    try:
        return any("multiprocessing.resource_tracker" in word for word in process.cmdline())
    except psutil.Error:
        return False


def health(url: str, deadline_s: float = 1.0) -> int | None:
    """Return the HTTP status of GET /health; None if there is no answer in time."""
    try:
        return httpx.get(url + "/health", timeout=deadline_s, trust_env=False).status_code
    except httpx.HTTPError:
        return None


def is_up(launch: Launch) -> bool:
    """Whether a process serves. The proxy does once it answers: that engines are there is not its doing."""
    status = health(launch.url)
    return status is not None if launch.role == "proxy" else status == 200


def last_lines(launch: Launch, count: int = 25) -> list[str]:
    """Return the end of a log; empty if there is none."""
    try:
        with launch.log.open("rb") as log:
            log.seek(max(0, launch.log.stat().st_size - _TAIL_BYTES))
            return log.read().decode(errors="replace").splitlines()[-count:]
    except OSError:
        return []
