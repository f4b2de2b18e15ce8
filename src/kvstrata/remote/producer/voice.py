"""What a producer says about one transfer: messages stamped with both lives, member and generation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvstrata.remote.holds import Hold
from kvstrata.remote.producer.parts import PublishedPart
from kvstrata.remote.producer.session import Session
from kvstrata.remote.protocol.actions import ProducerAction, Send
from kvstrata.remote.protocol.messages import MAX_TEXT_CHARS, Abort, AbortAck, AnyMessage, Open, Ready


class ProducerVoice:
    """Builds the messages of one transfer and hands them to `act` as Send."""

    def __init__(
        self,
        transfer: str,
        *,
        session: Session,
        act: Callable[[ProducerAction], None],
        hold: Hold,
        member: int,
        members: int,
        first_block: int,
        end_block: int,
    ) -> None:
        assert 0 <= member < members, (transfer, member, members)
        self.transfer = transfer
        self.hold = hold
        self.member = member
        self._session = session
        self._act = act
        self._members = members
        self._first_block, self._end_block = first_block, end_block

    def open(self) -> None:
        """Say Open."""
        self._send(
            Open(
                **self._stamp(),
                members=self._members,
                hold_slot=self.hold.slot,
                first_block=self._first_block,
                end_block=self._end_block,
            )
        )

    def ready(self, part: PublishedPart, now_s: float) -> None:
        """Say Ready for a part."""
        part.said_s = now_s
        self._send(
            Ready(
                **self._stamp(),
                layer=part.layer,
                part=part.number,
                first_block=part.first_block,
                end_block=part.end_block,
                blocks=part.blocks,
                is_last=part.is_last,
            )
        )

    def abort(self, reason: str) -> None:
        """Say Abort."""
        self._send(Abort(**self._stamp(), reason=reason[:MAX_TEXT_CHARS]))

    def abort_ack(self) -> None:
        """Say AbortAck."""
        self._send(AbortAck(**self._stamp()))

    def _stamp(self) -> dict[str, Any]:
        return {
            "epoch": self._session.epoch,
            "peer_epoch": self._session.peer_epoch,
            "transfer": self.transfer,
            "member": self.member,
            "generation": self.hold.generation,
        }

    def _send(self, message: AnyMessage) -> None:
        self._act(Send(peer=self._session.peer, message=message))
