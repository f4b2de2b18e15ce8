"""What prefill and decode say to each other about a transfer: typed, versioned, bounded.

Source: seed, Joint Prefill and Decode Design (request flow) and Validation and Failure Handling.

A *producer* is one rank of a prefill engine, a *consumer* one rank of a decode engine. A producer is *member*
0, 1, ... of the group of contributors of its consumer. An *epoch* names one life of a rank: a restarted one
has another. A *generation* names the producer's hold on a transfer's blocks: once it lets go of them, the
number is never valid again. A *part* is one piece of a layer, as a chunk of the prompt completes it; parts
are numbered from 0 and cover the transfer's blocks in order.

Block numbers `first_block` and `end_block` count the request's blocks from its first token; `end_block` is
behind the last one. `blocks` are the producer's own block ids.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

PROTOCOL_VERSION = 1
MAX_FRAME_BYTES = 8 << 20
"""Longer frames are dropped before they are decoded."""
MAX_BLOCKS = 1 << 20  # of one part: 16 M tokens at 16 tokens a block
MAX_LAYERS = 4096
MAX_TRANSFERS = 1 << 16  # named in one heartbeat
MAX_TEXT_CHARS = 4096
MAX_HOLD_SLOTS = 4096  # `holds.HOLD_SLOTS`

Count = Annotated[int, Meta(ge=0, lt=1 << 62)]
Generation = Annotated[int, Meta(ge=1, lt=1 << 62)]
Short = Annotated[str, Meta(max_length=256)]
Text = Annotated[str, Meta(max_length=MAX_TEXT_CHARS)]
Blocks = Annotated[tuple[Count, ...], Meta(max_length=MAX_BLOCKS)]


class Message(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=False):
    """Base of everything that goes over the control channel; fields added later have defaults."""

    epoch: Short
    """The sender's."""
    peer_epoch: Short = ""
    """The receiver's, as the sender knows it; empty before the sender knows."""


class ComponentLayout(msgspec.Struct, frozen=True, kw_only=True):
    """One cache of one layer, as `core.bundle.ComponentSpec` has it; equal on both sides or refused."""

    layer: Count
    component: Short
    is_draft: bool
    page_bytes: Count
    block_tokens: Count
    layout: Text


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """Where the pages of the component of the same index lie in the producer's exported regions."""

    region: Count
    offset: Count
    block_stride_bytes: Count
    num_blocks: Count


class TransportOffer(msgspec.Struct, frozen=True, kw_only=True):
    """A way to read the producer's memory; the ticket is for the transport of that name alone."""

    name: Short
    ticket: Annotated[bytes, Meta(max_length=1 << 20)]


class Hello(Message, frozen=True, kw_only=True, tag="hello"):
    """Producer to consumer, first and after every sign of a restart; repeated until it is answered."""

    version: Count
    rank: Count  # tensor-parallel rank of the producer
    tp_size: Count
    pp_size: Count = 1
    components: Annotated[tuple[ComponentLayout, ...], Meta(max_length=2 * MAX_LAYERS)]
    places: Annotated[tuple[Place, ...], Meta(max_length=2 * MAX_LAYERS)]  # one a component
    offers: Annotated[tuple[TransportOffer, ...], Meta(max_length=16)]
    memfabric_protocol: Short = "sdma"
    model: Short = ""  # names model, dtypes and draft model; equal on both sides
    lease_s: float


class Welcome(Message, frozen=True, kw_only=True, tag="welcome"):
    """Consumer to producer: the layouts agree, `transport` is the one it reads with."""

    version: Count
    transport: Short
    lease_s: float


class Refused(Message, frozen=True, kw_only=True, tag="refused"):
    """Consumer to producer: no transfers between these two; the reason holds both sides' values.

    `is_stale`: the producer speaks to an earlier life of this consumer and may say Hello again.
    """

    reason: Text
    is_stale: bool = False


class Stamped(Message, frozen=True, kw_only=True):
    """Base of the messages about one transfer."""

    transfer: Short
    member: Count
    generation: Count


class Open(Stamped, frozen=True, kw_only=True, tag="open"):
    """Producer to consumer: it has the request; repeated until accepted or rejected."""

    generation: Generation  # a hold's, never 0
    members: Annotated[int, Meta(ge=1, le=1 << 16)]  # contributors of the consumer, this one included
    hold_slot: Annotated[
        int, Meta(ge=0, lt=MAX_HOLD_SLOTS)
    ]  # with `generation`, the hold that guards every read of this transfer
    first_block: Count  # blocks before it are the consumer's own prefix hit
    end_block: Count


class Accept(Stamped, frozen=True, kw_only=True, tag="accept"):
    """Consumer to producer: the destination is registered and has these blocks."""


class Reject(Stamped, frozen=True, kw_only=True, tag="reject"):
    """Consumer to producer: it will never read this transfer (again), and reads nothing of it now."""

    reason: Text


class Ready(Stamped, frozen=True, kw_only=True, tag="ready"):
    """Producer to consumer: `blocks` of `layer` hold blocks `first_block..end_block` of the request.

    Repeated until it is answered. A part may be empty; a member that has nothing to send of it still says so.
    """

    layer: Count
    part: Count
    first_block: Count
    end_block: Count
    blocks: Blocks
    is_last: bool  # no part of this layer follows


class ReadDone(Stamped, frozen=True, kw_only=True, tag="read_done"):
    """Consumer to producer: every byte that it wants of the part has landed."""

    layer: Count
    part: Count


class ReadFailed(Stamped, frozen=True, kw_only=True, tag="read_failed"):
    """Consumer to producer: a part could not be read; it gave up the transfer and reads nothing of it now."""

    layer: Count
    part: Count
    reason: Text


class Abort(Stamped, frozen=True, kw_only=True, tag="abort"):
    """Either way: the transfer is over. Repeated until acknowledged, or the lease ends.

    From a consumer it also says that nothing is being read any more.
    """

    reason: Text


class AbortAck(Stamped, frozen=True, kw_only=True, tag="abort_ack"):
    """The answer to Abort. From a consumer: nothing of the transfer is being read any more."""


class Beat(Message, frozen=True, kw_only=True, tag="beat"):
    """Either way, several times a lease: the sender lives and still has these transfers with the receiver."""

    transfers: Annotated[tuple[Short, ...], Meta(max_length=MAX_TRANSFERS)]


AnyMessage = (
    Hello
    | Welcome
    | Refused
    | Open
    | Accept
    | Reject
    | Ready
    | ReadDone
    | ReadFailed
    | Abort
    | AbortAck
    | Beat
)
