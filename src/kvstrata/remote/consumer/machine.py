"""The consumer of remote read, without I/O: producers that it knows, transfers, reads, beats.

One owner calls it, from one thread at a time, and after every call carries out `take_actions()` in order.
What a peer sends never raises: what is wrong, late or unknown is answered or dropped, and counted by reason.

Source: seed, Joint Prefill and Decode Design (request flow) and Validation and Failure Handling.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from kvstrata.remote.consumer.moves import ConsumerState
from kvstrata.remote.consumer.peers import Peer, Peers
from kvstrata.remote.consumer.reads import Reads
from kvstrata.remote.consumer.transfer import ConsumerTransfer
from kvstrata.remote.consumer.voice import ConsumerVoice, SessionVoice
from kvstrata.remote.protocol.actions import ConsumerAction, Ending, Finish, LosePeer, Send
from kvstrata.remote.protocol.beats import Pulse, beats_of
from kvstrata.remote.protocol.handshake import Mismatch
from kvstrata.remote.protocol.messages import (
    Abort,
    AbortAck,
    AnyMessage,
    Beat,
    Hello,
    Open,
    Ready,
    Stamped,
)
from kvstrata.remote.protocol.moves import NEVER_S
from kvstrata.remote.protocol.statistics import ConsumerStatistics
from kvstrata.remote.protocol.tombstones import TOMBSTONE_LEASES
from kvstrata.remote.protocol.transfers import Transfers

__all__ = ["Consumer", "ConsumerStatistics"]


class Consumer:
    """One rank of a decode engine."""

    def __init__(
        self,
        *,
        epoch: str,
        check_hello: Callable[[Hello], str],
        clock: Callable[[], float],
        lease_s: float,
        resend_s: float,
        wait_s: float,
        read_attempts: int,
    ) -> None:
        """`check_hello` returns the transport's name or raises Mismatch; `clock` gives monotonic seconds."""
        assert lease_s > 0 < resend_s < wait_s, (lease_s, resend_s, wait_s)
        assert read_attempts >= 1, read_attempts
        self._epoch = epoch
        self._clock = clock
        self._resend_s, self._wait_s = resend_s, wait_s
        self._peers = Peers(check_hello=check_hello, lease_s=lease_s)
        # A prefill may be late to a request that was given up here, as late as it may be waited for.
        self._transfers = Transfers[ConsumerTransfer](max(TOMBSTONE_LEASES * lease_s, wait_s))
        self._reads = Reads(self._act, attempts=read_attempts)
        self._actions: list[ConsumerAction] = []
        self._counts: Counter[str] = Counter()
        self._finished: Counter[Ending] = Counter()
        self._dropped: Counter[str] = Counter()
        self._pulse = Pulse(lease_s)
        self._voice = SessionVoice(self._act, epoch, lease_s)

    def expect(self, transfer: str, *, first_block: int, end_block: int, layers: Iterable[int]) -> None:
        """Wait for a transfer whose destination is there; from now on exactly one Finish will follow.

        Raises TransferFailed if the id is in use or was lately.
        """
        self._transfers.check_unused(transfer)
        now_s = self._clock()
        self._transfers.open[transfer] = ConsumerTransfer(
            transfer,
            first_block=first_block,
            end_block=end_block,
            layers=layers,
            act=self._act,
            read=self._reads.begin,
            resend_s=self._resend_s,
            wait_s=self._wait_s,
            now_s=now_s,
        )
        self._counts["expected"] += 1
        self._pulse.start(now_s)

    def abort(self, transfer: str, reason: str) -> None:
        """Call a transfer off; its Finish follows as soon as nothing of it is being read."""
        begun = self._transfers.open.get(transfer)
        if begun is not None:
            now_s = self._clock()
            begun.stop(Ending.ABORTED, reason, now_s)
            self._transfers.bury(now_s)

    def receive(self, peer: str, message: AnyMessage) -> None:
        """Take a message of the producer that speaks under the identity `peer`."""
        now_s = self._clock()
        dropped: str | None
        if isinstance(message, Hello):
            dropped = self._hear_hello(peer, message, now_s)
        else:
            known = self._peers.speaking(peer, message, now_s)
            if known is None or message.peer_epoch != self._epoch:
                dropped = self._hear_stranger(peer, message, now_s)
            elif isinstance(message, Beat):
                dropped = None
                self._hear_beat(known, message, now_s)
            elif isinstance(message, Stamped):
                dropped = self._hear(known, message, now_s)
            else:
                dropped = "unexpected"
        if dropped:
            self._dropped[dropped] += 1
        self._transfers.bury(now_s)

    def read_finished(self, number: int, error: str | None = None, *, is_final: bool = False) -> None:
        """Report the end of the read of that number: None if every byte landed under a valid hold.

        After an error the part is read again under a new number, up to `read_attempts` reads, unless
        `is_final` says that it is of no use.
        """
        now_s = self._clock()
        self._reads.end(number, error, is_final=is_final, now_s=now_s)
        self._transfers.bury(now_s)

    def tick(self) -> None:
        """Do what is due: beat, repeat, end what has lapsed. Call at `next_tick_s`; earlier is harmless."""
        now_s = self._clock()
        self._counts["resent"] += self._transfers.tick(now_s)
        if self._pulse.is_due(now_s, go_on=bool(self._transfers.open)):
            self._beat()
        for peer in self._idle_peers():
            if now_s >= peer.forget_s():
                self._peers.forget(peer)
                self._lose(peer, now_s)

    def next_tick_s(self) -> float | None:
        """When `tick` has something to do, on the clock; None if nothing is pending."""
        due_s = [peer.forget_s() for peer in self._idle_peers()]
        earliest_s = min([*due_s, self._pulse.due_s, self._transfers.next_tick_s()])
        return None if earliest_s == NEVER_S else earliest_s

    def take_actions(self) -> list[ConsumerAction]:
        """Return what is to be done, in order, and forget it."""
        actions, self._actions = self._actions, []
        return actions

    def is_expected(self, transfer: str) -> bool:
        """Whether its Finish is still to come."""
        return transfer in self._transfers.open

    def statistics(self) -> ConsumerStatistics:
        """Return the counts since construction."""
        states = Counter(transfer.state for transfer in self._transfers.open.values())
        return ConsumerStatistics(
            expected=self._counts["expected"],
            waiting=states[ConsumerState.EXPECTED],
            receiving=states[ConsumerState.RECEIVING],
            draining=states[ConsumerState.DRAINING],
            finished={ending: self._finished[ending] for ending in Ending},
            reads=self._reads.begun,
            reading=len(self._reads),
            landed_reads=self._reads.landed,
            failed_reads=self._reads.failed,
            retried_reads=self._reads.retried,
            resent=self._counts["resent"],
            dropped=dict(self._dropped),
            peers=len(self._peers),
            refused_hellos=self._counts["refused"],
            lost_peers=self._counts["lost"],
            tombstones=len(self._transfers.ended),
        )

    def check_integrity(self) -> None:
        """Assert what holds between any two calls."""
        counts = self.statistics()
        live = counts.waiting + counts.receiving + counts.draining
        assert counts.expected == live + sum(counts.finished.values()), counts
        assert live == len(self._transfers.open), counts
        assert self._pulse.due_s < NEVER_S or not self._transfers.open
        self._reads.check_integrity()
        self._transfers.check_integrity()
        assert sum(transfer.reading for transfer in self._transfers.open.values()) == counts.reading, counts
        for transfer in (*self._transfers.open.values(), *self._transfers.ended):
            transfer.check_integrity()

    def _hear_hello(self, identity: str, hello: Hello, now_s: float) -> str | None:
        if self._peers.is_over(identity, hello.epoch, now_s):
            return "stale"
        over = self._peers.replaced_by(identity, hello, now_s)
        if over is not None:
            self._lose(over, now_s)
        try:
            peer = self._peers.greet(identity, hello, now_s)
        except Mismatch as mismatch:
            self._counts["refused"] += 1
            self._voice.refuse(identity, hello.epoch, str(mismatch))
            return None
        self._voice.welcome(identity, hello.epoch, peer.transport)
        return None

    def _hear_stranger(self, identity: str, message: AnyMessage, now_s: float) -> str | None:
        """A life that is not welcome, or not yet, may say that a transfer will never be opened.

        Its end is believed since the frame proves the secret and no transfer's id is used again, but not of
        a life that is known to be over, nor to an earlier life of this consumer.
        """
        is_for_us = message.peer_epoch in ("", self._epoch)
        if (
            isinstance(message, Abort)
            and is_for_us
            and not self._peers.is_over(identity, message.epoch, now_s)
        ):
            transfer = self._transfers.get(message.transfer)
            if transfer is not None and (transfer.is_ended or message.member not in transfer.members):
                voice = ConsumerVoice.answering(identity, message, epoch=self._epoch, act=self._act)
                return transfer.asked_to_stop(voice, message, now_s)
        return self._estrange(identity, message)

    def _estrange(self, identity: str, message: AnyMessage) -> str:
        """Answer one that speaks to an earlier life of this consumer, or is not known to it (any more)."""
        if isinstance(message, Open | Ready | Abort | Beat):
            self._voice.estrange(identity, message.epoch)
        return "stale"

    def _hear(self, peer: Peer, message: Stamped, now_s: float) -> str | None:
        voice = ConsumerVoice.answering(peer.identity, message, epoch=self._epoch, act=self._act)
        transfer = self._transfers.get(message.transfer)
        if transfer is None:
            if isinstance(message, Abort):
                voice.abort_ack()
                return "unknown"
            return "early" if isinstance(message, Open | Ready) else "unknown"
        if isinstance(message, Open):
            return transfer.opened(peer, voice, message, now_s)
        if isinstance(message, Abort):
            return transfer.asked_to_stop(voice, message, now_s)
        member = transfer.members.get(message.member)
        if member is None or not member.is_about(peer.identity, message):
            return "stale"
        member.heard_s = now_s
        if isinstance(message, Ready):
            return transfer.offered(member, message, now_s)
        return transfer.acknowledged(member) if isinstance(message, AbortAck) else "unexpected"

    def _hear_beat(self, peer: Peer, message: Beat, now_s: float) -> None:
        for name in message.transfers:
            transfer = self._transfers.open.get(name)
            for member in transfer.members.values() if transfer else ():
                if member.peer is peer:
                    member.heard_s = now_s

    def _beat(self) -> None:
        by_peer: dict[Peer, list[str]] = {}
        for name, transfer in self._transfers.open.items():
            for member in transfer.members.values():
                if member.is_awaited and not member.is_lost:
                    by_peer.setdefault(member.peer, []).append(name)
        for peer, names in by_peer.items():
            for beat in beats_of(names, epoch=self._epoch, peer_epoch=peer.epoch):
                self._act(Send(peer=peer.identity, message=beat))

    def _lose(self, peer: Peer, now_s: float) -> None:
        self._counts["lost"] += 1
        self._act(LosePeer(peer=peer.identity))
        for transfer in self._transfers.pending():
            transfer.lost(peer, now_s)

    def _idle_peers(self) -> list[Peer]:
        busy = {
            member.peer
            for transfer in self._transfers.open.values()
            for member in transfer.members.values()
            if not member.is_lost
        }
        return [peer for peer in self._peers if peer not in busy]

    def _act(self, action: ConsumerAction) -> None:
        self._actions.append(action)
        if isinstance(action, Finish):
            self._finished[action.ending] += 1
            self._transfers.end(action.transfer)
