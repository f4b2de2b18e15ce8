"""Reads ranges of a pool's objects: in waves through the staging memory, checked before they go on."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvstrata.errors import StoreError
from kvstrata.store.base import ByteRange, ReadLease, Status
from kvstrata.store.pool.client import PoolRead, Span
from kvstrata.store.pool.envelope import STAMP_BYTES, Envelope, pool_key
from kvstrata.store.pool.session import PoolSession, stamp_span

_WAVES_AT_A_TIME = 4
"""Reads that find room in the staging memory beside each other."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Part:
    """Neighbouring pieces of one object, and where they are in the staging memory."""

    read: int  # which of the reads
    envelope: Envelope
    pieces: range
    address: int = 0  # of the stamp; the pieces follow

    @property
    def offset(self) -> int:
        return self.envelope.cuts[self.pieces.start]

    @property
    def size_bytes(self) -> int:
        return self.envelope.cuts[self.pieces.stop] - self.offset

    def is_right(self) -> bool:
        """Whether the bytes that came are the ones that the envelope names."""
        if not self.envelope.is_stamped(ctypes.string_at(self.address, STAMP_BYTES)):
            return False
        start = self.address + STAMP_BYTES - self.offset
        return all(self.envelope.is_piece(piece, start + self.envelope.cuts[piece]) for piece in self.pieces)

    def copy_out(self, ranges: Sequence[ByteRange]) -> None:
        """Copy what is here of the ranges to where they belong."""
        for item in ranges:
            begin = max(item.offset, self.offset)
            end = min(item.offset + item.size_bytes, self.offset + self.size_bytes)
            if begin < end:
                source = self.address + STAMP_BYTES + begin - self.offset
                ctypes.memmove(item.dst_address + begin - item.offset, source, end - begin)


def read_checked(
    session: PoolSession, reads: Sequence[tuple[ReadLease, Envelope, Sequence[ByteRange]]]
) -> list[Status]:
    """Copy ranges of objects into the callers' memory: OK where every byte is the envelope's object's.

    Raises one of FAULTS; the destinations hold doubtful bytes then, but nobody writes to them any more.
    """
    statuses = [Status.OK] * len(reads)
    wave_bytes = session.staging.size_bytes // _WAVES_AT_A_TIME
    parts = [
        part
        for at, (_, envelope, ranges) in enumerate(reads)
        for part in _parts(at, envelope, ranges, wave_bytes)
    ]
    for wave in _waves(parts, wave_bytes):
        _read_wave(session, reads, wave, statuses)
    return statuses


def _read_wave(
    session: PoolSession,
    reads: Sequence[tuple[ReadLease, Envelope, Sequence[ByteRange]]],
    wave: Sequence[_Part],
    statuses: list[Status],
) -> None:
    room = session.staging.take(sum(_room(part) for part in wave), timeout_s=session.limits.deadline_s)
    if room is None:
        raise StoreError("no staging memory is free: calls that were given up hold it")
    placed, address = [], room.address
    for part in wave:
        placed.append(_Part(read=part.read, envelope=part.envelope, pieces=part.pieces, address=address))
        address += _room(part)
    wanted = [_pool_read(reads[part.read][0], part) for part in placed]
    size_bytes = sum(part.size_bytes for part in placed)
    lease_s = session.limits.read_lease_s
    answers = session.run_in(
        room,
        f"reading {size_bytes} bytes of {len(placed)} objects",
        lambda: session.client.read(wanted, lease_s=lease_s),
    )
    for part, answer in zip(placed, answers, strict=True):
        if answer is Status.OK and not part.is_right():
            answer = Status.MISSING
        if answer is Status.OK:
            part.copy_out(reads[part.read][2])
        elif statuses[part.read] is Status.OK:
            statuses[part.read] = answer
    session.staging.give_back(room)


def _pool_read(lease: ReadLease, part: _Part) -> PoolRead:
    pieces = Span(
        offset=part.envelope.head_bytes + part.offset,
        address=part.address + STAMP_BYTES,
        size_bytes=part.size_bytes,
    )
    return PoolRead(key=pool_key(lease.key), spans=(stamp_span(part.address), pieces))


def _room(part: _Part) -> int:
    """Bytes of staging memory, so that the next part begins on a cache line."""
    return STAMP_BYTES + -(-part.size_bytes // STAMP_BYTES) * STAMP_BYTES


def _parts(read: int, envelope: Envelope, ranges: Sequence[ByteRange], most_bytes: int) -> Iterator[_Part]:
    """The pieces that hold the ranges, each once; neighbours together up to `most_bytes`.

    Ranges without bytes still ask whether the object is there.
    """
    wanted = sorted({piece for item in ranges for piece in envelope.pieces_of(item.offset, item.size_bytes)})
    if not wanted:
        yield _Part(read=read, envelope=envelope, pieces=range(0))
        return
    start = previous = wanted[0]
    for piece in wanted[1:]:
        size_bytes = envelope.cuts[piece + 1] - envelope.cuts[start]
        if piece != previous + 1 or size_bytes + 2 * STAMP_BYTES > most_bytes:
            yield _Part(read=read, envelope=envelope, pieces=range(start, previous + 1))
            start = piece
        previous = piece
    yield _Part(read=read, envelope=envelope, pieces=range(start, previous + 1))


def _waves(parts: Sequence[_Part], most_bytes: int) -> Iterator[list[_Part]]:
    wave: list[_Part] = []
    held = 0
    for part in parts:
        if wave and held + _room(part) > most_bytes:
            yield wave
            wave, held = [], 0
        wave.append(part)
        held += _room(part)
    if wave:
        yield wave
