"""Device and host bytes -> blocks, for a layerwise plan."""

from dataclasses import dataclass

from kvstrata.core.buffers import BufferPlan
from kvstrata.errors import BudgetError


@dataclass(frozen=True, kw_only=True)
class Budget:
    """One rank's account. `reported_bytes` is what vLLM's planner must be told to plan `num_blocks`."""

    available_bytes: int
    physical_page_bytes: int
    logical_page_bytes: int
    num_blocks: int
    reported_bytes: int


def layerwise_budget(
    plan: BufferPlan,
    *,
    available_bytes: int,
    host_bytes: int | None,
    host_page_bytes: int,
    host_overhead_bytes: int = 0,
) -> Budget:
    """Count the blocks that fit into the device and into the host home, whichever is fewer (A2).

    `host_page_bytes` is what one block takes in the host home, `host_overhead_bytes` what the home takes
    beside its blocks, `host_bytes` the size of it all, None for no limit.
    vLLM's planner divides by the logical page bytes, so it is told blocks x logical, not the device bytes.

    Raises BudgetError with both numbers when not even one block fits.
    """
    physical = plan.physical_page_bytes
    assert physical > 0, "a plan without layers has no budget"
    num_blocks = available_bytes // physical
    if num_blocks < 1:
        raise BudgetError(
            f"one block needs {physical} bytes of device KV memory and {available_bytes} are available; "
            "raise the device KV budget, or lower layerwise_num_shared_buffers",
            needed=physical,
            available=available_bytes,
        )
    if host_bytes is not None and host_page_bytes > 0:
        needed_bytes = host_page_bytes + host_overhead_bytes
        if host_bytes < needed_bytes:
            raise BudgetError(
                f"one block needs {needed_bytes} bytes of host KV memory and {host_bytes} are available; "
                "raise host_memory_GB",
                needed=needed_bytes,
                available=host_bytes,
            )
        num_blocks = min(num_blocks, (host_bytes - host_overhead_bytes) // host_page_bytes)
    return Budget(
        available_bytes=available_bytes,
        physical_page_bytes=physical,
        logical_page_bytes=plan.logical_page_bytes,
        num_blocks=num_blocks,
        reported_bytes=num_blocks * plan.logical_page_bytes,
    )


def check_allocation(planned_blocks: int, allocated_bytes: int, budget: Budget) -> None:
    """Check at start-up, on every rank, that what vLLM planned is what was allocated (A1, A3).

    vLLM takes the minimum over the ranks, so `planned_blocks` may be below this rank's own count, never
    above. Raises BudgetError with both numbers.
    """
    if not 1 <= planned_blocks <= budget.num_blocks:
        raise BudgetError(
            f"the planner planned {planned_blocks} blocks and this rank has memory for {budget.num_blocks} "
            f"(at least 1 needed); remove num_gpu_blocks_override or set it to {budget.num_blocks} at most",
            needed=planned_blocks,
            available=budget.num_blocks,
        )
    expected_bytes = planned_blocks * budget.physical_page_bytes
    if allocated_bytes != expected_bytes:
        raise BudgetError(
            f"{planned_blocks} planned blocks take {expected_bytes} bytes, but {allocated_bytes} were "
            "allocated",
            needed=expected_bytes,
            available=allocated_bytes,
        )


def capacity_ratio_formula(plan: BufferPlan) -> float:
    """Return how many times more blocks the plan holds than plain vLLM in the same device bytes."""
    if not plan.is_reused:
        return 1.0
    return plan.logical_page_bytes / plan.physical_page_bytes
