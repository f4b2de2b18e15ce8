"""The states of a transfer at the producer, and every legal move between them."""

from __future__ import annotations

import enum

from kvstrata.remote.protocol.moves import Move, Moves


class ProducerState(enum.Enum):
    """Where a transfer is."""

    OPENING = "opening"
    ACTIVE = "active"
    ABORTING = "aborting"
    ENDED = "ended"


class ProducerEvent(enum.Enum):
    """What moves it."""

    ACCEPT = "Accept"
    ALL_READ = "ReadDone for the last part of the last layer"
    GIVEN_UP = "Reject or ReadFailed"
    ABORTED = "Abort"
    STOP = "`abort`"
    CALL_OFF = "`abort` before any Open was sent"
    STOPPED = "AbortAck, Reject or ReadFailed"
    REFUSED = "session refused"
    RESTARTED = "decode restarted"
    LATE = "nothing heard for `lease_s`"
    NEVER = "no Accept within `open_wait_s`"
    UNHEARD = "no AbortAck for `lease_s`"
    ENDED_ABORT = "Abort, late"
    ENDED_ABORT_ACK = "AbortAck, late"
    ENDED_NEWS = "ReadDone, or Beat that names the transfer, late"


_S, _E = ProducerState, ProducerEvent
_TELL = "send Abort until it is acknowledged, a lease at most"
PRODUCER_MOVES = Moves[ProducerState, ProducerEvent](
    {
        (_S.OPENING, _E.ACCEPT): Move(_S.ACTIVE, "send Ready for every part published so far"),
        (_S.OPENING, _E.GIVEN_UP): Move(_S.ENDED, "revoke, settle as failed"),
        (_S.OPENING, _E.ABORTED): Move(_S.ENDED, "revoke, send AbortAck, settle as aborted"),
        (_S.OPENING, _E.STOP): Move(_S.ABORTING, "send Abort"),
        (_S.OPENING, _E.CALL_OFF): Move(_S.ENDED, f"revoke, settle as aborted, {_TELL}"),
        (_S.OPENING, _E.REFUSED): Move(
            _S.ENDED, f"revoke, settle as failed with the reason of the refusal, {_TELL}"
        ),
        (_S.OPENING, _E.RESTARTED): Move(
            _S.OPENING,
            "at most one lease is left to be accepted: the restarted decode may be the one that asked",
        ),
        (_S.OPENING, _E.NEVER): Move(_S.ENDED, "revoke, settle as lapsed"),
        (_S.ACTIVE, _E.ALL_READ): Move(_S.ENDED, "revoke, settle as done"),
        (_S.ACTIVE, _E.GIVEN_UP): Move(_S.ENDED, "revoke, settle as failed"),
        (_S.ACTIVE, _E.ABORTED): Move(_S.ENDED, "revoke, send AbortAck, settle as aborted"),
        (_S.ACTIVE, _E.STOP): Move(_S.ABORTING, "send Abort"),
        (_S.ACTIVE, _E.RESTARTED): Move(_S.ENDED, "revoke, settle as failed"),
        (_S.ACTIVE, _E.LATE): Move(_S.ENDED, "revoke, settle as lapsed"),
        (_S.ABORTING, _E.STOPPED): Move(_S.ENDED, "revoke, settle as aborted"),
        (_S.ABORTING, _E.ABORTED): Move(_S.ENDED, "revoke, send AbortAck, settle as aborted"),
        (_S.ABORTING, _E.RESTARTED): Move(_S.ENDED, f"revoke, settle as failed, {_TELL}"),
        (_S.ABORTING, _E.UNHEARD): Move(_S.ENDED, "revoke, settle as lapsed"),
        (_S.ENDED, _E.ENDED_ABORT): Move(_S.ENDED, "send AbortAck"),
        (_S.ENDED, _E.ENDED_ABORT_ACK): Move(_S.ENDED, "repeat Abort no more"),
        (_S.ENDED, _E.ENDED_NEWS): Move(
            _S.ENDED, "unless it is done: send Abort, at most once per `resend_s`"
        ),
    }
)
