"""The proxy's metrics, in a registry of its own."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvstrata.proxy.backends import Pool
from kvstrata.proxy.failures import Failure
from kvstrata.proxy.metaserver import Metaserver

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class ProxyMetrics:
    """Every series begins with `kvstrata_proxy_`; see docs/serving_pd.md."""

    def __init__(self, pool: Pool, metaserver: Metaserver) -> None:
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "kvstrata_proxy_requests", "Requests by outcome.", ["path", "outcome"], registry=self._registry
        )
        self._retries = Counter(
            "kvstrata_proxy_failed_attempts",
            "Attempts that failed before anything was streamed.",
            ["role", "reason"],
            registry=self._registry,
        )
        self._prompts = Counter(
            "kvstrata_proxy_prompts",
            "Prompts by where they were computed: prefill, or decode alone.",
            ["computed_by"],
            registry=self._registry,
        )
        self._advert_wait = Histogram(
            "kvstrata_proxy_advert_wait_seconds",
            "From the decode request to its advert.",
            buckets=_SECONDS,
            registry=self._registry,
        )
        self._first_token = Histogram(
            "kvstrata_proxy_time_to_first_token_seconds",
            "From a request's arrival to the first streamed event, or the whole answer.",
            ["path", "is_stream"],
            buckets=_SECONDS,
            registry=self._registry,
        )
        self._registry.register(_Live(pool, metaserver))

    def request_ended(self, path: str, outcome: str) -> None:
        """Count a request: ok, refused (4xx), failed (5xx), cut (after it began), disconnected."""
        self._requests.labels(path=path, outcome=outcome).inc()

    def attempt_failed(self, failure: Failure) -> None:
        """Count an attempt that failed."""
        self._retries.labels(role=failure.role.value, reason=failure.kind.value).inc()

    def prompt_answered(self, *, by_prefill: bool) -> None:
        """Count a prompt whose answer has begun; `by_prefill`: an advert was answered for it."""
        self._prompts.labels(computed_by="prefill" if by_prefill else "decode").inc()

    def advert_came(self, seconds: float) -> None:
        """Observe how long decode took to ask for a prompt's KV."""
        self._advert_wait.observe(seconds)

    def first_token(self, path: str, *, is_stream: bool, seconds: float) -> None:
        """Observe the time to first token."""
        self._first_token.labels(path=path, is_stream=str(is_stream).lower()).observe(seconds)

    def render(self) -> bytes:
        """Return Prometheus' text format."""
        return generate_latest(self._registry)


class _Live(Collector):
    """Series that are read off the pool and the metaserver when they are asked for."""

    def __init__(self, pool: Pool, metaserver: Metaserver) -> None:
        self._pool, self._metaserver = pool, metaserver

    def collect(self) -> Iterator[Metric]:
        labels = ["role", "backend"]
        is_in = GaugeMetricFamily(
            "kvstrata_proxy_backend_in", "1 if the engine gets requests.", labels=labels
        )
        requests = GaugeMetricFamily(
            "kvstrata_proxy_in_flight_requests", "Requests there now.", labels=labels
        )
        tokens = GaugeMetricFamily(
            "kvstrata_proxy_in_flight_prompt_tokens", "Prompt tokens of those, roughly.", labels=labels
        )
        for backend in self._pool.statistics():
            values = [backend.role.value, backend.url]
            is_in.add_metric(values, float(backend.is_in))
            requests.add_metric(values, backend.requests)
            tokens.add_metric(values, backend.tokens)
        yield from (is_in, requests, tokens)
        adverts = CounterMetricFamily("kvstrata_proxy_adverts", "Adverts by answer.", labels=["answer"])
        for outcome, count in sorted(self._metaserver.outcomes.items()):
            adverts.add_metric([outcome], count)
        yield adverts
        yield GaugeMetricFamily(
            "kvstrata_proxy_transfers_open",
            "Prompts whose KV may be asked for.",
            value=self._metaserver.open(),
        )
