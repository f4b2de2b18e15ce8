"""What a newcomer runs, as it is written: the demonstration, the first example and the pages' servers."""

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
from typing import Any

import pytest

pytestmark = [pytest.mark.whole_machine, pytest.mark.timeout(1200)]

ROOT = Path(__file__).parents[2]
DEADLINE_S = 1100  # the demonstration takes four minutes on two idle cores


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
    written = json.loads(result.read_text())
    layerwise, sparse = written["layerwise"], written["sparse"]
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
    assert sparse["exact"] is True
    assert sparse["negative_control_diverges"] is True
    assert sparse["capacity_ratio"] >= 0.95 * sparse["capacity_ratio_formula"]
    assert sparse["capacity_ratio_formula"] > 4.5
    assert 0 < sparse["hit_rate"] < 1
    check_prefill_and_decode(written["pd"])
    check_two_ranks(written["kvpp"], prompt_tokens)
    assert layerwise["plain_enough_memory"]["token_ids"] == written["kvpp"]["kvstrata"]["token_ids"]
    assert all(written[part]["problems"] == [] for part in ("layerwise", "sparse", "pd", "kvpp"))


def check_prefill_and_decode(pd: dict[str, Any]) -> None:
    """Every answer is exact and was read from prefill, and nothing is held any more."""
    answers = pd["answers"]
    keys = ("48213", "90561", "13579", "24680")
    assert [one["expected_answer"] for one in answers] == [f"The pass key is {key}." for key in keys]
    for one in answers:
        assert one["token_ids"] == one["plain_token_ids"], one
        assert one["expected_answer"] in one["answer"]
        assert one["exact"] is True
    assert pd["exact"] is True
    assert pd["requests"] == pd["requests_pulled"] == len(answers)
    assert pd["layers_pulled"] > pd["requests_pulled"]
    assert pd["bytes_pulled"] > 0
    assert pd["negative_control_diverges"] is True
    assert pd["negative_control"]["token_ids"] != pd["negative_control"]["plain_token_ids"]
    assert "16509" in pd["negative_control"]["answer"]
    at_end = pd["counters_at_end"]
    assert at_end["pulls_done"] == at_end["sends_done"] == len(answers) + 1  # the control is read as well
    assert at_end["pulls_open"] == at_end["leases_open"] == pd["leases_open_at_end"] == 0
    assert pd["device_kv_budget_bytes"] > 0


def check_two_ranks(kvpp: dict[str, Any], prompt_tokens: int) -> None:
    """Two ranks with KVPP serve what two plain ranks of the same budget cannot hold."""
    assert kvpp["skipped"] is None, "these tests need two CPUs"
    assert kvpp["plain"]["max_tokens"] < prompt_tokens < kvpp["kvstrata"]["max_tokens"]
    assert "maximum context length" in kvpp["plain"]["refusal"]
    assert kvpp["exact"] is True
    assert "48213" in kvpp["kvstrata"]["answer"]
    assert kvpp["negative_control_diverges"] is True
    assert kvpp["negative_control"]["token_ids"] != kvpp["kvstrata"]["token_ids"]
    assert kvpp["capacity_ratio_formula"] == pytest.approx(6 / 5)  # six layers: three of its own, two scratch
    assert kvpp["capacity_ratio"] >= 0.95 * kvpp["capacity_ratio_formula"]
    assert len(kvpp["bytes_per_rank"]) == 2
    assert all(0 < size <= kvpp["device_kv_budget_bytes_per_rank"] for size in kvpp["bytes_per_rank"])
    assert kvpp["broadcast_bytes"] > 0


@pytest.mark.slow
def test_the_first_example_answers():
    assert "The pass key is 48213." in run(sys.executable, "examples/long_prompt.py")


def block_words(page: str, containing: str) -> list[str]:
    """Return the words of the one command of that page's only shell block with `containing` in it."""
    blocks = re.findall(r"```bash\n(.*?)```", (ROOT / page).read_text(), re.S)
    (block,) = [block for block in blocks if containing in block]
    return shlex.split(str(block).replace("\\\n", " "))


def own_store(directory: Path) -> dict[str, Any]:
    """Connector configuration that leaves the user's store alone."""
    return {"store_path": str(directory / "store"), "store_size_GB": 0.2}


def one_engine(feature: str, port: int, directory: Path) -> list[str]:
    """The README's server with `feature`, on another port and with a store, if any, of its own."""
    words = block_words("README.md", feature)
    assert words[0] == ".venv/bin/python"
    words[0] = sys.executable
    words[words.index("8000")] = str(port)
    if "--kv-transfer-config" in words:
        transfer = words.index("--kv-transfer-config") + 1
        config = json.loads(words[transfer])
        config["kv_connector_extra_config"] |= own_store(directory)
        words[transfer] = json.dumps(config)
    return words


def prefill_and_decode(page: str, port: int, directory: Path) -> list[str]:
    """The page's launch of both, on another port, with logs and a store of its own."""
    words = block_words(page, "serve-pd")
    assert words[0] == ".venv/bin/kvstrata"
    store = json.dumps(own_store(directory))
    apart = ("--port", str(port), "--log-dir", str(directory / "logs"))
    return [
        *(sys.executable, "-m", "kvstrata", *words[1:]),
        *(*apart, "--prefill-config", store, "--decode-config", store),
    ]


@contextmanager
def serving(words: list[str], port: int, log: Path) -> Iterator[None]:
    """Run that command until the block ends; it answers before the block begins."""
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


def text_of(url: str) -> str:
    with urllib.request.urlopen(url, timeout=30) as response:
        return str(response.read().decode())


def asked_as_on(page: str, port: int, **changes: Any) -> str:
    """Return the answer to the page's curl command; `changes` to its body, if any."""
    words = block_words(page, "curl")
    assert words[2] == "http://127.0.0.1:8000/v1/completions"
    body = words[words.index("-d") + 1]
    request = urllib.request.Request(
        words[2].replace("8000", str(port)),
        data=(json.dumps(json.loads(body) | changes) if changes else body).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=DEADLINE_S) as response:
        return str(json.load(response)["choices"][0]["text"])


def counted(metrics: str, name: str) -> float:
    found = re.search(rf"^vllm:kvstrata_{name}_total\{{.*\}} ([\d.e+]+)$", metrics, re.MULTILINE)
    assert found is not None, name
    return float(found.group(1))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("feature", "moved"),
    [("kv_connector_extra_config", "saved_bytes"), ("sparse_kv_offload_config", "selected_rows")],
    ids=["layerwise", "sparse"],
)
def test_the_readmes_servers_answer_the_readmes_question(feature: str, moved: str, tmp_path: Path):
    port = free_port()
    with serving(one_engine(feature, port, tmp_path), port, tmp_path / "server.log"):
        answer = asked_as_on("README.md", port)
        metrics = text_of(f"http://127.0.0.1:{port}/metrics")
    assert "48213" in answer
    documented = re.findall(
        r"^\| `(vllm:kvstrata_\w+)`", (ROOT / "docs/metrics.md").read_text(), re.MULTILINE
    )
    assert documented
    assert [name for name in documented if f"\n{name}" not in metrics] == []
    assert counted(metrics, moved) > 0


@pytest.mark.slow
@pytest.mark.parametrize("page", ["README.md", "docs/serving_pd.md"])
def test_the_pages_launch_of_prefill_and_decode_answers_the_pages_question(page: str, tmp_path: Path):
    port, log = free_port(), tmp_path / "server.log"
    longer = (
        f"<s><|user|>{'The sky is high. ' * 30}The pass key is 48213.\nWhat is the pass key?<|assistant|>"
    )
    with serving(prefill_and_decode(page, port, tmp_path), port, log):
        short_answer = asked_as_on(page, port)
        long_answer = asked_as_on(page, port, prompt=longer)
        (decode,) = re.findall(r"^decode-0: starting (\S+),", log.read_text(), re.MULTILINE)
        metrics = text_of(f"{decode}/metrics")
    assert "48213" in short_answer
    assert "48213" in long_answer
    assert counted(metrics, "remote_done_pulls") == counted(metrics, "remote_pulls") >= 1
    assert counted(metrics, "remote_pulled_bytes") > 0
