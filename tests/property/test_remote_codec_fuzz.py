"""Whatever comes in on the control channel: a message, or a named reason why not; never an exception."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstrata.remote.protocol.codec import FORMAT_BYTE, MAC_BYTES, Codec, Dropped
from kvstrata.remote.protocol.messages import (
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

counts = st.integers(0, (1 << 62) - 1)
shorts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
seconds = st.floats(allow_nan=False)
heads = {"epoch": shorts, "peer_epoch": shorts}
stamps = heads | {"transfer": shorts, "member": counts, "generation": counts}
parts = stamps | {"layer": counts, "part": counts}


def tuples(cls: type, **fields: st.SearchStrategy) -> st.SearchStrategy:
    return st.lists(st.builds(cls, **fields), max_size=3).map(tuple)


layouts = tuples(
    ComponentLayout,
    layer=counts,
    component=shorts,
    is_draft=st.booleans(),
    page_bytes=counts,
    block_tokens=counts,
    layout=shorts,
)
places = tuples(Place, region=counts, offset=counts, block_stride_bytes=counts, num_blocks=counts)
offers = tuples(TransportOffer, name=shorts, ticket=st.binary(max_size=40))
openings = stamps | {
    "generation": st.integers(1, (1 << 62) - 1),
    "members": st.integers(1, 1 << 16),
    "hold_slot": st.integers(0, 4095),
}
any_message = st.one_of(
    st.builds(
        Hello,
        **heads,
        version=counts,
        rank=counts,
        tp_size=counts,
        pp_size=counts,
        components=layouts,
        places=places,
        offers=offers,
        memfabric_protocol=shorts,
        lease_s=seconds,
    ),
    st.builds(Welcome, **heads, version=counts, transport=shorts, lease_s=seconds),
    st.builds(Refused, **heads, reason=shorts, is_stale=st.booleans()),
    st.builds(Open, **openings, first_block=counts, end_block=counts),
    st.builds(Accept, **stamps),
    st.builds(Reject, **stamps, reason=shorts),
    st.builds(
        Ready,
        **parts,
        first_block=counts,
        end_block=counts,
        blocks=st.lists(counts, max_size=20).map(tuple),
        is_last=st.booleans(),
    ),
    st.builds(ReadDone, **parts),
    st.builds(ReadFailed, **parts, reason=shorts),
    st.builds(Abort, **stamps, reason=shorts),
    st.builds(AbortAck, **stamps),
    st.builds(Beat, **heads, transfers=st.lists(shorts, max_size=5).map(tuple)),
)
as_msgpack = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.floats() | shorts | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(shorts, inner, max_size=4),
    max_leaves=20,
)


def sealed(body: bytes) -> list[bytes]:
    """What a broken peer with the right secret sends."""
    payload = FORMAT_BYTE + body
    return [Codec(SECRET)._mac(payload), payload]


def check(frames: list[bytes]) -> AnyMessage | Dropped:
    codec = Codec(SECRET)
    found = codec.decode(frames)
    statistics = codec.statistics()
    assert statistics.decoded + sum(statistics.dropped.values()) == 1
    assert statistics.decoded == (not isinstance(found, Dropped))
    if not isinstance(found, Dropped):
        assert Codec(SECRET).decode(Codec(SECRET).encode(found)) == found, "what was taken can be passed on"
    return found


@given(message=any_message)
@settings(max_examples=300)
def test_every_message_makes_the_round_trip(message: AnyMessage) -> None:
    assert check(Codec(SECRET).encode(message)) == message


@given(frames=st.lists(st.binary(max_size=80), max_size=4))
def test_random_frames_are_dropped(frames: list[bytes]) -> None:
    assert isinstance(check(frames), Dropped)


@given(message=any_message, data=st.data())
@settings(max_examples=300)
def test_a_flipped_bit_anywhere_is_noticed(message: AnyMessage, data: st.DataObject) -> None:
    frames = [bytearray(frame) for frame in Codec(SECRET).encode(message)]
    frame = data.draw(st.sampled_from(frames))
    at = data.draw(st.integers(0, len(frame) * 8 - 1))
    frame[at // 8] ^= 1 << at % 8
    found = check([bytes(frame) for frame in frames])
    assert isinstance(found, Dropped)
    assert found.reason == "secret"


@given(message=any_message, data=st.data())
def test_frames_cut_short_or_with_a_tail_are_dropped(message: AnyMessage, data: st.DataObject) -> None:
    mac, payload = Codec(SECRET).encode(message)
    keep = data.draw(st.integers(0, len(payload) - 1))
    assert isinstance(check([mac, payload[:keep]]), Dropped)
    assert isinstance(check([mac, payload + data.draw(st.binary(min_size=1, max_size=9))]), Dropped)
    assert isinstance(check([mac[: data.draw(st.integers(0, MAC_BYTES - 1))], payload]), Dropped)


@given(body=st.binary(max_size=120))
@settings(max_examples=300)
def test_random_bytes_under_the_right_secret_do_no_harm(body: bytes) -> None:
    check(sealed(body))


@given(message=any_message, data=st.data())
@settings(max_examples=400)
def test_damaged_messages_under_the_right_secret_do_no_harm(message: AnyMessage, data: st.DataObject) -> None:
    body = bytearray(Codec(SECRET).encode(message)[1][1:])
    for _ in range(data.draw(st.integers(1, 6))):
        at = data.draw(st.integers(0, len(body)))
        piece = data.draw(st.binary(max_size=6) | st.sampled_from([b"\xdd\xff\xff\xff\xff", b"\xc6\xff" * 3]))
        body[at : at + data.draw(st.integers(0, 6))] = piece
    check(sealed(bytes(body)))


@given(fields=st.dictionaries(shorts, as_msgpack, max_size=5), message=any_message, data=st.data())
@settings(max_examples=300)
def test_any_value_in_any_field_does_no_harm(fields: dict, message: AnyMessage, data: st.DataObject) -> None:
    packed = msgspec.to_builtins(message, builtin_types=(bytes,))
    name = data.draw(st.sampled_from(sorted(packed)))
    packed[name] = data.draw(as_msgpack)
    check(sealed(msgspec.msgpack.encode(packed | {f"x{key}": value for key, value in fields.items()})))


@pytest.mark.parametrize("opening", [b"\x91", b"\x81\xa1a", b"\x92\x90", b"\x81\xa4type"])
@pytest.mark.parametrize("depth", [10, 500, 900, 1100, 5000, 1_000_000])
def test_nesting_of_any_depth_does_no_harm(opening: bytes, depth: int) -> None:
    body = msgspec.msgpack.encode(
        msgspec.to_builtins(AbortAck(epoch="e", transfer="t", member=0, generation=1))
    )
    check(sealed(bytes([body[0] + 1]) + body[1:] + b"\xa1z" + opening * depth + b"\xc0"))
    check(sealed(opening * depth + b"\xc0"))
