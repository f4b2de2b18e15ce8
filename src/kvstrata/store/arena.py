"""The memory that holds the objects: one file, mapped whole by every process."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from collections.abc import Iterable
from pathlib import Path

from kvstrata.store.extents import GRANULE_BYTES, segments
from kvstrata.store.records import Extent

_PREFAULT_STEP_BYTES = 64 << 20
_MADV_POPULATE_WRITE = 23  # Linux 5.14; not in Python's mmap module


def create_arena(path: Path, size_bytes: int, headroom_bytes: int) -> None:
    """Make the file with all of its memory behind it; raises `OSError` and leaves no file.

    `headroom_bytes` must be left in the file system afterwards.

    Memory is taken now: a sparse file would end the process with SIGBUS, in the middle of a copy, on
    the day the file system is full.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        # Asked first, because filling a file system to find out that it is too small hurts others.
        room = os.fstatvfs(descriptor)
        if room.f_bavail * room.f_frsize < size_bytes + headroom_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        os.posix_fallocate(descriptor, 0, size_bytes)
    except BaseException:
        path.unlink()
        raise
    finally:
        os.close(descriptor)


class Arena:
    """The mapped file. Moves bytes; knows nothing of who owns them."""

    def __init__(self, path: Path, size_bytes: int) -> None:
        """Map an arena that `create_arena` made; raises `OSError`, `ValueError` for a wrong size."""
        assert size_bytes % GRANULE_BYTES == 0
        self.size_bytes = size_bytes
        self.descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            found_bytes = os.fstat(self.descriptor).st_size
            if found_bytes != size_bytes:
                raise ValueError(f"{path} has {found_bytes} bytes instead of {size_bytes}")
            self._map = mmap.mmap(self.descriptor, size_bytes)
        except BaseException:
            os.close(self.descriptor)
            raise
        self._first_byte = ctypes.c_char.from_buffer(self._map)
        self._address = ctypes.addressof(self._first_byte)

    def read(self, extents: Iterable[Extent], offset: int, dst_address: int, size_bytes: int) -> None:
        """Copy [offset, offset + size_bytes) of the object in `extents` to memory, without the GIL."""
        for piece in segments(extents, offset, size_bytes):
            ctypes.memmove(dst_address, self._address + piece.offset, piece.size_bytes)
            dst_address += piece.size_bytes

    def write(self, extents: Iterable[Extent], offset: int, src_address: int, size_bytes: int) -> None:
        """Copy memory to [offset, offset + size_bytes) of the object in `extents`, without the GIL."""
        for piece in segments(extents, offset, size_bytes):
            ctypes.memmove(self._address + piece.offset, src_address, piece.size_bytes)
            src_address += piece.size_bytes

    def view(self, extent: Extent) -> memoryview:
        """The bytes of an extent in place. Not to be kept: the arena cannot be unmapped under it."""
        assert extent.end <= self.size_bytes
        return memory_at(self._address + extent.offset, extent.size_bytes)

    def prefault(self) -> None:
        """Map every page now, so that first copies run at full speed; nothing where Linux cannot.

        Takes about a second a GiB and holds no lock: call it from a thread of its own.
        """
        madvise = ctypes.CDLL(None, use_errno=True).madvise
        madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        for offset in range(0, self.size_bytes, _PREFAULT_STEP_BYTES):
            step_bytes = min(_PREFAULT_STEP_BYTES, self.size_bytes - offset)
            if madvise(self._address + offset, step_bytes, _MADV_POPULATE_WRITE) != 0:
                return

    def close(self) -> None:
        """Unmap. No copy may be in progress."""
        del self._first_byte  # mmap refuses to close while an address into it is held
        self._map.close()
        os.close(self.descriptor)


def memory_at(address: int, size_bytes: int) -> memoryview:
    """Raw memory as writable bytes."""
    return memoryview((ctypes.c_char * size_bytes).from_address(address)).cast("B")
