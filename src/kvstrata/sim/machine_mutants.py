"""Defects in the producer's and the consumer's machine; see `sim.mutants`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from kvstrata.remote.consumer.machine import Consumer
from kvstrata.remote.consumer.member import Member
from kvstrata.remote.consumer.moves import ConsumerEvent, ConsumerState
from kvstrata.remote.consumer.parts import OfferedPart
from kvstrata.remote.consumer.transfer import ConsumerTransfer
from kvstrata.remote.producer.machine import Producer
from kvstrata.remote.producer.parts import PublishedParts
from kvstrata.remote.protocol.actions import Ending, Finish, ProducerAction, Send
from kvstrata.remote.protocol.messages import Abort, Hello, Ready

_NO_LEASE_S = 600.0


class NeverLapses(Producer):
    """Nothing that a consumer fails to say ends a transfer."""

    def __init__(
        self, *, hello: Hello, clock: Callable[[], float], lease_s: float, resend_s: float, open_wait_s: float
    ) -> None:
        super().__init__(
            hello=msgspec.structs.replace(hello, lease_s=_NO_LEASE_S),
            clock=clock,
            lease_s=_NO_LEASE_S,
            resend_s=resend_s,
            open_wait_s=open_wait_s,
        )


class KeepsRefusalsToItself(Producer):
    """What a decode refuses is over here, and decode waits for it."""

    def _act(self, action: ProducerAction) -> None:
        match action:
            case Send(peer=peer, message=Abort()) if not self._sessions[peer].is_welcomed:
                pass
            case _:
                super()._act(action)


class _TwiceAnswered(PublishedParts):
    def answer(self, layer: int, number: int) -> str | None:
        dropped = super().answer(layer, number)
        if dropped == "duplicate" and self._unanswered:
            self._unanswered -= 1
            return None
        return dropped

    def check_integrity(self) -> None:
        pass


class AnswersCountTwice(Producer):
    """A ReadDone that comes twice stands for two parts."""

    def open(self, transfer: str, **arguments: Any) -> None:
        super().open(transfer, **arguments)
        if transfer in self._transfers.open:
            self._transfers.open[transfer].parts.__class__ = _TwiceAnswered

    def check_integrity(self) -> None:
        pass


class _Careless(Consumer):
    """A consumer with other transfers, whose integrity is not checked."""

    transfer_class: type[ConsumerTransfer]

    def expect(self, transfer: str, *, first_block: int, end_block: int, layers: Iterable[int]) -> None:
        super().expect(transfer, first_block=first_block, end_block=end_block, layers=layers)
        self._transfers.open[transfer].__class__ = self.transfer_class

    def check_integrity(self) -> None:
        pass


class _MembersTwice(ConsumerTransfer):
    answers: Counter[int] | None = None  # by layer

    def offered(self, member: Member, message: Ready, now_s: float) -> str | None:
        dropped = super().offered(member, message, now_s)
        part = member.parts.known(message.layer, message.part)
        if dropped and message.is_last and part is not None and part.is_done:
            self._answer(message.layer)
        return dropped

    def landed(self, member: Member, part: OfferedPart, now_s: float) -> None:
        super().landed(member, part, now_s)
        if part.layer not in member.parts.incomplete_layers():
            self._answer(part.layer)

    def _answer(self, layer: int) -> None:
        self.answers = self.answers or Counter()
        self.answers[layer] += 1
        if self.state is ConsumerState.RECEIVING and all(
            self.answers[one] >= self.members_wanted for one in self.layers
        ):
            self._finish(ConsumerEvent.COMPLETE, Ending.DONE, "")


class MembersCountTwice(_Careless):
    """As many answers as members complete a layer, whoever gave them."""

    transfer_class = _MembersTwice


class _LastPart(ConsumerTransfer):
    def landed(self, member: Member, part: OfferedPart, now_s: float) -> None:
        super().landed(member, part, now_s)
        if self.state is not ConsumerState.RECEIVING or len(self.members) < self.members_wanted:
            return
        for other in self.members.values():
            for layer in other.parts._layers.values():
                if layer.last is None or not layer.parts[layer.last].is_done:
                    return
        self._finish(ConsumerEvent.COMPLETE, Ending.DONE, "")


class LastPartCompletes(_Careless):
    """The last part of a layer stands for those before it."""

    transfer_class = _LastPart


class _UnderReads(ConsumerTransfer):
    def stop(self, ending: Ending, reason: str, now_s: float) -> None:
        was_reading = self.reading
        super().stop(ending, reason, now_s)
        if was_reading and self.state is ConsumerState.DRAINING:
            self._act(Finish(transfer=self.transfer, ending=ending, reason=reason))
            self._act = lambda action: None


class FinishesUnderReads(_Careless):
    """Finish comes with the abort, not with the end of the last read."""

    transfer_class = _UnderReads
