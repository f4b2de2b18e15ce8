"""Processes that begin with vLLM imported, for engines of the tests.

An import of vLLM costs each process more than all else that a small engine does. Here one server per run of
the tests imports it, starts nothing, and is forked for each process; what vLLM itself starts from such a
process, its ranks and engine cores, is forked from the same server. What an import reads from the environment
is the server's: a test that changes that starts a process of its own (`engine_process`). Engines that users
start, through `vllm serve` and `kvstrata serve-pd`, are started by their commands in the tests, too.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import os
import signal
from collections.abc import Callable, Mapping
from multiprocessing import forkserver, resource_tracker
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any

IMPORTED = ["vllm", "vllm.v1.engine.async_llm", "vllm.v1.worker.cpu_worker", "kvstrata.vllm.worker"]
_STARTERS = ("vllm.v1.engine.utils", "vllm.v1.executor.multiproc_executor")
_family = 0  # process group that this process and those it starts are in; 0: none of ours
_log: Path | None = None  # takes what they print


class WarmProcess(ForkServerProcess):
    """As `multiprocessing.Process`; the processes that it starts are its family."""

    changes: Mapping[str, str] = {}  # to the starter's environment
    log: Path | None = None  # takes what the family prints; None: where the starter's goes

    def start(self) -> None:
        self._environment = {**os.environ, **self.changes}
        self._of_family = _family
        self.log = self.log or _log
        super().start()

    def run(self) -> None:
        global _family, _log
        os.environ.clear()
        os.environ.update(self._environment)
        _log = self.log
        if _log is not None:
            output = os.open(_log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            os.dup2(output, 1)
            os.dup2(output, 2)
        with contextlib.suppress(PermissionError, ProcessLookupError):  # the others have ended
            os.setpgid(0, self._of_family)
        _family = os.getpgrp()
        _go_on_as_the_server()
        try:
            super().run()
        finally:
            atexit._run_exitfuncs()  # a fork server's processes end without

    def kill_family(self) -> None:
        """Kill this process and all that were started from it."""
        assert self.pid is not None
        with contextlib.suppress(ProcessLookupError):  # it has not come as far as to found the group
            os.killpg(self.pid, signal.SIGKILL)
        self.kill()
        self.join(30)


class WarmContext(ForkServerContext):
    """Starts the processes; a `multiprocessing` context."""

    Process = WarmProcess


CONTEXT = WarmContext()
CONTEXT.set_forkserver_preload(IMPORTED)


def start(target: Callable[..., None], *arguments: Any, changes: Mapping[str, str], log: Path) -> WarmProcess:
    """Run `target` in a new process, with these changes to this one's environment."""
    process = WarmProcess(target=target, args=arguments)
    process.changes, process.log = changes, log
    process.start()
    return process


def _go_on_as_the_server() -> None:
    """Start others by the same server; let what an import has taken from the environment be this one's."""
    import torch
    import vllm.logger

    # Python would start another server here, though it knows the address of the one that it has.
    forkserver._forkserver.ensure_running = resource_tracker.ensure_running  # type: ignore[method-assign]
    for name in _STARTERS:
        importlib.import_module(name).get_mp_context = lambda: CONTEXT  # type: ignore[attr-defined]
    vllm.logger._configure_vllm_root_logger()
    if threads := os.environ.get("OMP_NUM_THREADS"):
        torch.set_num_threads(int(threads))
