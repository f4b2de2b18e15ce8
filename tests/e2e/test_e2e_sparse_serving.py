"""vLLM's API server with sparse decode offload: exact answers, its series on /metrics, a clean end."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path

import psutil
import pytest
from checks import ModelOf, TransformersTokens
from engines import BLOCK_SIZE, ROOMY_BYTES, engine_arguments, shared_memory, sparse
from test_e2e_serving import END_DEADLINE_S, serving, wait_until

pytestmark = pytest.mark.whole_machine

COUNTERS = (
    *("selected_rows", "hit_rows", "missed_rows", "placed_rows", "evicted_rows", "miss_bytes"),
    *("host_written_rows", "host_written_bytes", "prompt_window_loaded_bytes", "resolve_seconds"),
)


def counter(metrics: str, name: str) -> float:
    """Value of one of kvstrata's counters on a page of metrics."""
    found = re.search(rf"^vllm:kvstrata_{name}_total\{{.*\}} (\S+)$", metrics, re.MULTILINE)
    assert found is not None, name
    return float(found.group(1))


@pytest.mark.features("sparse", "chunked")
def test_a_server_answers_counts_and_ends(
    tmp_path: Path, model_of: ModelOf, transformers_tokens: TransformersTokens
) -> None:
    """No connector is named in the launch: the platform adds it."""
    model = model_of("dsa")
    additional = sparse(buffer=32, prompt_window_tokens=32)["additional_config"]
    arguments = [
        *("--model", str(model.path), "--served-model-name", model.name),
        *("--tokenizer", str(engine_arguments(model)["tokenizer"])),
        *("--dtype", "float32", "--enforce-eager", "--block-size", str(BLOCK_SIZE)),
        *("--max-model-len", str(model.max_model_len), "--max-num-seqs", "2"),
        *("--max-num-batched-tokens", "48", "--kv-cache-memory-bytes", str(ROOMY_BYTES)),
        *("--no-enable-prefix-caching", "--additional-config", json.dumps(additional)),
    ]
    memory = shared_memory()
    with serving(arguments, tmp_path / "server.log") as server:
        family = [psutil.Process(server.process.pid)]
        family += family[0].children(recursive=True)
        answers = [server.complete(model.name, prompt) for prompt in model.prompts]
        assert answers == transformers_tokens("dsa")
        wait_until(
            lambda: counter(server.get("/metrics"), "evicted_rows") > 0,
            server.process,
            server.log,
            END_DEADLINE_S,
            "counts",
        )
        metrics = server.get("/metrics")
        values = {name: counter(metrics, name) for name in COUNTERS}
        assert [name for name, value in values.items() if value <= 0] == []
        assert values["hit_rows"] + values["missed_rows"] == values["selected_rows"]
        assert values["miss_bytes"] == values["missed_rows"] * 576 * 4
        # Before its end: vLLM may report the engine it kills there as dead.
        assert "Traceback" not in server.log.read_text()
        server.process.send_signal(signal.SIGTERM)
        status = server.process.wait(END_DEADLINE_S)
        assert status in (0, -signal.SIGTERM), server.log.read_text()[-6000:]
        _, alive = psutil.wait_procs(family, timeout=END_DEADLINE_S)
    assert not alive
    assert shared_memory() <= memory
