"""The producer's memory served by a process of its own, so that a library's crash ends no engine.

A library that finds its network in a state it did not expect may abort the whole process: UCX does when it
answers a reader that has given up. The child maps the same memory, runs the library, ends with its parent.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from io import BufferedReader
from typing import IO

import msgspec

from kvstrata.errors import ConfigurationError, DeadlineExceeded
from kvstrata.remote.transports.engines.base import EngineLibrary

START_S = 60.0
"""A library may look at every network device first."""
CLOSE_S = 5.0
MAX_LINE_BYTES = 1 << 20
"""What the process says at once is shorter."""
_MODULE = "kvstrata.remote.transports.engines.serve"


class _Answer(msgspec.Struct, frozen=True):
    """The process's first line: where it serves, or why it cannot."""

    error: str = ""
    peer: bytes = b""
    addresses: tuple[int, ...] = ()


class OwnerProcess:
    """Serves memory with a library, from `start` to its end. Any thread may close it; one calls the rest."""

    def __init__(self, library: EngineLibrary, memory: Sequence[tuple[int, int]], *, host: str) -> None:
        """Start a process; `memory` is a descriptor and a size in bytes each. Raises OSError."""
        self._library = library
        self._memory = memory
        self._host = host
        self._lock = threading.Lock()
        self._is_closing = False
        self._told = 0
        self.peer = b""
        self.addresses: tuple[int, ...] = ()
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", _MODULE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=[fd for fd, _ in memory],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        )

    def start(self) -> None:
        """Return when it serves; then `peer` and `addresses`, one a piece of memory, say where.

        Raises ConfigurationError if the library refuses or the process ends, DeadlineExceeded if it does not
        answer. It has ended then.
        """
        try:
            answer = self._ask()
        except BaseException:
            self.discard()
            raise
        if answer.error:
            self.discard()
            raise ConfigurationError(
                f"transfer_backend={self._library.name!r} cannot serve here: {answer.error}"
            )
        self.peer, self.addresses = answer.peer, answer.addresses

    def told(self) -> int:
        """How many reads the library was notified of, as far as it has said so; never waits."""
        return self._told

    def watch(self) -> str:
        """Return how it ended, when it has. Call it once, after `start`."""
        said = ""
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            while line := lines.readline(MAX_LINE_BYTES):
                try:
                    self._told = int(line)
                except ValueError:
                    # Something else writes to its pipe: nothing that it says can be believed any more.
                    said = f", after it had said {line[:40]!r}"
                    self._process.kill()
                    break
        return f"code {self._process.wait()}{said}"

    def close(self) -> None:
        """End the process. Harmless to repeat."""
        with self._lock:
            if self._is_closing:
                return
            self._is_closing = True
        self._end()

    def discard(self) -> None:
        """End it, where `watch` will not be called."""
        self.close()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def _ask(self) -> _Answer:
        assert self._process.stdin is not None
        assert isinstance(self._process.stdout, BufferedReader)
        question = {
            "library": self._library.name,
            "options": dict(self._library.options),
            "host": self._host,
            "regions": [list(piece) for piece in self._memory],
        }
        give_up_s = time.monotonic() + START_S
        wait = f"the start of the {self._library.name} process"
        line = b""
        with contextlib.suppress(BrokenPipeError):  # it has ended: nothing will be read
            _write(self._process.stdin, json.dumps(question).encode() + b"\n", give_up_s, wait)
            line = _read_line(self._process.stdout, give_up_s, wait)
        if not line.endswith(b"\n") and len(line) <= MAX_LINE_BYTES:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(CLOSE_S)
            raise ConfigurationError(
                f"transfer_backend={self._library.name!r}: its process ended with code "
                f"{self._process.returncode}; its last words are in this process's error output"
            )
        try:
            answer = msgspec.json.decode(line, type=_Answer)
            if not answer.error and len(answer.addresses) != len(self._memory):
                raise ValueError(f"{len(answer.addresses)} addresses of {len(self._memory)} regions")
        except (msgspec.MsgspecError, ValueError) as error:
            raise ConfigurationError(
                f"transfer_backend={self._library.name!r}: its process answered {line[:80]!r}, which is no "
                f"answer ({error}); does something in its environment print?"
            ) from error
        return answer

    def _end(self) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError, ValueError):  # what could not be written; closed already
            self._process.stdin.close()
        try:
            self._process.wait(CLOSE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(CLOSE_S)


def _write(pipe: IO[bytes], data: bytes, give_up_s: float, wait: str) -> None:
    """Write all of it, though the process may be stopped and the pipe full."""
    os.set_blocking(pipe.fileno(), False)
    poll = select.poll()
    poll.register(pipe, select.POLLOUT)
    rest = memoryview(data)
    while rest:
        left_s = _left_s(give_up_s, wait)
        if poll.poll(left_s * 1000):
            with contextlib.suppress(BlockingIOError):
                rest = rest[os.write(pipe.fileno(), rest) :]


def _read_line(pipe: BufferedReader, give_up_s: float, wait: str) -> bytes:
    """Read one line; what the process says after it stays for `OwnerProcess.watch`."""
    poll = select.poll()
    poll.register(pipe, select.POLLIN)
    line = b""
    while not line.endswith(b"\n") and len(line) <= MAX_LINE_BYTES:
        left_s = _left_s(give_up_s, wait)
        if poll.poll(left_s * 1000):
            there = pipe.peek()
            if not there:
                return line
            line += pipe.read(there.find(b"\n") + 1 or len(there))
    return line


def _left_s(give_up_s: float, wait: str) -> float:
    left_s = give_up_s - time.monotonic()
    if left_s <= 0:
        raise DeadlineExceeded(wait, START_S)
    return left_s
