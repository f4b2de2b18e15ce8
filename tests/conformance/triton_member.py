"""The Triton table as `test_residency` asks it, for processes that set TRITON_INTERPRET at the start."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from kvstrata.core.residency import ResidencyStatistics
from kvstrata.kernels.triton_residency import (
    EVICTIONS,
    LOADS,
    PLACEMENTS,
    SELECTED,
    TritonResidencyTable,
)

Array = np.ndarray[Any, Any]


class Interpreted:
    """A device table whose device is the CPU. Padding must be -1, beyond what the counts say."""

    def __init__(self, *, host_rows: int, capacity: int, max_entries: int, policy: str) -> None:
        self.table = TritonResidencyTable(
            host_rows=host_rows, capacity=capacity, max_entries=max_entries, device="cpu", policy=policy
        )

    def resolve(self, rows: Array, fresh: Array | None = None, near: Array | None = None) -> Any:
        from test_residency import Answer

        found = self.table.resolve(
            torch.from_numpy(rows),
            None if fresh is None else torch.from_numpy(fresh),
            near_rows=None if near is None else torch.from_numpy(near),
        )
        assert found.slots.dtype == torch.int32
        counts = found.counts.tolist()
        if counts[0]:
            assert bool((found.slots == -1).all())
        loads = moves(found.load_rows, found.load_slots, counts[LOADS])
        placements = moves(found.placed_index, found.placed_slots, counts[PLACEMENTS])
        self.table.check(found)
        selected = counts[SELECTED]
        return Answer(
            found.slots.tolist(), loads, placements, selected, selected - counts[LOADS], counts[EVICTIONS]
        )

    def invalidate(self, rows: Array) -> None:
        refused = self.table.refused
        self.table.invalidate(torch.from_numpy(rows))
        if self.table.refused > refused:
            raise IndexError("a row beyond the host pool")

    def resident(self, rows: Array) -> list[int]:
        return self.table.resident(torch.from_numpy(rows)).tolist()

    def statistics(self) -> ResidencyStatistics:
        return self.table.statistics()

    def check_integrity(self) -> None:
        self.table.check_integrity()


def moves(first: torch.Tensor, second: torch.Tensor, count: int) -> list[tuple[int, int]]:
    assert bool((first[count:] == -1).all())
    assert bool((second[count:] == -1).all())
    return list(zip(first[:count].tolist(), second[:count].tolist(), strict=True))
