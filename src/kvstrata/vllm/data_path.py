"""One worker's data path, as the connector drives it: steps, store, counts. The members say what moves.

`layerwise_path.py` passes whole layers through a few buffers, `sparse_path.py` selected rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

import torch
from vllm.logger import init_logger

from kvstrata.core.bundle import Bundle
from kvstrata.core.layers import Component
from kvstrata.kernels.parallel import pool_cpus
from kvstrata.memory.host_pool import HostPool
from kvstrata.memory.pages import PageView
from kvstrata.memory.region import HostRegion
from kvstrata.move.engine import CopyEngine, CopyToken
from kvstrata.move.store_io import StoreIO
from kvstrata.store.base import Store

from .hooks import LayerHook, Window
from .stats import METRICS
from .transfers import StepTransfers

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

logger = init_logger("vllm.kvstrata.data_path")


class Pipeline(Protocol):
    """What moves a rank's layers between home and window."""

    def end_step(self) -> None:
        """Leave nothing in flight."""

    def ran_all_target_layers(self) -> bool:
        """Whether the forward got through."""

    def home(self, layer: int, component: Component) -> PageView:
        """Where the layer's full KV persists between steps."""

    def statistics(self) -> DataclassInstance:
        """Totals since start, under the keys of the metrics."""

    def check_integrity(self) -> None:
        """Check every part that holds state."""


class DataPath:
    """Owns everything that moves KV in this worker; the connector drives steps, the layers drive hooks.

    A member gives the pipeline and says how a step begins; what a store brings and takes is the same for all.
    """

    def __init__(
        self,
        *,
        pipeline: Pipeline,
        engine: CopyEngine,
        host: HostPool | None,
        store: Store | None,
        bundles: tuple[Bundle, ...],
        namespace: str,
        rank: str,
        num_blocks: int,
        deadline_s: float,
        owns_host: bool = True,
    ) -> None:
        self._pipeline = pipeline
        self._owns_host = owns_host
        self._engine = engine
        self._host = host
        self._store = store
        self._io = (
            StoreIO(
                store=store,
                bundles=bundles,
                home=pipeline.home,
                engine=engine,
                namespace=namespace,
                rank=rank,
                deadline_s=deadline_s,
            )
            if store is not None
            else None
        )
        self._rank = rank
        self._num_blocks = num_blocks
        self._deadline_s = deadline_s
        self._transfers = StepTransfers()
        self._reported: dict[str, float] = {}
        self._more_counts: Callable[[], Mapping[str, float]] | None = None

    def hook(self, layer: int) -> LayerHook:
        """Return the lifecycle hook of one layer."""
        raise NotImplementedError

    def window(self, layer: int) -> Window | None:
        """Return the memory that the layer's attention uses; None for the cache that vLLM bound to it."""
        return None

    def home(self, layer: int, component: Component) -> PageView:
        """Return where the layer's full KV persists between steps: what other engines read and fill."""
        return self._pipeline.home(layer, component)

    def saved(self, layer: int) -> CopyToken | None:
        """Return the token after which this step's rows of a released layer are home; None: they are."""
        return None

    @property
    def shares_main_home(self) -> bool:
        """Whether the ranks of this engine have one home for main KV, and not one each."""
        return False

    @property
    def shared_regions(self) -> list[HostRegion]:
        """Shared memory that homes lie in, apart from vLLM's own caches."""
        return [self._host.region] if self._host is not None else []

    @property
    def near(self) -> torch.Tensor | None:
        """Where indexers leave the positions they nearly selected, [max tokens, W]; None: nobody asks."""
        return None

    def begin_step(self, transfers: StepTransfers) -> None:
        """Start a forward: settle the step before, start the store's fetches."""
        raise NotImplementedError

    def end_step(self) -> None:
        """Leave nothing of the forward in flight, then offer finished blocks to the store."""
        self._pipeline.end_step()
        self._offer_blocks()

    def _offer_blocks(self) -> None:
        if self._io is None:
            return
        self._io.end_step()
        # Any request of this step may share a failed block and have computed from it; and vLLM ends the step
        # of a forward that raised, too.
        if self.failed_blocks() or not self._pipeline.ran_all_target_layers():
            return
        self._io.put([(put.block_id, put.block_hash) for put in self._transfers.puts])

    @property
    def step_number(self) -> int:
        """The scheduler's number of the step that was begun last; 0 where there is no store."""
        return self._transfers.number

    def failed_blocks(self) -> frozenset[int]:
        """Return the blocks of this step whose rows did not arrive: vLLM recomputes them."""
        return self._io.failed_blocks() if self._io is not None else frozenset()

    def counts(self) -> dict[str, float]:
        """Return totals since start under the keys of the metrics."""
        totals = dict(vars(self._pipeline.statistics()))  # asdict would copy deeply, in every step
        if self._io is not None:
            totals |= vars(self._io.statistics())
        if self._more_counts is not None:
            totals |= self._more_counts()
        if self._host is not None and self._owns_host:
            totals["own_host_pool_bytes"] = self._host.size_bytes
        return {metric.key: totals.get(metric.key, 0) for metric in METRICS}

    def count_also(self, totals: Callable[[], Mapping[str, float]]) -> None:
        """Report these totals since start too, of a part beside this path."""
        self._more_counts = totals

    def take_counts(self) -> dict[str, float]:
        """Return what was counted since the last call."""
        totals = self.counts()
        new = {key: value - self._reported.get(key, 0) for key, value in totals.items()}
        self._reported = totals
        return {key: value for key, value in new.items() if value}

    def figures(self) -> dict[str, Any]:
        """Return this rank's figures for demo, bench and tests."""
        return {
            "rank": self._rank,
            "num_blocks": self._num_blocks,
            "host_pool_bytes": self._host.size_bytes if self._host is not None else 0,
            **self.counts(),
        }

    def check_integrity(self) -> None:
        """Check every part that holds state."""
        self._pipeline.check_integrity()
        self._engine.check_integrity()
        if self._store is not None:
            self._store.check_integrity()

    def close(self) -> None:
        """Finish what is in flight and let go of memory and store."""
        if self._io is not None:
            self._io.settle_puts()
        self._engine.close(self._deadline_s)
        if self._host is not None:
            self._host.close()
        if self._store is not None:
            self._store.close()

    def _start_fetches(self, transfers: StepTransfers) -> Mapping[int, CopyToken]:
        """Start filling blocks from the store; return the token, by layer, after which its rows are there."""
        self._transfers = transfers
        if self._io is None:
            return {}
        return self._io.begin_step(
            [(fetch.block_id, fetch.leases.get(self._rank)) for fetch in transfers.fetches]
        )


def engine_options(device_type: str) -> dict[str, Any]:
    """On CPU the copy threads run where the rank computes, not on the one CPU of their maker."""
    return {"cpu_ids": sorted(pool_cpus()) or None} if device_type == "cpu" else {}
