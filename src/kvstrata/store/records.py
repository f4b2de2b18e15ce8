"""The index's records as bytes. Little endian, fixed heads, no pickles: another process reads them."""

from __future__ import annotations

import struct
from dataclasses import dataclass, fields
from enum import IntEnum
from operator import attrgetter

from kvstrata.memory.processes import HOLDER_BYTES, Holder


class Place(IntEnum):
    """Where an object's bytes are."""

    ARENA = 0
    SPILL = 1


@dataclass(frozen=True, slots=True)
class Extent:
    """[offset, offset + size_bytes) of the arena or of the spill file, whole granules."""

    offset: int
    size_bytes: int

    @property
    def end(self) -> int:
        return self.offset + self.size_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class ObjectRecord:
    """A published object."""

    generation: int
    place: Place
    size_bytes: int  # as written; the extents are rounded up to the granule
    touched_us: int
    extents: tuple[Extent, ...]
    layout: str
    encoded_key: bytes
    checksums: tuple[int, ...] = ()  # crc32 of each spill chunk; empty in the arena

    @property
    def held_bytes(self) -> int:
        return sum(extent.size_bytes for extent in self.extents)

    def pack(self) -> bytes:
        layout = self.layout.encode()
        return b"".join(
            (
                _OBJECT.pack(
                    self.generation,
                    self.place,
                    self.size_bytes,
                    self.touched_us,
                    len(self.extents),
                    len(layout),
                    len(self.encoded_key),
                    len(self.checksums),
                ),
                _pack_extents(self.extents),
                layout,
                self.encoded_key,
                struct.pack(f"<{len(self.checksums)}I", *self.checksums),
            )
        )

    @classmethod
    def unpack(cls, data: bytes) -> ObjectRecord:
        generation, place, size, touched, extents, layout, key, checksums = _OBJECT.unpack_from(data)
        at_layout = _OBJECT.size + extents * _EXTENT.size
        at_key = at_layout + layout
        at_checksums = at_key + key
        return cls(
            generation=generation,
            place=Place(place),
            size_bytes=size,
            touched_us=touched,
            extents=_unpack_extents(data[_OBJECT.size : at_layout]),
            layout=data[at_layout:at_key].decode(),
            encoded_key=data[at_key:at_checksums],
            checksums=struct.unpack_from(f"<{checksums}I", data, at_checksums),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Reservation:
    """Room granted to a writer."""

    holder: Holder
    deadline_us: int
    size_bytes: int
    extents: tuple[Extent, ...]

    @property
    def held_bytes(self) -> int:
        return sum(extent.size_bytes for extent in self.extents)

    def pack(self) -> bytes:
        head = _RESERVATION.pack(self.deadline_us, self.size_bytes)
        return self.holder.pack() + head + _pack_extents(self.extents)

    @classmethod
    def unpack(cls, data: bytes) -> Reservation:
        deadline, size = _RESERVATION.unpack_from(data, HOLDER_BYTES)
        return cls(
            holder=Holder.unpack(data[:HOLDER_BYTES]),
            deadline_us=deadline,
            size_bytes=size,
            extents=_unpack_extents(data[HOLDER_BYTES + _RESERVATION.size :]),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class LeaseRecord:
    """A reader's pin on one generation of one object."""

    holder: Holder
    expires_us: int

    def pack(self) -> bytes:
        return self.holder.pack() + _U64.pack(self.expires_us)

    @classmethod
    def unpack(cls, data: bytes) -> LeaseRecord:
        return cls(
            holder=Holder.unpack(data[:HOLDER_BYTES]), expires_us=_U64.unpack_from(data, HOLDER_BYTES)[0]
        )


@dataclass(kw_only=True, slots=True)
class Counters:
    """Totals kept beside the records, so that no call has to walk them."""

    next_serial: int = 1  # the next generation or lease id: never used twice
    free_bytes: int = 0
    reserved_bytes: int = 0
    spill_free_bytes: int = 0
    spilled_objects: int = 0
    hits: int = 0
    misses: int = 0
    stale_reads: int = 0
    evictions: int = 0
    granted: int = 0  # reservations
    published: int = 0
    publish_lost: int = 0
    abandoned: int = 0
    reclaimed: int = 0
    refused_full: int = 0
    spill_evictions: int = 0
    spill_corrupt: int = 0

    def pack(self) -> bytes:
        return _COUNTERS.pack(*_counter_values(self))

    @classmethod
    def unpack(cls, data: bytes) -> Counters:
        return cls(**dict(zip(_COUNTER_NAMES, _COUNTERS.unpack(data), strict=True)))


def generation_of(packed_object: bytes) -> int:
    """The generation of a packed `ObjectRecord`, without unpacking the rest."""
    generation: int = _U64.unpack_from(packed_object)[0]
    return generation


_OBJECT = struct.Struct("<QQQQIIII")
_RESERVATION = struct.Struct("<QQ")
_EXTENT = struct.Struct("<QQ")
_U64 = struct.Struct("<Q")
_COUNTER_NAMES = tuple(field.name for field in fields(Counters))
_counter_values = attrgetter(*_COUNTER_NAMES)
_COUNTERS = struct.Struct(f"<{len(_COUNTER_NAMES)}Q")


def _pack_extents(extents: tuple[Extent, ...]) -> bytes:
    return b"".join(_EXTENT.pack(extent.offset, extent.size_bytes) for extent in extents)


def _unpack_extents(data: bytes) -> tuple[Extent, ...]:
    return tuple(Extent(offset, size) for offset, size in _EXTENT.iter_unpack(data))
