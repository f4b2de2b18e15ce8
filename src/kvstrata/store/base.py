"""The contract of a content-addressed host KV store.

One object is one full KV block of one rank: all of that rank's layers one after the other, so that
each layer is a byte range. Objects are immutable once published and are found by content: the same
key always names the same bytes. A store may forget any object it has not leased out; it never
returns bytes that are not the object's (invariant M5: a miss means recompute, never failure).

Data-path calls answer with a `Status` for each key and do not raise for what a backend may do at
run time. They raise `ValueError` for a call that is wrong (a range outside the object, a null
address), and `StoreError` for a store that was closed or carried across a fork.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

_LENGTHS = struct.Struct(">III")


class Status(Enum):
    """What a store says of one key. The same words for every backend."""

    OK = "ok"
    EXISTS = "exists"  # already published by someone: nothing to write
    MISSING = "missing"  # not there (any more): recompute
    FULL = "full"  # no room for now: everything evictable is already gone, or leased
    LEASED = "leased"  # not removed: somebody reads it
    PEER_LOST = "peer_lost"  # the process or machine that holds the bytes died
    BACKEND_DOWN = "backend_down"  # the store itself does not answer


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreKey:
    """Names one object.

    `namespace`: everything on which the bytes depend apart from rank and tokens (model, weights,
    dtype, layout version, block size). `rank`: every rank dimension that changes the bytes (TP, PP,
    PCP, DP). `block_hash`: the hash of the tokens up to the end of the block.
    """

    namespace: str
    rank: str
    block_hash: bytes

    def encode(self) -> bytes:
        """The key as bytes; two keys encode alike only if all their fields are alike.

        Their lengths come first: no separator could tell ("a", "b|c") from ("a|b", "c").
        """
        namespace, rank = self.namespace.encode(), self.rank.encode()
        lengths = _LENGTHS.pack(len(namespace), len(rank), len(self.block_hash))
        return lengths + namespace + rank + self.block_hash


@dataclass(frozen=True, kw_only=True, slots=True)
class ByteRange:
    """Copy `size_bytes` from `offset` in the object to the memory at `dst_address`."""

    offset: int
    dst_address: int
    size_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadLease:
    """Permission to read one object until `expires_at_s`.

    Plain data: one process may acquire it and another on the same store read with it. `generation`
    names this very copy of the object; it changes when the bytes move or the object is published
    anew. `layout` is the digest the writer gave; a reader compares it with its own before reading.
    """

    key: StoreKey
    generation: int
    lease_id: int
    size_bytes: int
    layout: str
    expires_at_s: float  # on the store's clock


@dataclass(frozen=True, kw_only=True, slots=True)
class WriteHandle:
    """Room for one object that nobody can see yet. Valid only in the process that reserved it."""

    key: StoreKey
    generation: int
    size_bytes: int
    layout: str
    deadline_at_s: float  # on the store's clock


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreStatistics:
    """State and counters of the whole store: every process that uses it adds to the same ones.

    A store on a pool of another engine has those of its process: objects are what it published and did not
    see go, leases what it acquired, `abandoned` includes what the pool did not take.

    Invariants, in bytes (both hold at every commit, and `check_integrity()` checks them):
    `used + reserved + free == capacity`, `quarantined <= reserved`;
    `spill_used + spill_free == spill_capacity`.
    Counters: `hits + misses` == keys ever passed to `acquire` and answered;
    `published + publish_lost + abandoned + reclaimed + reservations == granted`.
    """

    objects: int  # published, in memory or spilled
    capacity_bytes: int
    used_bytes: int  # held by published objects, rounded up to the granule
    reserved_bytes: int  # granted to writers, not published yet
    quarantined_bytes: int  # the part of reserved_bytes whose writer is late but may still be writing
    free_bytes: int
    leases: int  # recorded, the expired ones not yet swept included
    reservations: int
    hits: int
    misses: int
    stale_reads: int  # reads answered MISSING because the lease or the object was lost
    evictions: int  # objects that left memory to make room, to the spill file included
    granted: int  # reservations
    published: int
    publish_lost: int  # another writer was first
    abandoned: int
    reclaimed: int  # reservations taken back from dead writers
    refused_full: int  # reservations answered FULL
    spill_capacity_bytes: int
    spill_used_bytes: int
    spill_free_bytes: int
    spilled_objects: int
    spill_evictions: int  # objects that left the spill file to make room there
    spill_corrupt: int  # spilled objects dropped because their bytes failed the checksum


class Store(Protocol):
    """Implemented by every backend. Any thread of the process that opened a store may call it."""

    def contains(self, keys: Sequence[StoreKey]) -> list[Status]:
        """OK or MISSING for each key. A hint without side effects: only a lease keeps an object."""
        ...

    def acquire(self, keys: Sequence[StoreKey], *, ttl_s: float) -> list[ReadLease | Status]:
        """Pin objects against eviction for `ttl_s` seconds; the status says why one is not pinned.

        A key may appear more than once, and may be leased to many readers: each gets its own lease.
        """
        ...

    def renew(self, leases: Sequence[ReadLease], *, ttl_s: float) -> list[ReadLease | Status]:
        """Make leases end `ttl_s` from now. One that ended or was lost stays so: MISSING.

        Other holders of the same lease may go on reading with the copy they have.
        """
        ...

    def release(self, leases: Sequence[ReadLease]) -> None:
        """End leases, in any process. Releasing one that has ended already does nothing."""
        ...

    def read(self, lease: ReadLease, ranges: Sequence[ByteRange]) -> Status:
        """Copy ranges into raw memory without holding the GIL.

        OK means that every byte is the object's: the lease is checked before the copy and the
        generation before and after it. With any other status the destination holds doubtful bytes.
        """
        ...

    def read_many(self, reads: Sequence[tuple[ReadLease, Sequence[ByteRange]]]) -> list[Status]:
        """`read` for several objects, with one look at the index before all copies and one after.

        One layer of many blocks should be read this way: a look costs as much as copying 100 KiB.
        """
        ...

    def reserve(self, key: StoreKey, size_bytes: int, layout: str) -> WriteHandle | Status:
        """Room for a new object, invisible until published.

        EXISTS when the key is published already; FULL when eviction could not make room. Two writers
        may hold reservations of one key: the first to publish wins. A size that can never fit raises
        `ConfigurationError`.
        """
        ...

    def write(self, handle: WriteHandle, offset: int, src_address: int, size_bytes: int) -> Status:
        """Copy raw memory into the reserved room without holding the GIL.

        Threads may write different ranges at once. MISSING when the handle is not open here.
        """
        ...

    def publish(self, handle: WriteHandle) -> Status:
        """Make the object visible, all at once. EXISTS when another writer was first (its bytes stay).

        FULL where the store learns only now that there is no room; BACKEND_DOWN where it may still appear,
        whole or not at all. Ends the handle in every case. Raises `StoreError`, and abandons, when a byte of
        the object was never written or a write is in progress: a key is never readable before its last layer.
        """
        ...

    def abandon(self, handle: WriteHandle) -> None:
        """Give the room back. With a write in progress, the room comes back when that write ends."""
        ...

    def remove(self, keys: Sequence[StoreKey], *, force: bool = False) -> list[Status]:
        """Drop objects: OK, MISSING, or LEASED for one that is being read, or was a moment ago.

        `force` drops leased ones too: their readers get MISSING.
        """
        ...

    def clear(self, *, force: bool = False) -> int:
        """Drop every published object that is not leased (with `force`, all); how many were dropped."""
        ...

    def statistics(self) -> StoreStatistics:
        """Counters of the whole store, by every process since it was created."""
        ...

    def check_integrity(self) -> None:
        """Raise `StoreFormatError` unless every byte of the store has exactly one owner."""
        ...

    def close(self) -> None:
        """Abandon this store's open handles and detach; published objects stay. Twice is harmless."""
        ...


def check_ranges(size_bytes: int, ranges: Sequence[ByteRange]) -> None:
    """Raise `ValueError` for a range that leaves an object of `size_bytes` or has no address."""
    for item in ranges:
        check_range(size_bytes, item.offset, item.dst_address, item.size_bytes)


def check_range(object_bytes: int, offset: int, address: int, size_bytes: int) -> None:
    """Raise `ValueError` unless [offset, offset + size_bytes) lies in the object and the address is set."""
    if offset < 0 or size_bytes < 0 or offset + size_bytes > object_bytes:
        raise ValueError(f"range [{offset}, {offset + size_bytes}) leaves the object's {object_bytes} bytes")
    if address <= 0:
        raise ValueError(f"address {address} is not memory")
