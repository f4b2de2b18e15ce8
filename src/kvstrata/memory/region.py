"""A piece of host memory that another process can open while its maker lives."""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
from dataclasses import dataclass

import torch

from kvstrata.errors import StoreUnavailable


@dataclass(frozen=True, kw_only=True)
class RegionHandle:
    """Names a region to another process of the same host and user; small and picklable.

    `label` holds random digits: a recycled process id or descriptor is recognised, not mapped.
    """

    pid: int
    fd: int
    size_bytes: int
    label: str


class HostRegion:
    """`size_bytes` of zeroed, page-aligned shared memory. Made by an allocator or by `open_region`.

    It has no name in the file system, so nothing is left behind by a crash. `close` gives up this object's
    hold only: tensors made from it keep the mapping alive, so order of closing does not matter.
    """

    def __init__(self, *, name: str, mapping: mmap.mmap, fd: int, handle: RegionHandle) -> None:
        self.name = name
        self.handle = handle
        self.size_bytes = handle.size_bytes
        self._mapping: mmap.mmap | None = mapping
        self._fd = fd
        self._address = torch.frombuffer(mapping, dtype=torch.uint8).data_ptr()

    @classmethod
    def create(cls, size_bytes: int, name: str, *, huge_pages: bool) -> HostRegion:
        """Map new memory; no page of it is taken until it is touched. Raises OSError."""
        label = f"kvstrata-{name[:64]}-{secrets.token_hex(8)}"
        fd = os.memfd_create(label, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, size_bytes)
            # Nobody may resize it: touching a page that was cut off would end the process.
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            mapping = mmap.mmap(fd, size_bytes, mmap.MAP_SHARED)
        except BaseException:
            os.close(fd)
            raise
        if huge_pages:
            advise_huge_pages(mapping)
        handle = RegionHandle(pid=os.getpid(), fd=fd, size_bytes=size_bytes, label=label)
        return cls(name=name, mapping=mapping, fd=fd, handle=handle)

    @property
    def address(self) -> int:
        self._mapped()
        return self._address

    @property
    def resident_bytes(self) -> int:
        """Memory taken so far, by all processes together; the rest of `size_bytes` is a promise."""
        self._mapped()
        return os.fstat(self._fd).st_blocks * 512

    def fileno(self) -> int:
        """This process's descriptor of the memory, for a child process to inherit; valid until `close`."""
        self._mapped()
        return self._fd

    def tensor(self) -> torch.Tensor:
        """The region as uint8 `[size_bytes]`, without a copy."""
        return torch.frombuffer(self._mapped(), dtype=torch.uint8)

    def prefault(self) -> None:
        """Take all memory now rather than on first use. Contents are kept."""
        mapping = self._mapped()
        try:
            mapping.madvise(23)  # MADV_POPULATE_WRITE, Linux 5.14
        except OSError:
            pages = self.tensor()[:: mmap.PAGESIZE]
            pages.copy_(pages.clone())

    def close(self) -> None:
        """Give the memory up. It is returned to the system once no tensor and no other process holds it."""
        if self._mapping is not None:
            # Dropped, never closed: tensors hold the mapping object, and closing would unmap under them.
            self._mapping = None
            os.close(self._fd)

    def _mapped(self) -> mmap.mmap:
        if self._mapping is None:
            raise ValueError(f"host region {self.name!r} was freed")
        return self._mapping


def open_region(handle: RegionHandle, *, huge_pages: bool = True) -> HostRegion:
    """Map a region that a living process of this host made; both then see the same bytes.

    Raises StoreUnavailable when that process is gone, is of another user, or has freed the region.
    """
    path = f"/proc/{handle.pid}/fd/{handle.fd}"
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise StoreUnavailable(
            f"host region {handle.label!r} cannot be opened through {path} ({error.strerror}): its maker "
            "must be alive, on this host, in the same process namespace and of the same user"
        ) from error
    try:
        found = os.readlink(f"/proc/self/fd/{fd}")
        if found != f"/memfd:{handle.label} (deleted)" or os.fstat(fd).st_size != handle.size_bytes:
            raise StoreUnavailable(f"host region {handle.label!r} is gone: {path} is now {found!r}")
        mapping = mmap.mmap(fd, handle.size_bytes, mmap.MAP_SHARED)
    except BaseException:
        os.close(fd)
        raise
    if huge_pages:
        advise_huge_pages(mapping)
    return HostRegion(name=handle.label, mapping=mapping, fd=fd, handle=handle)


def advise_huge_pages(mapping: mmap.mmap) -> bool:
    """Ask for huge pages, where the kernel has them: fewer address translations for large copies."""
    try:
        mapping.madvise(mmap.MADV_HUGEPAGE)
    except OSError:
        return False
    return True
