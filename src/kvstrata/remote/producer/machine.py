"""The producer of remote read, without I/O: sessions with consumers, transfers, beats.

One owner calls it, from one thread at a time, and after every call carries out `take_actions()` in order.
What a peer sends never raises: what is wrong, late or unknown is dropped and counted by reason.

Source: seed, Joint Prefill and Decode Design (request flow) and Validation and Failure Handling; beyond it,
no wait is without an end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from kvstrata.remote.holds import Hold
from kvstrata.remote.producer.moves import ProducerState
from kvstrata.remote.producer.parts import PublishedParts
from kvstrata.remote.producer.session import Session, SessionEvent, SessionState
from kvstrata.remote.producer.transfer import ProducerTransfer
from kvstrata.remote.producer.voice import ProducerVoice
from kvstrata.remote.protocol.actions import Ending, ProducerAction, Send, Settle
from kvstrata.remote.protocol.beats import Pulse, beats_of
from kvstrata.remote.protocol.messages import (
    Abort,
    AbortAck,
    AnyMessage,
    Beat,
    Hello,
    Refused,
    Stamped,
    Welcome,
)
from kvstrata.remote.protocol.moves import NEVER_S
from kvstrata.remote.protocol.statistics import ProducerStatistics
from kvstrata.remote.protocol.tombstones import TOMBSTONE_LEASES
from kvstrata.remote.protocol.transfers import Transfers

__all__ = ["Producer", "ProducerStatistics"]


class Producer:
    """One rank of a prefill engine."""

    def __init__(
        self, *, hello: Hello, clock: Callable[[], float], lease_s: float, resend_s: float, open_wait_s: float
    ) -> None:
        """`hello` is what this rank says of itself; `clock` returns monotonic seconds.

        `lease_s` must be the lease of `hello`; of two leases in a session the longer one counts for both.
        """
        assert hello.lease_s == lease_s > 0 < resend_s, (hello.lease_s, lease_s, resend_s)
        self._hello = hello
        self._epoch = hello.epoch
        self._clock = clock
        self._lease_s, self._resend_s, self._open_wait_s = lease_s, resend_s, open_wait_s
        self._sessions: dict[str, Session] = {}
        self._transfers = Transfers[ProducerTransfer](TOMBSTONE_LEASES * lease_s)
        self._actions: list[ProducerAction] = []
        self._counts: Counter[str] = Counter()
        self._settled: Counter[Ending] = Counter()
        self._dropped: Counter[str] = Counter()
        self._pulse = Pulse(lease_s)

    def open(
        self,
        transfer: str,
        *,
        peer: str,
        hold: Hold,
        member: int,
        members: int,
        first_block: int,
        end_block: int,
        layers: Iterable[int],
    ) -> None:
        """Offer a request's blocks to the consumer at `peer`; from now on exactly one Settle will follow.

        `hold` guards the blocks until then. Raises TransferFailed if the id is in use or was lately.
        """
        self._transfers.check_unused(transfer)
        now_s = self._clock()
        session = self._sessions.get(peer)
        if session is None:
            session = Session(peer, hello=self._hello, resend_s=self._resend_s)
            self._sessions[peer] = session
        voice = ProducerVoice(
            transfer,
            session=session,
            act=self._act,
            hold=hold,
            member=member,
            members=members,
            first_block=first_block,
            end_block=end_block,
        )
        begun = ProducerTransfer(
            voice,
            PublishedParts(layers, first_block, end_block),
            session=session,
            act=self._act,
            resend_s=self._resend_s,
            deadline_s=now_s + self._open_wait_s,
        )
        is_needed = not self._concerned(session)
        self._transfers.open[transfer] = begun
        self._counts["opened"] += 1
        self._pulse.start(now_s)
        if session.is_welcomed:
            begun.connected(now_s)
        elif session.retry(now_s) or (session.state is SessionState.CONNECTING and is_needed):
            self._act(session.say_hello(now_s))
        elif session.state is SessionState.REFUSED:
            begun.refused(session.reason, now_s)
        self._transfers.bury(now_s)

    def publish(
        self,
        transfer: str,
        *,
        layer: int,
        first_block: int,
        end_block: int,
        blocks: tuple[int, ...],
        is_last: bool,
    ) -> None:
        """State that `blocks` of `layer` hold blocks `first_block..end_block` of the request, in its home.

        Parts of a layer come in order and without gaps (AssertionError). Nothing happens if the transfer is
        unknown, ends or has ended.
        """
        begun = self._transfers.open.get(transfer)
        if begun is not None:
            took = begun.publish(self._clock(), layer, first_block, end_block, blocks, is_last)
            self._counts["published"] += took

    def abort(self, transfer: str, reason: str) -> None:
        """Call a transfer off; its Settle follows when the consumer agrees, or one lease later."""
        begun = self._transfers.open.get(transfer)
        if begun is not None:
            now_s = self._clock()
            begun.abort(now_s, reason)
            self._transfers.bury(now_s)

    def receive(self, peer: str, message: AnyMessage) -> None:
        """Take a message of the consumer at `peer`."""
        now_s = self._clock()
        session = self._sessions.get(peer)
        dropped: str | None
        if session is None:
            dropped = "stranger"
        elif message.peer_epoch != self._epoch:
            dropped = "stale"  # it is for an earlier life of this producer
        elif isinstance(message, Welcome | Refused):
            dropped = self._shake_hands(session, message, now_s)
        elif not session.speaks(message):
            dropped = self._hear_stranger(session, message, now_s)
        elif isinstance(message, Beat):
            dropped = None
            self._hear_beat(session, message, now_s)
        elif isinstance(message, Stamped):
            dropped = self._hear(session, message, now_s)
        else:
            dropped = "unexpected"
        if dropped:
            self._dropped[dropped] += 1
        self._transfers.bury(now_s)

    def tick(self) -> None:
        """Do what is due: repeat, beat, end what has lapsed. Call at `next_tick_s`; earlier is harmless."""
        now_s = self._clock()
        self._counts["resent"] += self._transfers.tick(now_s)
        for session in self._needed():
            hello = session.tick(now_s)
            if hello is not None:
                self._counts["resent"] += 1
                self._act(hello)
        if self._pulse.is_due(now_s, go_on=bool(self._transfers.open)):
            self._beat()

    def next_tick_s(self) -> float | None:
        """When `tick` has something to do, on the clock; None if nothing is pending."""
        due_s = [session.next_tick_s() for session in self._needed()]
        earliest_s = min([*due_s, self._pulse.due_s, self._transfers.next_tick_s()])
        return None if earliest_s == NEVER_S else earliest_s

    def take_actions(self) -> list[ProducerAction]:
        """Return what is to be done, in order, and forget it."""
        actions, self._actions = self._actions, []
        return actions

    def is_open(self, transfer: str) -> bool:
        """Whether its Settle is still to come."""
        return transfer in self._transfers.open

    def statistics(self) -> ProducerStatistics:
        """Return the counts since construction."""
        states = Counter(begun.state for begun in self._transfers.open.values())
        sessions = Counter(session.state for session in self._sessions.values())
        return ProducerStatistics(
            opened=self._counts["opened"],
            opening=states[ProducerState.OPENING],
            active=states[ProducerState.ACTIVE],
            aborting=states[ProducerState.ABORTING],
            settled={ending: self._settled[ending] for ending in Ending},
            published_parts=self._counts["published"],
            unanswered_parts=sum(begun.parts.unanswered for begun in self._transfers.open.values()),
            resent=self._counts["resent"],
            dropped=dict(self._dropped),
            welcomed_sessions=sessions[SessionState.WELCOMED],
            refused_sessions=sessions[SessionState.REFUSED],
            restarted_peers=self._counts["restarted"],
            tombstones=len(self._transfers.ended),
        )

    def check_integrity(self) -> None:
        """Assert what holds between any two calls."""
        counts = self.statistics()
        live = counts.opening + counts.active + counts.aborting
        assert counts.opened == live + sum(counts.settled.values()), counts
        assert live == len(self._transfers.open), counts
        assert self._pulse.due_s < NEVER_S or not self._transfers.open
        for transfer, begun in self._transfers.open.items():
            assert begun.session is self._sessions[begun.session.peer], transfer
            assert begun.state is ProducerState.OPENING or begun.session.is_welcomed, transfer
            begun.parts.check_integrity()
        self._transfers.check_integrity()

    def _shake_hands(self, session: Session, message: Welcome | Refused, now_s: float) -> str | None:
        event = session.receive(message, now_s)
        if event is None:
            return "late"
        concerned = self._concerned(session)
        if event in (SessionEvent.RESTART, SessionEvent.REPLACE):
            self._counts["restarted"] += 1
            for begun in concerned:
                begun.restarted(now_s)
            concerned = [begun for begun in concerned if not begun.is_ended]
        if event is SessionEvent.REFUSE:
            for begun in concerned:
                begun.refused(session.reason, now_s)
        elif event in (SessionEvent.WELCOME, SessionEvent.REPLACE, SessionEvent.KNOW_AGAIN):
            for begun in concerned:
                begun.connected(now_s)
        elif event is SessionEvent.FORGET or concerned:
            self._act(session.say_hello(now_s))
        return None

    def _hear(self, session: Session, message: Stamped, now_s: float) -> str | None:
        begun = self._transfers.get(message.transfer)
        if begun is None or begun.session is not session or not begun.is_about(message):
            if isinstance(message, Abort):
                self._act(Send(peer=session.peer, message=self._ack_of(message)))
            return "unknown" if begun is None else "stale"
        return begun.receive(message, now_s)

    def _hear_stranger(self, session: Session, message: AnyMessage, now_s: float) -> str | None:
        """A decode that did not welcome this producer may say that it has heard of an end."""
        if not isinstance(message, AbortAck) or session.is_over(message.epoch, now_s):
            return "stale"
        ended = self._transfers.ended.get(message.transfer)
        if ended is None or ended.session is not session or not ended.is_about(message):
            return "stale"
        return ended.receive(message, now_s)

    def _concerned(self, session: Session) -> list[ProducerTransfer]:
        return [begun for begun in self._transfers.open.values() if begun.session is session]

    def _needed(self) -> list[Session]:
        """Sessions that a transfer waits for; once each, in order."""
        return list({id(begun.session): begun.session for begun in self._transfers.open.values()}.values())

    def _ack_of(self, message: Abort) -> AbortAck:
        return AbortAck(
            epoch=self._epoch,
            peer_epoch=message.epoch,
            transfer=message.transfer,
            member=message.member,
            generation=message.generation,
        )

    def _hear_beat(self, session: Session, message: Beat, now_s: float) -> None:
        for transfer in message.transfers:
            begun = self._transfers.get(transfer)
            if begun is not None and begun.session is session:
                begun.named(now_s)

    def _beat(self) -> None:
        by_session: dict[Session, list[str]] = {}
        for transfer, begun in self._transfers.open.items():
            if begun.session.is_welcomed:
                by_session.setdefault(begun.session, []).append(transfer)
        for session, transfers in by_session.items():
            for beat in beats_of(transfers, epoch=self._epoch, peer_epoch=session.peer_epoch):
                self._act(Send(peer=session.peer, message=beat))

    def _act(self, action: ProducerAction) -> None:
        self._actions.append(action)
        if isinstance(action, Settle):
            self._settled[action.ending] += 1
            self._transfers.end(action.transfer)
