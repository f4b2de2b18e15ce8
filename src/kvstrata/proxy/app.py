"""The proxy's HTTP face: OpenAI's two completion endpoints, models, health, metrics, and the metaserver."""

from __future__ import annotations

import asyncio
import logging
import re
import time
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import httpx
import msgspec
from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from kvstrata.proxy.attempt import Engines
from kvstrata.proxy.backends import Pool
from kvstrata.proxy.bodies import CHAT, COMPLETIONS, parse
from kvstrata.proxy.failures import Refused, Role
from kvstrata.proxy.health import HealthWatch
from kvstrata.proxy.metaserver import Metaserver
from kvstrata.proxy.metrics import ProxyMetrics
from kvstrata.proxy.options import METASERVER_PATH, ProxyOptions
from kvstrata.proxy.relay import Relay
from kvstrata.proxy.upstream import Upstream
from kvstrata.remote.metaserver import MAX_ADVERT_BYTES

log = logging.getLogger(__name__)

_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
_PASSED_ON = ("authorization", "traceparent", "tracestate")


def create_app(
    options: ProxyOptions,
    *,
    clock: Callable[[], float] = time.monotonic,
    new_id: Callable[[], str] = lambda: uuid.uuid4().hex,
) -> FastAPI:
    """Return the application; its engines are watched while it runs. `app.state.engines` is for tests."""
    pool, metaserver = Pool(options.prefill, options.decode, clock=clock), Metaserver(options.secret)
    engines = Engines(
        options=options,
        pool=pool,
        metaserver=metaserver,
        upstream=Upstream(options, pool),
        metrics=ProxyMetrics(pool, metaserver),
        clock=clock,
        new_id=new_id,
    )

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        health = HealthWatch(options, pool, engines.upstream.client)
        health.start()
        try:
            yield
        finally:
            await health.stop()
            await engines.close()
            await engines.upstream.close()

    app = FastAPI(lifespan=lifespan, openapi_url=None, docs_url=None, redoc_url=None)
    app.state.engines = engines
    _add_inference(app, engines)
    _add_the_rest(app, engines)

    async def explain(_: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return _refusal(Refused(error.status_code, error.detail))

    app.add_exception_handler(HTTPException, explain)
    return app


def _add_inference(app: FastAPI, engines: Engines) -> None:
    async def serve(request: Request) -> Response:
        path = request.url.path
        request_id = request.headers.get("x-request-id")
        try:
            if request_id is not None and not _REQUEST_ID.fullmatch(request_id):
                request_id = None
                raise Refused(
                    400, "X-Request-Id is not 1 to 128 visible ASCII characters", param="X-Request-Id"
                )
            raw = await _body(request, engines.options.max_body_bytes, engines.options.body_deadline_s)
            job = parse(path, raw, most_children=engines.options.most_children)
            if request_id is None and job.request_id is not None and _REQUEST_ID.fullmatch(job.request_id):
                request_id = job.request_id
        except Refused as error:
            engines.metrics.request_ended(path, "refused")
            return _refusal(error, request_id or engines.new_id())
        headers = {name: value for name in _PASSED_ON if (value := request.headers.get(name)) is not None}
        headers["Content-Type"] = "application/json"
        return Relay(engines, job, request_id or engines.new_id(), headers)

    for path in (COMPLETIONS, CHAT):
        app.add_api_route(path, serve, methods=["POST"])


def _add_the_rest(app: FastAPI, engines: Engines) -> None:
    async def models(request: Request) -> Response:
        url = engines.pool.choose(Role.DECODE)
        if url is None:
            return _refusal(Refused(503, engines.pool.why_none(Role.DECODE)))
        headers = {name: value for name in _PASSED_ON if (value := request.headers.get(name)) is not None}
        timeout = engines.options.health_deadline_s
        try:
            answer = await engines.upstream.client.get(url + "/v1/models", headers=headers, timeout=timeout)
        except httpx.HTTPError as error:
            return _refusal(Refused(502, f"decode {url}: {type(error).__name__}: {error}"))
        return Response(answer.content, answer.status_code, media_type="application/json")

    async def health() -> Response:
        is_ready = engines.pool.is_ready()
        state = {
            "status": "ready" if is_ready else "not ready",
            "backends": [
                {"role": b.role, "url": b.url, "in": b.is_in, "why": b.why_out, "requests": b.requests}
                for b in engines.pool.statistics()
            ],
        }
        return _json(200 if is_ready else 503, state)

    async def metrics() -> Response:
        return Response(engines.metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def advert(request: Request) -> Response:
        try:
            body = await _body(request, MAX_ADVERT_BYTES, engines.options.connect_deadline_s)
        except Refused as error:
            return _refusal(error)
        answer = engines.metaserver.post(body, request.headers.get("authorization", ""))
        if answer.status != 200:
            log.warning("metaserver: %s", answer.message)
        return _json(answer.status, {"status": answer.outcome, "message": answer.message})

    app.add_api_route("/v1/models", models, methods=["GET"])
    app.add_api_route("/health", health, methods=["GET"])
    app.add_api_route("/metrics", metrics, methods=["GET"])
    app.add_api_route(METASERVER_PATH, advert, methods=["POST"])


async def _body(request: Request, most_bytes: int, deadline_s: float) -> bytes:
    """Return the body; raises Refused as soon as it is known to be too long, or too slow."""
    message = f"the body has more than {most_bytes} bytes"
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > most_bytes:
        raise Refused(413, message)
    body = bytearray()
    try:
        async with asyncio.timeout(deadline_s):
            async for piece in request.stream():
                body += piece
                if len(body) > most_bytes:
                    raise Refused(413, message)
    except TimeoutError as error:
        raise Refused(408, f"the body did not arrive within {deadline_s:g} s") from error
    except ClientDisconnect as error:
        raise Refused(400, "the client went before its body was here") from error
    return bytes(body)


def _json(status: int, value: object) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")


def _refusal(error: Refused, request_id: str | None = None) -> Response:
    headers = {} if request_id is None else {"X-Request-Id": request_id}
    return Response(error.body, error.status, headers, media_type="application/json")
