"""vLLM's API server with kvstrata's connector: exact answers, metrics, log line, a clean end."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from checks import NEW_TOKENS, ModelOf, TransformersTokens
from engines import BLOCK_SIZE, ROOMY_BYTES, engine_arguments, layerwise, shared_memory

from kvstrata.store.local import LocalStore

pytestmark = pytest.mark.whole_machine

START_DEADLINE_S = 240
END_DEADLINE_S = 60
NONZERO = ("loaded_bytes", "saved_bytes", "store_put_blocks", "store_put_bytes", "store_fetched_blocks")


@dataclass(frozen=True, kw_only=True)
class Server:
    url: str
    log: Path
    process: subprocess.Popen[bytes]

    def get(self, path: str) -> str:
        with urllib.request.urlopen(self.url + path, timeout=30) as response:
            return str(response.read().decode())

    def complete(self, model: str, prompt: tuple[int, ...]) -> list[int]:
        body = {
            "model": model,
            "prompt": list(prompt),
            "max_tokens": NEW_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        request = urllib.request.Request(
            self.url + "/v1/completions",
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=120) as response:
            return list(json.load(response)["choices"][0]["token_ids"])


def wait_until(true: Any, server: subprocess.Popen[bytes], log: Path, deadline_s: float, what: str) -> None:
    ends = time.monotonic() + deadline_s
    while not true():
        assert server.poll() is None, f"{what}: the server ended\n{log.read_text()[-6000:]}"
        assert time.monotonic() < ends, f"{what}: not within {deadline_s} s\n{log.read_text()[-6000:]}"
        time.sleep(0.2)  # polls a process that cannot call back


def healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(url + "/health", timeout=5) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False


@contextmanager
def serving(arguments: list[str], log: Path) -> Iterator[Server]:
    """A server on a free port of this machine; killed with its children if it is still there at the end."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1"]
    environment = {
        **os.environ,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "VLLM_LOGGING_LEVEL": "INFO",
        "VLLM_LOG_STATS_INTERVAL": "1",
    }
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, "--port", str(port), *arguments],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
    url = f"http://127.0.0.1:{port}"
    try:
        wait_until(lambda: healthy(url), process, log, START_DEADLINE_S, "start")
        yield Server(url=url, log=log, process=process)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(END_DEADLINE_S)


@pytest.mark.features("layerwise", "store", "chunked")
def test_a_server_answers_counts_and_ends(
    tmp_path: Path, model_of: ModelOf, transformers_tokens: TransformersTokens
) -> None:
    model = model_of("dsa")
    store = layerwise(shared=2, backend="local", store_path=str(tmp_path / "store"))["kv_transfer_config"]
    arguments = [
        *("--model", str(model.path), "--served-model-name", model.name),
        *("--tokenizer", str(engine_arguments(model)["tokenizer"])),
        *("--dtype", "float32", "--enforce-eager", "--block-size", str(BLOCK_SIZE)),
        *("--max-model-len", str(model.max_model_len), "--max-num-seqs", "8"),
        *("--max-num-batched-tokens", "48", "--kv-cache-memory-bytes", str(ROOMY_BYTES)),
        *("--no-enable-prefix-caching", "--kv-transfer-config", json.dumps(store)),
    ]
    memory = shared_memory()
    with serving(arguments, tmp_path / "server.log") as server:
        family = [psutil.Process(server.process.pid)]
        family += family[0].children(recursive=True)
        for _ in range(2):
            answers = [server.complete(model.name, prompt) for prompt in model.prompts]
            assert answers == transformers_tokens("dsa")
        wait_until(
            lambda: "KV Transfer metrics" in server.log.read_text(),
            server.process,
            server.log,
            END_DEADLINE_S,
            "log line",
        )
        metrics = server.get("/metrics")
        for name in NONZERO:
            found = re.search(rf"^vllm:kvstrata_{name}_total\{{.*\}} (\S+)$", metrics, re.MULTILINE)
            assert found is not None, name
            assert float(found.group(1)) > 0, name
        # Before its end: vLLM may report the engine it kills there as dead.
        assert "Traceback" not in server.log.read_text()
        server.process.send_signal(signal.SIGTERM)
        status = server.process.wait(END_DEADLINE_S)
        assert status in (0, -signal.SIGTERM), server.log.read_text()[-6000:]
        _, alive = psutil.wait_procs(family, timeout=END_DEADLINE_S)
    assert not alive
    assert shared_memory() <= memory
    # What was stored stays, whole and unleased.
    stored = LocalStore.open(tmp_path / "store", size_bytes=int(0.2 * 2**30))
    stored.check_integrity()
    statistics = stored.statistics()
    stored.close()
    assert statistics.objects > 0
    assert statistics.leases == statistics.reservations == 0
