"""Frames of the control channel: who is listened to, what is dropped, and how it is counted."""

from __future__ import annotations

import hashlib

import msgspec
import pytest

from kvstrata.remote import holds
from kvstrata.remote.protocol import messages
from kvstrata.remote.protocol.codec import FORMAT_BYTE, MAC_BYTES, Codec, Dropped
from kvstrata.remote.protocol.messages import (
    MAX_FRAME_BYTES,
    MAX_TEXT_CHARS,
    Abort,
    AbortAck,
    Accept,
    AnyMessage,
    Beat,
    ComponentLayout,
    Hello,
    Open,
    Place,
    ReadDone,
    ReadFailed,
    Ready,
    Refused,
    Reject,
    TransportOffer,
    Welcome,
)

SECRET = b"a secret of the test"
STAMP = {"epoch": "e1", "peer_epoch": "e2", "transfer": "t", "member": 1, "generation": 7}
HELLO = Hello(
    epoch="e1",
    version=1,
    rank=3,
    tp_size=8,
    components=(
        ComponentLayout(
            layer=0, component="main", is_draft=False, page_bytes=18432, block_tokens=16, layout="bf16"
        ),
    ),
    places=(Place(region=0, offset=4096, block_stride_bytes=18432, num_blocks=100),),
    offers=(TransportOffer(name="shm", ticket=b"\x00\xff"),),
    lease_s=10.0,
)
ONE_OF_EACH: list[AnyMessage] = [
    HELLO,
    Welcome(epoch="e2", peer_epoch="e1", version=1, transport="shm", lease_s=10.0),
    Refused(epoch="e2", reason="layer 3", is_stale=True),
    Open(**STAMP, members=2, hold_slot=5, first_block=3, end_block=9),
    Accept(**STAMP),
    Reject(**STAMP, reason="ended"),
    Ready(**STAMP, layer=2, part=0, first_block=3, end_block=5, blocks=(40, 1 << 40), is_last=False),
    ReadDone(**STAMP, layer=2, part=0),
    ReadFailed(**STAMP, layer=2, part=0, reason="gone"),
    Abort(**STAMP, reason="client left"),
    AbortAck(**STAMP),
    Beat(epoch="e1", peer_epoch="e2", transfers=("t", "u")),
]


def sealed(codec: Codec, body: bytes, *, format_byte: bytes = FORMAT_BYTE) -> list[bytes]:
    """Frames that a peer with the right secret could send, whatever is in them."""
    payload = format_byte + body
    return [codec._mac(payload), payload]


def dropped(codec: Codec, frames: list[bytes]) -> str:
    found = codec.decode(frames)
    assert isinstance(found, Dropped), found
    assert sum(codec.statistics().dropped.values()) == 1
    assert codec.statistics().dropped[found.reason] == 1
    assert codec.statistics().decoded == 0
    return found.reason


@pytest.mark.parametrize("message", ONE_OF_EACH, ids=lambda message: type(message).__name__)
def test_each_message_arrives_as_it_was_sent(message: AnyMessage) -> None:
    sender, receiver = Codec(SECRET), Codec(SECRET)
    frames = sender.encode(message)
    assert receiver.decode(frames) == message
    assert (sender.statistics().encoded, receiver.statistics().decoded) == (1, 1)
    assert sender.statistics().encoded_bytes == receiver.statistics().decoded_bytes == len(frames[1])


def test_every_kind_of_message_is_among_them() -> None:
    assert {type(message) for message in ONE_OF_EACH} == set(AnyMessage.__args__)


@pytest.mark.parametrize("message", ONE_OF_EACH, ids=lambda message: type(message).__name__)
def test_a_message_under_another_secret_is_dropped(message: AnyMessage) -> None:
    assert dropped(Codec(b"another"), Codec(SECRET).encode(message)) == "secret"


def test_the_digest_depends_on_the_whole_secret() -> None:
    # Longer than the 64 bytes that a blake2b key may have.
    assert dropped(Codec(b"x" * 100 + b"1"), Codec(b"x" * 100 + b"2").encode(HELLO)) == "secret"


def test_a_digest_made_with_the_bare_secret_is_dropped() -> None:
    # So that nothing signed for another purpose under the same secret is taken for a message.
    payload = Codec(SECRET).encode(HELLO)[1]
    bare = hashlib.blake2b(payload, key=SECRET, digest_size=MAC_BYTES).digest()
    assert dropped(Codec(SECRET), [bare, payload]) == "secret"


@pytest.mark.parametrize("secret_is_in", [0, 1])
def test_the_secret_is_not_sent(secret_is_in: int) -> None:
    assert SECRET not in Codec(SECRET).encode(HELLO)[secret_is_in]


def test_an_empty_secret_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        Codec(b"")


@pytest.mark.parametrize("count", [0, 1, 3, 1000])
def test_another_number_of_frames_is_dropped(count: int) -> None:
    frames = Codec(SECRET).encode(HELLO)
    assert dropped(Codec(SECRET), (frames * 500)[:count]) == "frames"


@pytest.mark.parametrize(("mac_bytes", "payload_bytes"), [(0, 9), (31, 9), (33, 9), (32, 0), (32, 1)])
def test_frames_of_a_wrong_size_are_dropped(mac_bytes: int, payload_bytes: int) -> None:
    assert dropped(Codec(SECRET), [b"m" * mac_bytes, b"p" * payload_bytes]) == "size"


def test_a_frame_that_is_too_long_is_dropped_unread() -> None:
    codec = Codec(SECRET)
    assert dropped(codec, sealed(codec, b"\xc0" * MAX_FRAME_BYTES)) == "size"


def test_another_format_is_dropped() -> None:
    codec = Codec(SECRET)
    body = Codec(SECRET).encode(HELLO)[1][1:]
    found = codec.decode(sealed(codec, body, format_byte=b"\x02"))
    assert found == Dropped("format", "format 2, this side has 1")


def packed(message: AnyMessage, **changed: object) -> bytes:
    return msgspec.msgpack.encode({**msgspec.to_builtins(message, builtin_types=(bytes,)), **changed})


READY = ONE_OF_EACH[6]
OPEN = ONE_OF_EACH[3]


@pytest.mark.parametrize(
    "body",
    [
        packed(READY, type="unheard_of"),
        packed(READY, layer=-1),
        packed(READY, layer=1 << 62),
        packed(READY, layer="1"),
        packed(READY, layer=1.0),
        packed(READY, layer=None),
        packed(READY, is_last=1),
        packed(READY, blocks=[-1]),
        packed(READY, blocks=[True]),
        packed(READY, blocks=[0] * (messages.MAX_BLOCKS + 1)),
        packed(READY, transfer="t" * 257),
        packed(READY, epoch=b"e1"),
        packed(OPEN, members=0),
        packed(OPEN, generation=0),
        packed(OPEN, hold_slot=holds.HOLD_SLOTS),
        packed(ONE_OF_EACH[5], reason="r" * (MAX_TEXT_CHARS + 1)),
        packed(ONE_OF_EACH[11], transfers=["t"] * (messages.MAX_TRANSFERS + 1)),
        packed(HELLO, offers=[{"name": "shm", "ticket": b"x" * ((1 << 20) + 1)}]),
        packed(READY) + b"\x00",
        packed(READY)[:-1],
        b"\xc0",
        b"\x80",
        b"\x90",
        msgspec.msgpack.encode("type"),
    ],
)
def test_what_is_no_message_is_dropped_though_the_secret_is_right(body: bytes) -> None:
    codec = Codec(SECRET)
    assert dropped(codec, sealed(codec, body)) == "malformed"


@pytest.mark.parametrize("message", [HELLO, OPEN, READY, *ONE_OF_EACH[5::6]])
def test_the_messages_before_they_were_spoilt_are_taken(message: AnyMessage) -> None:
    codec = Codec(SECRET)
    assert codec.decode(sealed(codec, packed(message))) == message


BLOCKS_HEADER = b"\xa6blocks\x92"


@pytest.mark.parametrize("header", [b"\xdd\xff\xff\xff\xff", b"\xdd\x7f\xff\xff\xff", b"\xdc\xff\xff"])
def test_a_length_that_lies_allocates_nothing(header: bytes) -> None:
    codec = Codec(SECRET)
    body = packed(READY)
    assert BLOCKS_HEADER in body
    lying = body.replace(BLOCKS_HEADER, b"\xa6blocks" + header)
    assert dropped(codec, sealed(codec, lying)) == "malformed"


@pytest.mark.parametrize("opening", [b"\x91", b"\x81\xa1a"])
def test_deep_nesting_ends_in_a_drop(opening: bytes) -> None:
    codec = Codec(SECRET)
    body = packed(AbortAck(**STAMP))
    # One more entry than the map says now, with a name that nobody knows: it is skipped, level by level.
    deep = bytes([body[0] + 1]) + body[1:] + b"\xa1z" + opening * 200_000 + b"\xc0"
    assert dropped(codec, sealed(codec, deep)) == "malformed"


def test_fields_of_a_newer_peer_are_ignored() -> None:
    codec = Codec(SECRET)
    assert codec.decode(sealed(codec, packed(READY, added_later=[1, {"a": 2}]))) == READY


def test_fields_with_defaults_may_be_missing() -> None:
    # Field fault: an optional field missing from an older peer.
    codec = Codec(SECRET)
    fields = msgspec.msgpack.decode(packed(HELLO))
    for name in ("peer_epoch", "pp_size", "memfabric_protocol"):
        del fields[name]
    assert codec.decode(sealed(codec, msgspec.msgpack.encode(fields))) == HELLO


@pytest.mark.parametrize("message", [ONE_OF_EACH[i] for i in (2, 5, 8, 9)], ids=lambda m: type(m).__name__)
def test_a_long_reason_is_shortened_and_arrives(message) -> None:
    long = msgspec.structs.replace(message, reason="r" * 100_000)
    arrived = Codec(SECRET).decode(Codec(SECRET).encode(long))
    assert isinstance(arrived, type(message))
    assert arrived.reason == "r" * (MAX_TEXT_CHARS - 3) + "..."


def test_the_largest_part_fits_into_a_frame() -> None:
    blocks = tuple(range(1 << 31, (1 << 31) + messages.MAX_BLOCKS))
    ready = msgspec.structs.replace(READY, blocks=blocks)
    assert Codec(SECRET).decode(Codec(SECRET).encode(ready)) == ready


def test_a_message_that_nobody_would_take_is_not_sent() -> None:
    codec = Codec(SECRET)
    names = tuple(f"{number:0200}" for number in range(messages.MAX_TRANSFERS))
    with pytest.raises(ValueError, match=rf"a Beat of \d+ bytes is longer than {MAX_FRAME_BYTES}"):
        codec.encode(Beat(epoch="e", transfers=names))
    assert codec.statistics().encoded == 0


def test_a_hold_slot_of_a_message_is_one_of_the_table() -> None:
    assert messages.MAX_HOLD_SLOTS == holds.HOLD_SLOTS
