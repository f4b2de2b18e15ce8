"""A producer's holds: what tells a reader, wherever it is, that the memory it read was still the request's.

One table of 64-bit words in shared memory. A word is the generation of the hold that has the slot, or 0. The
producer ends a hold *before* it gives the memory up, and a reader looks at the word before its first byte and
after its last: if both times it is its own generation, no byte was overwritten in between (M1, M3, P7).
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvstrata.errors import TransferFailed
from kvstrata.memory.region import HostRegion, RegionHandle, open_region

HOLD_SLOTS = 4096


class HoldRevoked(TransferFailed):
    """What was read under this hold may be somebody else's rows; no generation ever becomes valid again."""


@dataclass(frozen=True, kw_only=True)
class Hold:
    """Which slot of the producer's table guards a read, and the generation that it must have there."""

    slot: int
    generation: int

    def __post_init__(self) -> None:
        if not 0 <= self.slot < HOLD_SLOTS or self.generation < 1:
            raise ValueError(f"{self} is no hold: slots are 0..{HOLD_SLOTS - 1}, generations from 1")


@dataclass(frozen=True, kw_only=True)
class HoldStatistics:
    """Counts since construction; `granted == revoked + live`."""

    granted: int
    revoked: int
    live: int


class HoldTable:
    """The producer's side. Any thread may call."""

    def __init__(self) -> None:
        self._region = HostRegion.create(HOLD_SLOTS * 8, "remote-holds", huge_pages=False)
        self._words = self._region.tensor().numpy().view(np.int64)  # [HOLD_SLOTS]
        self._free = list(range(HOLD_SLOTS - 1, -1, -1))
        self._granted = 0
        self._revoked = 0
        self._is_closed = False
        self._lock = threading.Lock()

    @property
    def handle(self) -> RegionHandle:
        """What `HoldView.open` takes in another process of this host."""
        return self._region.handle

    @property
    def region(self) -> HostRegion:
        """The words' memory: slot i at byte `8 * i`. For exporters to show; nobody else writes to it."""
        return self._region

    def grant(self) -> Hold:
        """Return a new hold, of a generation never used before.

        Raises TransferFailed if no slot is free, or the table was closed.
        """
        with self._lock:
            if self._is_closed:
                raise TransferFailed("remote read: the table of holds was closed")
            if not self._free:
                raise TransferFailed(f"remote read: all {HOLD_SLOTS} holds are taken; settle transfers first")
            self._granted += 1
            hold = Hold(slot=self._free.pop(), generation=self._granted)
            self._words[hold.slot] = hold.generation
        return hold

    def revoke(self, hold: Hold) -> bool:
        """End a hold; False if it has ended already. Only then may its memory be reused."""
        with self._lock:
            if self._words[hold.slot] != hold.generation:
                return False
            self._words[hold.slot] = 0
            self._free.append(hold.slot)
            self._revoked += 1
        return True

    def is_valid(self, hold: Hold) -> bool:
        """Whether the hold has not ended."""
        return bool(self._words[hold.slot] == hold.generation)

    def statistics(self) -> HoldStatistics:
        """Return the counts since construction."""
        with self._lock:
            live = HOLD_SLOTS - len(self._free)
            return HoldStatistics(granted=self._granted, revoked=self._revoked, live=live)

    def check_integrity(self) -> None:
        """Assert that words, free slots and counts agree."""
        with self._lock:
            taken = set(np.flatnonzero(self._words).tolist())
            assert taken.isdisjoint(self._free), sorted(taken.intersection(self._free))
            assert len(taken) + len(self._free) == HOLD_SLOTS, (len(taken), len(self._free))
            assert self._granted == self._revoked + len(taken), (self._granted, self._revoked, len(taken))

    def close(self) -> None:
        """Revoke what is left and give the memory up; closing twice is harmless.

        Readers that have it mapped see every hold ended.
        """
        with self._lock:
            self._is_closed = True
            live = np.flatnonzero(self._words).tolist()
            self._words[:] = 0
            self._free.extend(live)
            self._revoked += len(live)
            self._words = np.zeros(HOLD_SLOTS, dtype=np.int64)
        self._region.close()


class HoldView:
    """A consumer's view of the table, in another process of the producer's host."""

    def __init__(self, region: HostRegion) -> None:
        self._region = region
        self._words: npt.NDArray[np.int64] = region.tensor().numpy().view(np.int64)

    @classmethod
    def open(cls, handle: RegionHandle) -> HoldView:
        """Map the table; raises StoreUnavailable if its owner is gone."""
        if handle.size_bytes != HOLD_SLOTS * 8:
            raise TransferFailed(f"a hold table has {HOLD_SLOTS * 8} bytes, not {handle.size_bytes}")
        return cls(open_region(handle, huge_pages=False))

    def is_valid(self, hold: Hold) -> bool:
        """Whether the hold has not ended."""
        return bool(self._words[hold.slot] == hold.generation)

    def close(self) -> None:
        """Unmap the table."""
        self._words = np.zeros(HOLD_SLOTS, dtype=np.int64)
        self._region.close()
