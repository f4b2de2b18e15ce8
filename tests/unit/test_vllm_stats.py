"""Fault 29: what the metrics carry is what the components count, and all of it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from kvstrata.move.layerwise import LayerwiseStatistics
from kvstrata.move.owner_turns import OwnerStatistics
from kvstrata.move.sparse import SparseStatistics
from kvstrata.move.store_io import StoreIOStatistics
from kvstrata.vllm.remote_stats import REMOTE_METRICS
from kvstrata.vllm.stats import METRICS, KVStrataPromMetrics, KVStrataStats

NOT_EXPORTED = {"steps"}  # vLLM counts its own steps


def test_every_count_of_a_worker_is_a_metric():
    kinds = (LayerwiseStatistics, OwnerStatistics, StoreIOStatistics, SparseStatistics)
    counted = {field.name for kind in kinds for field in dataclasses.fields(kind)}
    counted |= {metric.key for metric in REMOTE_METRICS}  # see test_vllm_remote_stats
    assert counted - NOT_EXPORTED | {"own_host_pool_bytes"} == {metric.key for metric in METRICS}
    assert len({metric.name for metric in METRICS}) == len(METRICS)
    assert all(metric.doc.endswith(".") for metric in METRICS)


def test_the_metrics_page_lists_them_in_order_with_their_unit():
    page = (Path(__file__).parents[2] / "docs/metrics.md").read_text()
    rows = [line.split("|")[1:-1] for line in page.splitlines() if line.startswith("| `vllm:kvstrata_")]
    assert [row[0].strip(" `") for row in rows] == [metric.name for metric in METRICS]
    for name, unit, meaning in rows:
        assert name.strip(" `").endswith(unit.strip())
        assert meaning.strip()


def test_reports_add_up_over_ranks_and_intervals():
    one, two = (
        KVStrataStats(data={"loaded_bytes": 5}),
        KVStrataStats(data={"loaded_bytes": 7, "put_blocks": 1}),
    )
    total = one.aggregate(two)
    assert total.data == {"loaded_bytes": 12, "put_blocks": 1}
    assert (one.data, two.data) == ({"loaded_bytes": 5}, {"loaded_bytes": 7, "put_blocks": 1})
    assert not total.is_empty()
    total.reset()
    assert total.is_empty()
    assert KVStrataStats(data={"loaded_bytes": 0}).is_empty()


def test_the_log_line_leaves_zeros_out():
    assert KVStrataStats(data={"put_blocks": 0, "load_wait_s": 0.123456}).reduce() == {"load_wait_s": 0.1235}


def test_prometheus_counters_add_reports_for_each_engine():
    registry = CollectorRegistry()

    class Here(Counter):
        def __init__(self, *args: object, **kwargs: object) -> None:
            super().__init__(*args, registry=registry, **kwargs)

    class GaugeHere(Gauge):
        def __init__(self, *args: object, **kwargs: object) -> None:
            super().__init__(*args, registry=registry, **kwargs)

    metrics = KVStrataPromMetrics(
        SimpleNamespace(kv_transfer_config=None),
        {Gauge: GaugeHere, Counter: Here, Histogram: Histogram},
        ["model_name", "engine"],
        {0: ["m", "0"], 1: ["m", "1"]},
    )
    metrics.observe({"loaded_bytes": 5, "unknown": 3}, engine_idx=0)
    metrics.observe({"loaded_bytes": 2, "save_wait_s": 0.5}, engine_idx=0)
    metrics.observe({"loaded_bytes": 1}, engine_idx=1)

    def read(name: str, engine: str) -> float | None:
        return registry.get_sample_value(f"{name}_total", {"model_name": "m", "engine": engine})

    names = {metric.key: metric.name for metric in METRICS}
    assert read(names["loaded_bytes"], "0") == 7
    assert read(names["loaded_bytes"], "1") == 1
    assert read(names["save_wait_s"], "0") == 0.5
    counters = [metric.name for metric in METRICS if not metric.is_gauge]
    assert all(read(name, "1") is not None for name in counters), "a series from the start"
    metrics.observe({"own_host_pool_bytes": 64}, engine_idx=1)
    (gauge,) = (metric.name for metric in METRICS if metric.key == "own_host_pool_bytes")
    assert registry.get_sample_value(gauge, {"model_name": "m", "engine": "1"}) == 64
