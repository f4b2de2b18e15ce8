"""Fake vLLM engines, each a uvicorn server in a thread, on real sockets of this machine.

A fake engine speaks OpenAI's API as vLLM does. As decode it posts a real advert to the metaserver and waits
until a fake prefill has had the transfer; as prefill it does nothing but say so. What it is to do wrong is
set on the object. `python proxy_fakes.py PORT WORDS SLOWNESS_S` runs one in a process of its own.
"""

from __future__ import annotations

import asyncio
import json
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import uvicorn

from kvstrata.remote.metaserver import Advert, MetaserverClient

SECRET = b"a-secret-of-the-tests"
DEADLINE_S = 60.0


def until(true: Callable[[], Any], what: str, deadline_s: float = DEADLINE_S) -> Any:
    """Poll servers, which cannot call back, until `true()` is; return what it returned."""
    ends = time.monotonic() + deadline_s
    while not (value := true()):
        assert time.monotonic() < ends, f"{what}: not within {deadline_s} s"
        time.sleep(0.005)
    return value


def listen(port: int = 0) -> socket.socket:
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", port))
    listener.listen(128)
    return listener


class Server:
    """An ASGI application in a thread; `loop` is the thread's."""

    def __init__(self, app: Any, listener: socket.socket) -> None:
        self.port = listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.loop: asyncio.AbstractEventLoop | None = None

        async def noticed(scope: Any, receive: Any, send: Any) -> None:
            self.loop = asyncio.get_running_loop()
            await app(scope, receive, send)

        config = uvicorn.Config(noticed, log_level="critical", access_log=False, timeout_graceful_shutdown=0)
        self._server = uvicorn.Server(config)
        self._listener = listener
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [listener]}, daemon=True)
        self._thread.start()
        until(lambda: self._server.started or not self._thread.is_alive(), "start of a server")
        assert self._server.started

    def end(self) -> None:
        self._server.should_exit = self._server.force_exit = True

    def stop(self) -> None:
        self.end()
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive()
        self._listener.close()


class Arrivals:
    """Stands for the bytes: which transfers prefill has computed and decode has read."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._here: set[str] = set()
        self._waiting: dict[str, tuple[asyncio.AbstractEventLoop, asyncio.Event]] = {}

    def arrive(self, transfer: str) -> None:
        with self._lock:
            self._here.add(transfer)
            loop, event = self._waiting.pop(transfer, (None, None))
        if loop is not None and event is not None:
            loop.call_soon_threadsafe(event.set)

    async def wait(self, transfer: str) -> None:
        event = asyncio.Event()
        with self._lock:
            if transfer in self._here:
                return
            self._waiting[transfer] = (asyncio.get_running_loop(), event)
        await event.wait()


@dataclass
class Request:
    path: str
    body: dict[str, Any]
    headers: dict[str, str]
    is_over: bool = False
    is_aborted: bool = False

    @property
    def params(self) -> dict[str, Any]:
        return self.body.get("kv_transfer_params") or {}

    @property
    def transfer(self) -> str | None:
        return self.params.get("transfer_id")


@dataclass
class FakeEngine:
    """A fake vLLM engine, an ASGI application."""

    arrivals: Arrivals = field(default_factory=Arrivals)
    adverts: MetaserverClient | None = None
    words: tuple[str, ...] = ("one", " two", " three")
    is_healthy: bool = True
    is_mute: bool = False  # does not even answer health checks
    hangs: bool = False  # completions are never answered
    wants_kv: bool = True  # decode: no prefix hit
    waits_to_advertise: bool = False  # decode: until `go_on`
    status: int = 200
    error_event: int | None = None  # code of an error sent as an event
    error_after: int = 0  # words that come before it
    dies_after: int | None = None  # breaks the connection after so many words
    slowness_s: float = 0.0  # between words; for processes, which nobody can tell to go on
    pauses_after: int | None = None  # waits for `go_on` after so many words
    ends_without_done: bool = False
    comment_first: bool = False
    comments_for_ever: bool = False  # and nothing else
    fails_for: Callable[[dict[str, Any]], bool] = lambda body: False
    may_fail: Callable[[], bool] = lambda: True  # what fails for a body waits for it
    requests: list[Request] = field(default_factory=list)
    health_checks: int = 0

    def __post_init__(self) -> None:
        self._go_on: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []

    @property
    def is_paused(self) -> bool:
        return bool(self._go_on)

    def go_on(self) -> None:
        for loop, event in self._go_on:
            loop.call_soon_threadsafe(event.set)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await receive()
            await send({"type": "lifespan.startup.complete"})
            await receive()
            await send({"type": "lifespan.shutdown.complete"})
            return
        path = scope["path"]
        if self.is_mute:
            await asyncio.Event().wait()
        if path == "/health":
            self.health_checks += 1
            await _answer(send, 200 if self.is_healthy else 503, b"")
        elif path == "/v1/models":
            await _answer(send, 200, json.dumps({"object": "list", "data": [{"id": "fake"}]}).encode())
        else:
            await self._complete(path, scope, receive, send)

    async def _complete(self, path: str, scope: Any, receive: Any, send: Any) -> None:
        raw = b""
        while True:
            message = await receive()
            raw += message.get("body", b"")
            if not message.get("more_body"):
                break
        headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        request = Request(path=path, body=json.loads(raw), headers=headers)
        self.requests.append(request)
        work = asyncio.ensure_future(self._serve(request, send))
        gone = asyncio.ensure_future(receive())
        await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
        request.is_aborted = not work.done()
        work.cancel()
        gone.cancel()
        await asyncio.gather(work, gone, return_exceptions=True)
        request.is_over = True
        if not request.is_aborted and not work.cancelled() and work.exception() is not None:
            raise work.exception()  # type: ignore[misc]

    async def _serve(self, request: Request, send: Any) -> None:
        body, params = request.body, request.params
        if self.hangs:
            await asyncio.Event().wait()
        if self.status != 200 or self.fails_for(body):
            while not self.may_fail():
                await asyncio.sleep(0.005)
            status = self.status if self.status != 200 else 500
            error = {"message": "a fake error", "type": "Fake", "param": None, "code": status}
            await _answer(send, status, json.dumps({"error": error}).encode())
            return
        if params.get("do_remote_decode"):
            self.arrivals.arrive(params["transfer_id"])
        if body.get("stream"):
            start = {"type": "http.response.start", "status": 200}
            await send({**start, "headers": [(b"content-type", b"text/event-stream; charset=utf-8")]})
            if self.comment_first:
                await _chunk(send, ": ping\n\n")
            while self.comments_for_ever:
                await _chunk(send, ": ping\n\n")
                await asyncio.sleep(0.05)
            await self._stream(request, send)
        else:
            await self._fetch(request)
            await self._pause(self.pauses_after, 0)
            if self.dies_after is not None:
                await send({"type": "http.response.start", "status": 200, "headers": []})
                await _chunk(send, "{")
                raise ConnectionError("a fake death")
            await _answer(send, 200, json.dumps(self._whole(request)).encode())

    async def _fetch(self, request: Request) -> None:
        params = request.params
        if not (params.get("do_remote_prefill") and self.wants_kv):
            return
        await self._pause(0 if self.waits_to_advertise else None, 0)
        assert self.adverts is not None
        self.adverts.send(params["metaserver"], advert(params["transfer_id"]))
        await self.arrivals.wait(params["transfer_id"])

    async def _pause(self, after: int | None, at: int) -> None:
        if after == at:
            event = asyncio.Event()
            self._go_on.append((asyncio.get_running_loop(), event))
            await event.wait()

    async def _stream(self, request: Request, send: Any) -> None:
        await self._fetch(request)
        body = request.body
        for at, word in enumerate(self.words):
            if self.error_event is not None and at == self.error_after:
                error = {"message": "a fake error", "type": "Fake", "param": None, "code": self.error_event}
                await _event(send, {"error": error})
                break
            await self._pause(self.pauses_after, at)
            await asyncio.sleep(self.slowness_s)
            if self.dies_after == at:
                raise ConnectionError("a fake death")
            for sample in range(body.get("n") or 1):
                last = "stop" if at == len(self.words) - 1 else None
                choice = {"index": sample, "finish_reason": last, **_text(request.path, word, "delta")}
                await _event(send, {"id": "fake", "created": 1, "model": "fake", "choices": [choice]})
        else:
            if (body.get("stream_options") or {}).get("include_usage"):
                last_chunk = {"id": "fake", "created": 1, "model": "fake", "choices": []}
                await _event(send, {**last_chunk, "usage": self._usage(request)})
        if not self.ends_without_done:
            await _chunk(send, "data: [DONE]\n\n")
        await send({"type": "http.response.body", "body": b""})

    def _whole(self, request: Request) -> dict[str, Any]:
        text = _text(request.path, "".join(self.words), "message")
        choices = [
            {"index": sample, "finish_reason": "stop", **text} for sample in range(request.body.get("n") or 1)
        ]
        return {"id": "fake", "model": "fake", "choices": choices, "usage": self._usage(request)}

    def _usage(self, request: Request) -> dict[str, Any]:
        prompt = len(request.body.get("prompt") or "") or 1
        made = len(self.words) * (request.body.get("n") or 1)
        return {"prompt_tokens": prompt, "completion_tokens": made, "total_tokens": prompt + made}


def advert(transfer: str) -> Advert:
    return Advert(
        transfer_id=transfer,
        request_id="cmpl-1",
        host="127.0.0.1",
        kv_port=4000,
        tp_size=2,
        dp_rank=1,
        first_block=3,
        num_tokens=100,
        block_tokens=16,
    )


def _text(path: str, text: str, key: str) -> dict[str, Any]:
    return {key: {"role": "assistant", "content": text}} if "chat" in path else {"text": text}


async def _answer(send: Any, status: int, body: bytes) -> None:
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def _chunk(send: Any, text: str) -> None:
    await send({"type": "http.response.body", "body": text.encode(), "more_body": True})


async def _event(send: Any, value: Any) -> None:
    await _chunk(send, f"data: {json.dumps(value)}\n\n")


if __name__ == "__main__":
    _, port_argument, words, slowness = sys.argv
    engine = FakeEngine(words=("word",) * int(words), slowness_s=float(slowness), wants_kv=False)
    uvicorn.run(engine, port=int(port_argument), log_level="critical")
