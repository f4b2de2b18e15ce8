"""What a newcomer runs, as it is written: the demonstration, the first example and the README's server."""

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
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DEADLINE_S = 400


def run(*command: str | Path) -> str:
    result = subprocess.run(
        [str(word) for word in command],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-4000:]
    return result.stdout


@pytest.mark.slow
def test_the_demonstration_shows_what_it_promises(tmp_path: Path):
    result = tmp_path / "demo.json"
    shown = run(sys.executable, "-m", "kvstrata", "demo", "--json", result, "--log", tmp_path / "demo.log")
    layerwise = json.loads(result.read_text())["layerwise"]
    prompt_tokens = layerwise["prompt_tokens"]
    assert layerwise["plain"]["max_tokens"] < prompt_tokens < layerwise["kvstrata"]["max_tokens"]
    assert layerwise["plain"]["device_kv_budget_bytes"] == layerwise["kvstrata"]["device_kv_budget_bytes"]
    assert "maximum context length" in layerwise["plain"]["refusal"]
    assert layerwise["exact"] is True
    assert layerwise["kvstrata"]["token_ids"] == layerwise["plain_enough_memory"]["token_ids"]
    assert layerwise["kvstrata"]["answer"] == layerwise["expected_answer"] == "The pass key is 48213."
    assert layerwise["negative_control_diverges"] is True
    assert layerwise["negative_control"]["loaded_bytes"] >= 0
    assert layerwise["capacity_ratio"] >= 0.98 * layerwise["capacity_ratio_formula"]
    assert layerwise["capacity_ratio_formula"] == 2.0
    assert layerwise["prefill_time_ratio"] > 0
    assert "The pass key is 48213." in " ".join(shown.split())


@pytest.mark.slow
def test_the_first_example_answers():
    assert "The pass key is 48213." in run(sys.executable, "examples/long_prompt.py")


def bash_block(containing: str) -> str:
    (block,) = [
        b for b in re.findall(r"```bash\n(.*?)```", (ROOT / "README.md").read_text(), re.S) if containing in b
    ]
    return str(block)


@contextmanager
def readme_server(port: int, directory: Path) -> Iterator[None]:
    """Start the README's server, on another port and with a store of its own."""
    words = shlex.split(bash_block("api_server").replace("\\\n", " "))
    assert words[0] == ".venv/bin/python"
    words[0] = sys.executable
    words[words.index("8000")] = str(port)
    transfer = words.index("--kv-transfer-config") + 1
    config = json.loads(words[transfer])
    config["kv_connector_extra_config"] |= {"store_path": str(directory / "store"), "store_size_GB": 0.2}
    words[transfer] = json.dumps(config)
    log = directory / "server.log"
    environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    with log.open("w") as output:
        server = subprocess.Popen(
            words, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
    try:
        ends = time.monotonic() + DEADLINE_S
        while not answers(f"http://127.0.0.1:{port}/health"):
            assert server.poll() is None, log.read_text()[-6000:]
            assert time.monotonic() < ends, f"not healthy within {DEADLINE_S} s\n{log.read_text()[-6000:]}"
            time.sleep(0.5)  # polling a process of its own, not waiting for an event of ours
        yield
    finally:
        server.send_signal(signal.SIGTERM)
        try:
            server.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait(60)


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.mark.slow
def test_the_readmes_server_answers_the_readmes_question(tmp_path: Path):
    port = free_port()
    words = shlex.split(bash_block("curl").replace("\\\n", " "))
    assert words[2] == "http://127.0.0.1:8000/v1/completions"
    request = urllib.request.Request(
        words[2].replace("8000", str(port)),
        data=words[words.index("-d") + 1].encode(),
        headers={"Content-Type": "application/json"},
    )
    with readme_server(port, tmp_path):
        with urllib.request.urlopen(request, timeout=DEADLINE_S) as response:
            answer = json.load(response)["choices"][0]["text"]
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as response:
            metrics = response.read().decode()
    assert "48213" in answer
    documented = re.findall(
        r"^\| `(vllm:kvstrata_\w+)`", (ROOT / "docs/metrics.md").read_text(), re.MULTILINE
    )
    assert documented
    assert [name for name in documented if f"{name}_total" not in metrics] == []
    saved = re.search(r"^vllm:kvstrata_saved_bytes_total\{.*\} ([\d.e+]+)$", metrics, re.MULTILINE)
    assert saved is not None
    assert float(saved.group(1)) > 0
