"""What the demonstration starts and asks of prefill and decode: processes, the relay, requests, metrics."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from kvstrata.demo.model import find_model
from kvstrata.demo.pd_processes import processes_of, proxy_in_front_of, relay_of_other_prompt, serving
from kvstrata.demo.pd_servers import PdEngines, PdServers
from kvstrata.errors import KVStrataError
from kvstrata.serve_pd.plan import Launch, Ports, plan_launches

DEADLINE_S = 60.0
METRICS = """\
vllm:kvstrata_remote_done_pulls_total{engine="0"} 2.0
vllm:kvstrata_remote_done_sends_total{engine="0"} %d.0
vllm:kvstrata_remote_pulled_parts_total{engine="0"} 48.0
vllm:kvstrata_remote_pulled_bytes_total{engine="0"} 4096.0
vllm:kvstrata_remote_open_pulls{engine="0"} 0.0
vllm:kvstrata_remote_open_sends{engine="0"} %d.0
"""


class FakeServer:
    """Answers a prompt with its length; the first /metrics say that leases are open."""

    def __init__(self, *, open_leases: int = 0, unsettled: int = 0, status: int = 200) -> None:
        self.prompts: list[list[int]] = []
        self._open_leases, self._unsettled, self._status = open_leases, unsettled, status

    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/v1/completions", self._complete, methods=["POST"]),
                Route("/metrics", self._metrics),
                Route("/health", lambda _: Response(status_code=self._status)),
            ]
        )

    async def _complete(self, request: Request) -> Response:
        body = await request.json()
        self.prompts.append(body["prompt"])
        if self._status != 200:
            return PlainTextResponse("out of order", self._status)
        choice = {"token_ids": [len(body["prompt"]), body["max_tokens"]], "text": "words"}
        if not body.get("stream"):
            return Response(json.dumps({"choices": [choice]}), media_type="application/json")
        events = [{"choices": []}, {"choices": [choice]}, {"usage": {}, "choices": []}]
        texts = [*(f"data: {json.dumps(event)}\n\n" for event in events), "data: [DONE]\n\n"]
        return StreamingResponse(iter(texts), media_type="text/event-stream")

    def _metrics(self, _: Request) -> Response:
        text = METRICS % (2 - self._unsettled, self._open_leases)
        self._open_leases = 0
        self._unsettled = max(0, self._unsettled - 1)
        return PlainTextResponse(text)


@contextmanager
def asked(server: FakeServer) -> Iterator[PdServers]:
    """One server in the place of every one."""
    with serving(server.app) as url:
        other: list[int] = []
        with serving(relay_of_other_prompt(url, other)) as relay:
            deployment = PdServers(proxy=url, other_proxy=relay, prefill=url, decode=url, other=other)
            yield deployment
            deployment.close()


def test_prompts_are_asked_all_at_once_and_answered_in_order():
    server = FakeServer()
    with asked(server) as deployment:
        answers = deployment.answer([(1, 2, 3), (4, 5), (6,)], max_new_tokens=9)
    assert [answer.token_ids for answer in answers] == [(3, 9), (2, 9), (1, 9)]
    assert {answer.text for answer in answers} == {"words"}
    assert sorted(server.prompts) == [[1, 2, 3], [4, 5], [6]]


def test_the_relay_exchanges_the_prompt_and_passes_on_everything_else():
    server = FakeServer()
    with asked(server) as deployment:
        answer = deployment.answer_from_other((1, 2, 3), (7, 8, 9), max_new_tokens=5)
    assert server.prompts == [[7, 8, 9]]
    assert answer.token_ids == (3, 5)


@pytest.mark.parametrize("status", [200, 503])
def test_the_relay_is_as_healthy_as_what_is_behind_it(status: int):
    with (
        serving(FakeServer(status=status).app) as url,
        serving(relay_of_other_prompt(url, [])) as relay,
    ):
        assert httpx.get(relay + "/health").status_code == status
    with serving(relay_of_other_prompt(url, [])) as relay:
        assert httpx.get(relay + "/health").status_code == 503


def test_the_first_token_is_timed_and_the_stream_read_to_its_end():
    with asked(FakeServer()) as deployment:
        assert 0 < deployment.seconds_to_first_token(deployment.prefill, [1, 2]) < DEADLINE_S


def test_an_answer_that_is_none_says_who_said_what():
    with asked(FakeServer(status=500)) as deployment:
        with pytest.raises(KVStrataError, match="answered 500: out of order"):
            deployment.answer([(1,)], max_new_tokens=1)
        with pytest.raises(KVStrataError, match="out of order"):
            deployment.seconds_to_first_token(deployment.prefill, [1])


def test_a_server_that_is_gone_is_an_error_that_names_it():
    with asked(FakeServer()) as deployment:
        gone = deployment.proxy
    left = PdServers(proxy=gone, other_proxy=gone, prefill=gone, decode=gone, other=[])
    with pytest.raises(KVStrataError, match=f"{gone}: no answer, ConnectError"):
        left.answer([(1,)], max_new_tokens=1)
    with pytest.raises(KVStrataError, match="no answer"):
        left.seconds_to_first_token(gone, [1])
    with pytest.raises(KVStrataError, match="no answer"):
        left.counters()
    left.close()


@pytest.mark.parametrize("server", [FakeServer(open_leases=3), FakeServer(unsettled=4)])
def test_counters_are_read_until_nothing_is_open_and_both_sides_say_so(server: FakeServer):
    with asked(server) as deployment:
        settled = deployment.settled_counters()
        assert (settled.pulls_done, settled.parts_pulled, settled.bytes_pulled) == (2, 48, 4096)
        assert settled.leases_open == 0
        assert settled.sends_done == 2


def engines(directory: Path) -> PdEngines:
    return PdEngines(
        model=find_model(None),
        device_kv_budget_bytes=20 << 20,
        max_model_len=2016,
        max_batched_tokens=512,
        max_num_seqs=4,
        num_shared_buffers=2,
        prefetch_layers=1,
        topk_buffer_size=128,
        log_directory=directory,
    )


def launches_of(directory: Path) -> tuple[Launch, ...]:
    ports = Ports(prefill=(8100,), decode=(8200,), kv=(8300,), proxy=8000)
    return plan_launches(
        engines(directory).launch(), ports, cpus=(0, 1), secret="a secret of both", python="python"
    )


def json_after(launch: Launch, option: str) -> dict[str, Any]:
    return dict(json.loads(launch.argv[launch.argv.index(option) + 1]))


def test_a_layerwise_prefill_and_a_sparse_decode_are_started_on_cores_of_their_own(tmp_path: Path):
    prefill, decode, proxy = launches_of(tmp_path)
    extra = json_after(prefill, "--kv-transfer-config")["kv_connector_extra_config"]
    assert (extra["use_layerwise"], extra["layerwise_num_shared_buffers"], extra["backend"]) == (
        True,
        2,
        "none",
    )
    assert json_after(decode, "--kv-transfer-config")["kv_role"] == "kv_consumer"
    sparse = json_after(decode, "--additional-config")["sparse_kv_offload_config"]
    assert sparse == {"enabled": True, "topk_buffer_size": 128}
    for engine in (prefill, decode):
        assert engine.argv[engine.argv.index("--kv-cache-memory-bytes") + 1] == str(20 << 20)
        assert engine.argv[engine.argv.index("--max-model-len") + 1] == "2016"
    binds = [engine.environment["VLLM_CPU_OMP_THREADS_BIND"] for engine in (prefill, decode)]
    assert binds == ["0", "1"]
    assert proxy.role == "proxy"


def test_the_controls_proxy_has_the_relay_for_its_prefill(tmp_path: Path):
    _, decode, proxy = launches_of(tmp_path)
    control = proxy_in_front_of(proxy, "http://127.0.0.1:1", decode.url)
    assert control.argv[control.argv.index("--prefill") + 1] == "http://127.0.0.1:1"
    assert control.argv[control.argv.index("--decode") + 1] == decode.url
    assert control.environment == proxy.environment
    assert control.url != proxy.url
    assert control.log != proxy.log


def launch_of(directory: Path, code: str, name: str = "engine") -> Launch:
    return Launch(
        name=name,
        role="prefill",
        url="http://127.0.0.1:1",
        argv=(sys.executable, "-c", code),
        environment={},
        log=directory / f"{name}.log",
    )


def test_processes_end_with_the_block(tmp_path: Path):
    wait = "import time; time.sleep(600)"
    with processes_of([launch_of(tmp_path, wait, name) for name in ("a", "b")]) as processes:
        for process in processes:
            process.check()
        assert not any(process.has_ended() for process in processes)
    assert all(process.has_ended() for process in processes)


def test_a_process_that_ends_while_it_starts_is_shown_with_the_end_of_its_log(tmp_path: Path):
    with processes_of([launch_of(tmp_path, "raise SystemExit('no such checkpoint')")]) as (process,):
        ends_s = time.monotonic() + DEADLINE_S
        while not process.has_ended():
            assert time.monotonic() < ends_s
            time.sleep(0.01)  # a process that cannot call back
        with pytest.raises(KVStrataError, match=r"engine ended with status 1(.|\n)*no such checkpoint"):
            process.check()
