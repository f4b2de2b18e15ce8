"""A connected socket on which every wait ends: at a deadline, at the peer's end, or at `shutdown`."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable

from kvstrata.errors import DeadlineExceeded, TransferFailed
from kvstrata.remote.transports.base import Int64Array
from kvstrata.remote.transports.loops import new_progress, receive, send

WAKE_S = 0.2
"""No call to the system lasts longer without progress; deadlines are met to within this."""
_AGAIN = frozenset({errno.EAGAIN, errno.EWOULDBLOCK, errno.EINTR})


class PeerGone(TransferFailed):
    """The other side ended the connection, or the network did."""


class Channel:
    """Owns `sock`. One thread sends and receives; `shutdown` may come from any.

    `give_up_s` is a time of `time.monotonic`, `wait` names what is waited for. All but `close` raise PeerGone
    or DeadlineExceeded, after which the stream is of no more use.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._lock = threading.Lock()
        self._is_open = True
        sock.settimeout(None)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        seconds = int(WAKE_S)
        timeval = struct.pack("@ll", seconds, int((WAKE_S - seconds) * 1e6))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeval)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeval)

    def send(self, data: bytes, *, give_up_s: float, wait: str) -> None:
        """Send all of `data`."""
        rest = memoryview(data)
        while rest:
            try:
                rest = rest[self._sock.send(rest, socket.MSG_NOSIGNAL) :]
            except BlockingIOError:
                pass
            except OSError as error:
                raise _gone(wait, error) from error
            if rest:
                _check_time(give_up_s, wait)

    def receive(self, size_bytes: int, *, give_up_s: float, wait: str) -> bytes:
        """Receive exactly that many bytes; the caller has bounded them."""
        data = bytearray(size_bytes)
        rest = memoryview(data)
        while rest:
            try:
                count = self._sock.recv_into(rest, flags=socket.MSG_WAITALL)
            except BlockingIOError:
                count = -1
            except OSError as error:
                raise _gone(wait, error) from error
            if count == 0:
                raise PeerGone(f"{wait}: the other side ended the connection")
            rest = rest[max(count, 0) :]
            if rest:
                _check_time(give_up_s, wait)
        return bytes(data)

    def send_ranges(self, address: Int64Array, size: Int64Array, *, give_up_s: float, wait: str) -> None:
        """Send memory of this process, range after range."""
        self._loop(send, address, size, give_up_s, wait)

    def receive_ranges(self, address: Int64Array, size: Int64Array, *, give_up_s: float, wait: str) -> None:
        """Receive straight into memory of this process, range after range."""
        self._loop(receive, address, size, give_up_s, wait)

    def wait_readable(self, seconds: float) -> bool:
        """Whether there is something to receive, the stream's end included, within that time."""
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        return bool(poll.poll(seconds * 1000))

    def shutdown(self) -> None:
        """Make calls that run and calls to come fail; any thread may ask."""
        with self._lock:
            if self._is_open:
                with contextlib.suppress(OSError):  # not connected (any more)
                    self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Only for the thread that uses the channel: a call under way would go on in another file."""
        with self._lock:
            self._is_open = False
            self._sock.close()

    def _loop(
        self, loop: Callable[..., int], address: Int64Array, size: Int64Array, give_up_s: float, wait: str
    ) -> None:
        progress = new_progress()
        while True:
            result = loop(self._sock.fileno(), address, size, progress, int(give_up_s * 1e9))
            if progress[0] == len(size):
                return
            if result == 0:
                raise PeerGone(f"{wait}: the other side ended the connection")
            if result < 0 and -result not in _AGAIN:
                raise _gone(wait, OSError(-result, os.strerror(-result)))
            _check_time(give_up_s, wait)


def _check_time(give_up_s: float, wait: str) -> None:
    if time.monotonic() >= give_up_s:
        raise DeadlineExceeded(wait)


def _gone(wait: str, error: OSError) -> PeerGone:
    return PeerGone(f"{wait}: the connection is lost ({error.strerror or error})")
