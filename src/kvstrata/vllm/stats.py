"""kvstrata's figures on vLLM's log line and on ``/metrics``.

Workers report differences since their last report; vLLM adds them up over ranks and intervals.
"""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
    PromMetric,
    PromMetricT,
)

from .metric import metric_table
from .remote_stats import REMOTE_METRICS, added

OWN_METRICS = metric_table("""
    loaded_bytes | loaded_bytes | Bytes copied from the host pool to layer buffers.
    saved_bytes | saved_bytes | Bytes copied from layer buffers to the host pool.
    prefetched_loads | prefetched_layer_loads | Layer loads started ahead of their layer.
    late_loads | late_layer_loads | Layer loads started when the layer needed them.
    load_wait_s | load_wait_seconds | Seconds that layers waited for their load.
    save_wait_s | save_wait_seconds | Seconds that steps waited for their saves.
    broadcasts | broadcasts | KVPP: layers that their owner gave to the other ranks, once a forward.
    broadcast_bytes | broadcast_bytes | KVPP: bytes of these, counted once however many ranks took them.
    broadcast_s | broadcast_seconds | KVPP: seconds from the start of a layer's load until every rank had it.
    broadcast_wait_s | broadcast_peer_wait_seconds | KVPP: seconds of these spent waiting for other ranks.
    fetched_blocks | store_fetched_blocks | Blocks filled from the store.
    failed_blocks | store_failed_blocks | Blocks the store lost; they were recomputed.
    fetched_bytes | store_fetched_bytes | Bytes read from the store.
    put_blocks | store_put_blocks | Blocks published in the store.
    put_known_blocks | store_put_known_blocks | Blocks offered that the store had already.
    put_refused_blocks | store_put_refused_blocks | Blocks the store had no room for.
    put_bytes | store_put_bytes | Bytes written to the store.
    selected_rows | selected_rows | Rows that decode tokens selected, once a share group.
    hit_rows | hit_rows | Selected rows for which no host byte moved.
    missed_rows | missed_rows | Selected rows fetched from the host pool.
    placed_rows | placed_rows | Rows put into hot slots as they were produced; they count as hits.
    evicted_rows | evicted_rows | Hot rows that made room for others.
    invalidated_rows | invalidated_rows | Hot rows given up because their host row was written again.
    miss_bytes | miss_bytes | Bytes copied from the host pool to hot rows.
    resolve_s | resolve_seconds | Seconds spent finding which selected rows are resident.
    row_copy_s | row_copy_seconds | Seconds that layers spent copying missed rows.
    written_rows | host_written_rows | New rows written to the host pool, once a layer.
    written_bytes | host_written_bytes | Bytes of new rows written to the host pool.
    write_s | host_write_seconds | Seconds that layers spent writing new rows to the host pool.
    store_wait_s | store_wait_seconds | Seconds that layers waited for rows from the store, with sparse \
        decode offload.
    prompt_loaded_bytes | prompt_window_loaded_bytes | Bytes of context copied into the prompt window.
    prompt_wait_s | prompt_window_wait_seconds | Seconds that layers waited for pieces of context.
    own_host_pool_bytes | host_pool_bytes | Size of the host pools, each counted by the rank that made it. \
        | gauge
""")
METRICS = (*OWN_METRICS, *REMOTE_METRICS)


class KVStrataStats(KVConnectorStats):
    """One interval's counts, additive over ranks and time."""

    def reset(self) -> None:
        """Start a new interval."""
        self.data.clear()

    def aggregate(self, other: KVConnectorStats) -> KVStrataStats:
        """Add another rank's or interval's counts."""
        return KVStrataStats(data=added(self.data, other.data))

    def reduce(self) -> dict[str, int | float]:
        """Return what the log line shows: every count that is not zero."""
        return {key: round(value, 4) for key, value in self.data.items() if value}

    def is_empty(self) -> bool:
        """Whether nothing moved in the interval."""
        return not any(self.data.values())


class KVStrataPromMetrics(KVConnectorPromMetrics):
    """The series of :data:`METRICS` on vLLM's ``/metrics``, one series an engine."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[type[PromMetric], type[PromMetricT]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._series = {}
        for metric in METRICS:
            kind = self._gauge_cls if metric.is_gauge else self._counter_cls
            series = kind(name=metric.name, documentation=metric.doc, labelnames=labelnames)
            for engine, labelvalues in per_engine_labelvalues.items():
                self._series[engine, metric.key] = series.labels(*labelvalues)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add one report's counts."""
        for metric in METRICS:
            value = transfer_stats_data.get(metric.key, 0)
            if value:
                self._series[engine_idx, metric.key].inc(value)
