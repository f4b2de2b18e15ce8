"""What `kvstrata serve-pd` starts on this machine, for the demonstration and the benchmark to ask.

One prefill and one decode engine behind vLLM's own API servers, and kvstrata's proxy, each in a process of
its own; beside them a second proxy, whose way to prefill goes through a relay that exchanges the prompt.
"""

from __future__ import annotations

import json
import re
import secrets
import shlex
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx

from kvstrata.demo.pd import PdAnswer, PdCounters
from kvstrata.demo.pd_processes import (
    ServerProcess,
    processes_of,
    proxy_in_front_of,
    relay_of_other_prompt,
    serving,
)
from kvstrata.errors import DeadlineExceeded, KVStrataError
from kvstrata.serve_pd.children import health
from kvstrata.serve_pd.machine import cpus_to_bind, find_ports
from kvstrata.serve_pd.options import EngineOptions, ServeOptions
from kvstrata.serve_pd.plan import Launch, plan_launches

MODEL = "demo"
LEASE_S = 5.0
WAIT_S = 120.0  # then decode computes a prompt itself, which the demonstration calls a failure
START_DEADLINE_S = 300.0
ANSWER_DEADLINE_S = 300.0
POLL_S = 0.1
# What engines in this process may have been told, servers are not.
ENVIRONMENT = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_LOGGING_LEVEL": "INFO"}


@dataclass(frozen=True, kw_only=True)
class PdEngines:
    """What the two engines are; both hold `device_kv_budget_bytes`."""

    model: Path
    device_kv_budget_bytes: int
    max_model_len: int
    max_batched_tokens: int
    max_num_seqs: int
    num_shared_buffers: int
    prefetch_layers: int
    topk_buffer_size: int
    log_directory: Path

    def launch(self) -> ServeOptions:
        """Return what `kvstrata serve-pd` would be told: layerwise prefill, sparse decode."""
        shared = {"backend": "none", "remote_lease_s": LEASE_S, "remote_wait_s": WAIT_S}
        return ServeOptions(
            model=str(self.model),
            port=0,
            num_shared_buffers=self.num_shared_buffers,
            prefill=EngineOptions(extra_config={**shared, "layerwise_prefetch_layers": self.prefetch_layers}),
            use_sparse=True,
            topk_buffer_size=self.topk_buffer_size,
            decode=EngineOptions(extra_config=shared),
            arguments=shlex.join(
                (
                    *("--served-model-name", MODEL, "--tokenizer-mode", "hf"),
                    *("--dtype", "float32", "--enforce-eager", "--no-enable-prefix-caching"),
                    *("--block-size", "16", "--kv-cache-memory-bytes", str(self.device_kv_budget_bytes)),
                    *("--max-model-len", str(self.max_model_len)),
                    *("--max-num-seqs", str(self.max_num_seqs)),
                    *("--max-num-batched-tokens", str(self.max_batched_tokens)),
                )
            ),
            log_directory=self.log_directory,
        )


class PdServers:
    """A running deployment. Made by `open_pd_servers`; unusable after its `with` block.

    `other` is the prompt that the relay hands to prefill.
    """

    def __init__(self, *, proxy: str, other_proxy: str, prefill: str, decode: str, other: list[int]) -> None:
        self.proxy, self.prefill, self.decode = proxy, prefill, decode
        self._other_proxy, self._other = other_proxy, other
        self._client = httpx.Client(
            timeout=ANSWER_DEADLINE_S, trust_env=False
        )  # all of it is on this machine

    def close(self) -> None:
        """Let go of the connections."""
        self._client.close()

    def answer(self, prompts: Sequence[tuple[int, ...]], *, max_new_tokens: int) -> list[PdAnswer]:
        """Send all prompts to the proxy at once. Raises KVStrataError where one is not answered."""
        with ThreadPoolExecutor(max(1, len(prompts))) as pool:
            return list(pool.map(lambda prompt: self._answer(self.proxy, prompt, max_new_tokens), prompts))

    def answer_from_other(
        self, prompt: tuple[int, ...], other: tuple[int, ...], *, max_new_tokens: int
    ) -> PdAnswer:
        """Send `prompt` to decode and `other` to prefill."""
        self._other[:] = other
        return self._answer(self._other_proxy, prompt, max_new_tokens)

    def seconds_to_first_token(self, url: str, prompt: Sequence[int]) -> float:
        """Time one streamed request for one token, from its submission to that token."""
        body = {**_body(prompt, 1), "stream": True, "ignore_eos": True}
        began_s = time.perf_counter()
        with (
            _failures_of(url),
            self._client.stream("POST", url + "/v1/completions", json=body) as response,
        ):
            if response.status_code != httpx.codes.OK:
                raise KVStrataError(f"{url}: {response.read().decode(errors='replace')[:500]}")
            seconds = None
            for line in response.iter_lines():  # to the end, so that the next request finds engines idle
                if seconds is None and line.startswith("data: {"):
                    event = json.loads(line.removeprefix("data: "))
                    if event.get("choices"):
                        seconds = time.perf_counter() - began_s
        if seconds is None:
            raise KVStrataError(f"{url}: the stream ended without a token")
        return seconds

    def counters(self) -> PdCounters:
        """Return the counters now."""
        prefill, decode = self._metrics(self.prefill), self._metrics(self.decode)
        return PdCounters(
            pulls_done=decode["remote_done_pulls"],
            sends_done=prefill["remote_done_sends"],
            parts_pulled=decode["remote_pulled_parts"],
            bytes_pulled=decode["remote_pulled_bytes"],
            pulls_open=decode["remote_open_pulls"],
            leases_open=prefill["remote_open_sends"],
        )

    def settled_counters(self) -> PdCounters:
        """Return the counters once nothing is open any more and both sides have counted it, or after a while.

        An engine counts on /metrics with its next step, and a while is twice the lease.
        """
        ends_s = time.monotonic() + 2 * LEASE_S
        while True:
            counters = self.counters()
            is_settled = counters.sends_done >= counters.pulls_done and not (
                counters.leases_open or counters.pulls_open
            )
            if is_settled or time.monotonic() > ends_s:
                return counters
            time.sleep(POLL_S)  # metrics are asked for; nobody calls back

    def _answer(self, url: str, prompt: Sequence[int], max_new_tokens: int) -> PdAnswer:
        with _failures_of(url):
            response = self._client.post(url + "/v1/completions", json=_body(prompt, max_new_tokens))
        if response.status_code != httpx.codes.OK:
            raise KVStrataError(f"{url} answered {response.status_code}: {response.text[:500]}")
        (choice,) = response.json()["choices"]
        return PdAnswer(token_ids=tuple(choice["token_ids"]), text=choice["text"])

    def _metrics(self, url: str) -> Mapping[str, int]:
        with _failures_of(url):
            return metrics_of(self._client.get(url + "/metrics").text)


@contextmanager
def open_pd_servers(engines: PdEngines) -> Iterator[PdServers]:
    """Start what `kvstrata serve-pd` starts, and the control's proxy; stop it all at the end of the block.

    Logs are written anew in `engines.log_directory`. Raises KVStrataError if one of them does not start.
    """
    options, secret = engines.launch(), secrets.token_hex(16)
    launches = [
        replace(launch, environment={**launch.environment, **ENVIRONMENT})
        for launch in plan_launches(
            options, find_ports(options), cpus=cpus_to_bind(), secret=secret, python=sys.executable
        )
    ]
    prefill, decode, proxy = launches
    other: list[int] = []
    with ExitStack() as running:
        relay = running.enter_context(serving(relay_of_other_prompt(prefill.url, other)))
        other_proxy = proxy_in_front_of(proxy, relay, decode.url)
        processes = running.enter_context(processes_of((*launches, other_proxy)))
        _wait_until_ready(processes, (proxy, other_proxy))
        deployment = PdServers(
            proxy=proxy.url,
            other_proxy=other_proxy.url,
            prefill=prefill.url,
            decode=decode.url,
            other=other,
        )
        running.callback(deployment.close)
        yield deployment


def _wait_until_ready(processes: Sequence[ServerProcess], proxies: Sequence[Launch]) -> None:
    """Wait until the proxies have found their engines healthy."""
    ends_s = time.monotonic() + START_DEADLINE_S
    while not all(health(proxy.url) == httpx.codes.OK for proxy in proxies):
        for process in processes:
            process.check()
        if time.monotonic() > ends_s:
            raise DeadlineExceeded("start of prefill engine, decode engine and proxies", START_DEADLINE_S)
        time.sleep(POLL_S)  # processes that cannot call back


@contextmanager
def _failures_of(url: str) -> Iterator[None]:
    """Turn an exchange that breaks or takes too long into an error of ours."""
    try:
        yield
    except httpx.HTTPError as error:
        raise KVStrataError(f"{url}: no answer, {type(error).__name__}: {error}") from error


def _body(prompt: Sequence[int], max_new_tokens: int) -> dict[str, Any]:
    return {
        "model": MODEL,
        "prompt": list(prompt),
        "max_tokens": max_new_tokens,
        "temperature": 0,
        "return_token_ids": True,
    }


def metrics_of(page: str) -> Mapping[str, int]:
    """Return the counters of remote read in a page of /metrics, all series of a name added."""
    found: dict[str, float] = {}
    for name, value in re.findall(
        r"^vllm:kvstrata_(remote_\w+?)(?:_total)?\{[^}]*\} (\S+)$", page, re.MULTILINE
    ):
        found[name] = found.get(name, 0.0) + float(value)
    return {name: int(value) for name, value in found.items()}
