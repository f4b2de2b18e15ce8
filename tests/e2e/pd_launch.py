"""A real `kvstrata serve-pd`, and plain vLLM's server beside it to say what the answers are."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
from models import EXAMPLE_MODELS, ledger

MODEL = "tiny"
START_DEADLINE_S = 240
WAIT_S = 60
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
ENGINE_ARGUMENTS = (
    *("--served-model-name", MODEL, "--tokenizer-mode", "hf", "--dtype", "float32", "--enforce-eager"),
    *("--block-size", "16", "--max-model-len", "2048", "--max-num-seqs", "8"),
    *("--kv-cache-memory-bytes", str(64 << 20)),
)
CHUNK = 48  # prefill's tokens in a step: a long prompt takes dozens, time enough to stop it in between


def until(true: Callable[[], object], what: str, deadline_s: float = WAIT_S) -> None:
    ends = time.monotonic() + deadline_s
    while not true():
        assert time.monotonic() < ends, f"{what}: not within {deadline_s} s"
        time.sleep(0.02)  # polls other processes, which cannot call back


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def is_gone(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


def shared_memory_of(family: list[psutil.Process]) -> set[str]:
    """Return the files in /dev/shm that these processes have mapped or open."""
    paths: set[str] = set()
    for process in family:
        with suppress(psutil.Error):
            paths.update(area.path for area in process.memory_maps())
            paths.update(file.path for file in process.open_files())
    return {path for path in paths if path.startswith("/dev/shm/") and not path.endswith("(deleted)")}


def essence(answer: dict[str, Any]) -> dict[str, Any]:
    """What two servers must agree on."""
    usage = answer["usage"] or {}
    counts = {name: usage.get(name) for name in ("prompt_tokens", "completion_tokens", "total_tokens")}
    choices = [{k: v for k, v in choice.items() if k != "logprobs"} for choice in answer["choices"]]
    return {"object": answer["object"], "model": answer["model"], "choices": choices, "usage": counts}


def prompt(seed: int, tokens: int | None = None) -> list[int]:
    """A prompt that begins like no other: facts, and a question. `tokens` asks for more facts than usual."""
    facts = list(ledger(seed).prompts[0])
    while tokens is not None and len(facts) < tokens:
        seed += 1000
        facts += list(ledger(seed).prompts[0])[2:]
    return facts


def asking(what: Any, max_tokens: int = 16, **more: Any) -> dict[str, Any]:
    """A body whose answer can be compared token by token."""
    return {"prompt": what, "max_tokens": max_tokens, "return_token_ids": True, "ignore_eos": True, **more}


@dataclass(kw_only=True)
class Api:
    """An OpenAI server."""

    url: str
    client: httpx.Client = field(init=False)

    def __post_init__(self) -> None:
        self.client = httpx.Client(base_url=self.url, timeout=120, trust_env=False)

    def post(self, body: dict[str, Any], path: str = COMPLETIONS, **headers: str) -> httpx.Response:
        return self.client.post(path, json={"model": MODEL, "temperature": 0, **body}, headers=headers)

    def answer(self, body: dict[str, Any], path: str = COMPLETIONS) -> dict[str, Any]:
        response = self.post(body, path)
        assert response.status_code == 200, response.text
        return dict(response.json())

    @contextmanager
    def events(self, body: dict[str, Any], path: str = COMPLETIONS) -> Iterator[Iterator[Any]]:
        """Yield the events of a stream as they come, parsed; `[DONE]` is one."""
        full = {"model": MODEL, "temperature": 0, "stream": True, **body}
        with self.client.stream("POST", path, json=full) as response:
            assert response.status_code == 200, response.read()
            lines = (line.removeprefix("data: ") for line in response.iter_lines() if line)
            yield (line if line == "[DONE]" else json.loads(line) for line in lines)

    def is_healthy(self) -> bool:
        try:
            return self.client.get("/health").status_code == 200
        except httpx.HTTPError:
            return False

    def metric(self, name: str, **labels: str) -> float:
        """Return the sum of a series over all labels but those given."""
        total = 0.0
        for line in self.client.get("/metrics").text.splitlines():
            series, _, value = line.rpartition(" ")
            if series.partition("{")[0] == name and all(f'{k}="{v}"' in series for k, v in labels.items()):
                total += float(value)
        return total


class Launch:
    """`kvstrata serve-pd` with an engine of each role, started and not yet ready."""

    def __init__(self, directory: Path, *options: str) -> None:
        self.port = free_port()
        self.api = Api(url=f"http://127.0.0.1:{self.port}")
        self.logs, self.output = directory / "logs", directory / "launch.txt"
        command = [
            *(sys.executable, "-m", "kvstrata", "serve-pd", "--model", str(EXAMPLE_MODELS / "tiny-dsv32")),
            *("--port", str(self.port), "--log-dir", str(self.logs), *options),
        ]
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(
                command,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_LOGGING_LEVEL": "INFO"},
            )

    def said(self) -> str:
        return self.output.read_text()

    def wait_ready(self) -> None:
        """Wait until engines and proxy are, again if need be, all in."""
        until(lambda: self.process.poll() is not None or self.api.is_healthy(), "start", START_DEADLINE_S)
        assert self.process.poll() is None, self.said()

    def engine(self, role: str) -> Api:
        (found,) = re.findall(rf"^{role}-0: starting (\S+),", self.said(), re.MULTILINE)[:1]
        return Api(url=found)

    def family(self, name: str) -> list[psutil.Process]:
        """Return the present processes of one of the launcher's children, its own first."""
        url = self.api.url if name == "proxy" else self.engine(name).url
        port = url.rpartition(":")[2]
        (first,) = (child for child in psutil.Process(self.process.pid).children() if port in child.cmdline())
        return [first, *first.children(recursive=True)]

    def everybody(self) -> list[psutil.Process]:
        launcher = psutil.Process(self.process.pid)
        return [launcher, *launcher.children(recursive=True)]

    def in_flight(self, role: str) -> int:
        """Return the proxy's requests at one engine."""
        backends = self.api.client.get("/health").json()["backends"]
        return sum(backend["requests"] for backend in backends if backend["role"] == role)

    def prompts_by(self, role: str) -> float:
        return self.api.metric("kvstrata_proxy_prompts_total", computed_by=role)

    def wait_at_rest(self) -> None:
        """Wait until neither engine has a request, a hold or a transfer left."""
        engines = [self.engine("prefill"), self.engine("decode")]

        def is_at_rest() -> bool:
            gauges = ("vllm:num_requests_running", "vllm:num_requests_waiting")
            gauges += ("vllm:kvstrata_remote_open_sends", "vllm:kvstrata_remote_open_pulls")
            return sum(engine.metric(gauge) for engine in engines for gauge in gauges) == 0

        until(is_at_rest, "engines at rest")
        assert self.api.metric("kvstrata_proxy_transfers_open") == 0

    def log_ends(self) -> str:
        texts = {log.name: log.read_text()[-3000:] for log in sorted(self.logs.glob("*.log"))}
        return self.said() + "".join(f"\n=== {name}\n{text}" for name, text in texts.items())

    def kill(self) -> None:
        """End what is left, whatever state it is in."""
        if self.process.poll() is None:
            for process in reversed(self.everybody()):
                process.kill()
            self.process.wait(WAIT_S)


@contextmanager
def launched(directory: Path, *options: str) -> Iterator[Launch]:
    """A launch, not ready yet; whatever of it is left is killed at the end."""
    launch = Launch(directory, *options, "--engine-args", shlex.join(ENGINE_ARGUMENTS))
    try:
        yield launch
    finally:
        launch.kill()


@contextmanager
def plain_server(directory: Path) -> Iterator[Api]:
    """Plain vLLM's server of the same model, not ready yet."""
    port = free_port()
    command = (sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1")
    model = ("--model", str(EXAMPLE_MODELS / "tiny-dsv32"), "--port", str(port))
    with (directory / "plain.log").open("wb") as output:
        process = subprocess.Popen(
            [*command, *model, *ENGINE_ARGUMENTS],
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"},
            start_new_session=True,
        )
    try:
        yield Api(url=f"http://127.0.0.1:{port}")
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(WAIT_S)


class Pending:
    """A request in a thread of its own; leaving the block waits for its end."""

    def __init__(self, api: Api, body: dict[str, Any]) -> None:
        self._pool = ThreadPoolExecutor(1)
        self._future = self._pool.submit(Api(url=api.url).post, body)

    def response(self) -> httpx.Response:
        """Return the response; raises what the request raised."""
        return self._future.result(WAIT_S)

    def answer(self) -> dict[str, Any]:
        response = self.response()
        assert response.status_code == 200, response.text
        return dict(response.json())

    def __enter__(self) -> Pending:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()


@contextmanager
def sent(api: Api, body: dict[str, Any]) -> Iterator[None]:
    """A request that nobody waits for: the block's end closes its connection."""
    content = json.dumps({"model": MODEL, "temperature": 0, **body}).encode()
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    host, _, port = api.url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), WAIT_S) as connection:
        connection.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
        yield


def kill(family: list[psutil.Process]) -> None:
    """What `kill -9` does to the first process; the rest of them end, by the launcher, in time."""
    family[0].kill()
    until(lambda: all(map(is_gone, family)), "the end of what was killed")
