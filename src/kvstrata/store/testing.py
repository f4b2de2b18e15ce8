"""For tests of stores and of their users: bytes in, bytes out, and a clock that is set by hand."""

from __future__ import annotations

import ctypes

import numpy as np

from kvstrata.store.base import ByteRange, ReadLease, Status, Store, StoreKey, WriteHandle


class ManualClock:
    """A clock that moves only when told to."""

    def __init__(self, now_s: float = 1_000_000.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s


def key(number: int, *, namespace: str = "model", rank: str = "tp0") -> StoreKey:
    """A key with a block hash made from a number."""
    return StoreKey(namespace=namespace, rank=rank, block_hash=number.to_bytes(32, "big"))


def pattern(number: int, size_bytes: int) -> bytes:
    """Bytes that betray foreign data: they depend on the number and on the position."""
    positions = np.arange(-(-size_bytes // 4), dtype=np.uint32) * np.uint32(40503)
    return (positions ^ np.uint32(number * 2654435761 % (1 << 32))).tobytes()[:size_bytes]


def write_bytes(store: Store, handle: WriteHandle, offset: int, data: bytes) -> Status:
    """`Store.write` from a bytes object."""
    source = ctypes.create_string_buffer(data, max(len(data), 1))
    return store.write(handle, offset, ctypes.addressof(source), len(data))


def put_bytes(store: Store, name: StoreKey, data: bytes, layout: str = "layout") -> Status:
    """Reserve, write and publish a whole object."""
    handle = store.reserve(name, len(data), layout)
    if isinstance(handle, Status):
        return handle
    wrote = write_bytes(store, handle, 0, data)
    if wrote is not Status.OK:
        store.abandon(handle)
        return wrote
    return store.publish(handle)


def read_bytes(
    store: Store, lease: ReadLease, offset: int = 0, size_bytes: int | None = None
) -> bytes | Status:
    """`Store.read` into a bytes object; the whole object if no size is given."""
    length = lease.size_bytes - offset if size_bytes is None else size_bytes
    target = ctypes.create_string_buffer(max(length, 1))
    wanted = ByteRange(offset=offset, dst_address=ctypes.addressof(target), size_bytes=length)
    status = store.read(lease, [wanted])
    return target.raw[:length] if status is Status.OK else status


def get_bytes(store: Store, name: StoreKey, *, ttl_s: float = 60.0) -> bytes | Status:
    """Acquire, read and release a whole object."""
    (lease,) = store.acquire([name], ttl_s=ttl_s)
    if isinstance(lease, Status):
        return lease
    try:
        return read_bytes(store, lease)
    finally:
        store.release([lease])
