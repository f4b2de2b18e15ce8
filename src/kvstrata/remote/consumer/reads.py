"""The reads in flight of a consumer, by number."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from kvstrata.remote.consumer.member import Member
from kvstrata.remote.consumer.parts import OfferedPart
from kvstrata.remote.consumer.transfer import ConsumerTransfer
from kvstrata.remote.protocol.actions import StartRead


class Reads:
    """Numbers them, never twice, and counts how they end."""

    def __init__(self, act: Callable[[StartRead], None], *, attempts: int) -> None:
        self.begun = 0
        self.retried = 0
        self.landed = 0
        self.failed = 0
        self._act = act
        self._attempts = attempts
        self._in_flight: dict[int, tuple[ConsumerTransfer, Member, OfferedPart]] = {}

    def __len__(self) -> int:
        return len(self._in_flight)

    def begin(self, transfer: ConsumerTransfer, member: Member, part: OfferedPart) -> None:
        """Ask for the read of a part, for the first time or again."""
        number, self.begun = self.begun, self.begun + 1
        self.retried += part.attempts > 1
        self._in_flight[number] = (transfer, member, part)
        self._act(
            StartRead(
                number=number,
                peer=member.peer.identity,
                transfer=transfer.transfer,
                member=member.number,
                members=transfer.members_wanted,
                hold=member.hold,
                layer=part.layer,
                part=part.number,
                first_block=part.first_block,
                end_block=part.end_block,
                blocks=part.blocks,
            )
        )

    def end(self, number: int, error: str | None, *, is_final: bool, now_s: float) -> None:
        """Tell the transfer how a read ended. KeyError for a number that is not in flight."""
        transfer, member, part = self._in_flight.pop(number)
        if error is None:
            self.landed += 1
            transfer.landed(member, part, now_s)
            return
        self.failed += 1
        try_again = not is_final and part.attempts < self._attempts
        transfer.missed(member, part, error, try_again=try_again, now_s=now_s)

    def check_integrity(self) -> None:
        """Assert that the counts agree, with those of the transfers too."""
        assert self.begun == len(self) + self.landed + self.failed
        by_transfer = Counter(transfer for transfer, _, _ in self._in_flight.values())
        for transfer, count in by_transfer.items():
            assert transfer.reading == count, transfer.transfer
