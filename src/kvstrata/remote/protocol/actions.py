"""What the machines ask of those who drive them: they do no I/O, read no clock and start no thread.

A driver calls a machine, then carries out `machine.take_actions()` in order. The order matters: a `Revoke`
stands before the `Settle` that lets the memory be reused.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from kvstrata.remote.holds import Hold
from kvstrata.remote.protocol.messages import AnyMessage


class Ending(enum.Enum):
    """How a transfer ended; only DONE means that the destination holds the request's rows."""

    DONE = "done"
    FAILED = "failed"  # a read, a mismatch, a rejection
    ABORTED = "aborted"  # someone asked for it
    LAPSED = "lapsed"  # nothing was heard within the lease, or within the time to begin


@dataclass(frozen=True, kw_only=True)
class Send:
    """Send to `peer`: at the producer the consumer's address, at the consumer the sender's identity."""

    peer: str
    message: AnyMessage


@dataclass(frozen=True, kw_only=True)
class Revoke:
    """Producer: end this hold now; reads in flight fail when they look at it."""

    transfer: str
    hold: Hold


@dataclass(frozen=True, kw_only=True)
class Settle:
    """Producer: nobody reads the transfer's blocks any more, or takes what it reads for valid; once each."""

    transfer: str
    ending: Ending
    reason: str


@dataclass(frozen=True, kw_only=True)
class StartRead:
    """Consumer: read the part, then report `read_finished(number, ...)` exactly once, whatever happens."""

    number: int
    peer: str
    transfer: str
    member: int
    members: int
    hold: Hold
    layer: int
    part: int
    first_block: int
    end_block: int
    blocks: tuple[int, ...]  # the producer's


@dataclass(frozen=True, kw_only=True)
class CancelReads:
    """Consumer: reads of this transfer should end soon; each is still reported by `read_finished`."""

    transfer: str


@dataclass(frozen=True, kw_only=True)
class Finish:
    """Consumer: the transfer is over and nothing writes to its destination any more; once each."""

    transfer: str
    ending: Ending
    reason: str


@dataclass(frozen=True, kw_only=True)
class LosePeer:
    """Consumer: the producer behind `peer` is gone or was replaced; give its connection up."""

    peer: str


ProducerAction = Send | Revoke | Settle
ConsumerAction = Send | StartRead | CancelReads | Finish | LosePeer
