"""The host pool of a data-parallel rank's pipeline stage: its first TP rank makes it, the others map it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvstrata.errors import StoreUnavailable
from kvstrata.memory.allocator import SharedMemoryAllocator
from kvstrata.memory.host_pool import MAIN_ONLY, HostPool
from kvstrata.memory.step_fence import StepFence

from .sparse_plan import SparsePlan


@dataclass(frozen=True, kw_only=True)
class SharedHome:
    """This rank's end of the pool. The writer's end lives longest: it closes last in an orderly shutdown."""

    pool: HostPool
    fence: StepFence | None  # None where the pool has one rank
    is_writer: bool

    def check_integrity(self) -> None:
        """Check the pool's guards and this rank's word of the fence."""
        self.pool.check_integrity()
        if self.fence is not None:
            self.fence.check_integrity()

    def close(self) -> None:
        """Let go of both."""
        self.pool.close()
        if self.fence is not None:
            self.fence.close()


def open_shared_home(
    plan: SparsePlan, num_blocks: int, *, tp_group: Any, limit_bytes: int | None, deadline_s: float
) -> SharedHome:
    """Make or map the pool; every rank of vLLM's tensor-parallel group calls this at the same time.

    Where the first rank cannot make the pool (BudgetError), the others raise too (StoreUnavailable): none
    waits for a handle that will not come.
    """
    ranks, rank = int(tp_group.world_size), int(tp_group.rank_in_group)
    if rank == 0:
        allocator = SharedMemoryAllocator(
            limit_bytes=limit_bytes,
            limit_knob="sparse_kv_offload_config.dram_size_per_dp_GB",
            prefault=True,
        )
        try:
            pool = HostPool(plan.bundles, num_blocks, allocator, layers=plan.layers, components=MAIN_ONLY)
            # The fence is beside the user's limit: a page, whatever the blocks.
            fence = (
                StepFence.create(SharedMemoryAllocator(), ranks=ranks, deadline_s=deadline_s)
                if ranks > 1
                else None
            )
        except Exception as error:
            if ranks > 1:
                tp_group.broadcast_object(error, src=0)
            raise
        if fence is not None:
            tp_group.broadcast_object((pool.handle, fence.handle), src=0)
        return SharedHome(pool=pool, fence=fence, is_writer=True)
    answer = tp_group.broadcast_object(None, src=0)
    if isinstance(answer, Exception):
        raise StoreUnavailable(f"the group's first rank has no host pool: {answer}") from answer
    pool_handle, fence_handle = answer
    return SharedHome(
        pool=HostPool.open(plan.bundles, num_blocks, pool_handle, layers=plan.layers, components=MAIN_ONLY),
        fence=StepFence.open(fence_handle, rank=rank, ranks=ranks, deadline_s=deadline_s),
        is_writer=False,
    )
