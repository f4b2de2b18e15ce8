"""The optional file on disk that takes in what memory has to give up.

A flat file of fixed size: on the page cache it runs at several times the speed of values inside a
database. Its bytes are guarded by a checksum for each chunk, because a disk may lie and because a
crash may leave half an overwrite: what fails the check is a miss.
"""

from __future__ import annotations

import errno
import os
import zlib
from collections.abc import Iterable
from pathlib import Path

from kvstrata.errors import ConfigurationError
from kvstrata.store.arena import Arena, memory_at
from kvstrata.store.extents import GRANULE_BYTES, segments
from kvstrata.store.locks import try_lock
from kvstrata.store.records import Extent, ObjectRecord

CHUNK_BYTES = 65536
"""A range is read and checked in whole chunks; one chunk too much at each end is the price."""

_HEADER_BYTES = GRANULE_BYTES
_MAGIC = b"kvstrata spill file 1\n"


def create_spill(path: Path, size_bytes: int, store_id: str) -> None:
    """Make or take over the file; raises `OSError`, or `ConfigurationError` if it is somebody's.

    A file left by a store that is gone is taken over: a crash must not fill the disk for ever.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        if os.fstat(descriptor).st_size > 0 and os.pread(descriptor, len(_MAGIC), 0) != _MAGIC:
            raise ConfigurationError(
                f"store_spill_path={path.parent}: {path.name} in it is a file that kvstrata did not make; it "
                "was left as it is. Fix: name another directory."
            )
        if not try_lock(descriptor, exclusive=True):
            raise ConfigurationError(
                f"store_spill_path={path.parent}: {path.name} in it is in use by another store, whose "
                "store_path was deleted under it. Fix: stop the engines that use it, or name another one."
            )
        found_bytes = os.fstat(descriptor).st_blocks * 512
        try:
            room = os.fstatvfs(descriptor)
            if room.f_bavail * room.f_frsize < size_bytes - found_bytes:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
            os.ftruncate(descriptor, _HEADER_BYTES + size_bytes)
            os.posix_fallocate(descriptor, 0, _HEADER_BYTES + size_bytes)
            os.pwrite(descriptor, (_MAGIC + store_id.encode()).ljust(_HEADER_BYTES, b"\0"), 0)
        except OSError:
            if found_bytes == 0:
                path.unlink()
            raise
    finally:
        os.close(descriptor)


class SpillFile:
    """Writes and reads objects in the file. Who owns which extent is the index's business."""

    def __init__(self, path: Path, size_bytes: int, store_id: str) -> None:
        """Open a file that `create_spill` made; raises `OSError`, `ValueError` if it is not this store's."""
        self.size_bytes = size_bytes
        self._descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        header = _MAGIC + store_id.encode()
        if os.pread(self._descriptor, len(header), 0) != header or not try_lock(
            self._descriptor, exclusive=False
        ):
            os.close(self._descriptor)
            raise ValueError(f"{path} does not belong to this store")

    def write(
        self, extents: tuple[Extent, ...], arena: Arena, held: tuple[Extent, ...], size_bytes: int
    ) -> tuple[int, ...]:
        """Copy an object of `size_bytes` from its arena extents; each chunk's crc32. Raises `OSError`."""
        checksums = []
        for start in range(0, size_bytes, CHUNK_BYTES):
            chunk_bytes = min(CHUNK_BYTES, size_bytes - start)
            checksum, position = 0, start
            for piece in segments(held, start, chunk_bytes):
                data = arena.view(piece)
                checksum = zlib.crc32(data, checksum)
                self._write_at(extents, position, data)
                position += piece.size_bytes
            checksums.append(checksum)
        return tuple(checksums)

    def read(self, record: ObjectRecord, offset: int, dst_address: int, size_bytes: int) -> bool:
        """Copy [offset, offset + size_bytes) of an object to memory; False when the bytes are not its own."""
        end = offset + size_bytes
        scratch = memoryview(bytearray(CHUNK_BYTES))
        for number in range(offset // CHUNK_BYTES, -(-end // CHUNK_BYTES)):
            start = number * CHUNK_BYTES
            stop = min(start + CHUNK_BYTES, record.size_bytes)
            chunk = scratch[: stop - start]
            if (
                not self._read_at(record.extents, start, chunk)
                or zlib.crc32(chunk) != record.checksums[number]
            ):
                return False
            first, last = max(start, offset), min(stop, end)
            memory_at(dst_address + first - offset, last - first)[:] = chunk[first - start : last - start]
        return True

    def close(self) -> None:
        os.close(self._descriptor)

    def _write_at(self, extents: Iterable[Extent], position: int, data: memoryview) -> None:
        for piece in segments(extents, position, len(data)):
            if os.pwrite(self._descriptor, data[: piece.size_bytes], _HEADER_BYTES + piece.offset) < (
                piece.size_bytes
            ):
                raise OSError(errno.ENOSPC, "the spill file took only a part of a chunk")
            data = data[piece.size_bytes :]

    def _read_at(self, extents: Iterable[Extent], position: int, into: memoryview) -> bool:
        for piece in segments(extents, position, len(into)):
            try:
                got_bytes = os.preadv(
                    self._descriptor, [into[: piece.size_bytes]], _HEADER_BYTES + piece.offset
                )
            except OSError:
                return False  # a bad sector is a miss like any other corruption
            if got_bytes < piece.size_bytes:
                return False
            into = into[piece.size_bytes :]
        return True
