"""The producer's side of `tcp`: a thread that accepts, and one for each reader."""

from __future__ import annotations

import contextlib
import logging
import secrets
import socket
import threading
import time
from collections.abc import Sequence

import numpy as np

from kvstrata.errors import ConfigurationError, DeadlineExceeded, TransferFailed
from kvstrata.memory.region import HostRegion
from kvstrata.remote.holds import HoldTable
from kvstrata.remote.transports.base import TransportStatistics
from kvstrata.remote.transports.channel import Channel, PeerGone
from kvstrata.remote.transports.checks import Counts, describe_outside
from kvstrata.remote.transports.loops import count_outside, prepare
from kvstrata.remote.transports.tcp_wire import (
    MAX_REQUEST_BYTES,
    BrokenFrame,
    Kind,
    Reply,
    Request,
    accept_reader,
    pack_reply,
    receive_request,
)

logger = logging.getLogger(__name__)

MAX_CONNECTIONS = 64
HANDSHAKE_S = 5.0
MAX_ANSWER_S = 120.0
"""A reader may ask for less."""
IDLE_S = 600.0
"""A reader that asks nothing for so long is let go; it connects again when it needs to."""
CLOSE_S = 5.0


class TcpServer:
    """Answers readers until it is closed. Its regions stay mapped until then, whoever frees them."""

    def __init__(
        self,
        regions: Sequence[HostRegion],
        holds: HoldTable,
        *,
        host: str,
        secret: bytes,
        max_connections: int = MAX_CONNECTIONS,
        handshake_s: float = HANDSHAKE_S,
    ) -> None:
        prepare()
        self.export_id = secrets.token_bytes(16)
        self.region_bytes = np.array([region.size_bytes for region in regions], dtype=np.int64)
        self._tensors = [region.tensor() for region in regions]
        self._addresses = np.array([tensor.data_ptr() for tensor in self._tensors], dtype=np.int64)
        self._holds = holds
        self._secret = secret
        self._max_connections = max_connections
        self._handshake_s = handshake_s
        self._counts = Counts()
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._connections: dict[Channel, threading.Thread] = {}
        self._ending: list[threading.Thread] = []  # at the very end of what they do
        self._listener = _listen(host)
        self.port: int = self._listener.getsockname()[1]
        self._acceptor = threading.Thread(target=self._accept, name="kvstrata-tcp-accept", daemon=True)
        self._acceptor.start()

    def statistics(self) -> TransportStatistics:
        return self._counts.statistics()

    def check_integrity(self) -> None:
        """Assert that the server serves until it is closed, and that what it counts is there."""
        assert self._closing.is_set() or self._acceptor.is_alive(), "the accepting thread is gone"
        with self._lock:
            assert len(self._connections) <= self._max_connections, len(self._connections)
            for thread in self._connections.values():
                assert thread.is_alive(), f"{thread.name} left its connection behind"

    def close(self) -> None:
        """End every connection and thread; raises DeadlineExceeded if one does not end."""
        self._closing.set()
        with contextlib.suppress(OSError):  # closed already
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the accepting thread
        give_up_s = time.monotonic() + CLOSE_S
        self._acceptor.join(CLOSE_S)
        self._listener.close()
        with self._lock:
            for channel in self._connections:
                channel.shutdown()
            threads = [self._acceptor, *self._connections.values(), *self._ending]
        for thread in threads:
            thread.join(max(0.0, give_up_s - time.monotonic()))
        late = [thread.name for thread in threads if thread.is_alive()]
        if late:
            raise DeadlineExceeded(f"closing the tcp export, threads {late}", CLOSE_S)
        self._tensors = []

    def _accept(self) -> None:
        while not self._closing.is_set():
            try:
                sock, _ = self._listener.accept()
            except OSError as error:
                # Out of descriptors, or shut down; the wait keeps the first from spinning.
                if not self._closing.wait(0.05):
                    logger.warning("tcp export: cannot accept a reader: %s", error)
                continue
            self._start(sock)

    def _start(self, sock: socket.socket) -> None:
        channel = Channel(sock)
        thread = threading.Thread(
            target=self._serve, args=(channel,), name=f"kvstrata-tcp-{sock.fileno()}", daemon=True
        )
        with self._lock:
            self._ending = [one for one in self._ending if one.is_alive()]
            is_full = len(self._connections) >= self._max_connections
            if not is_full and not self._closing.is_set():
                self._connections[channel] = thread
                thread.start()
                return
        if is_full:
            self._drop(f"{self._max_connections} readers are connected already")
        channel.close()

    def _serve(self, channel: Channel) -> None:
        try:
            give_up_s = time.monotonic() + self._handshake_s
            try:
                accept_reader(channel, export_id=self.export_id, secret=self._secret, give_up_s=give_up_s)
            except (TransferFailed, DeadlineExceeded) as error:
                if not self._closing.is_set():
                    self._drop(str(error))
                return
            while channel.wait_readable(IDLE_S) and not self._closing.is_set():
                give_up_s = time.monotonic() + self._handshake_s
                self._answer(channel, receive_request(channel, give_up_s=give_up_s))
        except PeerGone as error:
            logger.debug("tcp export: %s", error)  # a reader that is done, or died
        except BrokenFrame as error:
            self._drop(str(error))
        except (TransferFailed, DeadlineExceeded) as error:
            logger.info("tcp export: a reader is let go: %s", error)
        except Exception:
            logger.exception("tcp export: a reader's thread failed")
        finally:
            channel.close()
            with self._lock:
                self._ending.append(self._connections.pop(channel))

    def _answer(self, channel: Channel, request: Request) -> None:
        give_up_s = time.monotonic() + min(request.timeout_s, MAX_ANSWER_S)
        wait = "tcp answer to a reader"
        region, offset, size = request.ranges
        outside = int(count_outside(region, offset, size, self.region_bytes))
        if outside:
            self._counts.add(refused_ranges=outside, failed_reads=1)
            reason = f"{outside} of {len(size)} ranges are "
            reason += describe_outside(region, offset, size, self.region_bytes)
            channel.send(pack_reply(Reply.OUTSIDE, reason), give_up_s=give_up_s, wait=wait)
            return
        total_bytes = int(size.sum())
        if total_bytes > MAX_REQUEST_BYTES:
            raise BrokenFrame(f"a reader asked for {total_bytes} bytes at once")
        if not self._holds.is_valid(request.hold):
            self._counts.add(failed_reads=1)
            reason = f"the producer ended {request.hold}; its memory may be reused"
            channel.send(pack_reply(Reply.HOLD_ENDED, reason), give_up_s=give_up_s, wait=wait)
            return
        channel.send(pack_reply(Reply.OK), give_up_s=give_up_s, wait=wait)
        if request.kind is Kind.CHECK:
            self._counts.add(reads=1)
            return
        channel.send_ranges(self._addresses[region] + offset, size, give_up_s=give_up_s, wait=wait)
        self._counts.add(read_bytes=total_bytes)

    def _drop(self, reason: str) -> None:
        # Once, not every time: a stranger must not be able to fill the log.
        log = logger.debug if self.statistics().dropped_connections else logger.warning
        self._counts.add(dropped_connections=1)
        log("tcp export: a connection was dropped: %s; more are only counted", reason)


def _listen(host: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    if host in ("", "0.0.0.0", "::"):
        raise ConfigurationError(
            f"host {host!r} is no address that a reader could be told; name one interface"
        )
    try:
        return socket.create_server((host, 0), family=family, backlog=MAX_CONNECTIONS)
    except OSError as error:
        raise ConfigurationError(f"cannot listen on host {host!r}: {error}") from error
