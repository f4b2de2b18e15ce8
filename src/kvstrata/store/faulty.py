"""A store that fails when a script says so, to test that its users survive it.

Wraps any `Store` and passes the same conformance tests while the script is silent.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TypeVar

from kvstrata.store.base import (
    ByteRange,
    ReadLease,
    Status,
    Store,
    StoreKey,
    StoreStatistics,
    WriteHandle,
)

_Item = TypeVar("_Item")
_Answer = TypeVar("_Answer")


class LeaseFault(Enum):
    """What can happen to a lease behind its holder's back."""

    LOST = "lost"  # the object is dropped in spite of the lease, before the call goes on


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """One key's part of one call, as a script sees it."""

    method: str  # contains, acquire, renew, read, reserve, write, publish or remove
    key: StoreKey
    count: int  # of this method's keys so far, this one included: the first is 1


Script = Callable[[Call], Status | LeaseFault | None]
"""Says what goes wrong; None lets the call through."""


def no_faults(call: Call) -> None:
    """The silent script."""


def on(method: str, count: int, fault: Status | LeaseFault) -> Script:
    """A script with one fault, at the `count`-th key that `method` is called with."""
    return lambda call: fault if (call.method, call.count) == (method, count) else None


class FaultyStore:
    """Implements `Store` on top of another one."""

    def __init__(self, inner: Store, script: Script = no_faults) -> None:
        self._inner = inner
        self._script = script
        self._counts: Counter[str] = Counter()

    def contains(self, keys: Sequence[StoreKey]) -> list[Status]:
        faults = [self._fault("contains", key) for key in keys]
        return _overlaid(faults, self._inner.contains(_spared(keys, faults)))

    def acquire(self, keys: Sequence[StoreKey], *, ttl_s: float) -> list[ReadLease | Status]:
        faults = [self._fault("acquire", key) for key in keys]
        return _overlaid(faults, self._inner.acquire(_spared(keys, faults), ttl_s=ttl_s))

    def renew(self, leases: Sequence[ReadLease], *, ttl_s: float) -> list[ReadLease | Status]:
        faults = [self._fault("renew", lease.key) for lease in leases]
        return _overlaid(faults, self._inner.renew(_spared(leases, faults), ttl_s=ttl_s))

    def release(self, leases: Sequence[ReadLease]) -> None:
        self._inner.release(leases)

    def read(self, lease: ReadLease, ranges: Sequence[ByteRange]) -> Status:
        return self._fault("read", lease.key) or self._inner.read(lease, ranges)

    def read_many(self, reads: Sequence[tuple[ReadLease, Sequence[ByteRange]]]) -> list[Status]:
        faults = [self._fault("read", lease.key) for lease, _ in reads]
        return _overlaid(faults, self._inner.read_many(_spared(reads, faults)))

    def reserve(self, key: StoreKey, size_bytes: int, layout: str) -> WriteHandle | Status:
        return self._fault("reserve", key) or self._inner.reserve(key, size_bytes, layout)

    def write(self, handle: WriteHandle, offset: int, src_address: int, size_bytes: int) -> Status:
        return self._fault("write", handle.key) or self._inner.write(handle, offset, src_address, size_bytes)

    def publish(self, handle: WriteHandle) -> Status:
        fault = self._fault("publish", handle.key)
        if fault is None:
            return self._inner.publish(handle)
        self._inner.abandon(handle)  # a publish ends the handle, whatever it answers
        return fault

    def abandon(self, handle: WriteHandle) -> None:
        self._inner.abandon(handle)

    def remove(self, keys: Sequence[StoreKey], *, force: bool = False) -> list[Status]:
        faults = [self._fault("remove", key) for key in keys]
        return _overlaid(faults, self._inner.remove(_spared(keys, faults), force=force))

    def clear(self, *, force: bool = False) -> int:
        return self._inner.clear(force=force)

    def statistics(self) -> StoreStatistics:
        return self._inner.statistics()

    def check_integrity(self) -> None:
        self._inner.check_integrity()

    def close(self) -> None:
        self._inner.close()

    def _fault(self, method: str, key: StoreKey) -> Status | None:
        self._counts[method] += 1
        fault = self._script(Call(method=method, key=key, count=self._counts[method]))
        if fault is LeaseFault.LOST:
            self._inner.remove([key], force=True)
            return None
        assert fault is None or isinstance(fault, Status)
        return fault


def _spared(items: Sequence[_Item], faults: Sequence[Status | None]) -> list[_Item]:
    return [item for item, fault in zip(items, faults, strict=True) if fault is None]


def _overlaid(faults: Sequence[Status | None], answers: Iterable[_Answer]) -> list[_Answer | Status]:
    """The inner store's answers in the places that had no fault."""
    rest = iter(answers)
    return [next(rest) if fault is None else fault for fault in faults]
