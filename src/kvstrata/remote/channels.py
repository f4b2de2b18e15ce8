"""The sockets of an endpoint: ZeroMQ ROUTER where it listens, one DEALER a peer where it connects.

Owned by the endpoint's loop thread after construction; nobody else may touch a socket. Messages are frames as
the codec makes them. Nothing here waits except `wait`, and nothing is delivered for certain: what cannot be
sent now is counted and dropped, and the machines repeat what needs an answer.
"""

from __future__ import annotations

import math
import secrets
from collections import Counter, deque
from collections.abc import Callable
from typing import Protocol

import zmq

from kvstrata.errors import ConfigurationError
from kvstrata.remote.protocol.messages import MAX_FRAME_BYTES

HIGH_WATER = 4096  # messages a connection queues each way; beyond it they are dropped and repeated later
MAX_FRAMES = 4  # of one message; ours have two
MAX_PEERS = 256  # connections a producer keeps; the one that was quiet for longest goes first
CONNECT_TIMEOUT_MS = 2000  # then a connection is begun anew: TCP itself would ask again later and later
CLOSING_LINGER_MS = 100  # so that the last words of an orderly end are heard, and a dead peer delays nothing
FRAME_SLACK_BYTES = 4096  # what a frame of the largest message has beside it

Frames = list[bytes]


class Channel(Protocol):
    """What the loop needs of sockets."""

    @property
    def counts(self) -> Counter[str]:
        """What was dropped, by reason; other threads may read it."""

    def wait(self, timeout_s: float | None, wake_fd: int) -> bool:
        """Return once a message may be there (True), `wake_fd` is readable or the time is over."""

    def receive(self) -> tuple[str, Frames] | None:
        """The next message and who sent it; None when there is none now."""

    def send(self, peer: str, frames: Frames) -> None: ...

    def flush(self) -> None:
        """Send what waited for a connection."""

    def forget(self, peer: str) -> None:
        """Give up the connection to `peer`, if there is one of its own."""

    def close(self) -> None: ...


class ListeningChannel:
    """A ROUTER on one address. A peer is named by its socket's identity, in hexadecimal."""

    def __init__(self, *, host: str, port: int) -> None:
        """Bind; port 0 takes any free one. Raises ConfigurationError naming the address."""
        self.counts: Counter[str] = Counter()
        self._context = zmq.Context(io_threads=1)
        self._socket = self._context.socket(zmq.ROUTER)
        _set_common(self._socket)
        # A stranger who learned an identity must not take its owner's messages.
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 0)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        try:
            self._socket.bind(f"tcp://{_bracketed(host)}:{port}")
        except zmq.ZMQError as error:
            self.close()
            raise ConfigurationError(
                f"cannot listen on {host}:{port} for remote read: {error.strerror}"
            ) from error
        endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self.address = (host, int(endpoint.rpartition(":")[2]))
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)

    def wait(self, timeout_s: float | None, wake_fd: int) -> bool:
        return bool(_poll(self._poller, timeout_s, wake_fd))

    def receive(self) -> tuple[str, Frames] | None:
        while True:
            try:
                identity, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return None
            if len(frames) <= MAX_FRAMES:
                return identity.hex(), frames
            self.counts["too many frames"] += 1

    def send(self, peer: str, frames: Frames) -> None:
        try:
            self._socket.send_multipart([bytes.fromhex(peer), *frames], zmq.NOBLOCK)
        except zmq.Again:
            self.counts["peer does not read"] += 1
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self.counts["peer is gone"] += 1

    def flush(self) -> None:
        """Nothing waits here: a ROUTER has a connection or drops."""

    def forget(self, peer: str) -> None:
        """Connections here belong to their makers."""

    def close(self) -> None:
        self._context.destroy(linger=CLOSING_LINGER_MS)


class ConnectingChannel:
    """One DEALER for each peer, named `host:port`, made at the first message to it.

    A link that was cut tells nobody. When it is back, TCP may wait for as long again as it was away, up to
    two minutes, before it sends; and a ROUTER that still has the old connection takes no other one of the
    same identity. So after `doubt` a peer gets a new connection, of a new identity.
    """

    def __init__(self, *, keep_s: float, clock: Callable[[], float]) -> None:
        """What is sent while a peer has no connection is kept for `keep_s`, until the machine repeats it."""
        self.counts: Counter[str] = Counter()
        self._keep_s = keep_s
        self._clock = clock
        self._unanswered_since_s: dict[str, float] = {}
        self._doubted: set[str] = set()
        self._context = zmq.Context(io_threads=1)
        self._sockets: dict[str, zmq.Socket[bytes]] = {}  # in order of their last message
        self._waiting: dict[str, deque[tuple[float, Frames]]] = {}
        self._readable: deque[str] = deque()
        self._poller = zmq.Poller()

    def wait(self, timeout_s: float | None, wake_fd: int) -> bool:
        readable = _poll(self._poller, timeout_s, wake_fd)
        self._readable = deque(peer for peer, socket in self._sockets.items() if socket in readable)
        return bool(readable)

    def receive(self) -> tuple[str, Frames] | None:
        while self._readable:
            # One message of each in turn: a peer that floods keeps nobody from being heard.
            peer = self._readable.popleft()
            try:
                frames = self._sockets[peer].recv_multipart(zmq.NOBLOCK)
            except (zmq.Again, KeyError):
                continue
            self._readable.append(peer)
            self._unanswered_since_s.pop(peer, None)
            self._doubted.discard(peer)
            if len(frames) <= MAX_FRAMES:
                return peer, frames
            self.counts["too many frames"] += 1
        return None

    def send(self, peer: str, frames: Frames) -> None:
        if peer in self._doubted:
            self.counts["peer was silent"] += 1
            self.forget(peer)
        socket = self._sockets.pop(peer, None)
        if socket is None:
            try:
                socket = self._connect(peer)
            except (zmq.ZMQError, ValueError, UnicodeError):
                self.counts["not an address"] += 1
                return
        self._sockets[peer] = socket
        self._unanswered_since_s.setdefault(peer, self._clock())
        waiting = self._waiting.get(peer)
        if waiting is None and self._try_send(socket, frames):
            return
        if waiting is None:
            waiting = self._waiting[peer] = deque()
            self._poller.register(socket, zmq.POLLIN | zmq.POLLOUT)
        if len(waiting) >= HIGH_WATER:
            waiting.popleft()
            self.counts["peer does not read"] += 1
        waiting.append((self._clock() + self._keep_s, frames))

    def flush(self) -> None:
        for peer in list(self._waiting):
            socket, waiting = self._sockets[peer], self._waiting[peer]
            while waiting and (waiting[0][0] < self._clock() or self._try_send(socket, waiting[0][1])):
                if waiting.popleft()[0] < self._clock():
                    self.counts["peer has no connection"] += 1
            if not waiting:
                del self._waiting[peer]
                self._poller.register(socket, zmq.POLLIN)

    def forget(self, peer: str) -> None:
        socket = self._sockets.pop(peer, None)
        self._unanswered_since_s.pop(peer, None)
        self._doubted.discard(peer)
        if socket is not None:
            self._waiting.pop(peer, None)
            self._poller.unregister(socket)
            socket.close(linger=0)

    def doubt(self, peer: str, silent_s: float) -> None:
        """Connect anew for the next message, unless `peer` is heard before, or was within `silent_s`."""
        if self._clock() - self._unanswered_since_s.get(peer, math.inf) >= silent_s:
            self._doubted.add(peer)

    def close(self) -> None:
        self._context.destroy(linger=CLOSING_LINGER_MS)

    def _connect(self, peer: str) -> zmq.Socket[bytes]:
        if len(self._sockets) >= MAX_PEERS:
            self.forget(next(iter(self._sockets)))
        socket: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        _set_common(socket)
        # Given here, so that it outlives a lost connection: the peer then knows us again.
        socket.setsockopt(zmq.ROUTING_ID, b"k" + secrets.token_bytes(15))
        # Without a connection nothing piles up in the socket, where it could not be taken back.
        socket.setsockopt(zmq.IMMEDIATE, 1)
        socket.setsockopt(zmq.CONNECT_TIMEOUT, CONNECT_TIMEOUT_MS)
        socket.setsockopt(zmq.RECONNECT_IVL, 50)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        host, _, port = peer.rpartition(":")
        try:
            socket.connect(f"tcp://{_bracketed(host)}:{port}")
        except BaseException:
            socket.close(linger=0)
            raise
        self._poller.register(socket, zmq.POLLIN)
        return socket

    @staticmethod
    def _try_send(socket: zmq.Socket[bytes], frames: Frames) -> bool:
        try:
            socket.send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True


def _set_common(socket: zmq.Socket[bytes]) -> None:
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, HIGH_WATER)
    socket.setsockopt(zmq.RCVHWM, HIGH_WATER)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES + FRAME_SLACK_BYTES)
    socket.setsockopt(zmq.IPV6, 1)
    # A peer whose machine vanished says no goodbye.
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, 10)
    socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, 5)
    socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, 3)


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _poll(poller: zmq.Poller, timeout_s: float | None, wake_fd: int) -> set[object]:
    """Return the sockets that can be read."""
    if wake_fd not in poller:
        poller.register(wake_fd, zmq.POLLIN)
    # Rounded up: a poll that ends before the tick is due would spin.
    found = poller.poll(None if timeout_s is None else int(max(0.0, timeout_s) * 1000) + 1)
    return {socket for socket, events in found if events & zmq.POLLIN and socket != wake_fd}
