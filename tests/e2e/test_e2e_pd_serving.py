"""`kvstrata serve-pd` as a user runs it: real engines, answers of plain vLLM's server, processes that die.

One launch serves all tests, in the order of this file: each leaves the engines ready and at rest. Whatever
dies is started again by the launcher.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import httpx
import psutil
import pytest
from pd_launch import (
    CHAT,
    CHUNK,
    COMPLETIONS,
    START_DEADLINE_S,
    WAIT_S,
    Api,
    Launch,
    Pending,
    asking,
    essence,
    is_gone,
    kill,
    launched,
    plain_server,
    prompt,
    sent,
    shared_memory_of,
    until,
)

pytestmark = pytest.mark.whole_machine

# Without a store: no prompt has been computed by an earlier launch, and nothing is kept for a later one.
CONFIG = json.dumps({"remote_lease_s": 3, "remote_wait_s": 8, "backend": "none"})
LONG_TOKENS = 1600
GONE_DEADLINE_S = 10
QUESTION = "The pass key is 48213.\nWhat is the pass key?"


@dataclass(frozen=True, kw_only=True)
class World:
    launch: Launch
    plain: Api
    memory_seen: set[str]  # shared memory of engines, whatever has become of them

    @property
    def api(self) -> Api:
        return self.launch.api

    def check(self, body: dict[str, Any], path: str = COMPLETIONS) -> None:
        """The same answer as plain vLLM's, which nothing but its name and hour tells apart."""
        assert essence(self.api.answer(body, path)) == essence(self.plain.answer(body, path))


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    directory = tmp_path_factory.mktemp("serve-pd")
    configs = ("--prefill-config", CONFIG, "--decode-config", CONFIG)
    options = (*configs, "--shared-buffers", "2", "--restarts", "3")
    with ExitStack() as stack:
        launch = stack.enter_context(
            launched(directory, *options, "--prefill-args", f"--max-num-batched-tokens {CHUNK}")
        )
        plain = stack.enter_context(plain_server(directory))
        launch.wait_ready()
        until(plain.is_healthy, "plain server", START_DEADLINE_S)
        yield World(launch=launch, plain=plain, memory_seen=set())


@pytest.fixture(autouse=True)
def at_rest(world: World) -> None:
    """Every test begins with engines that are ready and idle."""
    world.launch.wait_ready()
    world.launch.wait_at_rest()
    world.memory_seen.update(shared_memory_of(world.launch.everybody()))


# What a client sees


@pytest.mark.features("prefill", "layerwise", "chunked")
@pytest.mark.features("decode", "sparse")
def test_a_prompt_is_computed_by_prefill_and_answered_as_by_plain_vllm(world: World) -> None:
    before = world.launch.prompts_by("prefill")
    world.check(asking(prompt(1)))
    world.check(asking(f"<s><|user|>{'The sky is high. ' * 30}{QUESTION}<|assistant|>", ignore_eos=False))
    assert world.launch.prompts_by("prefill") == before + 2
    decode = world.launch.engine("decode")
    until(lambda: decode.metric("vllm:kvstrata_remote_done_pulls_total") == before + 2, "pulls")


def test_a_prefix_hit_and_a_tiny_prompt_need_no_prefill(world: World) -> None:
    before = world.launch.prompts_by("prefill")
    world.check(asking(prompt(1)))
    world.check(asking("<s>"))
    assert world.launch.prompts_by("prefill") == before


def test_a_chat_is_answered_as_by_plain_vllm(world: World) -> None:
    before = world.launch.prompts_by("prefill")
    messages = [{"role": "user", "content": "The sea is deep. " * 30 + QUESTION}]
    body = {"messages": messages, "max_tokens": 24, "return_token_ids": True}
    answer = world.api.answer(body, CHAT)
    assert essence(answer) == essence(world.plain.answer(body, CHAT))
    assert answer["choices"][0]["message"]["content"] == "The pass key is 48213."
    assert world.launch.prompts_by("prefill") == before + 1


def joined(events: list[dict[str, Any]]) -> tuple[str, list[int], list[str]]:
    """Text, tokens and ends of a stream; how many tokens an event carries is a matter of haste."""
    choices = [choice for event in events for choice in event["choices"]]
    texts = [choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices]
    tokens = [token for choice in choices for token in choice.get("token_ids") or ()]
    return "".join(texts), tokens, [choice["finish_reason"] for choice in choices if choice["finish_reason"]]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_a_stream_is_that_of_plain_vllm(world: World, path: str) -> None:
    text = "The wind is cold. " * 30 + QUESTION
    asked = {"messages": [{"role": "user", "content": text}]} if path == CHAT else {"prompt": prompt(2)}
    body = {**asked, "max_tokens": 24, "return_token_ids": True, "stream_options": {"include_usage": True}}
    streams = []
    for api in (world.api, world.plain):
        with api.events(body, path) as events:
            streams.append(list(events))
    ours, plain = ([event for event in stream if event != "[DONE]"] for stream in streams)
    assert streams[0][-1] == "[DONE]"
    assert ours[-1]["usage"] == plain[-1]["usage"]
    assert joined(ours) == joined(plain)


@pytest.mark.parametrize("kind", ["tokens", "strings"])
def test_a_list_of_prompts_is_one_answer(world: World, kind: str) -> None:
    before = world.launch.prompts_by("prefill")
    words = ("red", "blue")
    strings = [f"<s><|user|>{f'The {word} sky. ' * 30}{QUESTION}<|assistant|>" for word in words]
    world.check(asking([prompt(3), prompt(4)] if kind == "tokens" else strings))
    assert world.launch.prompts_by("prefill") == before + 2


def test_a_streamed_list_is_one_stream(world: World) -> None:
    body = asking([prompt(5), prompt(6)])
    got: dict[int, list[int]] = {0: [], 1: []}
    with world.api.events(body) as events:
        for event in events:
            for choice in event["choices"] if event != "[DONE]" else ():
                got[choice["index"]] += choice["token_ids"] or []
    expected = world.plain.answer(body)["choices"]
    assert [got[0], got[1]] == [choice["token_ids"] for choice in expected]


def test_samples_are_those_of_plain_vllm(world: World) -> None:
    world.check(asking(prompt(7), n=2, temperature=1.0, seed=7))


def test_what_plain_vllm_refuses_is_refused_alike(world: World) -> None:
    for body in (
        asking([1] * 3000),
        asking("x", max_tokens=-1),
        asking("x", model="nobody"),
        asking("x", n=2),  # greedy samples are all the same
        asking("x", stream=True, max_tokens=-1),
    ):
        ours, plain = world.api.post(body), world.plain.post(body)
        assert (ours.status_code, ours.json()) == (plain.status_code, plain.json()), body


def test_a_request_id_is_kept(world: World) -> None:
    response = world.api.post(asking(prompt(8)), **{"X-Request-Id": "mine-8"})
    assert response.headers["x-request-id"] == "mine-8"
    assert response.json()["id"] == "cmpl-mine-8"
    assert world.api.post(asking("x")).headers["x-request-id"]


def test_health_models_and_metrics_tell_what_is_there(world: World) -> None:
    health = world.api.client.get("/health").json()
    assert health["status"] == "ready"
    assert [(b["role"], b["in"]) for b in health["backends"]] == [("prefill", True), ("decode", True)]
    (model,) = world.api.client.get("/v1/models").json()["data"]
    assert model["id"] == "tiny"
    assert world.api.metric("kvstrata_proxy_requests_total", outcome="ok") > 0
    assert world.api.metric("kvstrata_proxy_requests_total", outcome="failed") == 0
    assert world.api.metric("kvstrata_proxy_advert_wait_seconds_count") > 0
    prefill, decode = world.launch.engine("prefill"), world.launch.engine("decode")
    pulled = decode.metric("vllm:kvstrata_remote_done_pulls_total")
    assert pulled == world.launch.prompts_by("prefill")
    until(lambda: prefill.metric("vllm:kvstrata_remote_done_sends_total") == pulled, "as many sends")
    assert decode.metric("vllm:kvstrata_remote_failed_pulls_total") == 0


@pytest.mark.features("prefill", "layerwise", "chunked")
@pytest.mark.features("decode", "sparse")
def test_sixteen_requests_at_once_are_exact(world: World) -> None:
    bodies = [asking(prompt(100 + number), 8 + number) for number in range(16)]
    before = world.launch.prompts_by("prefill")
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(world.api.answer, bodies))
        expected = list(pool.map(world.plain.answer, bodies))
    assert [essence(answer) for answer in answers] == [essence(answer) for answer in expected]
    assert world.launch.prompts_by("prefill") == before + 16


def test_a_client_that_leaves_in_mid_stream_ends_its_request(world: World) -> None:
    with world.api.events(asking(prompt(9), 1500)) as events:
        for _ in range(3):
            next(events)
    world.launch.wait_at_rest()
    until(lambda: world.api.metric("kvstrata_proxy_requests_total", outcome="disconnected") == 1, "count")
    world.check(asking(prompt(9)))


def test_a_client_that_leaves_before_the_first_token_ends_its_request(world: World) -> None:
    with sent(world.api, asking(prompt(10, LONG_TOKENS))):
        until(lambda: world.launch.in_flight("prefill") == 1, "prefill at work")
    world.launch.wait_at_rest()
    until(lambda: world.api.metric("kvstrata_proxy_requests_total", outcome="disconnected") == 2, "count")
    world.check(asking(prompt(10, LONG_TOKENS)))


# What a client sees while processes die


@pytest.mark.faults
def test_a_prefill_that_is_stopped_in_mid_transfer_is_not_waited_for(world: World) -> None:
    decode, body = world.launch.engine("decode"), asking(prompt(11, LONG_TOKENS))
    lapsed = decode.metric("vllm:kvstrata_remote_lapsed_pulls_total")
    with Pending(world.api, body) as pending:
        until(lambda: world.launch.in_flight("prefill") == 1, "prefill at work")
        family = world.launch.family("prefill")
        for process in family:
            process.suspend()
        try:
            assert essence(pending.answer()) == essence(world.plain.answer(body))
            until(
                lambda: decode.metric("vllm:kvstrata_remote_lapsed_pulls_total") == lapsed + 1,
                "one lapsed pull",
            )
        finally:
            for process in family:
                process.resume()
    world.launch.wait_ready()
    world.launch.wait_at_rest()
    before = decode.metric("vllm:kvstrata_remote_done_pulls_total")
    world.check(asking(prompt(12)))
    until(lambda: decode.metric("vllm:kvstrata_remote_done_pulls_total") == before + 1, "a pull")


@pytest.mark.faults
def test_a_prefill_that_is_killed_is_done_without_and_comes_back(world: World) -> None:
    body = asking(prompt(13, LONG_TOKENS))
    with Pending(world.api, body) as pending:
        until(lambda: world.launch.in_flight("prefill") == 1, "prefill at work")
        kill(world.launch.family("prefill"))
        answer = pending.answer()
    before = world.launch.prompts_by("prefill")
    assert essence(answer) == essence(world.plain.answer(body))
    world.check(asking(prompt(14)))
    assert world.launch.prompts_by("prefill") == before
    world.launch.wait_ready()
    world.check(asking(prompt(15)))
    assert world.launch.prompts_by("prefill") == before + 1


@pytest.mark.faults
def test_a_decode_that_is_killed_ends_its_requests_with_an_error_and_comes_back(world: World) -> None:
    with (
        world.api.events(asking(prompt(16), 1500)) as events,
        Pending(world.api, asking(prompt(17), 1500)) as pending,
    ):
        next(events)
        until(lambda: world.launch.in_flight("decode") == 2, "decode at work")
        kill(world.launch.family("decode"))
        rest = list(events)
    assert rest[-1] == "[DONE]"
    assert rest[-2]["error"]["code"] == 502
    assert "decode" in rest[-2]["error"]["message"]
    refused = [pending.response(), world.api.post(asking("x"))]
    assert [response.status_code for response in refused] == [503, 503]
    for response in refused:
        assert response.json()["error"]["type"] == "ServiceUnavailableError"
        assert world.launch.engine("decode").url in response.json()["error"]["message"]
    world.launch.wait_ready()
    world.launch.wait_at_rest()
    before = world.launch.prompts_by("prefill")
    world.check(asking(prompt(18)))
    assert world.launch.prompts_by("prefill") == before + 1


@pytest.mark.faults
def test_a_proxy_that_is_killed_leaves_nothing_in_the_engines_and_comes_back(world: World) -> None:
    with Pending(world.api, asking(prompt(19), 1500)) as pending:
        until(lambda: world.launch.in_flight("decode") == 1, "decode at work")
        kill(world.launch.family("proxy"))
        with pytest.raises(httpx.HTTPError):
            pending.response()
    world.launch.wait_ready()
    world.launch.wait_at_rest()
    world.check(asking(prompt(20)))
    assert world.launch.prompts_by("prefill") == 1


def test_an_interrupt_leaves_no_process_no_memory_and_no_port(world: World) -> None:
    launch = world.launch
    ports = [
        int(api.url.rpartition(":")[2]) for api in (world.api, *map(launch.engine, ("prefill", "decode")))
    ]
    family = launch.everybody()
    ports += [
        connection.laddr.port
        for process in family
        for connection in process.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    ]
    assert len(family) >= 6
    with Pending(world.api, asking(prompt(21), 1500)) as pending:
        until(lambda: launch.in_flight("decode") == 1, "decode at work")
        launch.process.send_signal(signal.SIGINT)
        response = pending.response()
    assert response.status_code == 200 or response.json()["error"]["code"] >= 500, response.text
    assert launch.process.wait(WAIT_S) == 0, launch.log_ends()
    # Helpers of libraries, which no signal of the launcher reaches, see from closed pipes that they are done.
    until(lambda: all(map(is_gone, family)), f"the end of {family}", GONE_DEADLINE_S)
    until(
        lambda: not any(map(os.path.exists, world.memory_seen)), "the end of shared memory", GONE_DEADLINE_S
    )
    listening = {c.laddr.port for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN}
    assert sorted(listening & set(ports)) == []
    assert "Traceback" not in launch.said()
    assert "not all processes ended" not in launch.said()
