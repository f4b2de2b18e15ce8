"""kvstrata's figures on vLLM's log line and on ``/metrics``.

Workers report differences since their last report; vLLM adds them up over ranks and intervals.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
    PromMetric,
    PromMetricT,
)


@dataclass(frozen=True, kw_only=True)
class Metric:
    """One counter: its key in a report, its series on ``/metrics`` and what it means."""

    key: str
    series: str
    doc: str

    @property
    def name(self) -> str:
        """Prometheus name; vLLM takes series that begin like its own off the registry with an engine."""
        return f"vllm:kvstrata_{self.series}"


METRICS = (
    Metric(
        key="loaded_bytes",
        series="loaded_bytes",
        doc="Bytes copied from the host pool to layer buffers.",
    ),
    Metric(
        key="saved_bytes",
        series="saved_bytes",
        doc="Bytes copied from layer buffers to the host pool.",
    ),
    Metric(
        key="prefetched_loads",
        series="prefetched_layer_loads",
        doc="Layer loads started ahead of their layer.",
    ),
    Metric(
        key="late_loads",
        series="late_layer_loads",
        doc="Layer loads started when the layer needed them.",
    ),
    Metric(
        key="load_wait_s",
        series="load_wait_seconds",
        doc="Seconds that layers waited for their load.",
    ),
    Metric(
        key="save_wait_s",
        series="save_wait_seconds",
        doc="Seconds that steps waited for their saves.",
    ),
    Metric(key="fetched_blocks", series="store_fetched_blocks", doc="Blocks filled from the store."),
    Metric(
        key="failed_blocks",
        series="store_failed_blocks",
        doc="Blocks the store lost; they were recomputed.",
    ),
    Metric(key="fetched_bytes", series="store_fetched_bytes", doc="Bytes read from the store."),
    Metric(key="put_blocks", series="store_put_blocks", doc="Blocks published in the store."),
    Metric(
        key="put_known_blocks",
        series="store_put_known_blocks",
        doc="Blocks offered that the store had already.",
    ),
    Metric(
        key="put_refused_blocks",
        series="store_put_refused_blocks",
        doc="Blocks the store had no room for.",
    ),
    Metric(key="put_bytes", series="store_put_bytes", doc="Bytes written to the store."),
)


class KVStrataStats(KVConnectorStats):
    """One interval's counts, additive over ranks and time."""

    def reset(self) -> None:
        """Start a new interval."""
        self.data.clear()

    def aggregate(self, other: KVConnectorStats) -> KVStrataStats:
        """Add another rank's or interval's counts."""
        keys = self.data.keys() | other.data.keys()
        return KVStrataStats(
            data={key: self.data.get(key, 0) + other.data.get(key, 0) for key in sorted(keys)}
        )

    def reduce(self) -> dict[str, int | float]:
        """Return what the log line shows: every count that is not zero."""
        return {key: round(value, 4) for key, value in self.data.items() if value}

    def is_empty(self) -> bool:
        """Whether nothing moved in the interval."""
        return not any(self.data.values())


class KVStrataPromMetrics(KVConnectorPromMetrics):
    """The counters of :data:`METRICS` on vLLM's ``/metrics``, one series an engine."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[type[PromMetric], type[PromMetricT]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters = {
            (engine, metric.key): counter.labels(*labelvalues)
            for metric in METRICS
            for counter in (
                self._counter_cls(name=metric.name, documentation=metric.doc, labelnames=labelnames),
            )
            for engine, labelvalues in per_engine_labelvalues.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add one report's counts."""
        for metric in METRICS:
            value = transfer_stats_data.get(metric.key, 0)
            if value:
                self._counters[engine_idx, metric.key].inc(value)
