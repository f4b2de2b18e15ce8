"""What the two ends of a TCP connection say to each other, and how each proves that it has the secret.

    exporter -> reader   greeting: magic, version, nonce
    reader -> exporter   answer: magic, version, nonce, proof over both nonces and the export's identity
    exporter -> reader   proof of the other kind
    reader -> exporter   READ: a hold and ranges of regions (at most WINDOW of them unanswered)
    exporter -> reader   OK and the ranges' bytes, or a refusal and its reason
    reader -> exporter   CHECK: the same hold, when every byte has landed
    exporter -> reader   OK, or a refusal and its reason
The reader proves itself first: a stranger learns nothing to try secrets with. The proofs name the export, so
a port that another process has taken over since the ticket was made is not read from. After CHECK was
answered OK no byte can have come from memory that was given up, however long bytes lay in buffers on the way.
"""

from __future__ import annotations

import enum
import hmac
import secrets
import struct
from dataclasses import dataclass

import numpy as np

from kvstrata.errors import TransferFailed
from kvstrata.remote.holds import Hold, HoldRevoked
from kvstrata.remote.transports.base import Int64Array
from kvstrata.remote.transports.channel import Channel
from kvstrata.remote.transports.tickets import MAC_BYTES, mac

VERSION = 1
MAX_REQUEST_BYTES = 16 << 20
MAX_REQUEST_RANGES = 512
WINDOW = 2
"""Requests under way. As many as these must fit in a socket's buffers: neither side may wait for the other
to take a request while bytes go the other way."""
MAX_REASON_BYTES = 1024

_NONCE_BYTES = 32
_MAGIC = b"kvstrata"
_GREETING = struct.Struct(f"<8sI{_NONCE_BYTES}s")
_ANSWER = struct.Struct(f"<8sI{_NONCE_BYTES}s{MAC_BYTES}s")
_REQUEST = struct.Struct("<4sIIIQI")  # magic, kind, ranges, slot, generation, milliseconds
_REPLY = struct.Struct("<4sII")  # magic, status, bytes of the reason
_REQUEST_MAGIC, _REPLY_MAGIC = b"kvrq", b"kvrp"


class BrokenFrame(TransferFailed):
    """The other side does not speak this protocol, or not any more."""


class WrongSecret(TransferFailed):
    """The other side cannot prove that it has the secret, or is not the one that the ticket names."""


class Kind(enum.IntEnum):
    """What a reader asks."""

    READ = 1
    CHECK = 2


class Reply(enum.IntEnum):
    """What an exporter answers."""

    OK = 0
    HOLD_ENDED = 1
    OUTSIDE = 2


@dataclass(frozen=True, kw_only=True, eq=False)
class Request:
    """One question of a reader; `ranges` is `[3, count]`: region, offset, size."""

    kind: Kind
    hold: Hold
    timeout_s: float
    ranges: Int64Array


def accept_reader(channel: Channel, *, export_id: bytes, secret: bytes, give_up_s: float) -> None:
    """The exporter's half of the handshake. Raises WrongSecret, BrokenFrame, PeerGone or DeadlineExceeded."""
    wait = "tcp handshake of a reader"
    ours = secrets.token_bytes(_NONCE_BYTES)
    channel.send(_GREETING.pack(_MAGIC, VERSION, ours), give_up_s=give_up_s, wait=wait)
    answer = channel.receive(_ANSWER.size, give_up_s=give_up_s, wait=wait)
    magic, version, theirs, proof = _ANSWER.unpack(answer)
    _check_greeting(magic, version)
    if not hmac.compare_digest(proof, mac(secret, b"tcp reader", export_id, ours, theirs)):
        raise WrongSecret("a reader has another secret, or looked for another export")
    channel.send(mac(secret, b"tcp exporter", export_id, ours, theirs), give_up_s=give_up_s, wait=wait)


def greet_exporter(channel: Channel, *, export_id: bytes, secret: bytes, give_up_s: float) -> None:
    """The reader's half of the handshake. Raises as `accept_reader` does."""
    wait = "tcp handshake with the producer"
    greeting = channel.receive(_GREETING.size, give_up_s=give_up_s, wait=wait)
    magic, version, theirs = _GREETING.unpack(greeting)
    _check_greeting(magic, version)
    ours = secrets.token_bytes(_NONCE_BYTES)
    proof = mac(secret, b"tcp reader", export_id, theirs, ours)
    channel.send(_ANSWER.pack(_MAGIC, VERSION, ours, proof), give_up_s=give_up_s, wait=wait)
    answer = channel.receive(MAC_BYTES, give_up_s=give_up_s, wait=f"{wait} (it has another secret?)")
    if not hmac.compare_digest(answer, mac(secret, b"tcp exporter", export_id, theirs, ours)):
        raise WrongSecret("the producer has another secret, or is not the one that made the ticket")


def pack_request(kind: Kind, hold: Hold, *, timeout_s: float, ranges: Int64Array | None = None) -> bytes:
    """One frame; `ranges` is `[3, count]` of at most MAX_REQUEST_RANGES, for READ only."""
    body = b"" if ranges is None else ranges.astype("<i8").tobytes()
    count = 0 if ranges is None else ranges.shape[1]
    milliseconds = min(max(0, int(timeout_s * 1000)), (1 << 32) - 1)
    return _REQUEST.pack(_REQUEST_MAGIC, kind, count, hold.slot, hold.generation, milliseconds) + body


def receive_request(channel: Channel, *, give_up_s: float) -> Request:
    """Take the next request off the stream. Raises BrokenFrame for what is none."""
    wait = "tcp request of a reader"
    frame = channel.receive(_REQUEST.size, give_up_s=give_up_s, wait=wait)
    magic, kind, count, slot, generation, milliseconds = _REQUEST.unpack(frame)
    is_read = kind == Kind.READ
    if magic != _REQUEST_MAGIC or kind not in (Kind.READ, Kind.CHECK):
        raise BrokenFrame("a reader sent something that is no request")
    if not (1 if is_read else 0) <= count <= (MAX_REQUEST_RANGES if is_read else 0):
        raise BrokenFrame(f"a reader sent {Kind(kind).name} with {count} ranges")
    try:
        hold = Hold(slot=slot, generation=generation)
    except ValueError as error:
        raise BrokenFrame(f"a reader sent {error}") from None
    body = channel.receive(count * 24, give_up_s=give_up_s, wait=wait)
    ranges = np.frombuffer(body, dtype="<i8").astype(np.int64).reshape(3, count)
    return Request(kind=Kind(kind), hold=hold, timeout_s=milliseconds / 1000, ranges=ranges)


def pack_reply(reply: Reply, reason: str = "") -> bytes:
    """One frame; after OK to READ the bytes follow."""
    text = reason.encode()[:MAX_REASON_BYTES]
    return _REPLY.pack(_REPLY_MAGIC, reply, len(text)) + text


def receive_reply(channel: Channel, *, give_up_s: float, wait: str) -> None:
    """Return on OK; raises TransferFailed with the exporter's reason otherwise, BrokenFrame for no reply.

    The TransferFailed is a HoldRevoked if that is the reason.
    """
    frame = channel.receive(_REPLY.size, give_up_s=give_up_s, wait=wait)
    magic, status, length = _REPLY.unpack(frame)
    if magic != _REPLY_MAGIC or status not in tuple(Reply) or length > MAX_REASON_BYTES:
        raise BrokenFrame(f"{wait}: the producer sent something that is no reply")
    reason = channel.receive(length, give_up_s=give_up_s, wait=wait).decode(errors="replace")
    if status == Reply.HOLD_ENDED:
        raise HoldRevoked(f"{wait}: {reason}")
    if status != Reply.OK:
        raise TransferFailed(f"{wait}: {reason}")


def _check_greeting(magic: bytes, version: int) -> None:
    if magic != _MAGIC:
        raise BrokenFrame("tcp: the other side does not speak kvstrata's protocol")
    if version != VERSION:
        raise BrokenFrame(f"tcp: the other side speaks version {version}, this one version {VERSION}")
