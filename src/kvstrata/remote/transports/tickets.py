"""Tickets: how a producer tells what a reader needs, so that only holders of the secret are believed.

A ticket is not secret and proves nothing about its bearer. The signature keeps a reader from acting on the
words of a stranger, and finds two sides with different secrets before either reads.
"""

from __future__ import annotations

import hashlib
import hmac
from typing import TypeVar

import msgspec

from kvstrata.errors import TransferFailed

MAX_TICKET_BYTES = 1 << 20
MAX_REGIONS = 4096
MAC_BYTES = 32

_Ticket = TypeVar("_Ticket", bound=msgspec.Struct)


def sign(ticket: msgspec.Struct, *, transport: str, secret: bytes) -> bytes:
    """Encode a ticket of `transport`."""
    body = msgspec.msgpack.encode(ticket)
    return mac(secret, b"ticket", transport.encode(), body) + body


def read_unverified(data: bytes, kind: type[_Ticket], *, transport: str) -> _Ticket:
    """Decode a ticket without asking who made it. Raises TransferFailed for what is no such ticket."""
    if not MAC_BYTES < len(data) <= MAX_TICKET_BYTES:
        raise TransferFailed(f"{transport} ticket: {len(data)} bytes is no size for one")
    try:
        return msgspec.msgpack.decode(data[MAC_BYTES:], type=kind)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise TransferFailed(
            f"{transport} ticket cannot be read ({error}); is it of another version?"
        ) from None


def verify(data: bytes, kind: type[_Ticket], *, transport: str, secret: bytes) -> _Ticket:
    """Decode a ticket that a holder of `secret` made for `transport`; else raises TransferFailed."""
    ticket = read_unverified(data, kind, transport=transport)
    expected = mac(secret, b"ticket", transport.encode(), data[MAC_BYTES:])
    if not hmac.compare_digest(expected, data[:MAC_BYTES]):
        raise TransferFailed(f"{transport} ticket was signed with another secret; is remote_secret equal?")
    return ticket


def mac(secret: bytes, *parts: bytes) -> bytes:
    """Return a keyed digest of the parts; their borders count too."""
    digest = hmac.new(secret, digestmod=hashlib.sha256)
    for part in parts:
        digest.update(len(part).to_bytes(8, "big") + part)
    return digest.digest()
