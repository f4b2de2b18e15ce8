"""The proxy in front of fake engines that fail: who is asked next, what the client sees, who comes back."""

import threading
import time

import httpx
import pytest
from proxy_cluster import Cluster, cluster, text_of
from proxy_fakes import DEADLINE_S, until


@pytest.fixture
def pd():
    with cluster(prefill=2, decode=2) as made:
        yield made
        made.check_at_rest()


@pytest.fixture
def small():
    with cluster(prefill=1, decode=1) as made:
        yield made
        made.check_at_rest()


def transfers(engines) -> list[str | None]:
    return [request.transfer for engine in engines for request in engine.requests]


# Prefill fails


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("status", [500, 400])
def test_a_prefill_that_fails_is_replaced_under_a_new_transfer_id(pd: Cluster, stream: bool, status: int):
    pd.prefill[0].status = status
    answer = pd.complete(stream=stream)  # the broken one is chosen first
    assert answer.status_code == 200
    assert "three" in answer.text
    tried, replaced = transfers([pd.prefill[0]]), transfers([pd.prefill[1]])
    assert len(tried) == 1
    assert not set(tried) & set(replaced)
    pd.check_at_rest()
    seen = transfers(pd.decode)
    assert len(seen) == len(set(seen)) == 2
    assert [r.is_aborted for e in pd.decode for r in e.requests if r.transfer == tried[0]] == [True]
    assert pd.metric("kvstrata_proxy_failed_attempts_total", role="prefill", reason="status") == 1


@pytest.mark.parametrize("stream", [False, True])
def test_decode_computes_the_prompt_when_every_prefill_fails(pd: Cluster, stream: bool):
    for engine in pd.prefill:
        engine.status = 500
    answer = pd.complete(stream=stream)
    assert answer.status_code == 200
    *remote, local = sorted(transfers(pd.decode), key=lambda transfer: transfer is None)
    assert local is None
    assert len(set(remote)) == 2
    assert pd.metric("kvstrata_proxy_prompts_total", computed_by="decode") == 1


def test_decode_computes_the_prompt_when_all_prefills_are_gone(small: Cluster):
    port = small.stop(small.prefill[0])
    assert small.complete().status_code == 200  # found out by the request itself, or by the health check
    until(lambda: small.client.get("/health").status_code == 503, "health to tell")
    reason = small.client.get("/health").json()["backends"][0]
    assert (reason["in"], reason["role"]) == (False, "prefill")
    assert reason["why"]
    small.decode[0].requests.clear()
    assert small.complete().status_code == 200
    assert transfers(small.decode) == [None]  # nobody asks for what nobody will compute
    small.start(small.prefill[0], port)
    until(lambda: small.client.get("/health").status_code == 200, "the prefill's return")
    assert small.complete().status_code == 200
    assert transfers(small.decode)[-1] is not None


def test_a_prefill_that_vanishes_before_the_advert_is_found_out(small: Cluster):
    decode, prefill = small.decode[0], small.prefill[0]
    decode.waits_to_advertise = True
    answers: list[httpx.Response] = []
    client = threading.Thread(target=lambda: answers.append(small.complete()))
    client.start()
    until(lambda: decode.is_paused, "the decode request")
    small.stop(prefill)
    until(lambda: small.client.get("/health").status_code == 503, "health to tell")
    decode.waits_to_advertise = False
    decode.go_on()
    client.join(DEADLINE_S)
    assert answers[0].status_code == 200
    assert transfers([decode])[-1] is None
    assert small.metric("kvstrata_proxy_failed_attempts_total", role="prefill", reason="nobody") == 1


def test_a_prefill_that_is_lost_after_decode_spoke_changes_nothing(small: Cluster):
    decode, prefill = small.decode[0], small.prefill[0]
    prefill.pauses_after = 0  # has computed, and does not say so
    decode.pauses_after = 1
    with small.client.stream("POST", "/v1/completions", json={"prompt": "x", "stream": True}) as response:
        lines = response.iter_lines()
        assert "one" in next(lines)
        small.lose(small.prefill[0])
        decode.go_on()
        rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]"
    assert len(decode.requests) == 1
    prefill.go_on()


# Decode fails


@pytest.mark.parametrize("stream", [False, True])
def test_a_decode_that_dies_before_the_first_token_is_replaced(pd: Cluster, stream: bool):
    pd.decode[0].dies_after = 0
    answers = [pd.complete(stream=stream) for _ in range(2)]
    assert [answer.status_code for answer in answers] == [200, 200]
    assert all("three" in answer.text for answer in answers)
    assert pd.metric("kvstrata_proxy_failed_attempts_total", role="decode", reason="broken") == 1


def test_a_decode_that_dies_in_mid_stream_ends_the_stream_with_an_error(pd: Cluster):
    for engine in pd.decode:
        engine.dies_after = 2
    events = pd.events()
    assert text_of([*events[:2], "[DONE]"]) == "one two"
    error = events[-2]["error"]
    assert error["code"] == 502
    assert "decode http://127.0.0.1:" in error["message"]
    assert events[-1] == "[DONE]"
    assert sum(len(engine.requests) for engine in pd.decode) == 1
    pd.wait_metric(1, "kvstrata_proxy_requests_total", outcome="cut")


def test_a_stream_that_ends_too_soon_is_not_passed_off_as_whole(small: Cluster):
    small.decode[0].ends_without_done = True
    events = small.events()
    assert "before data: [DONE]" in events[-2]["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_decodes_own_refusal_reaches_the_client_unchanged(pd: Cluster, stream: bool):
    for engine in pd.decode:
        engine.status = 404
    answer = pd.complete(stream=stream)
    assert answer.status_code == 404
    assert answer.json()["error"]["message"] == "a fake error"
    assert sum(len(engine.requests) for engine in pd.decode) == 1
    pd.wait_metric(1, "kvstrata_proxy_requests_total", outcome="refused")


@pytest.mark.parametrize("code", [400, 500])
def test_an_error_as_the_first_event_is_like_an_http_error(small: Cluster, code: int):
    small.decode[0].error_event = code
    answer = small.complete(stream=True)
    assert answer.status_code == code
    assert answer.json()["error"]["message"] == "a fake error"
    assert len(small.decode[0].requests) == (1 if code == 400 else 2)


def test_an_engines_own_error_in_mid_stream_is_passed_on_and_counted(small: Cluster):
    small.decode[0].error_event, small.decode[0].error_after = 500, 2
    events = small.events()
    assert text_of([*events[:2], "[DONE]"]) == "one two"
    assert events[2]["error"]["message"] == "a fake error"
    assert events[3:] == ["[DONE]"]
    assert len(small.decode[0].requests) == 1
    small.wait_metric(1, "kvstrata_proxy_requests_total", outcome="cut")
    assert small.metric("kvstrata_proxy_failed_attempts_total", role="decode", reason="status") == 1


def test_a_decode_that_fails_with_prefill_is_asked_to_compute_alone(small: Cluster):
    decode = small.decode[0]
    decode.fails_for = lambda body: "kv_transfer_params" in body
    assert small.complete().status_code == 200
    assert [transfer is None for transfer in transfers([decode])] == [False, True]


def test_an_error_of_every_decode_is_told_in_its_own_words(pd: Cluster):
    for engine in pd.decode:
        engine.status = 500
    answer = pd.complete()
    assert answer.status_code == 500
    assert answer.json()["error"]["message"] == "a fake error"
    assert 2 <= sum(len(engine.requests) for engine in pd.decode) <= 4
    pd.wait_metric(1, "kvstrata_proxy_requests_total", outcome="failed")


def test_no_decode_is_a_503_that_says_why_and_one_that_returns_is_used(small: Cluster):
    url = small.url_of(small.decode[0])
    port = small.stop(small.decode[0])
    answer = small.complete()
    assert answer.status_code == 503
    assert "decode" in answer.json()["error"]["message"]
    assert answer.headers["retry-after"] == "1"
    until(lambda: small.client.get("/health").status_code == 503, "health to tell")
    answer = small.complete()
    assert answer.status_code == 503
    message = answer.json()["error"]["message"]
    assert message.startswith("no decode engine is ready: ")
    assert url in message
    assert small.client.get("/v1/models").status_code == 503
    assert small.metric("kvstrata_proxy_backend_in", role="decode") == 0
    small.start(small.decode[0], port)
    until(lambda: small.client.get("/health").status_code == 200, "the decode's return")
    assert small.complete().status_code == 200


def test_an_engine_that_says_it_is_dead_is_out_until_it_is_not(small: Cluster):
    small.decode[0].is_healthy = False
    until(lambda: small.client.get("/health").status_code == 503, "health to tell")
    assert "HTTP 503" in small.client.get("/health").json()["backends"][1]["why"]
    small.decode[0].is_healthy = True
    until(lambda: small.client.get("/health").status_code == 200, "the return")


def test_a_dead_engine_is_not_asked_for_its_health_without_pause():
    interval_s = 1.0
    with cluster(health_interval_s=interval_s) as made:
        made.decode[0].is_healthy = False
        until(lambda: not made.is_in(made.decode[0]), "the decode to be out")
        before, begun_s = made.decode[0].health_checks, time.monotonic()
        for _ in range(20):
            assert made.complete().status_code == 503
        checks = made.decode[0].health_checks - before
        due = (time.monotonic() - begun_s) / interval_s
        assert checks <= due + 2


def test_requests_at_an_engine_that_went_mute_are_tried_elsewhere():
    # The others must answer one of three checks in a row within this time.
    with cluster(prefill=1, decode=2, health_deadline_s=1.5, misses_until_lost=3) as made:
        made.decode[0].hangs = made.decode[0].is_mute = True
        answers = [made.complete() for _ in range(2)]
        assert [answer.status_code for answer in answers] == [200, 200]
        until(lambda: not made.is_in(made.decode[0]), "the mute one to be out")
        assert "no answer to" in made.client.get("/health").json()["backends"][1]["why"]
        made.decode[0].is_mute = False
        until(lambda: made.is_in(made.decode[0]), "the return")


# Deadlines


def test_a_decode_that_never_speaks_is_a_504_with_the_waits_name():
    with cluster(deadline_s=0.5, answer_deadline_s=0.5) as made:
        made.decode[0].hangs = True
        for stream, name in ((True, "next token"), (False, "answer")):
            answer = made.complete(stream=stream)
            assert answer.status_code == 504
            assert f"the {name} of decode http" in answer.json()["error"]["message"]
        assert made.metric("kvstrata_proxy_failed_attempts_total", role="decode", reason="silence") == 2
        made.check_at_rest()
        assert all(request.is_aborted for request in made.decode[0].requests)


def test_a_decode_that_falls_silent_ends_the_stream():
    with cluster(deadline_s=3.0) as made:  # time enough for the words before
        made.decode[0].wants_kv = False
        made.decode[0].pauses_after = 2
        events = made.events()
        assert events[-2]["error"]["code"] == 504
        made.check_at_rest()


def test_a_prefill_that_hangs_is_given_up_and_decode_computes():
    with cluster(answer_deadline_s=0.3) as made:
        made.prefill[0].hangs = True
        assert made.complete(stream=True).status_code == 200
        assert transfers(made.decode)[-1] is None
        assert made.metric("kvstrata_proxy_failed_attempts_total", role="prefill", reason="silence") == 1
        made.check_at_rest()


def test_a_comment_is_passed_on_and_does_not_rule_out_another_attempt(pd: Cluster):
    for engine in pd.decode:
        engine.comment_first = True
    pd.prefill[0].status = pd.prefill[1].status = 500
    answer = pd.complete(stream=True)
    assert answer.status_code == 200
    assert answer.text.startswith(": ping\n\n")
    assert "three" in answer.text


def test_comments_do_not_make_a_hanging_engine_alive():
    with cluster(deadline_s=0.5) as made:
        made.decode[0].comments_for_ever = True
        answer = made.complete(stream=True)
        assert "the next token of decode" in answer.text
        assert "not finished within 0.5 s" in answer.text
        made.check_at_rest()


def test_a_proxy_without_prefills_is_ready_with_decode_alone():
    with cluster(prefill=0) as made:
        assert made.client.get("/health").status_code == 200
        assert made.complete().status_code == 200
        assert transfers(made.decode) == [None]
