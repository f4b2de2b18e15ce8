"""Copies of one layer between its layer buffer and the host pool, against memcpy in the same run.

The layer is one of DeepSeek-V3.2 in bf16 with a prefix of 32 K tokens, 42 MB; the copies taking turns touch
250 MB together. The prefix lies in every second block, as after some turnover, so that no two of its blocks
can be merged into one copy.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from kvstrata.core.bundle import Bundle, ComponentSpec
from kvstrata.core.layers import Component, LayerId
from kvstrata.memory.allocator import SharedMemoryAllocator
from kvstrata.memory.host_pool import HostPool
from kvstrata.memory.pages import PageView
from kvstrata.move.plan import CopyPlan, concat, plan_block_copies
from kvstrata.move.threads import ThreadEngine

BLOCK_TOKENS = 64
PREFIX_TOKENS = 32 * 1024
MAIN_ROW_BYTES = 1152  # 576 bf16 values
INDEXER_ROW_BYTES = 132  # 128 fp8 values and a float32 scale
DEADLINE_S = 60.0


@dataclass(frozen=True, kw_only=True)
class CopyRuns:
    """Seconds of every run, in order; the three kinds took turns."""

    layer_bytes: int
    ranges: int
    load_s: tuple[float, ...]
    save_s: tuple[float, ...]
    memcpy_s: tuple[float, ...]


def measure_copies(*, repeats: int) -> CopyRuns:
    """Time `repeats` loads, saves and memcpys of the same number of bytes, after one untimed round."""
    blocks = PREFIX_TOKENS // BLOCK_TOKENS
    bundle = _bundle()
    pool = HostPool((bundle,), 2 * blocks, SharedMemoryAllocator(prefault=True), layers=(0,), name="bench")
    engine = ThreadEngine()
    try:
        # Written once, so that every page is there and none is the shared page of zeros.
        device = {
            component: torch.full((2 * blocks, spec.page_bytes), 1, dtype=torch.uint8)
            for component, spec in ((Component.MAIN, bundle.main), (Component.INDEXER, bundle.indexer))
            if spec is not None
        }
        views = [(PageView.of_tensor(tensor), pool.view(0, part)) for part, tensor in device.items()]
        ids = np.arange(0, 2 * blocks, 2, dtype=np.int64)
        load = concat(plan_block_copies(buffer, home, ids) for buffer, home in views)
        save = concat(plan_block_copies(home, buffer, ids) for buffer, home in views)
        source, target = (torch.full((load.total_bytes,), value, dtype=torch.uint8) for value in (2, 3))

        def submit(plan: CopyPlan, lane: str) -> None:
            token = engine.lane(lane).submit(plan, name=f"bench {lane}")
            token.wait(deadline_s=DEADLINE_S, what=f"bench {lane}")

        kinds: dict[str, Callable[[], object]] = {
            "load": lambda: submit(load, "load"),
            "save": lambda: submit(save, "save"),
            "memcpy": lambda: ctypes.memmove(target.data_ptr(), source.data_ptr(), load.total_bytes),
        }
        runs: dict[str, list[float]] = {kind: [] for kind in kinds}
        for run in range(repeats + 1):
            for kind, copy in kinds.items():
                started = time.perf_counter()
                copy()
                if run:
                    runs[kind].append(time.perf_counter() - started)
        pool.check_integrity()
        engine.check_integrity()
    finally:
        engine.close(DEADLINE_S)
        pool.close()
    return CopyRuns(
        layer_bytes=load.total_bytes,
        ranges=len(load),
        load_s=tuple(runs["load"]),
        save_s=tuple(runs["save"]),
        memcpy_s=tuple(runs["memcpy"]),
    )


def _bundle() -> Bundle:
    def spec(component: Component, row_bytes: int) -> ComponentSpec:
        return ComponentSpec(
            name=f"layers.0.{component.value}",
            layer=LayerId(0, component, False),
            page_bytes=BLOCK_TOKENS * row_bytes,
            block_tokens=BLOCK_TOKENS,
            layout=f"bench {row_bytes}",
        )

    return Bundle(
        index=0,
        is_draft=False,
        main=spec(Component.MAIN, MAIN_ROW_BYTES),
        indexer=spec(Component.INDEXER, INDEXER_ROW_BYTES),
    )
