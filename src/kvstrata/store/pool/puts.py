"""Writing objects: staged whole in this process, put into the pool at once when they are published."""

from __future__ import annotations

import ctypes
import itertools
import secrets
import threading
from dataclasses import dataclass, field

from kvstrata.store.base import Status, StoreKey, WriteHandle
from kvstrata.store.pool.envelope import (
    LONGEST_HEAD_BYTES,
    Envelope,
    check_layout,
    checksum,
    cut,
    pool_key,
)
from kvstrata.store.pool.session import PoolSession, key_digest
from kvstrata.store.pool.staging import Room
from kvstrata.store.writes import OpenWrites

_PAUSE_S = 0.05
"""Between two tries of a put for which there was no room: pools evict in the background."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Staged:
    """An object that is being written: its head goes right before `address`, when it is known."""

    room: Room
    address: int
    cuts: set[int] = field(default_factory=set)  # where writes begin and end


class StagedWrites:
    """The write handles of one `PooledStore`. Thread-safe."""

    def __init__(self, session: PoolSession) -> None:
        self._session = session
        self._open: OpenWrites[_Staged] = OpenWrites()
        self._lock = threading.Lock()
        self._handles: dict[int, tuple[WriteHandle, _Staged]] = {}
        self._closing = threading.Event()

    def reserve(self, key: StoreKey, size_bytes: int, layout: str) -> WriteHandle | None:
        """Room for an object; None when the staging memory has none."""
        check_layout(layout)
        room = self._session.staging.take(LONGEST_HEAD_BYTES + size_bytes)
        if room is None:
            return None
        handle = WriteHandle(
            key=key,
            generation=secrets.randbits(63),
            size_bytes=size_bytes,
            layout=layout,
            deadline_at_s=self._session.clock() + self._session.limits.late_after_s,
        )
        staged = _Staged(room=room, address=room.address + LONGEST_HEAD_BYTES)
        with self._lock:
            self._handles[handle.generation] = (handle, staged)
        self._open.add(handle, staged)
        return handle

    def write(self, handle: WriteHandle, offset: int, src_address: int, size_bytes: int) -> Status:
        """As `Store.write`, the range being checked already."""
        staged = self._open.begin(handle)
        if staged is None:
            return Status.MISSING
        try:
            ctypes.memmove(staged.address + offset, src_address, size_bytes)
            staged.cuts.update((offset, offset + size_bytes))
        finally:
            if self._open.end(handle, offset, size_bytes):
                self._give_back(handle.generation)
        return Status.OK

    def publish(self, handle: WriteHandle) -> Status:
        """As `Store.publish`; raises one of FAULTS too, the handle being ended then."""
        if self._open.finish(handle) is Status.MISSING:
            return Status.MISSING
        with self._lock:
            staged = self._handles.pop(handle.generation)[1]
        envelope = _envelope(handle, staged)
        head = envelope.encode()
        address = staged.address - len(head)
        ctypes.memmove(address, head, len(head))
        return self._put(handle, staged.room, address, len(head) + handle.size_bytes)

    def abandon(self, handle: WriteHandle) -> bool:
        """End a handle; whether it was open."""
        with self._lock:
            was_open = handle.generation in self._handles
        if self._open.abandon(handle.generation):
            self._give_back(handle.generation)
        return was_open

    def abandon_all(self) -> int:
        """End every handle, and waits for room; how many there were."""
        self._closing.set()
        with self._lock:
            count = len(self._handles)
        for generation in self._open.abandon_all():
            self._give_back(generation)
        return count

    def handles(self) -> list[WriteHandle]:
        """The ones that are open."""
        with self._lock:
            return [handle for handle, _ in self._handles.values()]

    def _put(self, handle: WriteHandle, room: Room, address: int, size_bytes: int) -> Status:
        """Put, again while the pool is full; the room comes back in the end, whatever happens."""
        name, client = pool_key(handle.key), self._session.client
        tries = max(1, round(self._session.limits.full_wait_s / _PAUSE_S))
        for _ in range(tries):
            status = self._session.run_in(
                room, f"putting {size_bytes} bytes", lambda: client.put(name, address, size_bytes)
            )
            if status is not Status.FULL or self._closing.wait(_PAUSE_S):
                break
        self._session.staging.give_back(room)
        return status if status is not Status.OK else self._whose(handle)

    def _whose(self, handle: WriteHandle) -> Status:
        """OK if the pool has our object, EXISTS if another writer's, FULL if it kept neither."""
        (found,) = self._session.envelopes([handle.key])
        if isinstance(found, Envelope):
            return Status.OK if found.generation == handle.generation else Status.EXISTS
        return Status.FULL if found is Status.MISSING else found

    def _give_back(self, generation: int) -> None:
        with self._lock:
            _, staged = self._handles.pop(generation)
        self._session.staging.give_back(staged.room)


def _envelope(handle: WriteHandle, staged: _Staged) -> Envelope:
    cuts = cut(handle.size_bytes, staged.cuts)
    sums = tuple(checksum(staged.address + begin, end - begin) for begin, end in itertools.pairwise(cuts))
    return Envelope(
        digest=key_digest(handle.key),
        generation=handle.generation,
        layout=handle.layout,
        cuts=cuts,
        sums=sums,
    )
