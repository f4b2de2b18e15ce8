"""One contributor of a transfer, as the consumer sees it."""

from __future__ import annotations

from dataclasses import dataclass

from kvstrata.remote.consumer.parts import OfferedParts
from kvstrata.remote.consumer.peers import Peer
from kvstrata.remote.consumer.voice import ConsumerVoice
from kvstrata.remote.holds import Hold
from kvstrata.remote.protocol.messages import Stamped
from kvstrata.remote.protocol.moves import Resend


@dataclass(eq=False, slots=True)
class Member:
    """State of one member: the life that supplies it, what it offered, and how it is to be told the end."""

    number: int
    peer: Peer
    hold: Hold
    parts: OfferedParts
    voice: ConsumerVoice
    resend: Resend  # of Abort, once the transfer has ended
    heard_s: float
    is_lost: bool = False  # its life is over: nobody hears what is said to it
    asked_to_stop: bool = False  # it said Abort
    failed: tuple[int, int] | None = None  # layer and part that could not be read

    def is_about(self, identity: str, message: Stamped) -> bool:
        """Whether the message is of this member's life, forgotten meanwhile or not, and about this hold."""
        is_same_life = (self.peer.identity, self.peer.epoch) == (identity, message.epoch)
        return is_same_life and self.hold.generation == message.generation

    @property
    def is_awaited(self) -> bool:
        """Whether something of it is missing, so that its silence matters."""
        return not self.parts.is_complete

    @property
    def lapse_s(self) -> float:
        """When its silence ends the transfer."""
        return self.heard_s + self.peer.lease_s

    def is_silent(self, now_s: float) -> bool:
        """Whether something of it is missing and it said nothing of the transfer for its lease."""
        return self.is_awaited and now_s >= self.lapse_s

    def lose(self) -> None:
        """Its life is over."""
        self.is_lost = True
        self.resend.stop()

    def repeat_abort(self, now_s: float, until_s: float, reason: str) -> bool:
        """Say Abort again if it is time, or give that up after `until_s`; whether it was said."""
        if now_s < self.resend.due_s:
            return False
        if now_s >= until_s:
            self.resend.stop()
            return False
        self.resend.again(now_s)
        self.voice.abort(reason)
        return True

    def dismiss(self, now_s: float, reason: str) -> None:
        """Tell it that the transfer is over and that nothing of it is being read."""
        if self.is_lost:
            return
        if self.asked_to_stop:
            self.voice.abort_ack()
        elif self.failed is not None:
            self.voice.read_failed(*self.failed, reason)
        else:
            self.voice.abort(reason)
            self.resend.start(now_s)
