"""The states of a transfer at the consumer, and every legal move between them."""

from __future__ import annotations

import enum

from kvstrata.remote.protocol.actions import Ending
from kvstrata.remote.protocol.moves import Move, Moves


class ConsumerState(enum.Enum):
    """Where a transfer is."""

    EXPECTED = "expected"
    RECEIVING = "receiving"
    DRAINING = "draining"
    ENDED = "ended"


class ConsumerEvent(enum.Enum):
    """What moves it."""

    OPEN = "Open that fits"
    COMPLETE = "the last part of all layers of all members has landed"
    BREAK = "it cannot go on (see below), no read in flight"
    BREAK_READING = "it cannot go on (see below), reads in flight"
    DRAINED = "the last read in flight is reported"
    LATE_OPEN = "Open"
    LATE_READY = "Ready"
    LATE_ABORT = "Abort"
    LATE_ABORT_ACK = "AbortAck"


_S, _E = ConsumerState, ConsumerEvent
_DISMISS = "tell every member: AbortAck, ReadFailed, or Abort until it is acknowledged; finish"
CONSUMER_MOVES = Moves[ConsumerState, ConsumerEvent](
    {
        (_S.EXPECTED, _E.OPEN): Move(_S.RECEIVING, "send Accept"),
        (_S.EXPECTED, _E.BREAK): Move(_S.ENDED, "finish"),
        (_S.RECEIVING, _E.OPEN): Move(_S.RECEIVING, "send Accept, again if it is repeated"),
        (_S.RECEIVING, _E.COMPLETE): Move(_S.ENDED, "finish as done"),
        (_S.RECEIVING, _E.BREAK): Move(_S.ENDED, _DISMISS),
        (_S.RECEIVING, _E.BREAK_READING): Move(_S.DRAINING, "cancel the reads, begin none"),
        (_S.DRAINING, _E.DRAINED): Move(_S.ENDED, _DISMISS),
        (_S.DRAINING, _E.LATE_OPEN): Move(_S.DRAINING, "send Reject, unless it is a member's"),
        (_S.DRAINING, _E.LATE_READY): Move(_S.DRAINING, "nothing"),
        (_S.DRAINING, _E.LATE_ABORT): Move(_S.DRAINING, "remember that a member is to be told AbortAck"),
        (_S.ENDED, _E.LATE_OPEN): Move(_S.ENDED, "send Reject, unless it is done and a member's"),
        (_S.ENDED, _E.LATE_READY): Move(_S.ENDED, "send ReadDone if it is done, else Reject"),
        (_S.ENDED, _E.LATE_ABORT): Move(_S.ENDED, "send AbortAck"),
        (_S.ENDED, _E.LATE_ABORT_ACK): Move(_S.ENDED, "repeat Abort no more"),
    }
)
BREAKS = (
    ("`abort`", Ending.ABORTED),
    ("an Open, a Ready or a member that contradicts what is known", Ending.FAILED),
    ("a part that could not be read, after all attempts or under a hold that was revoked", Ending.FAILED),
    ("Abort from a member, or from one that has not opened it, welcome or not", Ending.FAILED),
    ("another life of a member of which something is missing", Ending.FAILED),
    ("a member of which something is missing, silent for `lease_s`", Ending.LAPSED),
    ("no Open for `wait_s`; a member missing for `wait_s` after the first one", Ending.LAPSED),
    ("no new part and no read that ended for five times `wait_s`", Ending.LAPSED),
)
"""What "cannot go on" means, for the page: events alike in what follows but for the ending."""
