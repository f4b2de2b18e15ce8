"""Clients that leave, stall or come all at once; strangers at the metaserver."""

import asyncio
import json
import socket
import threading

import httpx
import msgspec
import pytest
from proxy_cluster import Cluster, cluster
from proxy_fakes import DEADLINE_S, SECRET, advert, until

from kvstrata.proxy.backends import Pool
from kvstrata.proxy.health import HealthWatch
from kvstrata.proxy.options import ProxyOptions
from kvstrata.remote.metaserver import authorization, decode_advert


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


# The client goes


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("stage", ["decode waits", "prefill computes", "decode streams"])
def test_a_client_that_goes_ends_both_engines_requests(small: Cluster, stream: bool, stage: str):
    decode, prefill = small.decode[0], small.prefill[0]
    decode.hangs = stage == "decode waits"
    prefill.hangs = stage == "prefill computes"
    decode.pauses_after = (1 if stream else 0) if stage == "decode streams" else None
    host, port = "127.0.0.1", small.proxy.port
    body = json.dumps({"prompt": "x", "stream": stream}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)
    with socket.create_connection((host, port)) as client:
        client.sendall(head + body)
        engines = [decode] if stage == "decode waits" else [decode, prefill]
        until(lambda: all(engine.requests for engine in engines), "the requests upstream")
        if stage == "decode streams":
            until(lambda: decode.is_paused, "the first token")
            if stream:
                received = b""
                while b"one" not in received:
                    piece = client.recv(4096)
                    assert piece, received
                    received += piece
    until(lambda: decode.requests[0].is_aborted, "the abort at decode")
    if stage == "prefill computes":
        until(lambda: prefill.requests[0].is_aborted, "the abort at prefill")
    assert len(decode.requests) == 1
    until(lambda: small.metric("kvstrata_proxy_requests_total", outcome="disconnected") == 1, "the count")


def test_a_client_that_does_not_read_is_given_up():
    with cluster(deadline_s=3.0) as made:  # time enough for the first word
        made.decode[0].wants_kv = False
        made.decode[0].words = ("x" * 100_000,) * 2000
        body = json.dumps({"prompt": "x", "stream": True}).encode()
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)
        with socket.create_connection(("127.0.0.1", made.proxy.port)) as client:
            client.sendall(head + body)
            until(lambda: made.decode[0].requests, "the request")
            made.wait_metric(1, "kvstrata_proxy_requests_total", outcome="disconnected")
        made.check_at_rest()


# The metaserver


def post_advert(pd: Cluster, body: bytes, header: str) -> httpx.Response:
    return pd.client.post("/v1/metaserver", content=body, headers={"Authorization": header})


def test_the_metaserver_takes_an_advert_once_from_who_knows_the_secret(small: Cluster):
    prefill = small.prefill[0]
    prefill.hangs = True
    small.decode[0].pauses_after = 0
    client = threading.Thread(target=small.complete)
    client.start()
    until(lambda: prefill.requests, "the first advert")
    transfer = prefill.requests[0].transfer
    assert transfer is not None
    again = msgspec.json.encode(advert(transfer))
    assert post_advert(small, again, authorization(b"wrong secret", again)).status_code == 401
    assert post_advert(small, again, "Bearer " + SECRET.decode()).status_code == 401
    assert post_advert(small, again, "").status_code == 401
    assert post_advert(small, again, authorization(SECRET, again)).status_code == 409
    strange = msgspec.json.encode(advert("strange"))
    assert post_advert(small, strange, authorization(SECRET, strange)).status_code == 404
    bad = b'{"transfer_id": 5}'
    answer = post_advert(small, bad, authorization(SECRET, bad))
    assert answer.status_code == 400
    assert "transfer_id" in answer.json()["message"]
    long = b"x" * 20_000
    assert post_advert(small, long, authorization(SECRET, long)).status_code == 413
    small.prefill[0].hangs = False
    small.lose(small.prefill[0])
    until(lambda: len(small.decode[0].requests) == 2, "the repeated request")
    until(lambda: small.decode[0].is_paused, "the answer")
    small.decode[0].go_on()
    client.join(DEADLINE_S)
    late = msgspec.json.encode(advert(transfer))
    assert post_advert(small, late, authorization(SECRET, late)).status_code == 404
    assert small.metric("kvstrata_proxy_adverts_total", answer="unauthorized") == 3


def test_decode_advert_round_trip_is_what_prefill_is_told():
    assert decode_advert(msgspec.json.encode(advert("t"))) == advert("t")


# Many at once


def test_many_clients_are_all_answered_while_an_engine_fails(pd: Cluster):
    pd.prefill[0].status = 500

    async def everyone() -> list[httpx.Response]:
        limits = httpx.Limits(max_connections=100)
        async with httpx.AsyncClient(base_url=pd.url, timeout=DEADLINE_S, limits=limits) as client:
            bodies = [{"prompt": f"prompt {n}", "stream": n % 2 == 0} for n in range(32)]
            return list(await asyncio.gather(*(client.post("/v1/completions", json=body) for body in bodies)))

    answers = asyncio.run(everyone())
    assert {answer.status_code for answer in answers} == {200}
    assert all("three" in answer.text for answer in answers)


# The health watch


def test_a_watch_that_is_woken_and_cancelled_at_once_ends():
    async def wake_and_stop() -> None:
        pool = Pool((), ("http://127.0.0.1:1",))
        options = ProxyOptions(
            prefill=(), decode=("http://127.0.0.1:1",), secret=SECRET, metaserver_url="http://a:1"
        )
        async with httpx.AsyncClient(trust_env=False) as client:
            watch = HealthWatch(options, pool, client)
            watch.start()
            backend = pool.backends[0]
            while backend.why_out == "not checked yet":
                await asyncio.sleep(0)
            backend.check_now.set()
            async with asyncio.timeout(DEADLINE_S):
                await watch.stop()

    asyncio.run(wake_and_stop())


class Trouble:
    """A client whose first answers are troubles; afterwards every engine is healthy."""

    def __init__(self, *troubles: str) -> None:
        self._troubles = list(troubles)

    async def get(self, url: str) -> httpx.Response:
        trouble = self._troubles.pop(0) if self._troubles else ""
        if trouble == "forgets its cancellation":
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                await asyncio.Event().wait()  # for ever
        if trouble == "an error of another library":
            raise RuntimeError("the pool is confused")
        return httpx.Response(200)


@pytest.mark.parametrize("trouble", ["forgets its cancellation", "an error of another library"])
def test_whatever_a_check_runs_into_the_engine_comes_back(trouble: str):
    async def watch_it() -> None:
        url = "http://127.0.0.1:1"
        pool = Pool((), (url,))
        options = ProxyOptions(
            prefill=(),
            decode=(url,),
            secret=SECRET,
            metaserver_url="http://a:1",
            health_interval_s=0.05,
            health_deadline_s=0.05,
        )
        watch = HealthWatch(options, pool, Trouble(trouble))  # type: ignore[arg-type]
        watch.start()
        async with asyncio.timeout(DEADLINE_S):
            while not pool.backends[0].is_in:
                await asyncio.sleep(0)
            await watch.stop()

    asyncio.run(watch_it())
