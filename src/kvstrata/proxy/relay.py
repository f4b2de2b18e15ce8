"""One client's request as an ASGI response: its prompts are run, and given up when the client goes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from kvstrata.proxy.attempt import Engines, answer_child
from kvstrata.proxy.bodies import Child, Job
from kvstrata.proxy.failures import Refused, error_body, error_event
from kvstrata.proxy.merge import merged_answer, merged_events

log = logging.getLogger(__name__)


class Relay(Response):
    """Sends nothing before there is something of the answer, so that a failure still has its HTTP status."""

    def __init__(self, engines: Engines, job: Job, request_id: str, headers: dict[str, str]) -> None:
        """`headers` go upstream with the request's id."""
        super().__init__()
        self._engines, self._job, self._request_id, self._upstream_headers = engines, job, request_id, headers
        self._arrived_s = engines.clock()
        self._has_begun = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run until the answer is sent, or the client is gone; then both engines have been told."""
        serving = asyncio.create_task(self._serve(send), name=f"request {self._request_id}")
        leaving = asyncio.create_task(_disconnected(receive), name=f"client of {self._request_id}")
        ending = asyncio.create_task(self._engines.ending.wait(), name=f"end during {self._request_id}")
        outcome = "disconnected"
        try:
            await asyncio.wait((serving, leaving, ending), return_when=asyncio.FIRST_COMPLETED)
            if serving.done():
                outcome = serving.result()
            elif not leaving.done():
                await _cancel(serving)
                outcome = await self._fail(send, 503, error_body(503, "the proxy is shutting down"))
        except OSError:  # the client went while it was sent something, or reads too slowly
            pass
        finally:
            await _cancel(serving, leaving, ending)
            self._engines.metrics.request_ended(self._job.path, outcome)
        if outcome != "ok":
            log.info("request %s: %s", self._request_id, outcome)

    async def _serve(self, send: Send) -> str:
        """Send the answer and return the outcome for metrics."""
        media_type = "text/event-stream; charset=utf-8" if self._job.is_stream else "application/json"
        try:
            async with aclosing(self._pieces()) as pieces:
                async for piece in pieces:
                    await self._begin(send, 200, media_type)
                    await self._send(send, piece, more_body=True)
        except Refused as error:
            return await self._fail(send, error.status, error.body)
        except (OSError, TimeoutError):  # of the client
            raise
        except Exception as error:
            log.exception("request %s", self._request_id)
            return await self._fail(send, 500, error_body(500, f"the proxy failed: {error!r}"))
        await self._send(send, b"", more_body=False)
        return "ok"

    async def _fail(self, send: Send, status: int, body: bytes) -> str:
        if self._has_begun:
            await self._send(send, error_event(body), more_body=False)
            return "cut"
        await self._begin(send, status, "application/json")
        await self._send(send, body, more_body=False)
        return "refused" if status < 500 else "failed"

    async def _send(self, send: Send, body: bytes, *, more_body: bool) -> None:
        async with asyncio.timeout(self._engines.options.deadline_s):  # a client that does not read
            await send({"type": "http.response.body", "body": body, "more_body": more_body})

    async def _pieces(self) -> AsyncGenerator[bytes]:
        job, engines = self._job, self._engines
        if len(job.children) == 1:
            pieces = answer_child(engines, job, job.children[0], self._headers_for(self._request_id))
        elif job.is_stream:
            pieces = merged_events(job.children, self._answer)
        else:
            yield await merged_answer(job.children, self._answer)
            return
        async with aclosing(pieces):
            async for piece in pieces:
                yield piece

    def _answer(self, child: Child) -> AsyncGenerator[bytes]:
        headers = self._headers_for(f"{self._request_id}-{child.number}")
        return answer_child(self._engines, self._job, child, headers)

    def _headers_for(self, request_id: str) -> dict[str, str]:
        return {**self._upstream_headers, "X-Request-Id": request_id}

    async def _begin(self, send: Send, status: int, media_type: str) -> None:
        if self._has_begun:
            return
        self._has_begun = True
        if status == 200:
            seconds = self._engines.clock() - self._arrived_s
            self._engines.metrics.first_token(self._job.path, is_stream=self._job.is_stream, seconds=seconds)
        headers = [
            (b"content-type", media_type.encode()),
            (b"x-request-id", self._request_id.encode()),
        ]
        if status == 503:
            headers.append((b"retry-after", b"1"))
        await send({"type": "http.response.start", "status": status, "headers": headers})


async def _cancel(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    """Return when the client is gone; call it after the body has been read."""
    while (await receive())["type"] != "http.disconnect":
        pass
