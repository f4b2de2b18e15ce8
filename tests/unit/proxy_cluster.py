"""Fake engines, the real proxy in front of them, and a client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
from proxy_fakes import DEADLINE_S, SECRET, Arrivals, FakeEngine, Server, listen, until

from kvstrata.proxy.app import create_app
from kvstrata.proxy.options import METASERVER_PATH, ProxyOptions
from kvstrata.remote.metaserver import MetaserverClient


class Cluster:
    """Fake engines, a real proxy, and a client."""

    def __init__(self, prefill: int, decode: int, **options: Any) -> None:
        self.arrivals = Arrivals()
        self.client_of_adverts = MetaserverClient(SECRET, first_pause_s=0.01, longest_pause_s=0.05)
        shared = {"arrivals": self.arrivals, "adverts": self.client_of_adverts}
        self.prefill = [FakeEngine(**shared) for _ in range(prefill)]
        self.decode = [FakeEngine(**shared) for _ in range(decode)]
        self.servers = {id(engine): Server(engine, listen()) for engine in (*self.prefill, *self.decode)}
        listener = listen()
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        self.app = create_app(
            ProxyOptions(
                **{
                    "prefill": tuple(self.servers[id(engine)].url for engine in self.prefill),
                    "decode": tuple(self.servers[id(engine)].url for engine in self.decode),
                    "secret": SECRET,
                    "metaserver_url": self.url + METASERVER_PATH,
                    "deadline_s": DEADLINE_S,
                    "answer_deadline_s": DEADLINE_S,
                    "health_interval_s": 0.05,
                    "health_deadline_s": DEADLINE_S,
                    "connect_deadline_s": DEADLINE_S,
                    **options,
                }
            )
        )
        self.proxy = Server(self.app, listener)
        self.client = httpx.Client(base_url=self.url, timeout=DEADLINE_S, trust_env=False)

    @property
    def engines(self) -> Any:
        return self.app.state.engines

    def wait_ready(self) -> None:
        until(lambda: all(b.is_in for b in self.engines.pool.backends), "readiness of all engines")

    def url_of(self, engine: FakeEngine) -> str:
        return self.servers[id(engine)].url

    def stop(self, engine: FakeEngine) -> int:
        """End an engine; return its port, so that it can come back there."""
        server = self.servers.pop(id(engine))
        server.stop()
        return server.port

    def start(self, engine: FakeEngine, port: int) -> None:
        self.servers[id(engine)] = Server(engine, listen(port))

    def is_in(self, engine: FakeEngine) -> bool:
        return any(b.is_in and b.url == self.url_of(engine) for b in self.engines.pool.backends)

    def complete(self, prompt: Any = "hello", **body: Any) -> httpx.Response:
        return self.client.post("/v1/completions", json={"model": "fake", "prompt": prompt, **body})

    def events(self, prompt: Any = "hello", **body: Any) -> list[Any]:
        """Stream a completion and return its events' data, parsed."""
        with self.client.stream(
            "POST", "/v1/completions", json={"model": "fake", "prompt": prompt, "stream": True, **body}
        ) as response:
            assert response.status_code == 200, response.read()
            return [parsed(line) for line in response.iter_lines() if line.startswith("data:")]

    def metric(self, name: str, **labels: str) -> float:
        """Return the sum of a series' values with these labels."""
        total = 0.0
        for line in self.client.get("/metrics").text.splitlines():
            series, _, value = line.rpartition(" ")
            if series.partition("{")[0] == name and all(f'{k}="{v}"' in series for k, v in labels.items()):
                total += float(value)
        return total

    def wait_metric(self, value: float, name: str, **labels: str) -> None:
        until(lambda: self.metric(name, **labels) == value, f"{name}{labels} to be {value}")

    def lose(self, engine: FakeEngine) -> None:
        """Let the proxy believe that an engine stopped answering health checks."""
        pool, url = self.engines.pool, self.url_of(engine)
        (backend,) = (backend for backend in pool.backends if backend.url == url)
        assert self.proxy.loop is not None
        self.proxy.loop.call_soon_threadsafe(pool.lose, backend, "a test")

    def check_at_rest(self) -> None:
        """Nothing is left of any request."""
        until(lambda: all(b.requests == 0 for b in self.engines.pool.statistics()), "the end of requests")
        until(lambda: self.engines.metaserver.open() == 0, "the end of transfers")
        self.engines.pool.check_integrity()
        for engine in (*self.prefill, *self.decode):
            until(lambda e=engine: all(request.is_over for request in e.requests), "the end at an engine")

    def close(self) -> None:
        self.client.close()
        servers = [self.proxy, *self.servers.values()]
        for server in servers:
            server.end()  # all at once: each looks up only now and then
        for server in servers:
            server.stop()
        self.client_of_adverts.close()


def parsed(line: str) -> Any:
    data = line.removeprefix("data:").strip()
    return data if data == "[DONE]" else json.loads(data)


def text_of(events: list[Any], index: int = 0) -> str:
    """Return one choice's text out of a stream's events."""
    choices = [choice for event in events[:-1] for choice in event["choices"] if choice["index"] == index]
    return "".join(choice["text"] for choice in choices)


@contextmanager
def cluster(prefill: int = 1, decode: int = 1, *, ready: bool = True, **options: Any) -> Iterator[Cluster]:
    made = Cluster(prefill, decode, **options)
    try:
        if ready:
            made.wait_ready()
        yield made
    finally:
        made.close()
