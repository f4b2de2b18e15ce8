"""The lmdb index: which object is where, who holds what, what is free. All of it commits together.

Databases and their keys (numbers big endian, so that lmdb's byte order is their order):

| database | key | value |
|---|---|---|
| meta | "store", "counters" | the store's id; `Counters` |
| objects | digest of the store key | `ObjectRecord` |
| lru_arena, lru_spill | touched time in us, generation | digest: the eviction order of each place |
| leases | generation, lease id | `LeaseRecord` |
| reservations | generation | `Reservation` |
| free_arena, free_spill | offset | length: `FreeMap` |

Not synced to disk: a killed process loses nothing that was committed, and after a restart of the
machine the store is made anew anyway (see `directory.py`).
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lmdb

from kvstrata.errors import StoreError, StoreFormatError, StoreUnavailable
from kvstrata.store.base import StoreKey
from kvstrata.store.extents import FreeMap
from kvstrata.store.locks import FileLock
from kvstrata.store.records import Counters, LeaseRecord, ObjectRecord, Place, Reservation, generation_of

DATABASES = (
    "meta",
    "objects",
    "lru_arena",
    "lru_spill",
    "leases",
    "reservations",
    "free_arena",
    "free_spill",
)
_MAX_READERS = 1024  # threads of all processes that are inside a read transaction at one moment
_LRU_KEY = struct.Struct(">QQ")
_LEASE_KEY = struct.Struct(">QQ")
_SERIAL = struct.Struct(">Q")


_CORRUPT = (
    lmdb.CorruptedError,
    lmdb.InvalidError,
    lmdb.PageNotFoundError,
    lmdb.VersionMismatchError,
    lmdb.PanicError,
    lmdb.BadTxnError,
    lmdb.IncompatibleError,
)
# Besides lmdb's errors: a record that is too short, that names no place, or whose text is not UTF-8.
_FAULTS = (lmdb.Error, struct.error, ValueError)


class IndexFull(StoreUnavailable):
    """No room for one more record: the write did not happen."""


def digest(key: StoreKey) -> bytes:
    """What stands for a key in the index: lmdb keys are short, namespaces need not be."""
    return _digest(key.encode())


class IndexTransaction:
    """One consistent view of the index; changes are visible to others at commit, all or none."""

    def __init__(self, transaction: Any, databases: dict[str, Any]) -> None:
        self._transaction = transaction
        self._databases = databases
        self._counters: Counters | None = None

    @property
    def counters(self) -> Counters:
        """To be read and, in a write transaction, changed in place."""
        if self._counters is None:
            stored = self._get("meta", b"counters")
            self._counters = Counters() if stored is None else Counters.unpack(stored)
        return self._counters

    def save_counters(self) -> None:
        if self._counters is not None:
            self._put("meta", b"counters", self._counters.pack())

    def free(self, place: Place) -> FreeMap:
        """The free extents of the arena or of the spill file."""
        return FreeMap(
            self._transaction, self._databases["free_arena" if place is Place.ARENA else "free_spill"]
        )

    def new_serial(self) -> int:
        """A number that this store never used before: a generation or a lease id."""
        serial = self.counters.next_serial
        self.counters.next_serial += 1
        return serial

    @property
    def store_id(self) -> bytes | None:
        return self._get("meta", b"store")

    def set_store_id(self, store_id: bytes) -> None:
        self._put("meta", b"store", store_id)

    def count(self, database: str) -> int:
        return int(self._transaction.stat(self._databases[database])["entries"])

    # Objects

    def has(self, key: StoreKey) -> bool:
        return self._get("objects", digest(key)) is not None

    def generation(self, key: StoreKey) -> int | None:
        """Of the object under this key; None without one."""
        data = self._get("objects", digest(key))
        return None if data is None else generation_of(data)

    def find(self, key: StoreKey) -> ObjectRecord | None:
        encoded = key.encode()
        data = self._get("objects", _digest(encoded))
        if data is None:
            return None
        record = ObjectRecord.unpack(data)
        if record.encoded_key != encoded:
            raise StoreFormatError(f"the index names another object under the digest of {key}")
        return record

    def find_by_digest(self, key_digest: bytes) -> ObjectRecord:
        data = self._get("objects", key_digest)
        if data is None:
            raise StoreFormatError(
                f"the eviction order names an object that is not there: {key_digest.hex()}"
            )
        return ObjectRecord.unpack(data)

    def put(self, key_digest: bytes, record: ObjectRecord) -> None:
        """Add the object, or replace the record that `take_out` removed."""
        self._put("objects", key_digest, record.pack())
        self._put(_lru(record.place), _lru_key(record), key_digest)

    def take_out(self, key_digest: bytes, record: ObjectRecord) -> None:
        """Forget the record. Its extents and leases are the caller's to settle."""
        self._delete("objects", key_digest)
        self._delete(_lru(record.place), _lru_key(record))

    def objects(self) -> Iterator[tuple[bytes, ObjectRecord]]:
        for key_digest, data in self._items("objects"):
            yield key_digest, ObjectRecord.unpack(data)

    def oldest_first(self, place: Place) -> Iterator[tuple[bytes, bytes]]:
        """(order key, digest) in eviction order."""
        return self._items(_lru(place))

    # Leases

    def lease(self, generation: int, lease_id: int) -> LeaseRecord | None:
        data = self._get("leases", _LEASE_KEY.pack(generation, lease_id))
        return None if data is None else LeaseRecord.unpack(data)

    def put_lease(self, generation: int, lease_id: int, record: LeaseRecord) -> None:
        self._put("leases", _LEASE_KEY.pack(generation, lease_id), record.pack())

    def delete_lease(self, generation: int, lease_id: int) -> None:
        self._delete("leases", _LEASE_KEY.pack(generation, lease_id))

    def leases_of(self, generation: int) -> list[tuple[int, LeaseRecord]]:
        """(lease id, record): a list, so that the caller may delete while going through it."""
        found = []
        cursor = self._transaction.cursor(self._databases["leases"])
        more = cursor.set_range(_LEASE_KEY.pack(generation, 0))
        while more:
            of_generation, lease_id = _LEASE_KEY.unpack(cursor.key())
            if of_generation != generation:
                break
            found.append((lease_id, LeaseRecord.unpack(cursor.value())))
            more = cursor.next()
        return found

    def leases(self) -> Iterator[tuple[int, int, LeaseRecord]]:
        for key, data in self._items("leases"):
            yield *_LEASE_KEY.unpack(key), LeaseRecord.unpack(data)

    # Reservations

    def reservation(self, generation: int) -> Reservation | None:
        data = self._get("reservations", _SERIAL.pack(generation))
        return None if data is None else Reservation.unpack(data)

    def put_reservation(self, generation: int, record: Reservation) -> None:
        self._put("reservations", _SERIAL.pack(generation), record.pack())

    def delete_reservation(self, generation: int) -> None:
        self._delete("reservations", _SERIAL.pack(generation))

    def reservations(self) -> Iterator[tuple[int, Reservation]]:
        for key, data in self._items("reservations"):
            yield _SERIAL.unpack(key)[0], Reservation.unpack(data)

    def _get(self, database: str, key: bytes) -> bytes | None:
        data: bytes | None = self._transaction.get(key, db=self._databases[database])
        return data

    def _put(self, database: str, key: bytes, value: bytes) -> None:
        self._transaction.put(key, value, db=self._databases[database])

    def _delete(self, database: str, key: bytes) -> None:
        self._transaction.delete(key, db=self._databases[database])

    def _items(self, database: str) -> Iterator[tuple[bytes, bytes]]:
        yield from self._transaction.cursor(self._databases[database])


class Index:
    """One process's environment. lmdb allows only one for each directory and process, opened after a fork."""

    def __init__(self, path: Path, map_bytes: int, lock: FileLock, lock_timeout_s: float) -> None:
        """Open or create; raises what `read` raises. The caller holds `lock` if others may be creating."""
        self._path = path
        self._lock = lock
        self._lock_timeout_s = lock_timeout_s
        try:
            self._environment = lmdb.open(
                str(path),
                map_size=map_bytes,
                max_dbs=len(DATABASES),
                max_readers=_MAX_READERS,
                sync=False,
                metasync=False,
                readahead=False,
                mode=0o600,
            )
            self.was_short = self._lengthen()
            self._databases = {name: self._environment.open_db(name.encode()) for name in DATABASES}
            self._environment.reader_check()  # slots of killed readers would keep old pages for ever
        except _FAULTS as error:
            raise self._fault(error) from error

    def _lengthen(self) -> bool:
        """Give the file the length that its newest commit speaks of; whether it was shorter.

        lmdb maps the file, and a page beyond its end is a SIGBUS. A file that was cut off shows this,
        but so, harmlessly, does one whose last pages were allocated and never written: after this,
        reading a page that is lost is an error of lmdb, and the caller checks the whole index.
        """
        psize_bytes = self._environment.stat()["psize"]
        needed_bytes = (self._environment.info()["last_pgno"] + 1) * psize_bytes
        data = self._path / "data.mdb"
        if data.stat().st_size >= needed_bytes:
            return False
        os.truncate(data, needed_bytes)
        return True

    @contextmanager
    def read(self) -> Iterator[IndexTransaction]:
        """A consistent view; waits for nobody. Raises `StoreFormatError` or `StoreUnavailable`."""
        try:
            with self._environment.begin() as transaction:
                yield IndexTransaction(transaction, self._databases)
        except _FAULTS as error:
            raise self._fault(error) from error

    @contextmanager
    def write(self, waiting_to: str) -> Iterator[IndexTransaction]:
        """Change the index, or nothing if the block raises. Also raises `DeadlineExceeded`, `IndexFull`."""
        with self._lock.hold(waiting_to, self._lock_timeout_s):
            try:
                with self._environment.begin(write=True) as transaction:
                    changes = IndexTransaction(transaction, self._databases)
                    yield changes
                    changes.save_counters()
            except _FAULTS as error:
                raise self._fault(error) from error

    def close(self) -> None:
        self._environment.close()

    def _fault(self, error: Exception) -> StoreError:
        """An error of lmdb, or a record that cannot be read, in the words of this project."""
        if isinstance(error, lmdb.MapFullError):
            return IndexFull(f"the store's index {self._path} is full: {error}")
        if isinstance(error, lmdb.Error) and not isinstance(error, _CORRUPT):
            return StoreUnavailable(f"the store's index {self._path} does not answer: {error}")
        return StoreFormatError(
            f"the store's index {self._path} is corrupt ({error}). {how_to_clear(self._path.parent)}"
        )


def _digest(encoded_key: bytes) -> bytes:
    return hashlib.blake2b(encoded_key, digest_size=32).digest()


def how_to_clear(path: Path) -> str:
    """The fix for a store that cannot be read."""
    return f"Fix: run `kvstrata store clear --path {path} --delete`; what it held is computed again."


def _lru(place: Place) -> str:
    return "lru_arena" if place is Place.ARENA else "lru_spill"


def _lru_key(record: ObjectRecord) -> bytes:
    return _LRU_KEY.pack(record.touched_us, record.generation)
