"""Device and host bytes -> blocks, for a layerwise plan, for sparse decode offload and for KVPP."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvstrata.core.buffers import BufferPlan
from kvstrata.core.bundle import Bundle
from kvstrata.core.owners import OwnerPlan
from kvstrata.errors import BudgetError

_WINDOW_PERCENT = 3


@dataclass(frozen=True, kw_only=True)
class Budget:
    """One rank's account. `reported_bytes` is what vLLM's planner must be told to plan `num_blocks`.

    On the device, `num_blocks` blocks take `fixed_bytes` + blocks x `physical_page_bytes`.
    """

    available_bytes: int
    physical_page_bytes: int
    logical_page_bytes: int
    num_blocks: int
    reported_bytes: int
    fixed_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class SparseBudget(Budget):
    """One rank's account with sparse decode offload, with what makes up `fixed_bytes` and a block."""

    hot_rows_bytes: int
    residency_bytes: int
    prompt_window_bytes: int
    indexer_page_bytes: int
    residency_page_bytes: int
    kept_main_page_bytes: int  # 0 unless the full device cache is kept, to compare with
    main_page_bytes: int  # of one block in the host home
    host_bytes: int | None  # None: no limit
    host_overhead_bytes: int
    device_blocks: int
    host_blocks: int | None

    @property
    def plain_blocks(self) -> int:
        """Blocks that plain vLLM would have in the same device bytes."""
        return self.available_bytes // self.logical_page_bytes

    @property
    def capacity_ratio_formula(self) -> float:
        """How many times plain vLLM's blocks the device holds, by `sparse_capacity_formula`."""
        return sparse_capacity_formula(
            device_bytes=self.available_bytes,
            hot_rows_bytes=self.hot_rows_bytes,
            indexer_bytes=self.indexer_page_bytes,
            logical_bytes=self.logical_page_bytes,
        )

    @property
    def host_pool_bytes(self) -> int:
        """Most that the host home of `num_blocks` takes."""
        return self.num_blocks * self.main_page_bytes + self.host_overhead_bytes

    def describe(self) -> str:
        """Say what was decided, why, and what takes how much; a line each."""
        kept = f", main KV kept to compare {self.kept_main_page_bytes}" if self.kept_main_page_bytes else ""
        if self.host_blocks is None:
            host = f"host: no limit set; {self.num_blocks} blocks take {_mib(self.host_pool_bytes)}"
        else:
            host = f"host: {self.host_blocks} blocks in {_mib(self.host_bytes or 0)}"
        by_host = self.host_blocks is not None and self.host_blocks < self.device_blocks
        return "\n".join(
            (
                f"sparse decode offload: {self.num_blocks} blocks, as the {'host' if by_host else 'device'} "
                f"decides; plain vLLM: {self.plain_blocks}",
                f"  device: {self.device_blocks} blocks in {_mib(self.available_bytes)}, less hot rows "
                f"{_mib(self.hot_rows_bytes)}, residency {_mib(self.residency_bytes)} and prompt window "
                f"{_mib(self.prompt_window_bytes)}",
                f"  a block takes {self.physical_page_bytes} device bytes instead of "
                f"{self.logical_page_bytes}: indexer {self.indexer_page_bytes}, residency "
                f"{self.residency_page_bytes}{kept}",
                f"  {host}, {self.main_page_bytes} bytes of main KV a block",
            )
        )


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


def sparse_budget(
    bundles: Iterable[Bundle],
    *,
    available_bytes: int,
    host_bytes: int | None,
    host_overhead_bytes: int,
    hot_rows_bytes: int,
    residency_bytes: int,
    residency_page_bytes: int,
    prompt_window_bytes: int,
    keep_device_kv_cache: bool = False,
) -> SparseBudget:
    """Count the blocks that fit into the device and into the host home, whichever is fewer (A2).

    On the device lie, for all blocks, the hot rows of all layers, the residency state and the prompt window;
    and per block its indexer pages, `residency_page_bytes` of residency tables and, with
    `keep_device_kv_cache`, its main pages. The host home holds the main pages of every layer and
    `host_overhead_bytes`; `host_bytes` is this rank's share of it (`stage_host_bytes`), None for no limit.
    vLLM's planner is told blocks x logical bytes. Source: seed, Sparse Decode Offload, Memory layout.

    Raises BudgetError with both numbers and the knobs to change when not even one block fits.
    """
    bundles = tuple(bundles)
    main = sum(bundle.main.page_bytes for bundle in bundles)
    logical = sum(bundle.page_bytes for bundle in bundles)
    kept = main if keep_device_kv_cache else 0
    physical = logical - main + residency_page_bytes + kept
    fixed = hot_rows_bytes + residency_bytes + prompt_window_bytes
    assert physical > 0, "a plan without an indexer has no sparse budget"
    device_blocks = (available_bytes - fixed) // physical
    if device_blocks < 1:
        raise BudgetError(
            f"sparse decode offload needs {fixed + physical} bytes of device KV memory for one block and "
            f"{available_bytes} are available: hot rows take {hot_rows_bytes}, residency {residency_bytes}, "
            f"the prompt window {prompt_window_bytes}, one block {physical}; lower max_num_seqs, "
            "sparse_kv_offload_config.topk_buffer_size or kvstrata.prompt_window_tokens, or raise the device "
            "KV budget",
            needed=fixed + physical,
            available=available_bytes,
        )
    host_blocks = None
    if host_bytes is not None:
        host_blocks = (host_bytes - host_overhead_bytes) // main
        if host_blocks < 1:
            raise BudgetError(
                f"one block needs {main + host_overhead_bytes} bytes of host memory for main KV and "
                f"{host_bytes} are available; raise sparse_kv_offload_config.dram_size_per_dp_GB",
                needed=main + host_overhead_bytes,
                available=host_bytes,
            )
    num_blocks = device_blocks if host_blocks is None else min(device_blocks, host_blocks)
    return SparseBudget(
        available_bytes=available_bytes,
        physical_page_bytes=physical,
        logical_page_bytes=logical,
        num_blocks=num_blocks,
        reported_bytes=num_blocks * logical,
        fixed_bytes=fixed,
        hot_rows_bytes=hot_rows_bytes,
        residency_bytes=residency_bytes,
        prompt_window_bytes=prompt_window_bytes,
        indexer_page_bytes=logical - main,
        residency_page_bytes=residency_page_bytes,
        kept_main_page_bytes=kept,
        main_page_bytes=main,
        host_bytes=host_bytes,
        host_overhead_bytes=host_overhead_bytes,
        device_blocks=device_blocks,
        host_blocks=host_blocks,
    )


def owner_budget(plan: OwnerPlan, *, member: int, available_bytes: int) -> Budget:
    """Count the blocks of one member of a KVPP group: floor(available / physical).

    Members that own fewer layers have room for more blocks; vLLM's planner takes the fewest of all ranks.
    Source: seed, KVPP, Physical layout and memory budget. Raises BudgetError with both numbers and the knobs
    when not even one block fits.
    """
    physical, logical = plan.physical_page_bytes(member), plan.logical_page_bytes
    assert physical > 0, "a plan without layers has no budget"
    num_blocks = available_bytes // physical
    if num_blocks < 1:
        raise BudgetError(
            f"one block needs {physical} bytes of device KV memory on member {member} of a KVPP group of "
            f"{plan.group_size} and {available_bytes} are available; raise the device KV budget or "
            f"tensor_parallel_size"
            + ("" if physical < logical else f", or set enable_kvpp to false (a block then needs {logical})"),
            needed=physical,
            available=available_bytes,
        )
    return Budget(
        available_bytes=available_bytes,
        physical_page_bytes=physical,
        logical_page_bytes=logical,
        num_blocks=num_blocks,
        reported_bytes=num_blocks * logical,
    )


def prompt_window_blocks(tokens: int | None, *, device_bytes: int, block_tokens: int, page_bytes: int) -> int:
    """Return the whole blocks of the prompt window, at least one, whose pages take `page_bytes` each.

    `tokens` is the knob `kvstrata.prompt_window_tokens`, rounded up; None: what fits in 3 % of the device.
    """
    if tokens is not None:
        return -(-tokens // block_tokens)
    return max(1, device_bytes * _WINDOW_PERCENT // (100 * page_bytes))


def stage_host_bytes(total_bytes: int, own_layers: Sequence[int], all_layers: Sequence[int]) -> int:
    """Return a pipeline stage's share of the host bytes of its data-parallel rank.

    `own_layers` and `all_layers` hold the main page bytes of each layer of the stage and of the whole model;
    the shares of all stages together never exceed `total_bytes`.
    """
    own, everything = sum(own_layers), sum(all_layers)
    assert 0 < own <= everything, f"a stage with {own} of {everything} bytes of main KV a block"
    return total_bytes * own // everything


def check_allocation(planned_blocks: int, allocated_bytes: int, budget: Budget) -> None:
    """Check at start-up, on every rank, that what vLLM planned is what was allocated (A1, A3).

    vLLM takes the minimum over the ranks, so `planned_blocks` may be below this rank's own count, never
    above. `allocated_bytes` counts all that the budget does, `fixed_bytes` included. Raises BudgetError with
    both numbers.
    """
    if not 1 <= planned_blocks <= budget.num_blocks:
        raise BudgetError(
            f"the planner planned {planned_blocks} blocks and this rank has memory for {budget.num_blocks} "
            f"(at least 1 needed); remove num_gpu_blocks_override or set it to {budget.num_blocks} at most",
            needed=planned_blocks,
            available=budget.num_blocks,
        )
    expected_bytes = budget.fixed_bytes + planned_blocks * budget.physical_page_bytes
    if allocated_bytes != expected_bytes:
        beside = f" ({budget.fixed_bytes} of them whatever the blocks)" if budget.fixed_bytes else ""
        raise BudgetError(
            f"{planned_blocks} planned blocks take {expected_bytes} bytes{beside}, but {allocated_bytes} "
            "were allocated",
            needed=expected_bytes,
            available=allocated_bytes,
        )


def capacity_ratio_formula(plan: BufferPlan) -> float:
    """Return how many times more blocks the plan holds than plain vLLM in the same device bytes."""
    if not plan.is_reused:
        return 1.0
    return plan.logical_page_bytes / plan.physical_page_bytes


def owner_capacity_formula(plan: OwnerPlan, member: int) -> float:
    """Return how many times plain vLLM's blocks `member` holds: N / (ceil(N / R) + 2) for equal bundles."""
    return plan.logical_page_bytes / plan.physical_page_bytes(member)


def sparse_capacity_formula(
    *, device_bytes: int, hot_rows_bytes: int, indexer_bytes: int, logical_bytes: int
) -> float:
    """Return how many times plain vLLM's blocks fit with only the indexer cache beside the hot rows.

    (main + indexer) / indexer, less what the hot rows take of `device_bytes`. `indexer_bytes` and
    `logical_bytes` (main + indexer) are of all layers, both a block or both a token.
    """
    return (device_bytes - hot_rows_bytes) / indexer_bytes / (device_bytes / logical_bytes)


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / 2**20:.1f} MiB"
