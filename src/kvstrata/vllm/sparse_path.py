"""Sparse decode offload in one worker: host pool, hot rows, residency and prompt window put together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from vllm.logger import init_logger

from kvstrata.core.budget import SparseBudget
from kvstrata.core.layers import Component
from kvstrata.errors import BudgetError
from kvstrata.kernels.base import kernels_for
from kvstrata.kernels.gather import gather_rows_shared
from kvstrata.kernels.residency import ResidencyTable
from kvstrata.kernels.selection import Int64Array
from kvstrata.memory.hot_rows import HotRows
from kvstrata.memory.pages import PageView
from kvstrata.memory.rows import RowView
from kvstrata.move import engine_for
from kvstrata.move.engine import CopyEngine
from kvstrata.move.faulty import DroppingEngine
from kvstrata.move.forward_rows import FreshRows
from kvstrata.move.hot_path import CopyRows, HotLayer, HotPath, Observer
from kvstrata.move.prompt_window import PROMPT_LANE, PromptWindow
from kvstrata.move.sparse import SparsePipeline
from kvstrata.store.base import Store

from .data_path import DataPath, engine_options
from .row_window import ComparedWindow, RowHook, RowWindow
from .settings import Settings
from .shared_home import SharedHome
from .sparse_plan import WINDOW_BUFFERS, SparsePlan
from .transfers import StepTransfers

if TYPE_CHECKING:
    from .hooks import Window

logger = init_logger("vllm.kvstrata.sparse")


class SparsePath(DataPath):
    """Sparse decode offload of one worker; made once caches are bound and the budget is checked."""

    def __init__(
        self,
        *,
        plan: SparsePlan,
        budget: SparseBudget,
        num_blocks: int,
        kv_caches: Mapping[str, torch.Tensor],
        near: torch.Tensor | None,
        home: SharedHome,
        settings: Settings,
        store: Store | None,
        namespace: str,
        rank: str,
        observer: Observer | None = None,
    ) -> None:
        connector = settings.connector
        assert connector is not None, "the platform names kvstrata's connector with sparse offload"
        device = next(iter(kv_caches.values())).device
        self._plan, self._budget, self._home = plan, budget, home
        self._near, self._observer = near, observer
        self._kernels = kernels_for(device.type, plan.packed)
        engine: CopyEngine = engine_for(device.type, **engine_options(device.type))
        moving, copy_rows = _with_fault(engine, settings)
        self._hot_rows = HotRows(
            dict.fromkeys(plan.layers, plan.row_elements),
            capacity_rows=plan.limits.capacity,
            dtype=plan.dtype,
            device=device,
        )
        homes = {
            layer: home.pool.tensor(layer, Component.MAIN, width=plan.row_elements, dtype=plan.dtype)
            for layer in plan.layers
        }
        buffers = [
            torch.zeros(
                plan.limits.window_blocks, *homes[plan.layers[0]].shape[1:], dtype=plan.dtype, device=device
            )
            for _ in range(WINDOW_BUFFERS)
        ]
        host_rows = num_blocks * plan.limits.block_tokens
        tables = {
            group: ResidencyTable(host_rows=host_rows, capacity=plan.limits.capacity, policy=plan.policy)
            for group in plan.groups
        }
        fresh = FreshRows(host_rows)
        self._check_bytes(num_blocks, buffers)
        indexers = {
            layer.index: PageView.of_tensor(kv_caches[name])
            for name, layer in plan.layout.layer_of.items()
            if layer.component is Component.INDEXER
        }

        def pages(layer: int, component: Component) -> PageView:
            return indexers[layer] if component is Component.INDEXER else home.pool.view(layer, component)

        self._pipeline_of_rows = SparsePipeline(
            order=plan.layers,
            drafts=plan.drafts,
            homes=homes,
            pages=pages,
            hot=HotPath(
                groups=tables,
                layers={
                    layer: HotLayer(
                        buffer=self._hot_rows.buffer(layer),
                        hot=RowView.of_tensor(self._hot_rows.buffer(layer)),
                        home=RowView.of_tensor(homes[layer]),
                    )
                    for layer in plan.layers
                },
                fresh=fresh.table,
                engine=moving,
                copy_rows=copy_rows,
                deadline_s=connector.deadline_s,
                observer=observer,
            ),
            window=PromptWindow(
                homes={layer: home.pool.view(layer, Component.MAIN) for layer in plan.layers},
                buffers=buffers,
                engine=moving,
                deadline_s=connector.deadline_s,
            ),
            fresh=fresh,
            block_tokens=plan.limits.block_tokens,
            writes_home=home.is_writer,
            fence=home.fence,
            deadline_s=connector.deadline_s,
        )
        super().__init__(
            pipeline=self._pipeline_of_rows,
            engine=engine,
            host=home.pool,
            store=store,
            bundles=plan.bundles,
            namespace=namespace,
            rank=rank,
            num_blocks=num_blocks,
            deadline_s=connector.deadline_s,
            owns_host=home.is_writer,
        )
        logger.info(
            "rank %s: %d blocks; main KV of %d layers in a host pool of %.1f MiB (%s); on the device the "
            "indexer caches, %d hot rows a layer in %d share groups (%.1f MiB, policy %s) and a prompt "
            "window of 2 x %d blocks; store %s",
            rank,
            num_blocks,
            len(plan.layers),
            home.pool.size_bytes / 2**20,
            "made here" if home.is_writer else "of the group's first rank",
            plan.limits.capacity,
            len(plan.groups),
            plan.hot_rows_bytes / 2**20,
            plan.policy,
            plan.limits.window_blocks,
            "on" if store is not None else "off",
        )

    def hook(self, layer: int) -> RowHook:
        """Return the lifecycle hook of one layer."""
        return RowHook(self._pipeline_of_rows, layer)

    def window(self, layer: int) -> Window:
        """Return the row window of one layer."""
        kind = ComparedWindow if self._plan.keeps_device_cache else RowWindow
        return kind(self._pipeline_of_rows, layer, self._plan.limits, self._kernels, self._near)

    @property
    def shares_main_home(self) -> bool:
        """True where several ranks write and read one pool."""
        return self._home.fence is not None

    @property
    def near(self) -> torch.Tensor | None:
        """Where indexers leave the positions they nearly selected."""
        return self._near

    def begin_step(self, transfers: StepTransfers) -> None:
        """Start a forward, once every rank of the pool may; then the store's fetches."""
        self._pipeline_of_rows.begin_step()
        arrivals = self._start_fetches(transfers)
        filled = [fetch.block_id for fetch in transfers.fetches] + transfers.imported_block_ids
        self._pipeline_of_rows.expect(filled, arrivals)

    def end_step(self) -> None:
        """Leave nothing of the forward in flight, then let the other ranks of the pool go on.

        Where there are others, the store is done with the pool first: they may write it from then on (M3).
        """
        if self._home.fence is None or self._io is None:
            super().end_step()
            return
        try:
            self._offer_blocks()
            self._io.settle_puts()
        except BaseException as trouble:
            self._home.fence.fail(f"the store is not done with the pool: {trouble}")
            raise
        finally:
            self._pipeline_of_rows.end_step()

    def figures(self) -> dict[str, Any]:
        """Return this rank's figures for demo, bench and tests."""
        budget = self._budget
        return {
            **super().figures(),
            "device_bytes": budget.fixed_bytes + self._num_blocks * budget.physical_page_bytes,
            "logical_page_bytes": budget.logical_page_bytes,
            "physical_page_bytes": budget.physical_page_bytes,
            "indexer_page_bytes": budget.indexer_page_bytes,
            "hot_row_bytes": budget.hot_rows_bytes,
            "hot_row_capacity": self._plan.limits.capacity,
            "prompt_window_bytes": budget.prompt_window_bytes,
            "host_pool_resident_bytes": self._home.pool.statistics().resident_bytes,
            "capacity_ratio_formula": budget.capacity_ratio_formula,
            "share_groups": [list(group) for group in self._plan.groups],
            "policy": self._plan.policy,
            "plan": budget.describe(),
        }

    def check_integrity(self) -> None:
        """Check every part that holds state."""
        super().check_integrity()
        self._home.check_integrity()

    def close(self) -> None:
        """Finish what is in flight and let go of memory and store."""
        try:
            super().close()
        finally:
            self._home.close()
            if self._observer is not None:
                self._observer.close()

    def _check_bytes(self, num_blocks: int, buffers: list[torch.Tensor]) -> None:
        """A1: what is allocated here is what the budget took off the device's memory."""
        window_bytes = sum(buffer.nbytes for buffer in buffers)
        for what, planned, taken in (
            ("hot rows", self._plan.hot_rows_bytes, self._hot_rows.size_bytes),
            ("prompt window", self._plan.window_bytes, window_bytes),
        ):
            if planned != taken:
                raise BudgetError(
                    f"{what}: {planned} bytes were planned and {taken} allocated for {num_blocks} blocks",
                    needed=taken,
                    available=planned,
                )


def _with_fault(engine: CopyEngine, settings: Settings) -> tuple[CopyEngine, CopyRows]:
    """Return the engine and the row copy to use: the real ones, unless a test aid breaks them."""
    fault = settings.additional.fault
    if fault == "none":
        return engine, gather_rows_shared
    logger.warning("fault is %r: answers of this engine are wrong on purpose", fault)
    if fault == "skip_loads":
        return DroppingEngine(engine, lanes={PROMPT_LANE}), _copy_nothing
    return engine, _copy_nothing


def _copy_nothing(dst: RowView, dst_rows: Int64Array, src: RowView, src_rows: Int64Array) -> None:
    """Leave in the slots what they held before."""
