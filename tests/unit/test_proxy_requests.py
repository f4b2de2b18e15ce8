"""The proxy in front of fake engines, when nothing goes wrong: what is sent where, and what comes back."""

import re
from pathlib import Path

import pytest
from proxy_cluster import Cluster, cluster, text_of


@pytest.fixture(scope="module")
def shared():
    with cluster(prefill=2, decode=2) as made:
        yield made


@pytest.fixture
def pd(shared: Cluster):
    for engine in (*shared.prefill, *shared.decode):
        engine.requests.clear()
    yield shared
    shared.check_at_rest()


def asked(engines):
    return [request for engine in engines for request in engine.requests]


def test_decode_asks_first_and_prefill_gets_what_it_advertised(pd: Cluster):
    answer = pd.complete("hello", max_tokens=7, temperature=0, logprobs=1, stop=["x"], min_tokens=2)
    assert answer.status_code == 200
    assert answer.json()["choices"][0]["text"] == "one two three"
    (decode,), (prefill,) = asked(pd.decode), asked(pd.prefill)
    assert decode.body["max_tokens"] == 7
    assert decode.params == {
        "do_remote_prefill": True,
        "transfer_id": prefill.transfer,
        "metaserver": pd.url + "/v1/metaserver",
    }
    assert prefill.body == {
        "model": "fake",
        "prompt": "hello",
        "temperature": 0,
        "max_tokens": 1,
        "n": 1,
        "stream": False,
        "ignore_eos": True,
        "kv_transfer_params": {
            "do_remote_decode": True,
            "transfer_id": prefill.transfer,
            "remote": {"host": "127.0.0.1", "kv_port": 4000, "tp_size": 2, "dp_rank": 1, "first_block": 3},
        },
    }


def test_a_stream_is_passed_on_event_by_event(pd: Cluster):
    events = pd.events(max_tokens=3)
    assert text_of(events) == "one two three"
    assert events[-1] == "[DONE]"
    assert len(events) == 4


def test_chat_is_served_and_prefill_makes_one_token(pd: Cluster):
    messages = [{"role": "user", "content": "hello"}]
    body = {"model": "fake", "messages": messages, "max_tokens": 9, "top_logprobs": 2, "logprobs": True}
    answer = pd.client.post("/v1/chat/completions", json=body)
    assert answer.json()["choices"][0]["message"]["content"] == "one two three"
    (prefill,) = asked(pd.prefill)
    assert prefill.body["messages"] == messages
    assert prefill.body["max_completion_tokens"] == 1
    assert not {"max_tokens", "top_logprobs", "logprobs"} & set(prefill.body)


@pytest.mark.parametrize("stream", [False, True])
def test_a_prefix_hit_needs_no_prefill(pd: Cluster, stream: bool):
    for engine in pd.decode:
        engine.wants_kv = False
    try:
        answer = pd.complete(stream=stream)
    finally:
        for engine in pd.decode:
            engine.wants_kv = True
    assert answer.status_code == 200
    assert asked(pd.prefill) == []


def test_the_request_id_is_kept_in_and_out_and_upstream(pd: Cluster):
    body = {"model": "fake", "prompt": "hello"}
    answer = pd.client.post("/v1/completions", json=body, headers={"X-Request-Id": "my-id"})
    assert answer.headers["x-request-id"] == "my-id"
    assert {request.headers["x-request-id"] for request in asked([*pd.decode, *pd.prefill])} == {"my-id"}


def test_a_request_without_an_id_gets_one(pd: Cluster):
    answer = pd.complete()
    (decode,) = asked(pd.decode)
    assert answer.headers["x-request-id"] == decode.headers["x-request-id"] != ""


def test_the_clients_authorization_goes_to_the_engines(pd: Cluster):
    body = {"model": "fake", "prompt": "hello"}
    pd.client.post("/v1/completions", json=body, headers={"Authorization": "Bearer key"})
    assert {request.headers["authorization"] for request in asked([*pd.decode, *pd.prefill])} == {
        "Bearer key"
    }


def test_prompts_go_to_the_engines_in_turn(pd: Cluster):
    for _ in range(4):
        pd.complete()
        pd.check_at_rest()
    assert [len(engine.requests) for engine in (*pd.prefill, *pd.decode)] == [2, 2, 2, 2]


def test_models_come_from_a_decode_engine(pd: Cluster):
    assert pd.client.get("/v1/models").json()["data"] == [{"id": "fake"}]


def test_health_says_who_is_in(pd: Cluster):
    health = pd.client.get("/health")
    assert health.status_code == 200
    state = health.json()
    assert state["status"] == "ready"
    assert [(b["role"], b["in"]) for b in state["backends"]] == [
        ("prefill", True),
        ("prefill", True),
        ("decode", True),
        ("decode", True),
    ]


def test_metrics_count_requests_prompts_and_waits(pd: Cluster):
    before = pd.metric("kvstrata_proxy_requests_total", outcome="ok")
    waited = pd.metric("kvstrata_proxy_advert_wait_seconds_count")
    adverts = pd.metric("kvstrata_proxy_adverts_total", answer="ok")
    pd.complete()
    pd.wait_metric(before + 1, "kvstrata_proxy_requests_total", outcome="ok")
    assert pd.metric("kvstrata_proxy_advert_wait_seconds_count") == waited + 1
    assert pd.metric("kvstrata_proxy_adverts_total", answer="ok") == adverts + 1
    assert pd.metric("kvstrata_proxy_backend_in") == 4
    assert pd.metric("kvstrata_proxy_prompts_total", computed_by="prefill") > 0
    assert pd.metric("kvstrata_proxy_time_to_first_token_seconds_count") > 0


def test_every_series_of_the_proxy_is_documented(pd: Cluster):
    pd.complete()
    text = pd.client.get("/metrics").text
    families = {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")}
    ours = {name for name in families if not name.endswith("_created")}
    page = (Path(__file__).parents[2] / "docs/serving_pd.md").read_text()
    assert ours
    assert set(re.findall(r"^\| `(kvstrata_proxy_\w+)", page, re.MULTILINE)) == ours
