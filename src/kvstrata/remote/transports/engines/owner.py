"""The producer's memory served by a process of its own, so that a library's crash ends no engine.

A library that finds its network in a state it did not expect may abort the whole process: UCX does when it
answers a reader that has given up. The child maps the same memory, runs the library, ends with its parent.
"""

from __future__ import annotations

import base64
import contextlib
import json
import logging
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import IO, Any

from kvstrata.errors import ConfigurationError, DeadlineExceeded
from kvstrata.memory.region import HostRegion
from kvstrata.remote.transports.engines.base import EngineLibrary

logger = logging.getLogger(__name__)

START_S = 60.0
"""A library may look at every network device first."""
CLOSE_S = 5.0
_MODULE = "kvstrata.remote.transports.engines.serve"


class OwnerProcess:
    """Serves `regions` with a library. Any thread may call."""

    def __init__(self, library: EngineLibrary, regions: Sequence[HostRegion], *, host: str) -> None:
        """Raises ConfigurationError if the library refuses, DeadlineExceeded if it does not answer."""
        self._library = library.name
        self._lock = threading.Lock()
        self._closing = False
        self._told = 0
        descriptors = [region.fileno() for region in regions]
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", _MODULE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=descriptors,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        )
        question = {
            "library": library.name,
            "options": dict(library.options),
            "host": host,
            "regions": [[fd, region.size_bytes] for fd, region in zip(descriptors, regions, strict=True)],
        }
        try:
            answer = self._ask(question)
        except BaseException:
            self._give_up_start()
            raise
        if "error" in answer:
            self._give_up_start()
            raise ConfigurationError(
                f"transfer_backend={library.name!r} cannot serve here: {answer['error']}"
            )
        self.peer = base64.b64decode(answer["peer"])
        self.addresses: tuple[int, ...] = tuple(answer["addresses"])
        self._watcher = threading.Thread(
            target=self._watch, name=f"kvstrata-{library.name}-owner", daemon=True
        )
        self._watcher.start()

    def _give_up_start(self) -> None:
        assert self._process.stdout is not None
        self._end()
        self._process.stdout.close()

    def told(self) -> int:
        """How many reads the library was notified of, as far as it has said so; never waits."""
        return self._told

    def close(self) -> None:
        """End the process. Harmless to repeat."""
        with self._lock:
            if self._closing:
                return
            self._closing = True
        self._end()
        self._watcher.join(CLOSE_S)

    def _watch(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout:
            for line in self._process.stdout:
                self._told = int(line)
        code = self._process.wait()
        if not self._closing:
            logger.error(
                "the process that serves reads over %s ended with code %s: they fail until this engine is "
                "started again",
                self._library,
                code,
            )

    def _ask(self, question: object) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        line = b""
        with contextlib.suppress(BrokenPipeError):  # it has ended: nothing will be read
            self._process.stdin.write(json.dumps(question).encode() + b"\n")
            self._process.stdin.flush()
            line = _read_line(self._process.stdout, START_S, f"the start of the {self._library} process")
        if not line.endswith(b"\n"):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(CLOSE_S)
            raise ConfigurationError(
                f"transfer_backend={self._library!r}: its process ended with code "
                f"{self._process.returncode}; its last words are in this process's error output"
            )
        return json.loads(line)

    def _end(self) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # what could not be written
            self._process.stdin.close()
        try:
            self._process.wait(CLOSE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(CLOSE_S)


def _read_line(pipe: IO[bytes], deadline_s: float, wait: str) -> bytes:
    give_up_s = time.monotonic() + deadline_s
    poll = select.poll()
    poll.register(pipe, select.POLLIN)
    line = b""
    while not line.endswith(b"\n"):
        left_s = give_up_s - time.monotonic()
        if left_s <= 0:
            raise DeadlineExceeded(wait, deadline_s)
        if poll.poll(left_s * 1000):
            piece = os.read(pipe.fileno(), 1 << 16)
            if not piece:
                return line
            line += piece
    return line
