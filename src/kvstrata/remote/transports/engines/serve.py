"""What runs in the process of `engines.owner`: maps the memory, serves it, ends with its parent.

Speaks JSON lines over standard input and output. What a library prints goes to the error output.
"""

from __future__ import annotations

import base64
import json
import mmap
import os
import select
import signal
import sys
from collections.abc import Callable
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
    question = json.loads(lines.take(os.getppid()))
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
    while lines.take(question["parent"], owner.told):
        _answer(answers, owner.told())
    owner.close()
    os._exit(0)  # what a library does at the end of an interpreter is of no use here


class _Lines:
    """Lines of the standard input."""

    def __init__(self) -> None:
        self._rest = b""
        self._poll = select.poll()
        self._poll.register(0, select.POLLIN)

    def take(self, parent: int, meanwhile: Callable[[], object] = lambda: None) -> bytes:
        """The next line, empty when there will be none, or when `parent` is this one's parent no more.

        `meanwhile` is called again and again: notifications that nobody takes would pile up.
        """
        while b"\n" not in self._rest:
            if os.getppid() != parent:
                return b""
            meanwhile()
            if self._poll.poll(LOOK_S * 1000):
                piece = os.read(0, 1 << 16)
                if not piece:
                    return b""
                self._rest += piece
        line, _, self._rest = self._rest.partition(b"\n")
        return line


def _map(fd: int, size_bytes: int) -> tuple[Any, int, int]:
    """Map for reading only, so that no stranger's write gets through, unless an RDMA card has to pin it."""
    has_rdma = os.path.isdir(RDMA_DEVICES) and bool(os.listdir(RDMA_DEVICES))
    access = mmap.PROT_READ | (mmap.PROT_WRITE if has_rdma else 0)
    mapping = mmap.mmap(fd, size_bytes, mmap.MAP_SHARED, access)
    return mapping, np.frombuffer(mapping, dtype=np.uint8).ctypes.data, size_bytes


def _answer(fd: int, answer: object) -> None:
    os.write(fd, json.dumps(answer).encode() + b"\n")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        sys.exit("this is started by kvstrata itself")
    main()
