"""One transfer at the producer, from the opening to the tombstone.

Whatever ends it, the hold is revoked before the transfer is settled: a reader that has not heard yet fails
when it looks at the hold, so the blocks may be reused at once.
"""

from __future__ import annotations

from collections.abc import Callable

from kvstrata.remote.producer.moves import PRODUCER_MOVES, ProducerEvent, ProducerState
from kvstrata.remote.producer.parts import PublishedParts
from kvstrata.remote.producer.session import Session
from kvstrata.remote.producer.voice import ProducerVoice
from kvstrata.remote.protocol.actions import Ending, ProducerAction, Revoke, Settle
from kvstrata.remote.protocol.messages import (
    Abort,
    AbortAck,
    Accept,
    ReadDone,
    ReadFailed,
    Reject,
    Stamped,
)
from kvstrata.remote.protocol.moves import NEVER_S, Resend


class ProducerTransfer:
    """State of one transfer. The producer owns it; `act` takes what it asks for, in order."""

    def __init__(
        self,
        voice: ProducerVoice,
        parts: PublishedParts,
        *,
        session: Session,
        act: Callable[[ProducerAction], None],
        resend_s: float,
        deadline_s: float,
    ) -> None:
        """It lapses at `deadline_s`, a time on the clock, if no consumer has accepted it by then."""
        self.transfer = voice.transfer
        self.session = session
        self.parts = parts
        self.state = ProducerState.OPENING
        self.ending: Ending | None = None
        self._voice = voice
        self._act = act
        self._resend_s = resend_s
        self._resend = Resend(resend_s, session.lease_s / 4)
        self._deadline_s = deadline_s
        self._is_open_said = False
        self._reason = ""
        self._repeat_until_s = 0.0  # once ended: Abort, unless it is acknowledged

    @property
    def is_ended(self) -> bool:
        """Whether only the tombstone is left."""
        return self.state is ProducerState.ENDED

    def is_about(self, message: Stamped) -> bool:
        """Whether the message names this very hold of this member."""
        return (message.generation, message.member) == (self._voice.hold.generation, self._voice.member)

    # What the producer's owner does

    def publish(
        self,
        now_s: float,
        layer: int,
        first_block: int,
        end_block: int,
        blocks: tuple[int, ...],
        is_last: bool,
    ) -> bool:
        """Queue or send the next part of a layer; False if the transfer is being aborted or has ended."""
        if self.state not in (ProducerState.OPENING, ProducerState.ACTIVE):
            return False
        part = self.parts.add(layer, first_block, end_block, blocks, is_last, now_s)
        if self.state is ProducerState.ACTIVE:
            if self.parts.unanswered == 1:
                self._resend.start(now_s)
            self._voice.ready(part, now_s)
        return True

    def abort(self, now_s: float, reason: str) -> None:
        """Begin to end it for a reason of the producer's own; nothing if that has begun already."""
        if self.state not in (ProducerState.OPENING, ProducerState.ACTIVE):
            return
        if not self._is_open_said:
            self._settle(ProducerEvent.CALL_OFF, Ending.ABORTED, reason)
            self._tell(now_s)
            return
        self._move(ProducerEvent.STOP)
        self._reason = reason
        self._deadline_s = now_s + self.session.lease_s
        self.parts.clear()
        self._voice.abort(self._reason)
        self._resend.start(now_s)

    # What the session does

    def connected(self, now_s: float) -> None:
        """The consumer welcomed this producer."""
        if self.state is ProducerState.OPENING:
            self._is_open_said = True
            self._voice.open()
            self._resend.start(now_s)

    def refused(self, reason: str, now_s: float) -> None:
        """The consumer will have nothing to do with this producer."""
        self._settle(ProducerEvent.REFUSED, Ending.FAILED, f"refused by decode: {reason}")
        self._tell(now_s)

    def restarted(self, now_s: float) -> None:
        """The consumer's earlier life is over."""
        if self.state is not ProducerState.OPENING:
            is_expected = self.state is ProducerState.ABORTING  # perhaps, by the life that follows
            self._settle(ProducerEvent.RESTARTED, Ending.FAILED, "decode restarted")
            if is_expected:
                self._tell(now_s)
            return
        self._move(ProducerEvent.RESTARTED)
        self._is_open_said = False
        self._resend.stop()
        self._deadline_s = min(self._deadline_s, now_s + self.session.lease_s)

    # What the consumer says

    def named(self, now_s: float) -> None:
        """The consumer has the transfer among its own."""
        if self.is_ended:
            self._tell_of_end(now_s)
        elif self.state is ProducerState.ACTIVE:
            self._deadline_s = now_s + self.session.lease_s

    def receive(self, message: Stamped, now_s: float) -> str | None:
        """Take a message about this hold from the right life; return why it was dropped, if it was."""
        if self.is_ended:
            return self._receive_late(message, now_s)
        self.named(now_s)
        match message:
            case Accept():
                return self._accepted(now_s)
            case ReadDone():
                return self._read(message, now_s)
            case Abort():
                self._voice.abort_ack()
                self._settle(ProducerEvent.ABORTED, Ending.ABORTED, f"decode aborted: {message.reason}")
            case Reject() | ReadFailed() if self.state is not ProducerState.ABORTING:
                what = "rejected" if isinstance(message, Reject) else "could not read"
                self._settle(ProducerEvent.GIVEN_UP, Ending.FAILED, f"decode {what}: {message.reason}")
            case Reject() | ReadFailed() | AbortAck() if self.state is ProducerState.ABORTING:
                self._settle(ProducerEvent.STOPPED, Ending.ABORTED, self._reason)
            case _:
                return "unexpected"
        return None

    def _tell_of_end(self, now_s: float) -> None:
        self._move(ProducerEvent.ENDED_NEWS)
        if self.ending is not Ending.DONE and now_s >= self._resend.due_s:
            self._resend.start(now_s)
            self._voice.abort(f"ended: {self._reason}")

    def _accepted(self, now_s: float) -> str | None:
        if self.state is not ProducerState.OPENING:
            return "duplicate"
        self._move(ProducerEvent.ACCEPT)
        self._deadline_s = now_s + self.session.lease_s
        self._resend.stop()
        for part in self.parts.waiting():
            self._voice.ready(part, now_s)
            self._resend.start(now_s)
        return None

    def _read(self, message: ReadDone, now_s: float) -> str | None:
        if self.state is not ProducerState.ACTIVE:
            return "unexpected"
        dropped = self.parts.answer(message.layer, message.part)
        if dropped:
            return dropped
        if self.parts.unanswered:
            self._resend.start(now_s)
            return None
        self._resend.stop()
        if self.parts.is_all_read:
            self._settle(ProducerEvent.ALL_READ, Ending.DONE, "")
        return None

    def _receive_late(self, message: Stamped, now_s: float) -> str | None:
        match message:
            case Abort():
                self._move(ProducerEvent.ENDED_ABORT)
                self._voice.abort_ack()
            case AbortAck() if self._repeat_until_s:
                self._move(ProducerEvent.ENDED_ABORT_ACK)
                self._repeat_until_s = 0.0
            case ReadDone():
                self._tell_of_end(now_s)
                return "late"
            case _:
                return "late"
        return None

    # Time

    def tick(self, now_s: float) -> int:
        """Repeat what is unanswered; end what nothing is heard of. Returns how often it repeated."""
        if self.is_ended:
            return self._repeat_abort(now_s)
        if now_s >= self._deadline_s:
            self._lapse()
            return 0
        return self._repeat(now_s) if now_s >= self._resend.due_s else 0

    def next_tick_s(self) -> float:
        """When `tick` has something to do."""
        if self.is_ended:
            return self._resend.due_s if self._repeat_until_s else NEVER_S
        return min(self._deadline_s, self._resend.due_s)

    def _lapse(self) -> None:
        lease_s = self.session.lease_s
        if self.state is ProducerState.OPENING:
            self._settle(
                ProducerEvent.NEVER,
                Ending.LAPSED,
                f"no decode accepted the transfer in time; the session was {self.session.state.value}",
            )
        elif self.state is ProducerState.ACTIVE:
            self._settle(
                ProducerEvent.LATE, Ending.LAPSED, f"decode said nothing of the transfer for {lease_s:g} s"
            )
        else:
            self._settle(
                ProducerEvent.UNHEARD,
                Ending.LAPSED,
                f"decode did not acknowledge the abort within {lease_s:g} s; aborted for: {self._reason}",
            )

    def _repeat(self, now_s: float) -> int:
        self._resend.again(now_s)
        if self.state is ProducerState.OPENING:
            self._voice.open()
            return 1
        if self.state is ProducerState.ABORTING:
            self._voice.abort(self._reason)
            return 1
        overdue = [part for part in self.parts.waiting() if part.said_s + self._resend_s <= now_s]
        for part in overdue:
            self._voice.ready(part, now_s)
        return len(overdue)

    def _repeat_abort(self, now_s: float) -> int:
        if now_s < self._resend.due_s:
            return 0
        if now_s >= self._repeat_until_s:
            self._repeat_until_s = 0.0
            return 0
        self._resend.again(now_s)
        self._voice.abort(self._reason)
        return 1

    def _tell(self, now_s: float) -> None:
        """Say Abort of what has ended, until it is acknowledged or for a lease: decode may wait for Open."""
        self._voice.abort(self._reason)
        self._resend.start(now_s)
        self._repeat_until_s = now_s + self.session.lease_s

    def _settle(self, event: ProducerEvent, ending: Ending, reason: str) -> None:
        self._move(event)
        self.ending, self._reason = ending, reason
        self.parts.clear()
        self._resend.due_s = 0.0  # as a tombstone: not before then another Abort is sent
        self._act(Revoke(transfer=self.transfer, hold=self._voice.hold))
        self._act(Settle(transfer=self.transfer, ending=ending, reason=self._reason))

    def _move(self, event: ProducerEvent) -> None:
        self.state = PRODUCER_MOVES.after(self.state, event)
