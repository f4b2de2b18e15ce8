"""Heads of a pool's objects that nobody of ours wrote: none of them is believed, and none raises.

A pool asks for no credential, and the checksum of a head is one that anybody can work out.
"""

from __future__ import annotations

import random
import struct
import zlib
from collections.abc import Sequence

import pytest

from kvstrata.store.pool.envelope import STAMP_BYTES, Envelope, cut, head_bytes
from kvstrata.store.pool.session import key_digest
from kvstrata.store.testing import key

DIGEST = key_digest(key(1))


def forged(
    *,
    cuts: Sequence[int] = (0, 10, 30),
    sums: Sequence[int] = (1, 2),
    layout: bytes = b"layout",
    size_bytes: int | None = None,
    pieces: int | None = None,
    layout_bytes: int | None = None,
    length: int | None = None,
) -> bytes:
    """A head with a right checksum over what it says."""
    pieces = len(sums) if pieces is None else pieces
    length = head_bytes(len(sums), len(layout)) if length is None else length
    rest = struct.pack("<II", len(layout) if layout_bytes is None else layout_bytes, pieces) + layout
    rest += struct.pack(f"<{len(cuts)}Q", *cuts) + struct.pack(f"<{len(sums)}Q", *sums)
    rest = rest.ljust(length - STAMP_BYTES, b"\0")[: length - STAMP_BYTES]
    size_bytes = cuts[-1] if size_bytes is None else size_bytes
    stamp = struct.pack("<8sQQI32sI", b"kvstrat1", 7, size_bytes, length, DIGEST, zlib.crc32(rest))
    return stamp + rest


def test_what_is_forged_well_is_read_so_that_the_cases_below_fail_for_their_reason() -> None:
    found = Envelope.decode(DIGEST, forged())
    assert isinstance(found, Envelope)
    assert (found.cuts, found.sums, found.layout) == ((0, 10, 30), (1, 2), "layout")
    assert found.encode() == forged()


@pytest.mark.parametrize(
    "head",
    [
        forged(cuts=(5, 10, 30)),
        forged(cuts=(0, 40, 30)),
        forged(cuts=(0, 0, 30)),
        forged(cuts=(0, 30, 30)),
        forged(cuts=(0, 1 << 63, 30)),
        forged(size_bytes=31),
        forged(cuts=(0, 10, 1 << 63)),
        forged(cuts=(0,), sums=(), size_bytes=0),
        forged(cuts=(0, 30), sums=(), pieces=0),
        forged(pieces=1 << 31),
        forged(pieces=4097),
        forged(pieces=100),
        forged(layout=b"\xff\xfe"),
        forged(layout=b"x" * 257),
        forged(layout_bytes=1 << 31),
        forged(length=STAMP_BYTES + 4),
        forged(length=STAMP_BYTES + 1),
        forged(length=512),
        forged(length=4096),
    ],
    ids=range(19),
)
def test_a_head_that_makes_no_sense_is_none(head: bytes) -> None:
    assert Envelope.decode(DIGEST, head) is None


def test_no_bytes_at_all_raise() -> None:
    dice, whole = random.Random(3), forged()
    for _ in range(3000):
        head = bytearray(whole)
        for _ in range(dice.randint(1, 4)):
            head[dice.randrange(STAMP_BYTES, STAMP_BYTES + 80)] = dice.randrange(256)
        head[STAMP_BYTES - 4 : STAMP_BYTES] = struct.pack("<I", zlib.crc32(bytes(head[STAMP_BYTES:])))
        found = Envelope.decode(DIGEST, bytes(head))
        if isinstance(found, Envelope):
            assert found.cuts[0] == 0
            assert list(found.cuts) == sorted(set(found.cuts))
    assert Envelope.decode(DIGEST, b"") is None


@pytest.mark.parametrize("size_bytes", [1, 7, 1 << 18, (1 << 31) + 5, (1 << 40) + 3])
def test_objects_of_any_size_have_heads_of_their_own(size_bytes: int) -> None:
    cuts = cut(size_bytes, written_at=[size_bytes // 3, size_bytes // 2])
    made = Envelope(digest=DIGEST, generation=1, layout="", cuts=cuts, sums=(3,) * (len(cuts) - 1))
    assert Envelope.decode(DIGEST, made.encode()) == made
    last = made.pieces_of(size_bytes - 1, 1)
    assert (made.cuts[last.stop], len(last)) == (size_bytes, 1)
