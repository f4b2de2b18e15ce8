"""Which rows of the host pool are in the hot buffer, and in which slots: the rule, said slowly.

A hot buffer is a device's window on main KV during sparse decode. One table serves all layers that share a
top-k selection. `kernels.residency` gives the same answers, bit for bit, at the speed of decode; this is its
reference. Source: seed, Sparse Decode Offload, Decode step.

What one `resolve` does, in order:

1. Entries are walked token by token, column by column; a negative one is skipped and gets slot -1. A row with
   a slot is a hit. The first entry of a row without one is a *load*, or a *placement* where the row is one of
   this step's own new rows: its bytes are still on the device. Later entries of it name the same slot.
2. The policy is told which slots were hit.
3. As many slots as there are rows without one are taken: free ones first, the lowest number first, then the
   lowest (priority, slot) that this call does not select (R3). Rows get them in order of first occurrence, by
   ascending number.

The owner of the table calls `invalidate` for every host row that was rewritten, before it resolves (R4); so
for every row that `fresh` knows.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from kvstrata.core.eviction import DEFAULT_POLICY, POLICIES, check_policy


class ResidencyOverflow(ValueError):  # noqa: N818 - named for what happened
    """One selection has more distinct rows than the hot buffer; the caller should have split the batch."""

    def __init__(self, distinct_rows: int, capacity_rows: int) -> None:
        super().__init__(
            f"one selection names {distinct_rows} distinct rows and the hot buffer holds {capacity_rows}"
        )
        self.distinct_rows = distinct_rows
        self.capacity_rows = capacity_rows


@dataclass(frozen=True, kw_only=True)
class ResidencyStatistics:
    """Counts since construction; `hits + misses == selected`."""

    resolves: int
    selected: int  # entries that name a row
    hits: int  # entries for which no host byte moves: resident, placed, or named before in the same call
    misses: int  # rows loaded from the host
    placements: int  # rows taken from the step's own new rows
    evictions: int
    invalidated: int  # rows that lost their slot because the host row was rewritten


@dataclass(frozen=True, kw_only=True)
class Resolution:
    """What one `resolve` decided."""

    slots: tuple[tuple[int, ...], ...]  # [T, K], -1 where no row was named
    loads: tuple[tuple[int, int], ...]  # (host row, slot), in order of first occurrence
    placements: tuple[tuple[int, int], ...]  # (fresh index, slot), likewise
    selected: int
    hits: int
    evictions: int


def never_fresh(row: int) -> int:
    """The `fresh` of a call none of whose rows is new."""
    return -1


class Residency:
    """The rows of one hot buffer of `capacity` rows. Not thread-safe: one thread owns it."""

    def __init__(self, capacity: int, policy: str = DEFAULT_POLICY) -> None:
        if capacity < 1:
            raise ValueError(f"a hot buffer of {capacity} rows holds nothing; it needs at least 1")
        self.capacity = capacity
        self._policy = POLICIES[check_policy(policy)](capacity)
        self._slot_of: dict[int, int] = {}
        self._row_of: dict[int, int] = {}
        self._counts = dict.fromkeys(ResidencyStatistics.__dataclass_fields__, 0)

    def resolve(
        self,
        rows: Sequence[Sequence[int]],  # [T, K]
        fresh: Callable[[int], int] = never_fresh,
        *,
        near_rows: Iterable[int] = (),
    ) -> Resolution:
        """Give every row of one selection a slot; module documentation says how.

        `fresh(row)` is the index of a host row among this step's new rows, or negative. `near_rows` were just
        below the selection's cut: they are never loaded, resident ones may be kept longer. ResidencyOverflow,
        with nothing changed, when the distinct rows exceed the capacity.
        """
        named = [row for token in rows for row in token if row >= 0]
        distinct = dict.fromkeys(named)
        if len(distinct) > self.capacity:
            raise ResidencyOverflow(len(distinct), self.capacity)
        hit = {self._slot_of[row] for row in distinct if row in self._slot_of}
        near = {self._slot_of[row] for row in near_rows if row in self._slot_of}
        self._policy.touch(self._row_of.keys(), hit, near)
        missing = [row for row in distinct if row not in self._slot_of]
        slots = self._slots_for(len(missing), hit)
        loads, placements = [], []
        evictions = 0
        for row, slot in zip(missing, slots, strict=True):
            if slot in self._row_of:
                del self._slot_of[self._row_of[slot]]
                evictions += 1
            self._slot_of[row] = slot
            self._row_of[slot] = row
            self._policy.place(slot)
            index = fresh(row)
            if index >= 0:
                placements.append((index, slot))
            else:
                loads.append((row, slot))
        resolution = Resolution(
            slots=tuple(tuple(self._slot_of[row] if row >= 0 else -1 for row in token) for token in rows),
            loads=tuple(loads),
            placements=tuple(placements),
            selected=len(named),
            hits=len(named) - len(loads),
            evictions=evictions,
        )
        self._count(resolution)
        return resolution

    def invalidate(self, rows: Iterable[int]) -> int:
        """Take the slots of rows that were rewritten and return how many had one; others are ignored."""
        taken = 0
        for row in rows:
            slot = self._slot_of.pop(row, None)
            if slot is not None:
                del self._row_of[slot]
                taken += 1
        self._counts["invalidated"] += taken
        return taken

    def resident(self, rows: Iterable[int]) -> list[int]:
        """The slot of each row, -1 for rows that have none. Changes nothing."""
        return [self._slot_of.get(row, -1) for row in rows]

    def statistics(self) -> ResidencyStatistics:
        """Return the counts since construction."""
        return ResidencyStatistics(**self._counts)

    def check_integrity(self) -> None:
        """Assert what holds between any two calls: row <-> slot is a bijection (R1), the counts agree."""
        assert {slot: row for row, slot in self._slot_of.items()} == self._row_of
        assert len(self._slot_of) == len(self._row_of) <= self.capacity
        assert all(0 <= slot < self.capacity for slot in self._row_of)
        assert all(row >= 0 for row in self._slot_of)
        counts = self.statistics()
        assert counts.hits + counts.misses == counts.selected, counts
        given = counts.misses + counts.placements
        assert given == len(self._row_of) + counts.evictions + counts.invalidated, counts

    def _slots_for(self, count: int, selected: set[int]) -> list[int]:
        free = [slot for slot in range(self.capacity) if slot not in self._row_of]
        victims = sorted(
            (slot for slot in self._row_of if slot not in selected),
            key=lambda slot: (self._policy.priority(slot), slot),
        )
        return sorted((free + victims)[:count])

    def _count(self, resolution: Resolution) -> None:
        self._counts["resolves"] += 1
        self._counts["selected"] += resolution.selected
        self._counts["hits"] += resolution.hits
        self._counts["misses"] += len(resolution.loads)
        self._counts["placements"] += len(resolution.placements)
        self._counts["evictions"] += resolution.evictions
