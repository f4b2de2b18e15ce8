"""For tests: a connection that can be cut, between a producer and the consumer it speaks to."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Sequence
from types import TracebackType
from typing import Any

CHUNK_BYTES = 1 << 16


class Wire:
    """Listens on a port of this host and passes on what comes, to `target` and back."""

    def __init__(self, target: Sequence[Any]) -> None:
        """`target` is host and port."""
        self.connections = 0
        self._target = (str(target[0]), int(target[1]))
        self._open: list[socket.socket] = []
        self._lock = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = list(self._listener.getsockname())
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def __enter__(self) -> Wire:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def cut(self) -> None:
        """Break every connection; new ones are accepted."""
        with self._lock:
            cut, self._open = self._open, []
        for end in cut:
            _close(end)

    def close(self) -> None:
        """Break every connection and accept no more; harmless to repeat."""
        _close(self._listener)
        self.cut()
        for thread in self._threads:
            thread.join(10.0)

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
                far = socket.create_connection(self._target)
            except OSError:
                return
            with self._lock:
                self.connections += 1
                self._open += [near, far]
            for source, sink in ((near, far), (far, near)):
                pump = threading.Thread(target=_pump, args=(source, sink), daemon=True)
                self._threads.append(pump)
                pump.start()


def _pump(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(CHUNK_BYTES):
            sink.sendall(data)
    _close(source)
    _close(sink)


def _close(end: socket.socket) -> None:
    # Closing alone does not wake a thread that waits in it.
    with contextlib.suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)
    end.close()
