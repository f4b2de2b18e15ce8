"""The producer's end of a session with one consumer: who it is, in which of its lives, and whether it agreed.

Nothing but Hello, and the Abort of what will never be opened, is sent before the Welcome. A consumer that was
restarted shows itself by refusing what was meant for its earlier life; what that life said, and arrives
later, is not believed.
"""

from __future__ import annotations

import enum

from kvstrata.remote.protocol.actions import Send
from kvstrata.remote.protocol.former_lives import FormerLives
from kvstrata.remote.protocol.messages import AnyMessage, Hello, Refused, Welcome
from kvstrata.remote.protocol.moves import NEVER_S, Move, Moves, Resend

MAX_LEASE_S = 3600.0


class SessionState(enum.Enum):
    """What the producer knows about the consumer at an address."""

    CONNECTING = "connecting"
    WELCOMED = "welcomed"
    REFUSED = "refused"


class SessionEvent(enum.Enum):
    """What changes it."""

    WELCOME = "Welcome"
    REFUSE = "Refused"
    RESTART = "Refused as stale, by a life not known before"
    REPLACE = "Welcome of a life not known before"
    FORGET = "Refused as stale, by the life that welcomed this producer"
    KNOW_AGAIN = "Welcome of the same life, after that"
    RETRY = "`open`, a lease or more after the refusal"


SESSION_MOVES = Moves[SessionState, SessionEvent](
    {
        (SessionState.CONNECTING, SessionEvent.WELCOME): Move(
            SessionState.WELCOMED, "send Open for every transfer that waits"
        ),
        (SessionState.CONNECTING, SessionEvent.REFUSE): Move(
            SessionState.REFUSED,
            "every transfer fails with the reason, and decode is told; so does one opened within a lease",
        ),
        (SessionState.WELCOMED, SessionEvent.RESTART): Move(
            SessionState.CONNECTING,
            "accepted transfers fail (decode restarted), others have a lease left to be accepted; send Hello",
        ),
        (SessionState.WELCOMED, SessionEvent.REPLACE): Move(
            SessionState.WELCOMED, "the same, but no Hello is needed: send Open for every transfer left"
        ),
        (SessionState.WELCOMED, SessionEvent.FORGET): Move(
            SessionState.WELCOMED, "send Hello, seldom; nothing fails by it, since the message may be late"
        ),
        (SessionState.WELCOMED, SessionEvent.KNOW_AGAIN): Move(
            SessionState.WELCOMED, "send Open for every transfer that waits, again"
        ),
        (SessionState.REFUSED, SessionEvent.RETRY): Move(SessionState.CONNECTING, "send Hello"),
        (SessionState.REFUSED, SessionEvent.RESTART): Move(
            SessionState.CONNECTING, "the refusal is void; Abort of what it ended is for whoever lives there"
        ),
    }
)


def agreed_lease_s(own_s: float, peers_s: float) -> float:
    """Seconds of silence that end a transfer: the longer lease of the two sides, so that both wait alike."""
    return max(own_s, peers_s) if 0 < peers_s <= MAX_LEASE_S else own_s


class Session:
    """State of one session; the producer owns it and carries out what its events ask for."""

    def __init__(self, peer: str, *, hello: Hello, resend_s: float) -> None:
        self.peer = peer
        self.state = SessionState.CONNECTING
        self.peer_epoch = ""
        self.transport = ""
        self.reason = ""
        self.epoch = hello.epoch
        self.lease_s = hello.lease_s
        self._hello = hello
        self._resend = Resend(resend_s, hello.lease_s / 4)
        self._retry_s = 0.0  # no Hello before, after a refusal or a consumer's loss of memory
        self._is_forgotten = False
        self._former = FormerLives(hello.lease_s)

    @property
    def is_welcomed(self) -> bool:
        """Whether messages about transfers may be sent."""
        return self.state is SessionState.WELCOMED

    def speaks(self, message: AnyMessage) -> bool:
        """Whether the message is from the life that welcomed this producer."""
        return self.is_welcomed and message.epoch == self.peer_epoch

    def is_over(self, epoch: str, now_s: float) -> bool:
        """Whether that life of the consumer was replaced by another one, not long ago."""
        return self._former.has(epoch, now_s)

    def say_hello(self, now_s: float) -> Send:
        """Return the Hello to send now; `tick` repeats it until there is an answer."""
        self._resend.start(now_s)
        return Send(peer=self.peer, message=self._hello)

    def tick(self, now_s: float) -> Send | None:
        """Return the Hello if it is time to repeat it. Call only while a transfer needs the session."""
        if self.state is not SessionState.CONNECTING or now_s < self._resend.due_s:
            return None
        self._resend.again(now_s)
        return Send(peer=self.peer, message=self._hello)

    def next_tick_s(self) -> float:
        """When `tick` has something to do, if a transfer needs the session."""
        return self._resend.due_s if self.state is SessionState.CONNECTING else NEVER_S

    def retry(self, now_s: float) -> bool:
        """Leave REFUSED if a lease has passed since; whether a Hello shall be said."""
        if self.state is not SessionState.REFUSED or now_s < self._retry_s:
            return False
        self._move(SessionEvent.RETRY)
        return True

    def receive(self, message: Welcome | Refused, now_s: float) -> SessionEvent | None:
        """Return what happened, or None for a message that is late or of no consequence."""
        if self.is_over(message.epoch, now_s):
            return None
        if isinstance(message, Welcome):
            return self._welcome(message, now_s)
        if message.is_stale:
            return self._stale(message, now_s)
        if self.state is not SessionState.CONNECTING:
            return None
        self.reason, self._retry_s = message.reason, now_s + self.lease_s
        self.peer_epoch = message.epoch
        return self._move(SessionEvent.REFUSE)

    def _welcome(self, message: Welcome, now_s: float) -> SessionEvent | None:
        if self.state is SessionState.CONNECTING:
            event = SessionEvent.WELCOME
        elif self.is_welcomed and message.epoch != self.peer_epoch:
            self._former.add(self.peer_epoch, now_s)
            event = SessionEvent.REPLACE
        elif self.is_welcomed and self._is_forgotten:
            event = SessionEvent.KNOW_AGAIN
        else:
            return None
        self._is_forgotten = False
        self.peer_epoch, self.transport = message.epoch, message.transport
        self.lease_s = agreed_lease_s(self._hello.lease_s, message.lease_s)
        return self._move(event)

    def _stale(self, message: Refused, now_s: float) -> SessionEvent | None:
        if self.state is SessionState.REFUSED and message.epoch != self.peer_epoch:
            # Not put among the former lives: should this message be the late one, nothing is lost.
            self.peer_epoch = ""
            return self._move(SessionEvent.RESTART)
        if not self.is_welcomed:
            return None
        if message.epoch == self.peer_epoch:
            if now_s < self._retry_s:
                return None
            self._retry_s = now_s + self._resend.first_s
            self._is_forgotten = True
            return self._move(SessionEvent.FORGET)
        self._former.add(self.peer_epoch, now_s)
        self.peer_epoch = ""
        return self._move(SessionEvent.RESTART)

    def _move(self, event: SessionEvent) -> SessionEvent:
        self.state = SESSION_MOVES.after(self.state, event)
        if self.state is not SessionState.CONNECTING:
            self._resend.stop()
        return event
