"""The residency table on a device, untested on a GPU: checked in Triton's interpreter on a CPU only.

The semantics of `core.residency`, bit for bit, for both policies. State and results are device tensors; no
call waits for the device, and lists of moves are -1 padded, as `triton_gather` takes them. One program
serves one table, so every call is deterministic. Nothing imports this module unless a device asks for it.
Source: seed, Sparse Decode Offload, Decode step; device constraint 7.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

from typing import NamedTuple

import torch
import triton

from kvstrata.core.eviction import DEFAULT_POLICY, LRU, check_policy
from kvstrata.core.residency import ResidencyOverflow, ResidencyStatistics
from kvstrata.kernels.triton_residency_kernels import invalidate_kernel, resolve_kernel

# Outcomes, the first of a call's counts.
DONE, BAD_ROW, OVERFLOW = 0, 1, 2
# A call's counts, int64: outcome; entries that name a row; rows loaded; rows placed; victims; distinct rows.
OUTCOME, SELECTED, LOADS, PLACEMENTS, EVICTIONS, DISTINCT = range(6)
# Counts since construction, int64.
RESOLVES, ALL_SELECTED, ALL_LOADS, ALL_PLACEMENTS, ALL_EVICTIONS, INVALIDATED, REFUSED = range(7)

MAX_CAPACITY = 8192  # one program holds all slots at once
_BLOCK = 1024


class DeviceResolution(NamedTuple):
    """What one `resolve` decided, on the device: views of the table's memory, valid until its next call."""

    slots: torch.Tensor  # int32 [T, K], -1 where no row was named or the call was refused
    load_rows: torch.Tensor  # int64 [T * K], host rows in order of first occurrence, then -1
    load_slots: torch.Tensor  # int64 [T * K], where each goes, then -1
    placed_index: torch.Tensor  # int64 [T * K], indices into the step's new rows, then -1
    placed_slots: torch.Tensor  # int64 [T * K]
    counts: torch.Tensor  # int64 [6], see OUTCOME and what follows it


class TritonResidencyTable:
    """`kernels.residency.ResidencyTable` on a device. Calls enqueue on the current stream.

    One thread owns it. Memory is allocated once, for selections of at most `max_entries` entries; `capacity`
    is at most MAX_CAPACITY. What a call was refused for is in its counts; `check` raises it.
    """

    def __init__(
        self,
        *,
        host_rows: int,
        capacity: int,
        max_entries: int,
        device: torch.device | str,
        policy: str = DEFAULT_POLICY,
    ) -> None:
        if host_rows < 1 or max_entries < 1 or not 1 <= capacity <= MAX_CAPACITY:
            raise ValueError(
                f"a table of {host_rows} host rows and {capacity} hot rows for {max_entries} entries: all "
                f"must be positive, and one program sorts at most {MAX_CAPACITY} hot rows"
            )
        self.host_rows = host_rows
        self.capacity = capacity
        self.max_entries = max_entries
        self.policy = check_policy(policy)
        self._width = triton.next_power_of_2(capacity)

        def full(size: int, value: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.full((size,), value, dtype=dtype, device=device)

        self._slot_of_row = full(host_rows, -1, torch.int32)
        self._row_of_slot = full(capacity, -1)
        self._priority = full(capacity, 0)
        self._totals = full(7, 0)
        self._marks = full(capacity, 0, torch.int32)
        self._absent = full(max_entries, -1)
        self._order = full(capacity, 0)
        self._slots = full(max_entries, -1, torch.int32)
        self._moves = tuple(full(max_entries, -1) for _ in range(4))
        self._counts = full(6, 0)

    def resolve(
        self, rows: torch.Tensor, fresh: torch.Tensor | None = None, *, near_rows: torch.Tensor | None = None
    ) -> DeviceResolution:
        """Enqueue the giving of slots to one selection.

        Arguments as those of `ResidencyTable.resolve`, contiguous on the table's device. A row beyond the
        host pool, or more distinct rows than the capacity, changes nothing: the outcome is in the counts, all
        slots are -1 and nothing is to be moved.
        """
        entries = rows.numel()
        if entries > self.max_entries:
            raise ValueError(f"a selection of {entries} entries; the table was made for {self.max_entries}")
        if fresh is not None and (fresh.shape != (self.host_rows,) or fresh.dtype != torch.int32):
            raise ValueError(
                f"fresh must be int32 [{self.host_rows}], got {fresh.dtype} {tuple(fresh.shape)}"
            )
        near = rows if near_rows is None else near_rows
        for tensor in (rows, near):
            if tensor.dtype != torch.int64 or not tensor.is_contiguous():
                raise TypeError(f"rows must be contiguous int64, got {tensor.dtype} {tuple(tensor.shape)}")
        resolve_kernel[(1,)](
            rows, entries, near, 0 if near_rows is None else near.numel(),
            self._slot_of_row if fresh is None else fresh, self.host_rows, self.capacity,
            self._slot_of_row, self._row_of_slot, self._priority, self._totals, self._marks, self._absent,
            self._order, self._slots, *self._moves, self._counts,
            is_lru=self.policy == LRU, has_fresh=fresh is not None, block=_BLOCK, width=self._width,
            num_warps=8,
        )  # fmt: skip
        load_rows, load_slots, placed_index, placed_slots = (move[:entries] for move in self._moves)
        return DeviceResolution(
            slots=self._slots[:entries].view(rows.shape),
            load_rows=load_rows,
            load_slots=load_slots,
            placed_index=placed_index,
            placed_slots=placed_slots,
            counts=self._counts,
        )

    def invalidate(self, rows: torch.Tensor) -> None:
        """Enqueue the taking of the slots of rewritten host rows [n] int64; negative and absent are ignored.

        With a row beyond the host pool nothing is changed; `refused` counts it.
        """
        if rows.dtype != torch.int64 or not rows.is_contiguous():
            raise TypeError(f"rows must be contiguous int64, got {rows.dtype} {tuple(rows.shape)}")
        invalidate_kernel[(1,)](
            rows, rows.numel(), self.host_rows, self._slot_of_row, self._row_of_slot, self._totals,
            block=_BLOCK,
        )  # fmt: skip

    def check(self, resolution: DeviceResolution) -> None:
        """Wait for the device and raise what the call was refused for: IndexError or ResidencyOverflow."""
        counts = resolution.counts.tolist()
        if counts[OUTCOME] == BAD_ROW:
            raise IndexError(f"a selected row is beyond the {self.host_rows} rows of the host pool")
        if counts[OUTCOME] == OVERFLOW:
            raise ResidencyOverflow(counts[DISTINCT], self.capacity)

    def resident(self, rows: torch.Tensor) -> torch.Tensor:
        """The slot of each host row int32, -1 for those that have none and for negative ones."""
        return torch.where(rows >= 0, self._slot_of_row[rows.clamp(min=0)], -1)

    @property
    def refused(self) -> int:
        """Calls that changed nothing because of a bad row or an overflow. Waits for the device."""
        return int(self._totals[REFUSED])

    def statistics(self) -> ResidencyStatistics:
        """Return the counts since construction. Waits for the device."""
        totals = self._totals.tolist()
        return ResidencyStatistics(
            resolves=totals[RESOLVES],
            selected=totals[ALL_SELECTED],
            hits=totals[ALL_SELECTED] - totals[ALL_LOADS],
            misses=totals[ALL_LOADS],
            placements=totals[ALL_PLACEMENTS],
            evictions=totals[ALL_EVICTIONS],
            invalidated=totals[INVALIDATED],
        )

    def check_integrity(self) -> None:
        """Assert what holds between any two calls: row <-> slot is a bijection (R1), the counts agree."""
        rows = torch.nonzero(self._slot_of_row != -1).flatten()
        slots = self._slot_of_row[rows].long()
        assert bool(((slots >= 0) & (slots < self.capacity)).all())
        assert torch.equal(self._row_of_slot[slots], rows)
        assert int((self._row_of_slot != -1).sum()) == len(rows)
        counts = self.statistics()
        given = counts.misses + counts.placements
        assert given == len(rows) + counts.evictions + counts.invalidated, counts
