"""What the tests of the local store's parts share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvstrata.store.base import ReadLease
from kvstrata.store.faulty import FaultyStore
from kvstrata.store.local import LocalStore
from kvstrata.store.testing import ManualClock, key

MIB = 1 << 20


@contextmanager
def spilling_store(directory: Path, clock: ManualClock) -> Iterator[LocalStore]:
    """A store of one MiB with a spill file of two."""
    made = LocalStore.open(
        directory / "store",
        size_bytes=MIB,
        spill_path=directory / "spill",
        spill_size_bytes=2 * MIB,
        clock=clock,
    )
    yield made
    made.check_integrity()
    made.close()


def acquire(store: LocalStore | FaultyStore, number: int, ttl_s: float = 60.0) -> ReadLease:
    (lease,) = store.acquire([key(number)], ttl_s=ttl_s)
    assert isinstance(lease, ReadLease)
    return lease
