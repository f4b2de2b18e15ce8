"""The metaserver's client, against a fake metaserver on a real socket."""

import asyncio
import json
import socket
import threading
from collections.abc import Iterator

import pytest
from proxy_fakes import SECRET, Server, advert, listen, until

from kvstrata.errors import TransferFailed
from kvstrata.remote.metaserver import (
    FailedAdvert,
    MetaserverClient,
    authorization,
    decode_advert,
    is_authorized,
)

LONG_S = 60.0


class FakeMetaserver:
    """Answers with the scripted statuses, the last one for ever; 0 hangs, -1 breaks the connection."""

    def __init__(self, *statuses: int) -> None:
        self.statuses = list(statuses)
        self.posts: list[tuple[bytes, str]] = []

    async def __call__(self, scope, receive, send):
        if scope["type"] == "lifespan":
            return
        body = (await receive())["body"]
        headers = {name: value.decode() for name, value in scope["headers"]}
        self.posts.append((body, headers[b"authorization"]))
        status = self.statuses.pop(0) if len(self.statuses) > 1 else self.statuses[0]
        if status == 0:
            await asyncio.Event().wait()
        if status == -1:
            raise ConnectionError("a fake death")
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": b"as told"})


@pytest.fixture
def client() -> Iterator[MetaserverClient]:
    made = quick_client()
    yield made
    made.close(LONG_S)
    made.check_integrity()


def quick_client(*, attempt_s: float = LONG_S, **options) -> MetaserverClient:
    """Repeats soon; gives nothing up unless it is told to."""
    return MetaserverClient(
        SECRET,
        deadline_s=LONG_S,
        attempt_s=attempt_s,
        first_pause_s=0.01,
        longest_pause_s=0.05,
        jitter=lambda: 0.5,
        **options,
    )


@pytest.fixture
def serve() -> Iterator:
    servers = []

    def start(*statuses: int) -> tuple[FakeMetaserver, str]:
        fake = FakeMetaserver(*statuses)
        servers.append(Server(fake, listen()))
        return fake, servers[-1].url + "/v1/metaserver"

    yield start
    for server in servers:
        server.stop()


def test_an_advert_is_delivered_once_and_signed(client: MetaserverClient, serve):
    fake, url = serve(200)
    client.send(url, advert("t1"))
    until(lambda: client.statistics().delivered == 1, "delivery")
    ((body, header),) = fake.posts
    assert decode_advert(body) == advert("t1")
    assert json.loads(body)["first_block"] == 3
    assert is_authorized(SECRET, body, header)
    assert not is_authorized(SECRET, body + b" ", header)
    assert not is_authorized(b"another secret", body, header)
    assert SECRET.decode() not in header
    assert client.take_failed() == []


def test_http_500_then_ok_is_delivered_after_a_repeat(client: MetaserverClient, serve):
    fake, url = serve(500, 503, 200)
    client.send(url, advert("t1"))
    until(lambda: client.statistics().delivered == 1, "delivery")
    assert len(fake.posts) == 3
    assert client.statistics().repeated == 2
    assert client.take_failed() == []


def test_a_broken_connection_is_repeated_and_seen_already_counts_as_delivered(client, serve):
    fake, url = serve(-1, 409)
    client.send(url, advert("t1"))
    until(lambda: client.statistics().delivered == 1, "delivery")
    assert len(fake.posts) == 2


def test_a_refused_connection_is_repeated_until_somebody_listens(client: MetaserverClient):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    client.send(f"http://127.0.0.1:{port}/v1/metaserver", advert("t1"))
    until(lambda: client.statistics().repeated > 0, "a repeat")
    fake = FakeMetaserver(200)
    server = Server(fake, listen(port))
    until(lambda: client.statistics().delivered == 1, "delivery")
    server.stop()


@pytest.mark.parametrize("status", [400, 401, 404, 302])
def test_an_answer_that_will_not_change_fails_at_once(client: MetaserverClient, serve, status: int):
    fake, url = serve(status)
    told = []
    client.send(url, advert("t1"), on_failed=lambda *failure: told.append(failure))
    until(lambda: client.statistics().failed == 1, "failure")
    (failed,) = client.take_failed()
    assert failed.transfer_id == "t1"
    assert f"HTTP {status}: as told" in failed.reason
    assert url in failed.reason
    until(lambda: told, "the callback")
    assert told == [("t1", failed.reason)]
    assert len(fake.posts) == 1
    assert client.take_failed() == []


@pytest.mark.parametrize(
    ("statuses", "attempt_s", "named"),
    [
        pytest.param((500,), LONG_S, "HTTP 500", id="always an error"),
        pytest.param((0,), 0.1, "no answer within 0.1 s", id="never an answer"),
        pytest.param(
            (500, 0), LONG_S, "HTTP 500", id="an error, then an attempt that the deadline cuts short"
        ),
    ],
)
def test_the_deadline_bounds_all_attempts_and_names_the_last_error(serve, statuses, attempt_s, named):
    fake, url = serve(*statuses)
    # Time passes with the first post, and leaves next to nothing for the second one.
    client = quick_client(attempt_s=attempt_s, clock=lambda: LONG_S - 0.01 if fake.posts else 0.0)
    client.send(url, advert("t1"))
    until(lambda: client.statistics().failed == 1, "failure")
    (failed,) = client.take_failed()
    assert "not delivered within 60 s" in failed.reason
    assert named in failed.reason
    client.close(LONG_S)


@pytest.mark.parametrize("url", ["ftp://host/x", "nonsense", "http://", "http://[::1", "file:///etc/passwd"])
def test_what_is_not_a_url_fails_and_is_not_raised(client: MetaserverClient, url: str):
    client.send(url, advert("t1"))
    until(lambda: client.statistics().failed == 1, "failure")
    assert "not a URL" in client.take_failed()[0].reason


def test_a_hanging_metaserver_delays_its_own_adverts_alone(client: MetaserverClient, serve):
    _, hanging = serve(0)
    _, good = serve(200)
    client.send(hanging, advert("t1"))
    client.send(good, advert("t2"))
    until(lambda: client.statistics().delivered == 1, "delivery")
    assert client.statistics().waiting == 1


def test_a_cancelled_advert_is_neither_delivered_nor_failed(client: MetaserverClient, serve):
    fake, url = serve(0)
    client.send(url, advert("t1"))
    until(lambda: fake.posts, "the post")
    client.cancel("t1")
    client.cancel("t1")
    client.cancel("never sent")
    counts = client.statistics()
    assert (counts.cancelled, counts.waiting, counts.failed) == (1, 0, 0)


def test_a_transfer_is_sent_once_however_often_it_is_asked(client: MetaserverClient, serve):
    fake, url = serve(0)
    client.send(url, advert("t1"))
    client.send(url, advert("t1"))
    until(lambda: fake.posts, "the post")
    assert client.statistics().sent == 1


def test_too_many_adverts_fail_instead_of_piling_up(serve):
    _, url = serve(0)
    client = quick_client(most_waiting=2)
    for number in range(3):
        client.send(url, advert(f"t{number}"))
    assert client.take_failed() == [FailedAdvert("t2", "2 adverts are waiting already")]
    client.close(LONG_S)
    client.check_integrity()


def test_close_fails_what_waits_and_later_sends_raise(serve):
    _, url = serve(0)
    client = quick_client()
    client.send(url, advert("t1"))
    client.close(LONG_S)
    client.close(LONG_S)
    assert client.take_failed() == [FailedAdvert("t1", "the engine is shutting down")]
    with pytest.raises(TransferFailed, match="closed"):
        client.send(url, advert("t2"))
    assert not [thread for thread in threading.enumerate() if thread is client._thread]


def test_a_dead_thread_is_an_error_not_a_wait():
    client = quick_client()

    def die() -> None:
        raise SystemExit("a fake death")

    client._loop.call_soon_threadsafe(die)
    until(lambda: not client._thread.is_alive(), "the death")
    with pytest.raises(TransferFailed, match="died: SystemExit"):
        client.send("http://127.0.0.1:1/", advert("t1"))
    client.close(LONG_S)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"null",
        b"{}",
        b"\xff",
        b"[" * 100_000,
        json.dumps({"transfer_id": "t"}).encode(),
        b'{"transfer_id":"t","request_id":"r","host":"h","kv_port":70000,"tp_size":1,"dp_rank":0,'
        b'"first_block":0,"num_tokens":1,"block_tokens":16}',
        b'{"transfer_id":"","request_id":"r","host":"h","kv_port":7,"tp_size":1,"dp_rank":0,'
        b'"first_block":0,"num_tokens":1,"block_tokens":16}',
        b'{"transfer_id":"t","request_id":"r","host":"h","kv_port":7,"tp_size":1,"dp_rank":0,'
        b'"first_block":-1,"num_tokens":1,"block_tokens":16}',
    ],
)
def test_a_malformed_advert_is_a_value_error(body: bytes):
    with pytest.raises(ValueError):
        decode_advert(body)


def test_a_later_versions_field_is_ignored():
    body = (
        b'{"transfer_id":"t","request_id":"r","host":"h","kv_port":7,"tp_size":1,"dp_rank":0,'
        b'"first_block":0,"num_tokens":1,"block_tokens":16,"later":1}'
    )
    assert decode_advert(body).transfer_id == "t"


def test_the_signature_depends_on_the_secret_and_the_body():
    assert len({authorization(secret, body) for secret in (b"a", b"b") for body in (b"x", b"y")}) == 4
