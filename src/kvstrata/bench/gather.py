"""Row gather against memcpy and torch's `index_select(out=)`: the same bytes in the same run, one thread.

The home is much larger than any cache and lies in shared memory with huge pages, as the host pool does.
Every run reads other random rows (memcpy: another stretch), so that nothing is in the cache beforehand.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import numpy as np
import torch

from kvstrata.kernels.gather import gather_rows, prepare
from kvstrata.memory.allocator import SharedMemoryAllocator
from kvstrata.memory.rows import RowView

ROW_BYTES = 1152  # 576 bf16 values
ROWS = 16 * 1024  # misses of 30 % for 27 tokens with a top-k of 2048
POOL_BYTES = 1 << 30
SEED = 20


@dataclass(frozen=True, kw_only=True)
class GatherRuns:
    """Seconds of every run, in order; the three kinds took turns and each moved `rows * row_bytes` bytes."""

    rows: int
    row_bytes: int
    pool_bytes: int
    gather_s: tuple[float, ...]
    memcpy_s: tuple[float, ...]
    index_select_s: tuple[float, ...]

    @property
    def gather_over_memcpy(self) -> float:
        """Bytes a second of the gather over those of memcpy, medians."""
        return median(self.memcpy_s) / median(self.gather_s)

    @property
    def gather_over_index_select(self) -> float:
        """Bytes a second of the gather over those of `index_select(out=)`, medians."""
        return median(self.index_select_s) / median(self.gather_s)

    @property
    def gather_bytes_per_s(self) -> float:
        return self.rows * self.row_bytes / median(self.gather_s)


def measure_gather(*, repeats: int, rows: int = ROWS, pool_bytes: int = POOL_BYTES) -> GatherRuns:
    """Time `repeats` runs of each kind, after one untimed round. Takes pool_bytes of memory meanwhile.

    Raises ValueError if the pool has fewer rows than one run reads, BudgetError if there is no room for it.
    """
    pool_rows = pool_bytes // ROW_BYTES
    if not 0 < rows <= pool_rows:
        raise ValueError(
            f"rows={rows}: a pool of {pool_bytes} bytes has {pool_rows} rows of {ROW_BYTES} bytes"
        )
    allocator = SharedMemoryAllocator(prefault=True)
    region = allocator.alloc(pool_bytes, "gather bench")
    torch_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        home = region.tensor()[: pool_rows * ROW_BYTES].view(pool_rows, ROW_BYTES)
        home.fill_(1)
        target = torch.zeros(rows, ROW_BYTES, dtype=torch.uint8)
        runs = _take_turns(home, target, repeats)
    finally:
        torch.set_num_threads(torch_threads)
        allocator.free(region)
    return GatherRuns(
        rows=rows,
        row_bytes=ROW_BYTES,
        pool_bytes=pool_bytes,
        gather_s=tuple(runs["gather"]),
        memcpy_s=tuple(runs["memcpy"]),
        index_select_s=tuple(runs["index_select"]),
    )


def _take_turns(home: torch.Tensor, target: torch.Tensor, repeats: int) -> dict[str, list[float]]:
    prepare()
    pool_rows, rows = len(home), len(target)
    source_view, target_view = RowView.of_tensor(home), RowView.of_tensor(target)
    slots = np.arange(rows, dtype=np.int64)
    kinds: dict[str, Callable[[np.ndarray], object]] = {
        "gather": lambda ids: gather_rows(target_view, slots, source_view, ids),
        "memcpy": lambda ids: ctypes.memmove(
            target.data_ptr(),
            home.data_ptr() + int(ids[0]) % (pool_rows - rows + 1) * ROW_BYTES,
            rows * ROW_BYTES,
        ),
        "index_select": lambda ids: torch.index_select(home, 0, torch.from_numpy(ids), out=target),
    }
    generator = np.random.default_rng(SEED)
    runs: dict[str, list[float]] = {kind: [] for kind in kinds}
    for run in range(repeats + 1):
        for kind, copy in kinds.items():
            ids = generator.integers(0, pool_rows, rows)
            started = time.perf_counter()
            copy(ids)
            if run:
                runs[kind].append(time.perf_counter() - started)
    return runs
