"""What `PooledStore` needs from the client library of a pool.

Every call may block as long as its library likes; `PooledStore` makes them in threads that it can give up.
Any thread may call. Keys are short ASCII words. Memory is always inside `memory()`, never a caller's own:
a call that was given up may go on reading and writing there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kvstrata.store.base import Status


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """Copy `size_bytes` from `offset` in a pool's object to `address`."""

    offset: int
    address: int
    size_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolRead:
    """What to read of one object."""

    key: str
    spans: tuple[Span, ...]


class PoolClient(Protocol):
    """Implemented once a library."""

    @property
    def name(self) -> str:
        """The pool in words, for logs: its kind, its address, how its bytes travel."""
        ...

    def memory(self, size_bytes: int) -> int:
        """Address of memory that the library may read and write; called once, right after opening.

        Raises `StoreUnavailable`.
        """
        ...

    def present(self, keys: Sequence[str]) -> list[Status]:
        """OK or MISSING for each key; a hint."""
        ...

    def hold(self, keys: Sequence[str], *, ttl_s: float) -> list[Status]:
        """Keep objects from eviction, for `ttl_s` or for the pool's own lease time, whichever is shorter."""
        ...

    def put(self, key: str, address: int, size_bytes: int) -> Status:
        """Store an object. OK also where the key was there before: the bytes of the first writer stay."""
        ...

    def read(self, reads: Sequence[PoolRead], *, lease_s: float) -> list[Status]:
        """Copy spans. Whose bytes came is for the caller to find out.

        Where the pool needs a lease for that, it is one of `lease_s`, unless `hold` got a longer one.
        """
        ...

    def remove(self, keys: Sequence[str], *, force: bool) -> list[Status]:
        """Drop objects. LEASED where the pool says that somebody holds one."""
        ...

    def clear(self, *, force: bool) -> int | None:
        """Drop all objects, with `force` the held ones too; how many, None where the pool does not tell.

        None without having dropped any where the pool cannot spare the held ones; never with `force`.
        """
        ...

    @property
    def spares_held(self) -> bool:
        """Whether `clear` without `force` spares what is held, by whomever."""
        ...

    def close(self) -> None:
        """Let go of the pool. Its memory stays mapped if a call was given up."""
        ...
