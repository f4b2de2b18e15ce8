"""The producers that a consumer knows: one life each, by the identity under which they speak."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from kvstrata.remote.producer.session import agreed_lease_s
from kvstrata.remote.protocol.former_lives import FormerLives
from kvstrata.remote.protocol.handshake import Mismatch
from kvstrata.remote.protocol.messages import AnyMessage, Hello
from kvstrata.remote.protocol.moves import Move, Moves

IDLE_LEASES = 60
"""A producer without transfers and silent for so long loses its connection, and the memory that it maps."""


class PeerState(enum.Enum):
    """What the consumer knows about an identity."""

    UNKNOWN = "unknown"
    WELCOMED = "welcomed"


class PeerEvent(enum.Enum):
    """What changes it."""

    HELLO = "Hello that agrees"
    MISMATCH = "Hello that does not agree"
    HELLO_AGAIN = "Hello of the same life"
    RESTART = "Hello of another life"
    SILENCE = f"silent for a lease with a transfer, or for {IDLE_LEASES} without"
    STRANGE = "anything but Hello, or of another life"


_S, _E = PeerState, PeerEvent
_ESTRANGE = (
    "believe Abort of a transfer that this member has not opened, unless its life is known to be over; "
    "else send Refused as stale, unless it is an answer"
)
PEER_MOVES = Moves[PeerState, PeerEvent](
    {
        (_S.UNKNOWN, _E.HELLO): Move(_S.WELCOMED, "send Welcome with the transport's name"),
        (_S.UNKNOWN, _E.MISMATCH): Move(_S.UNKNOWN, "send Refused with both sides' values"),
        (_S.UNKNOWN, _E.STRANGE): Move(_S.UNKNOWN, _ESTRANGE),
        (_S.WELCOMED, _E.HELLO_AGAIN): Move(_S.WELCOMED, "send Welcome again"),
        (_S.WELCOMED, _E.RESTART): Move(
            _S.UNKNOWN, "give the connection up, fail what that life still supplies; then as if unknown"
        ),
        (_S.WELCOMED, _E.SILENCE): Move(_S.UNKNOWN, "give the connection up"),
        (_S.WELCOMED, _E.STRANGE): Move(_S.WELCOMED, _ESTRANGE),
    }
)


@dataclass(eq=False, slots=True)
class Peer:
    """One welcomed life of a producer."""

    identity: str
    epoch: str
    transport: str
    lease_s: float  # the longer one of both sides
    heard_s: float
    is_suspect: bool = False  # a transfer lapsed for its silence, and nothing was heard since

    def forget_s(self) -> float:
        """When to give it up, if it has no transfer and stays silent."""
        return self.heard_s + self.lease_s * (1 if self.is_suspect else IDLE_LEASES)


class Peers:
    """All of them; the consumer owns it."""

    def __init__(self, *, check_hello: Callable[[Hello], str], lease_s: float) -> None:
        self._check_hello = check_hello
        self._lease_s = lease_s
        self._by_identity: dict[str, Peer] = {}
        self._former = FormerLives(lease_s)

    def __iter__(self) -> Iterator[Peer]:
        return iter(list(self._by_identity.values()))

    def __len__(self) -> int:
        return len(self._by_identity)

    def is_over(self, identity: str, epoch: str, now_s: float) -> bool:
        """Whether that life was replaced by another one, not long ago."""
        return self._former.has((identity, epoch), now_s)

    def speaking(self, identity: str, message: AnyMessage, now_s: float) -> Peer | None:
        """Return who sent the message, which counts as heard; None if it is of no welcomed life."""
        peer = self._by_identity.get(identity)
        if peer is None or peer.epoch != message.epoch:
            self._move(peer, PeerEvent.STRANGE)
            return None
        peer.heard_s, peer.is_suspect = now_s, False
        return peer

    def replaced_by(self, identity: str, hello: Hello, now_s: float) -> Peer | None:
        """Return and forget the life that this Hello shows to be over, if there is one."""
        peer = self._by_identity.get(identity)
        if peer is None or peer.epoch == hello.epoch:
            return None
        self._move(peer, PeerEvent.RESTART)
        self._former.add((identity, peer.epoch), now_s)
        return self._by_identity.pop(identity)

    def greet(self, identity: str, hello: Hello, now_s: float) -> Peer:
        """Return the life that says Hello, new or known; raises Mismatch if it is not welcome."""
        peer = self._by_identity.get(identity)
        if peer is not None:
            self._move(peer, PeerEvent.HELLO_AGAIN)
            peer.heard_s, peer.is_suspect = now_s, False
            return peer
        try:
            transport = self._check_hello(hello)
        except Mismatch:
            self._move(None, PeerEvent.MISMATCH)
            raise
        self._move(None, PeerEvent.HELLO)
        lease_s = agreed_lease_s(self._lease_s, hello.lease_s)
        peer = Peer(identity, hello.epoch, transport, lease_s, now_s)
        self._by_identity[identity] = peer
        return peer

    def forget(self, peer: Peer) -> None:
        """Forget a silent one; it may come back with a Hello."""
        self._move(peer, PeerEvent.SILENCE)
        del self._by_identity[peer.identity]

    def _move(self, peer: Peer | None, event: PeerEvent) -> None:
        # That a peer is known is its state; the table says what may happen to it.
        PEER_MOVES.after(PeerState.UNKNOWN if peer is None else PeerState.WELCOMED, event)
