"""One transfer at the consumer, from the wait for its first member to the tombstone.

It is finished only when no read of it is in flight: until then the destination may still be written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from kvstrata.remote.consumer.member import Member
from kvstrata.remote.consumer.moves import CONSUMER_MOVES, ConsumerEvent, ConsumerState
from kvstrata.remote.consumer.parts import OfferedPart, OfferedParts
from kvstrata.remote.consumer.patience import Patience
from kvstrata.remote.consumer.peers import Peer
from kvstrata.remote.consumer.voice import ConsumerVoice
from kvstrata.remote.holds import HOLD_SLOTS, Hold
from kvstrata.remote.protocol.actions import CancelReads, ConsumerAction, Ending, Finish
from kvstrata.remote.protocol.messages import Abort, Open, Ready
from kvstrata.remote.protocol.moves import NEVER_S, Resend


class ConsumerTransfer:
    """State of one transfer. The consumer owns it."""

    def __init__(
        self,
        transfer: str,
        *,
        first_block: int,
        end_block: int,
        layers: Iterable[int],
        act: Callable[[ConsumerAction], None],
        read: Callable[[ConsumerTransfer, Member, OfferedPart], None],
        resend_s: float,
        wait_s: float,
        now_s: float,
    ) -> None:
        """`read` begins a read and has it reported by `landed` or `missed`."""
        self.transfer = transfer
        self.layers = tuple(layers)
        self.state = ConsumerState.EXPECTED
        self.ending: Ending | None = None
        self.reason = ""
        self.members: dict[int, Member] = {}
        self.reading = 0
        assert self.layers, f"transfer {transfer} has no layers"
        assert 0 <= first_block <= end_block, (transfer, first_block, end_block)
        self._first_block, self._end_block = first_block, end_block
        self.members_wanted = 0  # unknown before the first Open
        self._act = act
        self._read = read
        self._resend_s = resend_s
        self._patience = Patience(wait_s, now_s)
        self._repeat_until_s = NEVER_S  # once ended

    @property
    def is_ended(self) -> bool:
        """Whether only the tombstone is left."""
        return self.state is ConsumerState.ENDED

    # What members say

    def opened(self, peer: Peer, voice: ConsumerVoice, message: Open, now_s: float) -> str | None:
        """Take an Open; return why it was dropped or rejected, if it was."""
        member = self.members.get(message.member)
        is_known = member is not None and member.is_about(peer.identity, message)
        if self.state in (ConsumerState.DRAINING, ConsumerState.ENDED):
            self._move(ConsumerEvent.LATE_OPEN)
            is_answered = self.state is ConsumerState.DRAINING or self.ending is Ending.DONE
            if not (is_known and is_answered):
                voice.reject(f"ended: {self.reason}")
            return "late"
        if is_known:
            assert member is not None
            member.heard_s = now_s
            self._move(ConsumerEvent.OPEN)
            voice.accept()
            return "duplicate"
        if member is not None:
            voice.reject(f"member {message.member} is another producer already")
            return "conflict"
        problem = self._problem(peer, message)
        if problem is not None:
            voice.reject(problem)
            self.stop(Ending.FAILED, problem, now_s)
            return "contradiction"
        if not self.members:
            self._patience.begin(now_s)
        self._patience.progress(now_s)
        self.members_wanted = message.members
        self.members[message.member] = Member(
            message.member,
            peer,
            Hold(slot=message.hold_slot, generation=message.generation),
            OfferedParts(self.layers, self._first_block, self._end_block),
            voice,
            Resend(self._resend_s, peer.lease_s / 4),
            now_s,
        )
        self._move(ConsumerEvent.OPEN)
        voice.accept()
        return None

    def offered(self, member: Member, message: Ready, now_s: float) -> str | None:
        """Take a Ready of a member; return why it was dropped, if it was."""
        if self.state is not ConsumerState.RECEIVING:
            return self._offered_late(member, message)
        is_new = member.parts.known(message.layer, message.part) is None
        part = member.parts.offer(message)
        if isinstance(part, str):
            member.failed = (message.layer, message.part)
            self.stop(Ending.FAILED, f"member {member.number}: {part}", now_s)
            return "contradiction"
        if part.is_done:
            member.voice.read_done(part.layer, part.number)
        elif is_new:
            self._patience.progress(now_s)
            self._begin(member, part)
        return None if is_new else "duplicate"

    def asked_to_stop(self, voice: ConsumerVoice, message: Abort, now_s: float) -> str | None:
        """Take an Abort; return why it was dropped, if it was. It is always acknowledged in the end."""
        member = self.members.get(message.member)
        if member is not None and member.is_about(voice.peer, message):
            return self._member_asked_to_stop(member, message, now_s)
        if member is None and self.state in (ConsumerState.EXPECTED, ConsumerState.RECEIVING):
            # Its Open was lost, or it never came so far, and there will be no other one.
            self.stop(Ending.FAILED, f"prefill aborted: {message.reason}", now_s)
            voice.abort_ack()
            return None
        voice.abort_ack()
        return "stale"

    def acknowledged(self, member: Member) -> str | None:
        """Take an AbortAck of a member; return why it was dropped, if it was."""
        if not self.is_ended:
            return "unexpected"
        self._move(ConsumerEvent.LATE_ABORT_ACK)
        member.resend.stop()
        return None

    # What its owner says

    def landed(self, member: Member, part: OfferedPart, now_s: float) -> None:
        """A read ended well."""
        self._read_ended(now_s)
        if self.state is not ConsumerState.RECEIVING:
            return
        member.parts.land(part)
        if not member.is_lost:
            member.voice.read_done(part.layer, part.number)
        missing = self.members_wanted - len(self.members)
        if not missing and all(member.parts.is_complete for member in self.members.values()):
            self._finish(ConsumerEvent.COMPLETE, Ending.DONE, "")

    def missed(self, member: Member, part: OfferedPart, error: str, *, try_again: bool, now_s: float) -> None:
        """A read failed."""
        self._read_ended(now_s)
        if self.state is not ConsumerState.RECEIVING:
            return
        if try_again:
            self._begin(member, part)
            return
        member.failed = (part.layer, part.number)
        what = f"layer {part.layer} part {part.number} of member {member.number}"
        self.stop(Ending.FAILED, f"{what} could not be read: {error}", now_s)

    def lost(self, peer: Peer, now_s: float) -> None:
        """A life of a producer is over."""
        for member in self.members.values():
            if member.peer is peer:
                member.lose()
                if member.is_awaited:
                    self.stop(Ending.FAILED, "prefill restarted", now_s)

    def stop(self, ending: Ending, reason: str, now_s: float) -> None:
        """End it without success, as soon as nothing is being read; nothing if it ends or has ended."""
        if self.state not in (ConsumerState.EXPECTED, ConsumerState.RECEIVING):
            return
        self.ending, self.reason = ending, reason
        if self.reading:
            self._move(ConsumerEvent.BREAK_READING)
            self._act(CancelReads(transfer=self.transfer))
        else:
            self._conclude(ConsumerEvent.BREAK, now_s)

    # Time

    def tick(self, now_s: float) -> int:
        """End it if a member or the whole is too late; repeat Abort. Returns how often it repeated."""
        if self.state in (ConsumerState.EXPECTED, ConsumerState.RECEIVING):
            self._lapse(now_s)
            return 0
        if self.state is ConsumerState.DRAINING:
            return 0
        until_s = self._repeat_until_s
        return sum(m.repeat_abort(now_s, until_s, self.reason) for m in self.members.values())

    def next_tick_s(self) -> float:
        """When `tick` has something to do."""
        if self.is_ended:
            return min((member.resend.due_s for member in self.members.values()), default=NEVER_S)
        if self.state is ConsumerState.DRAINING:
            return NEVER_S  # each read has a deadline of its own
        return self._patience.end_s(self.members, self.members_wanted)

    def check_integrity(self) -> None:
        """Assert what holds between any two calls."""
        assert (self.ending is None) == (self.state in (ConsumerState.EXPECTED, ConsumerState.RECEIVING))
        assert (self.state is ConsumerState.EXPECTED) <= (not self.members), self.transfer
        assert self.state is not ConsumerState.DRAINING or self.reading, self.transfer
        assert self.reading == 0 or not self.is_ended, self.transfer
        for number, member in self.members.items():
            assert number == member.number < self.members_wanted, (self.transfer, number)
            member.parts.check_integrity()

    def _offered_late(self, member: Member, message: Ready) -> str:
        self._move(ConsumerEvent.LATE_READY)
        if self.ending is Ending.DONE:
            member.voice.read_done(message.layer, message.part)
        elif self.is_ended:
            member.voice.reject(f"ended: {self.reason}")
        return "late"

    def _member_asked_to_stop(self, member: Member, message: Abort, now_s: float) -> str | None:
        member.asked_to_stop = True
        if self.state is ConsumerState.RECEIVING:
            self.stop(Ending.FAILED, f"prefill aborted: {message.reason}", now_s)
            return None
        self._move(ConsumerEvent.LATE_ABORT)
        if self.is_ended:
            member.resend.stop()
            member.voice.abort_ack()
        return "late"

    def _begin(self, member: Member, part: OfferedPart) -> None:
        part.attempts += 1
        self.reading += 1
        self._read(self, member, part)

    def _read_ended(self, now_s: float) -> None:
        assert self.reading > 0, self.transfer
        self.reading -= 1
        self._patience.progress(now_s)
        if self.state is ConsumerState.DRAINING and not self.reading:
            self._conclude(ConsumerEvent.DRAINED, now_s)

    def _conclude(self, event: ConsumerEvent, now_s: float) -> None:
        assert self.ending is not None
        for member in self.members.values():
            member.dismiss(now_s, self.reason)
        self._repeat_until_s = now_s + max((m.peer.lease_s for m in self.members.values()), default=0.0)
        self._finish(event, self.ending, self.reason)

    def _finish(self, event: ConsumerEvent, ending: Ending, reason: str) -> None:
        self._move(event)
        self.ending, self.reason = ending, reason
        for member in self.members.values():
            member.parts.clear()
        self._act(Finish(transfer=self.transfer, ending=ending, reason=reason))

    def _lapse(self, now_s: float) -> None:
        reason = self._patience.exhausted(self.members, self.members_wanted, now_s)
        if reason is None:
            return
        for member in self.members.values():
            if member.is_silent(now_s):
                member.peer.is_suspect = member.peer.heard_s <= member.heard_s
        self.stop(Ending.LAPSED, reason, now_s)

    def _problem(self, peer: Peer, message: Open) -> str | None:
        theirs, ours = (message.first_block, message.end_block), (self._first_block, self._end_block)
        if theirs != ours:
            return f"blocks {theirs[0]}..{theirs[1]} at prefill, {ours[0]}..{ours[1]} at decode"
        if self.members and message.members != self.members_wanted:
            return (
                f"{message.members} members says member {message.member}, {self.members_wanted} said others"
            )
        if message.member >= message.members:
            return f"member {message.member} of {message.members}"
        if message.hold_slot >= HOLD_SLOTS or message.generation < 1:
            return f"hold slot {message.hold_slot}, generation {message.generation} is no hold"
        twin = next((member for member in self.members.values() if member.peer is peer), None)
        return f"members {twin.number} and {message.member} are one producer" if twin else None

    def _move(self, event: ConsumerEvent) -> None:
        self.state = CONSUMER_MOVES.after(self.state, event)
