"""Messages as authenticated frames: the only place where bytes from the control channel are looked at.

A message is two frames. The first is a keyed digest of the second, the second a format byte and msgpack. A
replay is harmless: epochs and generations tell the machines that it is old.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import msgspec

from kvstrata.remote.protocol.messages import (
    MAX_FRAME_BYTES,
    MAX_TEXT_CHARS,
    Abort,
    AnyMessage,
    ReadFailed,
    Refused,
    Reject,
)

FORMAT_BYTE = b"\x01"
"""Of the frames; what messages mean has its own version, told in Hello and answered with both sides'."""
MAC_BYTES = 32

DropReason = Literal["frames", "size", "secret", "format", "malformed"]
"""Not two frames; too long; digest wrong (another secret); other format byte; not a message."""


@dataclass(frozen=True)
class Dropped:
    """What `decode` returns instead of a message; `detail` is for a log line."""

    reason: DropReason
    detail: str = ""


@dataclass(frozen=True, kw_only=True)
class CodecStatistics:
    """Counts since construction. `dropped` holds every reason, with 0 for those that did not occur."""

    encoded: int
    encoded_bytes: int
    decoded: int
    decoded_bytes: int
    dropped: Mapping[str, int]


class Codec:
    """One side of a control channel. One thread encodes and decodes; any may read the statistics."""

    def __init__(self, secret: bytes) -> None:
        """Both sides have the same secret; it is never sent. Raises ValueError for an empty one."""
        if not secret:
            raise ValueError("the secret of the control channel is empty: everybody would know it")
        # A digest of its own: nothing said on the data channel, under the same secret, is valid here.
        self._key = hashlib.blake2b(secret, person=b"kvstrata-control").digest()
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[AnyMessage] = msgspec.msgpack.Decoder(AnyMessage)
        self._encoded = self._encoded_bytes = self._decoded = self._decoded_bytes = 0
        # Every key is there from the beginning: another thread may copy it at any time.
        self._dropped: dict[str, int] = dict.fromkeys(get_args(DropReason), 0)

    def encode(self, message: AnyMessage) -> list[bytes]:
        """Return the frames. A reason that is too long is shortened, so that it arrives.

        Raises ValueError for a message that is longer than MAX_FRAME_BYTES: the other side would drop it.
        """
        if isinstance(message, (Refused, Reject, ReadFailed, Abort)) and len(message.reason) > MAX_TEXT_CHARS:
            shorter = message.reason[: MAX_TEXT_CHARS - 3] + "..."
            message = msgspec.structs.replace(message, reason=shorter)
        payload = FORMAT_BYTE + self._encoder.encode(message)
        if len(payload) > MAX_FRAME_BYTES:
            raise ValueError(
                f"a {type(message).__name__} of {len(payload)} bytes is longer than {MAX_FRAME_BYTES}"
            )
        self._encoded += 1
        self._encoded_bytes += len(payload)
        return [self._mac(payload), payload]

    def decode(self, frames: Sequence[bytes]) -> AnyMessage | Dropped:
        """Return the message, or why there is none, counted by reason. Never raises, whatever comes in."""
        if len(frames) != 2:
            return self._drop("frames", f"{len(frames)} frames")
        mac, payload = frames
        if len(mac) != MAC_BYTES or not 1 < len(payload) <= MAX_FRAME_BYTES:
            return self._drop("size", f"frames of {len(mac)} and {len(payload)} bytes")
        if not hmac.compare_digest(mac, self._mac(payload)):
            return self._drop("secret", "the secrets differ, or a byte was changed on the way")
        if payload[:1] != FORMAT_BYTE:
            return self._drop("format", f"format {payload[0]}, this side has {FORMAT_BYTE[0]}")
        try:
            message = self._decoder.decode(memoryview(payload)[1:])
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            return self._drop("malformed", str(error)[:200])
        self._decoded += 1
        self._decoded_bytes += len(payload)
        return message

    def statistics(self) -> CodecStatistics:
        """Return the counts since construction."""
        return CodecStatistics(
            encoded=self._encoded,
            encoded_bytes=self._encoded_bytes,
            decoded=self._decoded,
            decoded_bytes=self._decoded_bytes,
            dropped=dict(self._dropped),
        )

    def _mac(self, payload: bytes) -> bytes:
        return hashlib.blake2b(payload, key=self._key, digest_size=MAC_BYTES).digest()

    def _drop(self, reason: DropReason, detail: str) -> Dropped:
        self._dropped[reason] += 1
        return Dropped(reason, detail)
