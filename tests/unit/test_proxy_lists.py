"""Prompt lists and several samples: one upstream request each, one answer for the client."""

import pytest
from proxy_cluster import Cluster, cluster, text_of
from proxy_fakes import until


@pytest.fixture(scope="module")
def shared():
    with cluster(prefill=2, decode=2) as made:
        yield made


@pytest.fixture
def pd(shared: Cluster):
    for engine in (*shared.prefill, *shared.decode):
        engine.requests.clear()
        engine.fails_for = lambda body: False
        engine.may_fail = lambda: True
        engine.words = ("one", " two", " three")
        engine.dies_after = engine.pauses_after = None
        engine.hangs = False
    until(lambda: all(shared.is_in(engine) for engine in (*shared.prefill, *shared.decode)), "readiness")
    yield shared
    shared.check_at_rest()


def asked(engines):
    return [request for engine in engines for request in engine.requests]


def indices_and_texts(answer) -> list[tuple[int, str]]:
    return [(choice["index"], choice["text"]) for choice in answer["choices"]]


@pytest.mark.parametrize("prompts", [["x", "yy", "zzz"], [[1], [2, 3], [4, 5, 6]], ["x", [2, 3], "zzz"]])
def test_every_prompt_has_a_transfer_of_its_own_and_the_answer_is_one(pd: Cluster, prompts):
    answer = pd.complete(prompts, max_tokens=5).json()
    assert indices_and_texts(answer) == [(0, "one two three"), (1, "one two three"), (2, "one two three")]
    assert answer["usage"] == {"prompt_tokens": 6, "completion_tokens": 9, "total_tokens": 15}
    decodes, prefills = asked(pd.decode), asked(pd.prefill)
    by_prompt = {str(request.body["prompt"]): request.transfer for request in decodes}
    assert [by_prompt[str(prompt)].rpartition("-")[2] for prompt in prompts] == ["0", "1", "2"]
    assert {str(request.body["prompt"]): request.transfer for request in prefills} == by_prompt
    ids = sorted(request.headers["x-request-id"].rpartition("-")[2] for request in decodes)
    assert ids == ["0", "1", "2"]


def test_a_list_of_one_and_a_list_of_tokens_are_one_prompt(pd: Cluster):
    for prompt, sent in ((["x"], "x"), ([[1, 2]], [1, 2]), ([1, 2], [1, 2])):
        answer = pd.complete(prompt).json()
        assert indices_and_texts(answer) == [(0, "one two three")]
        assert asked(pd.decode)[-1].body["prompt"] is not None
        assert sent in [request.body["prompt"] for request in asked(pd.decode)]
    assert all("-" not in request.transfer for request in asked(pd.decode))


@pytest.mark.parametrize("usage", [False, True])
def test_streams_are_merged_with_their_indices_and_end_once(pd: Cluster, usage: bool):
    options = {"stream_options": {"include_usage": True}} if usage else {}
    events = pd.events(["x", "yy", "zzz"], **options)
    assert [text_of(events, index) for index in range(3)] == ["one two three"] * 3
    assert events.count("[DONE]") == 1
    assert events[-1] == "[DONE]"
    with_usage = [event for event in events[:-1] if event.get("usage")]
    if usage:
        assert with_usage == [events[-2]]
        assert events[-2]["usage"] == {"prompt_tokens": 6, "completion_tokens": 9, "total_tokens": 15}
        assert events[-2]["choices"] == []
    else:
        assert with_usage == []


def test_samples_are_requests_of_their_own_with_seeds_of_their_own(pd: Cluster):
    answer = pd.complete(["xx", "yy"], n=2, seed=5, max_tokens=3).json()
    assert [index for index, _ in indices_and_texts(answer)] == [0, 1, 2, 3]
    assert answer["usage"] == {"prompt_tokens": 4, "completion_tokens": 12, "total_tokens": 16}
    decodes = asked(pd.decode)
    assert len({request.transfer for request in decodes}) == 4
    assert sorted((r.body["prompt"], r.body["n"], r.body["seed"]) for r in decodes) == [
        ("xx", 1, 5),
        ("xx", 1, 6),
        ("yy", 1, 5),
        ("yy", 1, 6),
    ]


def test_chat_samples_are_merged_as_well(pd: Cluster):
    body = {"messages": [{"role": "user", "content": "x"}], "n": 3}
    answer = pd.client.post("/v1/chat/completions", json=body).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert answer["usage"]["prompt_tokens"] == 1
    with pd.client.stream("POST", "/v1/chat/completions", json={**body, "stream": True}) as response:
        lines = [line for line in response.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    assert len(lines) == 10


def test_a_beam_search_is_one_request_that_decode_computes_alone(pd: Cluster):
    answer = pd.complete(["x", "y"], n=2, use_beam_search=True).json()
    assert [index for index, _ in indices_and_texts(answer)] == [0, 1, 2, 3]
    assert [request.transfer for request in asked(pd.decode)] == [None, None]
    assert asked(pd.prefill) == []


@pytest.mark.parametrize("stream", [False, True])
def test_one_failing_child_is_an_error_of_the_request_and_ends_the_others(pd: Cluster, stream: bool):
    for engine in pd.decode:
        engine.fails_for = lambda body: body["prompt"] == "bad"
        engine.may_fail = lambda: len(asked(pd.decode)) >= 3
        engine.pauses_after = 0  # the good ones never begin
    answer = pd.complete(["good", "bad", "fine"], stream=stream)
    assert answer.status_code == 500
    assert answer.json()["error"]["message"] == "a fake error"
    pd.check_at_rest()
    assert [r.is_aborted for r in asked(pd.decode) if r.body["prompt"] != "bad"] == [True, True]


def test_a_child_that_dies_in_mid_stream_ends_the_stream_with_an_error(pd: Cluster):
    for engine in pd.decode:
        engine.dies_after = 1
    events = pd.events(["x", "y"])
    assert events[-2]["error"]["code"] == 502
    assert events[-1] == "[DONE]"


def test_a_child_whose_prefill_fails_is_repeated_alone(pd: Cluster):
    for engine in pd.prefill:
        engine.fails_for = lambda body: body["prompt"] == "bad"
    answer = pd.complete(["good", "bad"])
    assert answer.status_code == 200
    prompts = [request.body["prompt"] for request in asked(pd.decode)]
    assert prompts.count("good") == 1
    assert prompts.count("bad") == 3  # two prefills refuse, then decode computes
    assert None in [r.transfer for r in asked(pd.decode) if r.body["prompt"] == "bad"]


def test_a_client_that_goes_ends_every_child(pd: Cluster):
    for engine in pd.decode:
        engine.pauses_after = 1
    body = {"prompt": ["x", "y", "z"], "stream": True}
    with pd.client.stream("POST", "/v1/completions", json=body) as response:
        next(response.iter_lines())
        until(lambda: len(asked(pd.decode)) == 3, "every child at an engine")
    pd.check_at_rest()
    assert [request.is_aborted for request in asked(pd.decode)] == [True, True, True]
