"""What a consumer says to a producer: about their session, and as a member about one transfer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvstrata.remote.protocol.actions import ConsumerAction, Send
from kvstrata.remote.protocol.messages import (
    MAX_TEXT_CHARS,
    PROTOCOL_VERSION,
    Abort,
    AbortAck,
    Accept,
    AnyMessage,
    ReadDone,
    ReadFailed,
    Refused,
    Reject,
    Stamped,
    Welcome,
)


@dataclass(frozen=True, slots=True)
class SessionVoice:
    """What a consumer says to a producer about the two of them."""

    act: Callable[[ConsumerAction], None]
    epoch: str
    lease_s: float

    def welcome(self, peer: str, peer_epoch: str, transport: str) -> None:
        """Say Welcome."""
        message = Welcome(
            epoch=self.epoch,
            peer_epoch=peer_epoch,
            version=PROTOCOL_VERSION,
            transport=transport,
            lease_s=self.lease_s,
        )
        self.act(Send(peer=peer, message=message))

    def refuse(self, peer: str, peer_epoch: str, reason: str) -> None:
        """Say Refused: the two do not fit."""
        self.act(Send(peer=peer, message=Refused(epoch=self.epoch, peer_epoch=peer_epoch, reason=reason)))

    def estrange(self, peer: str, peer_epoch: str) -> None:
        """Say Refused as stale: the producer may say Hello, again."""
        reason = f"decode does not know this life of prefill rank; say Hello (epoch {self.epoch})"
        refused = Refused(epoch=self.epoch, peer_epoch=peer_epoch, reason=reason, is_stale=True)
        self.act(Send(peer=peer, message=refused))


@dataclass(frozen=True, slots=True)
class ConsumerVoice:
    """What a consumer says to one member about one transfer: stamped with both lives and the hold."""

    act: Callable[[ConsumerAction], None]
    peer: str
    epoch: str
    peer_epoch: str
    transfer: str
    member: int
    generation: int

    @classmethod
    def answering(
        cls, peer: str, message: Stamped, *, epoch: str, act: Callable[[ConsumerAction], None]
    ) -> ConsumerVoice:
        """The voice that answers this message of that peer."""
        return cls(act, peer, epoch, message.epoch, message.transfer, message.member, message.generation)

    def accept(self) -> None:
        """Say Accept."""
        self._send(Accept(**self._stamp()))

    def reject(self, reason: str) -> None:
        """Say Reject."""
        self._send(Reject(**self._stamp(), reason=reason[:MAX_TEXT_CHARS]))

    def read_done(self, layer: int, part: int) -> None:
        """Say ReadDone."""
        self._send(ReadDone(**self._stamp(), layer=layer, part=part))

    def read_failed(self, layer: int, part: int, reason: str) -> None:
        """Say ReadFailed."""
        self._send(ReadFailed(**self._stamp(), layer=layer, part=part, reason=reason[:MAX_TEXT_CHARS]))

    def abort(self, reason: str) -> None:
        """Say Abort."""
        self._send(Abort(**self._stamp(), reason=reason[:MAX_TEXT_CHARS]))

    def abort_ack(self) -> None:
        """Say AbortAck."""
        self._send(AbortAck(**self._stamp()))

    def _stamp(self) -> dict[str, Any]:
        return {
            "epoch": self.epoch,
            "peer_epoch": self.peer_epoch,
            "transfer": self.transfer,
            "member": self.member,
            "generation": self.generation,
        }

    def _send(self, message: AnyMessage) -> None:
        self.act(Send(peer=self.peer, message=message))
