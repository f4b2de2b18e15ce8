"""What a metric of kvstrata's is, and how a table of them is read."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Metric:
    """One series: its key in a report, its name on ``/metrics`` and what it means.

    A gauge is reported as everything else is, by what was added since the last report.
    """

    key: str
    series: str
    doc: str
    is_gauge: bool = False

    @property
    def name(self) -> str:
        """Prometheus name; vLLM takes series that begin like its own off the registry with an engine."""
        return f"vllm:kvstrata_{self.series}"


def metric_table(text: str) -> tuple[Metric, ...]:
    """Return the metrics of a table, one a line: key, series and meaning, and `gauge` where it is one."""
    metrics = []
    for line in text.strip().splitlines():
        key, series, doc, *kind = (" ".join(cell.split()) for cell in line.split("|"))
        assert kind in ([], ["gauge"]), line
        metrics.append(Metric(key=key, series=series, doc=doc, is_gauge=bool(kind)))
    return tuple(metrics)
