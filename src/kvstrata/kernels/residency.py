"""The residency table of sparse decode on the CPU: `core.residency`, bit for bit, in microseconds.

State is a slot for every host row and a row and a priority for every slot, all allocated once. A call looks
every selected row up by its number, and finds the slots to give away without sorting them all: its time grows
with the entries and, far more slowly, with the capacity. What Python does a call counts too: one block of
memory is handed over, and results are views made ahead where they can be.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from kvstrata.core.eviction import DEFAULT_POLICY, LRU, check_policy
from kvstrata.core.residency import ResidencyOverflow, ResidencyStatistics
from kvstrata.kernels import residency_loops as loops
from kvstrata.kernels import residency_memory as part

Array = np.ndarray[Any, Any]

_INT64 = np.dtype(np.int64)
_NO_ROWS = np.empty((0, 0), np.int64)
_NEVER_FRESH = np.full(1, -1, np.int32)
_NONE_PLACED = np.empty(0, np.int64)


class Resolution(NamedTuple):
    """What one `resolve` decided. The arrays are views of the table's memory, valid until its next call."""

    slots: Array  # int32 [T, K], -1 where no row was named
    load_rows: Array  # int64 [m], host rows in order of first occurrence ...
    load_slots: Array  # int64 [m], ... and where each goes
    placed_index: Array  # int64 [p], indices into the step's new rows, likewise
    placed_slots: Array  # int64 [p]
    selected: int  # entries that name a row
    hits: int  # of these, entries for which no host byte moves
    evictions: int

    @property
    def misses(self) -> int:
        """Rows to load."""
        return self.selected - self.hits


def table_bytes(*, host_rows: int, capacity: int, policy: str = DEFAULT_POLICY) -> int:
    """Memory of one `ResidencyTable`, in bytes, for selections of at most `capacity` entries."""
    check_policy(policy)
    return 8 * sum(part.sizes(host_rows, capacity, capacity))


class ResidencyTable:
    """Which host rows are in the hot buffers of one share group, and where. One thread owns it.

    `host_rows` is the size of the host pool in rows; `capacity` that of a hot buffer. Nothing is allocated
    after construction, except once more when a call has more entries than `capacity`.
    """

    def __init__(self, *, host_rows: int, capacity: int, policy: str = DEFAULT_POLICY) -> None:
        if host_rows < 1 or capacity < 1:
            raise ValueError(
                f"a table of {host_rows} host rows and {capacity} hot rows: both must be positive"
            )
        if capacity > np.iinfo(np.int32).max:
            raise ValueError(f"a hot buffer of {capacity} rows: slots are numbered in 32 bits")
        self.host_rows = host_rows
        self.capacity = capacity
        self.policy = check_policy(policy)
        memory = np.zeros(sum(part.sizes(host_rows, capacity, capacity)), np.int64)
        memory[[part.HOST_ROWS, part.CAPACITY, part.ENTRIES]] = host_rows, capacity, capacity
        memory[part.FREE] = capacity
        memory[part.IS_LRU] = policy == LRU
        self._use(memory)
        self._slot_of_row[0] = part.ABSENT_ROW
        self._slot_of_row[1:] = part.REWRITTEN
        self._wide[part.ROW_OF_SLOT] = -1
        # Compile what decode steps would wait for.
        loops.resolve(_NO_ROWS, _NO_ROWS, _NEVER_FRESH, memory)
        self._totals[part.RESOLVES] = 0
        self.invalidate(_NONE_PLACED)

    def resolve(
        self, rows: Array, fresh: Array | None = None, *, near_rows: Array | None = None
    ) -> Resolution:
        """Give every row of one selection a slot; `core.residency` says by which rule.

        rows [T, K] int64, C-contiguous: host rows, negative where nothing is selected. fresh
        [host_rows] int32: index of each host row among this step's new rows, or -1; None = none is new. A new
        row was given to `invalidate` before (R4): one that was not may be loaded instead of placed.
        near_rows, any shape, int64, C-contiguous: host rows just below the selection's cut
        (`index_topk(near=...)` gives their positions), negative where there is none; None = not known. They
        are never loaded; those that are resident may stay longer. IndexError for a row beyond the host pool,
        ResidencyOverflow when the distinct rows exceed the capacity; both change nothing.
        """
        assert rows.dtype == _INT64
        if rows.shape != self._shape:
            self._shape_slots(rows.shape)
        if near_rows is None:
            near_rows = _NO_ROWS
        elif near_rows.ndim != 2:
            near_rows = near_rows.reshape(1, -1)
        if fresh is None:
            fresh = _NEVER_FRESH
        else:
            assert fresh.shape[0] == self.host_rows, "one entry for each host row"
        outcome, loaded, placed, selected, evicted = loops.resolve(rows, near_rows, fresh, self._memory)
        if outcome == loops.BAD_ROW:
            raise self._beyond(rows if rows.max(initial=-1) >= self.host_rows else near_rows)
        if outcome == loops.OVERFLOW:
            raise ResidencyOverflow(loaded, self.capacity)
        return Resolution(
            self._slots,
            self._load_rows[:loaded],
            self._load_slots[:loaded],
            self._placed_index[:placed] if placed else _NONE_PLACED,
            self._placed_slots[:placed] if placed else _NONE_PLACED,
            selected,
            selected - loaded,
            evicted,
        )

    def invalidate(self, rows: Array) -> int:
        """Take the slots of host rows [n] int64 that were rewritten; negative and absent ones are ignored.

        Returns how many had a slot. The owner calls it for every row written in a step before it resolves
        (R4). IndexError, with nothing changed, for a row beyond the host pool.
        """
        taken = int(loops.invalidate(rows, self._memory))
        if taken < 0:
            raise self._beyond(rows)
        return taken

    def resident(self, rows: Array) -> Array:
        """The slot of each host row, -1 for those that have none and for negative ones; changes nothing."""
        if rows.max(initial=-1) >= self.host_rows:
            raise self._beyond(rows)
        return np.maximum(self._slot_of_row[np.maximum(rows, -1) + 1], -1)

    def residents(self) -> tuple[Array, Array]:
        """Host rows that have a slot [r] int64 and their slots [r] int32, by ascending slot; copies."""
        row_of_slot = self._wide[part.ROW_OF_SLOT, : self.capacity]
        slots = np.flatnonzero(row_of_slot != -1)
        return row_of_slot[slots], slots.astype(np.int32)

    def statistics(self) -> ResidencyStatistics:
        """Return the counts since construction."""
        totals = self._totals.tolist()
        return ResidencyStatistics(
            resolves=totals[part.RESOLVES],
            selected=totals[part.SELECTED],
            hits=totals[part.SELECTED] - totals[part.LOADS],
            misses=totals[part.LOADS],
            placements=totals[part.PLACEMENTS],
            evictions=totals[part.EVICTIONS],
            invalidated=totals[part.INVALIDATED],
        )

    def check_integrity(self) -> None:
        """Assert what holds between any two calls: row <-> slot is a bijection (R1), the counts agree."""
        row_of_slot = self._wide[part.ROW_OF_SLOT, : self.capacity]
        priority = self._octets[part.COUNT, : self.capacity]
        if self.policy == LRU:
            priority = self._wide[part.LAST_TOUCH, : self.capacity]
        assert self._slot_of_row[0] == -1, "no row has no slot"
        rows = np.flatnonzero(self._slot_of_row >= 0) - 1
        slots = self._slot_of_row[rows + 1]
        assert np.all((slots >= 0) & (slots < self.capacity))
        assert np.array_equal(row_of_slot[slots], rows)
        assert np.count_nonzero(row_of_slot != -1) == rows.size
        assert np.array_equal(priority != 0, row_of_slot != -1), "free slots, and they alone, have priority 0"
        assert self._totals[part.FREE] == self.capacity - rows.size
        counts = self.statistics()
        given = counts.misses + counts.placements
        assert given == rows.size + counts.evictions + counts.invalidated, counts

    def _use(self, memory: Array) -> None:
        self._memory = memory
        self._totals, self._slot_of_row, self._wide, self._octets, self._small = part.parts(memory)
        # A call's loads and placements, cut short for each result.
        self._load_rows, self._load_slots = self._wide[part.LOAD_ROWS], self._wide[part.LOAD_SLOTS]
        self._placed_index, self._placed_slots = (
            self._wide[part.PLACED_INDEX],
            self._wide[part.PLACED_SLOTS],
        )
        self._shape_slots((0, 0))

    def _shape_slots(self, shape: tuple[int, ...]) -> None:
        """Let the next result's slots have this shape, in more memory if need be."""
        tokens, columns = shape
        entries = tokens * columns
        if entries > self._totals[part.ENTRIES]:
            memory = np.zeros(sum(part.sizes(self.host_rows, self.capacity, entries)), np.int64)
            memory[: self._memory.size] = self._memory
            memory[part.ENTRIES] = entries
            self._use(memory)
        self._shape = shape
        self._slots: Array = self._small[part.SLOTS, :entries].reshape(shape)

    def _beyond(self, rows: Array) -> IndexError:
        return IndexError(f"row {int(rows.max())} is beyond the {self.host_rows} rows of the host pool")
