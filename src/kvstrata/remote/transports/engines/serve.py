"""What runs in the process of `engines.owner`: maps the memory, serves it, ends with its parent.

Takes a line of JSON and answers with one, then says how many reads it was told of, whenever that changes.
What a library prints goes to the error output.
"""

from __future__ import annotations

import base64
import contextlib
import json
import mmap
import os
import select
import signal
import sys
from typing import Any

import numpy as np

from kvstrata.remote.transports.base import Destination
from kvstrata.remote.transports.engines.base import RDMA_DEVICES, Owner
from kvstrata.remote.transports.engines.libraries import library_for

LOOK_S = 0.2
"""How soon the end of a parent is noticed whose pipe somebody else keeps open."""


def main() -> None:
    """Serve until the parent closes the pipe or is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # meant for the engine, which ends this process
    answers = os.dup(1)
    os.dup2(2, 1)  # libraries print
    lines = _Lines()
    question = json.loads(lines.first())
    try:
        mappings = [_map(fd, size) for fd, size in question["regions"]]
        memory = [Destination(address=address, size_bytes=size) for _, address, size in mappings]
        library = library_for(question["library"], **question["options"])
        owner: Owner = library.serve(memory, host=question["host"])
    except Exception as error:
        _answer(answers, {"error": f"{type(error).__name__}: {error}"})
        return
    peer = base64.b64encode(owner.peer).decode()
    _answer(answers, {"peer": peer, "addresses": [address for _, address, _ in mappings]})
    told = 0
    while lines.goes_on():
        # Also since notifications that nobody takes would pile up.
        if owner.told() != told:
            told = owner.told()
            _answer(answers, told)
    owner.close()
    _answer(answers, owner.told())
    os._exit(0)  # what a library does at the end of an interpreter is of no use here


class _Lines:
    """The parent's words, and whether it is there."""

    def __init__(self) -> None:
        self._parent = os.getppid()
        self._poll = select.poll()
        self._poll.register(0, select.POLLIN)

    def first(self) -> bytes:
        """The only line that it says."""
        line = b""
        while not line.endswith(b"\n") and self.goes_on():
            if self._poll.poll(0):
                line += os.read(0, 1 << 16)
        return line

    def goes_on(self) -> bool:
        """Wait a moment, shorter if there is news; False once the pipe is closed or the parent is gone."""
        for _, event in self._poll.poll(LOOK_S * 1000):
            if event & select.POLLHUP and not event & select.POLLIN:
                return False
        return os.getppid() == self._parent


def _map(fd: int, size_bytes: int) -> tuple[Any, int, int]:
    """Map for reading only, so that no stranger's write gets through, unless an RDMA card has to pin it."""
    has_rdma = os.path.isdir(RDMA_DEVICES) and bool(os.listdir(RDMA_DEVICES))
    access = mmap.PROT_READ | (mmap.PROT_WRITE if has_rdma else 0)
    mapping = mmap.mmap(fd, size_bytes, mmap.MAP_SHARED, access)
    return mapping, np.frombuffer(mapping, dtype=np.uint8).ctypes.data, size_bytes


def _answer(fd: int, answer: object) -> None:
    with contextlib.suppress(BrokenPipeError):  # the parent is gone
        os.write(fd, json.dumps(answer).encode() + b"\n")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        sys.exit("this is started by kvstrata itself")
    main()
