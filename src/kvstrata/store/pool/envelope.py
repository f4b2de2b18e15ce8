"""What goes around an object in a pool: a head that says what the object is and what its bytes add up to.

Pools know a key and a length. The rest is ours: the object's size, its layout digest, a generation (a
random number; two puts never share one) and a checksum a piece. A piece is what was written in one go, a
layer's part say, cut at `PIECE_BYTES`; so one layer is read and checked without the others.

A reader takes the head first and learns the generation and the sums. With every later range it reads the
first `STAMP_BYTES` again: another generation, or another sum, and the bytes do not count. That holds whatever
a pool does behind our back: evicts, restarts, or lets a writer that was stopped for minutes write where it
once might.
"""

from __future__ import annotations

import ctypes
import struct
import zlib
from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import sha256

import numpy as np

from kvstrata.store.arena import memory_at
from kvstrata.store.base import StoreKey

FIRST_READ_BYTES = 1024
"""Every object is longer than this; most heads are not."""

STAMP_BYTES = 64

_MAGIC = b"kvstrat1"
_STAMP = struct.Struct("<8sQQI32sI")  # magic, generation, size, head bytes, key digest, checksum of the rest
_REST = struct.Struct("<II")  # length of the layout, number of pieces
_HEAD_GRANULE = 512
_LAYOUT_LIMIT = 256
_NO_WORDS = np.zeros(0, dtype="<u8")
_MOST_PIECES = 4096
_LARGEST_BYTES = 1 << 62
PIECE_BYTES = 256 << 10
"""A piece is not longer than this, except in objects of more than a GiB."""

assert _STAMP.size == STAMP_BYTES
_NAMED_BYTES = STAMP_BYTES - 4  # of a stamp: all but the checksum of the rest


def pool_key(key: StoreKey) -> str:
    """The key in a pool: short, ASCII, and different for keys that differ in any field."""
    return "kvs1-" + sha256(key.encode()).hexdigest()


@dataclass(frozen=True, kw_only=True, slots=True)
class Envelope:
    """The head of one object. `cuts` are the pieces' limits, 0 and the object's size included."""

    digest: bytes  # of the key
    generation: int
    layout: str
    cuts: tuple[int, ...]
    sums: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        """Of the object, without the head."""
        return self.cuts[-1]

    @property
    def head_bytes(self) -> int:
        return head_bytes(len(self.sums), len(self.layout.encode()))

    def encode(self) -> bytes:
        layout = self.layout.encode()
        rest = _REST.pack(len(layout), len(self.sums)) + layout
        rest += np.array(self.cuts, dtype="<u8").tobytes() + np.array(self.sums, dtype="<u8").tobytes()
        rest = rest.ljust(self.head_bytes - STAMP_BYTES, b"\0")
        return self._stamp(zlib.crc32(rest)) + rest

    @classmethod
    def decode(cls, digest: bytes, data: bytes) -> Envelope | int | None:
        """A head; how long it is where `data` is a part of it; None where it is none, or not the key's."""
        if len(data) < STAMP_BYTES:
            return None
        magic, generation, size_bytes, length, found, crc = _STAMP.unpack_from(data)
        if magic != _MAGIC or found != digest or not STAMP_BYTES < length <= LONGEST_HEAD_BYTES:
            return None
        if len(data) < length:
            return int(length)
        rest = data[STAMP_BYTES:length]
        if zlib.crc32(rest) != crc:
            return None
        return cls._checked(digest, generation, size_bytes, rest)

    @classmethod
    def _checked(cls, digest: bytes, generation: int, size_bytes: int, rest: bytes) -> Envelope | None:
        """The rest of a head; None unless it makes sense: its checksum is one that anybody can work out."""
        if len(rest) < _REST.size:
            return None
        layout_bytes, pieces = _REST.unpack_from(rest)
        at = _REST.size + layout_bytes
        if not 0 < pieces <= _MOST_PIECES or layout_bytes > _LAYOUT_LIMIT:
            return None
        if at + 8 * (2 * pieces + 1) > len(rest) or size_bytes > _LARGEST_BYTES:
            return None
        numbers = np.frombuffer(rest, dtype="<u8", count=2 * pieces + 1, offset=at)
        cuts = numbers[: pieces + 1]
        if cuts[0] != 0 or cuts[-1] != size_bytes or not (cuts[1:] > cuts[:-1]).all():
            return None
        try:
            layout = rest[_REST.size : at].decode()
        except UnicodeDecodeError:
            return None
        if STAMP_BYTES + len(rest) != head_bytes(pieces, layout_bytes):
            return None  # the bytes of the object would be looked for elsewhere
        return cls(
            digest=digest,
            generation=generation,
            layout=layout,
            cuts=tuple(cuts.tolist()),
            sums=tuple(numbers[pieces + 1 :].tolist()),
        )

    def pieces_of(self, offset: int, size_bytes: int) -> range:
        """The pieces that hold [offset, offset + size_bytes); empty for no bytes."""
        if size_bytes == 0:
            return range(0)
        return range(bisect_right(self.cuts, offset) - 1, bisect_left(self.cuts, offset + size_bytes))

    def is_stamped(self, stamp: bytes) -> bool:
        """Whether the first bytes of an object in the pool are this one's."""
        return stamp[:_NAMED_BYTES] == self._stamp(0)[:_NAMED_BYTES]

    def is_piece(self, piece: int, address: int) -> bool:
        """Whether the memory at `address` holds this piece."""
        return checksum(address, self.cuts[piece + 1] - self.cuts[piece]) == self.sums[piece]

    def _stamp(self, crc: int) -> bytes:
        return _STAMP.pack(_MAGIC, self.generation, self.size_bytes, self.head_bytes, self.digest, crc)


def head_bytes(pieces: int, layout_bytes: int) -> int:
    """Length of a head; never below `FIRST_READ_BYTES`."""
    plain = STAMP_BYTES + _REST.size + layout_bytes + 8 * (2 * pieces + 1)
    return max(FIRST_READ_BYTES, -(-plain // _HEAD_GRANULE) * _HEAD_GRANULE)


def check_layout(layout: str) -> None:
    """Raise `ValueError` for a layout digest that no head can hold."""
    if len(layout.encode()) > _LAYOUT_LIMIT:
        raise ValueError(f"a layout digest of {len(layout.encode())} bytes; at most {_LAYOUT_LIMIT} fit")


def cut(size_bytes: int, written_at: Iterable[int]) -> tuple[int, ...]:
    """Limits of pieces: where writes began or ended, and every `PIECE_BYTES`."""
    step = max(PIECE_BYTES, -(-size_bytes // (_MOST_PIECES // 2)))
    regular = set(range(0, size_bytes, step)) | {size_bytes}
    cuts = regular | {at for at in written_at if 0 < at < size_bytes}
    return tuple(sorted(cuts if len(cuts) <= _MOST_PIECES else regular))


def checksum(address: int, size_bytes: int) -> int:
    """64 bits of memory: the sum of its words, and its length. As fast as memory, without the GIL."""
    whole_bytes = size_bytes // 8 * 8
    words = np.frombuffer(memory_at(address, whole_bytes), dtype="<u8") if whole_bytes else _NO_WORDS
    tail = ctypes.string_at(address + whole_bytes, size_bytes - whole_bytes)
    total = int(words.sum(dtype=np.uint64)) + int.from_bytes(tail, "little") * 3 + size_bytes
    return total % (1 << 64)


LONGEST_HEAD_BYTES = head_bytes(_MOST_PIECES, _LAYOUT_LIMIT)
"""No head is longer."""
