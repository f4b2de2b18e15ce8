"""Requests to engines: an error becomes a Failure that names the engine; a broken engine is taken out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager

import httpx
import msgspec

from kvstrata.errors import DeadlineExceeded
from kvstrata.proxy.backends import Backend, Pool
from kvstrata.proxy.events import DONE, data_of, error_in, split_events
from kvstrata.proxy.failures import ExchangeFailed, Failure, Kind
from kvstrata.proxy.options import ProxyOptions
from kvstrata.proxy.waits import Waits

_MAX_ERROR_BYTES = 1 << 20


class Upstream:
    """Sends requests to engines. Leaving a context, or cancelling, closes the connection: the engine aborts.

    Every request has a connection of its own. An engine closes idle ones whenever it likes, and a request
    that is lost to that could not be told from one that broke it.
    """

    def __init__(self, options: ProxyOptions, pool: Pool) -> None:
        self._options, self._pool = options, pool
        self.client = httpx.AsyncClient(
            timeout=httpx.Timeout(None, connect=options.connect_deadline_s),
            headers={"Accept-Encoding": "identity"},  # events are passed on as they come
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
            trust_env=False,  # proxies of the environment are for the world outside
            follow_redirects=False,
        )

    async def close(self) -> None:
        """Close every connection."""
        await self.client.aclose()

    async def answer(
        self, backend: Backend, path: str, body: bytes, headers: Mapping[str, str], waits: Waits, *, name: str
    ) -> bytes:
        """Return the body of a 200. Raises ExchangeFailed."""
        deadline_s = self._options.answer_deadline_s
        async with self._posted(backend, path, body, headers, waits, name, deadline_s) as response:
            return await waits.until(self._read(response), name, deadline_s)

    async def events(
        self, backend: Backend, path: str, body: bytes, headers: Mapping[str, str], waits: Waits, *, name: str
    ) -> AsyncGenerator[bytes]:
        """Yield the events of a 200, comments included, up to and with `[DONE]`. Raises ExchangeFailed.

        An error among the events is a failure like an HTTP error, be it the first or a later one.
        Comments do not count as a sign of life: an engine's front sends them while the engine hangs.
        """
        deadline_s, now_s = self._options.deadline_s, asyncio.get_running_loop().time
        async with self._posted(backend, path, body, headers, waits, name, deadline_s) as response:
            events = split_events(response.aiter_raw(), self._options.max_event_bytes)
            data, heard_s = None, now_s()
            while True:
                left_s = heard_s + deadline_s - now_s()
                # Nothing has to be closed after an error: the response, which is, holds the connection.
                event = await waits.until(anext(events, None), name, deadline_s, left_s=left_s)
                if event is None:
                    if data != DONE:
                        raise ConnectionResetError("the stream ended before data: [DONE]")
                    return
                data = data_of(event)
                if data is not None:
                    heard_s = now_s()
                    error = error_in(data)
                    if error is not None:
                        raise ExchangeFailed(_error_status(backend, error, data))
                yield event

    @asynccontextmanager
    async def _posted(
        self,
        backend: Backend,
        path: str,
        body: bytes,
        headers: Mapping[str, str],
        waits: Waits,
        name: str,
        deadline_s: float,
    ) -> AsyncIterator[httpx.Response]:
        """Send, and yield a response of status 200; errors of the block are explained as well."""
        response = None
        try:
            request = self.client.build_request(
                "POST", backend.url + path, content=body, headers=dict(headers)
            )
            response = await waits.until(self.client.send(request, stream=True), name, deadline_s)
            if response.status_code != 200:
                answer = await waits.until(self._read(response, _MAX_ERROR_BYTES), name, deadline_s)
                raise ExchangeFailed(_http_status(backend, response.status_code, answer))
            yield response
            self._pool.succeeded(backend)
        except DeadlineExceeded as error:
            self._pool.failed(backend)
            raise ExchangeFailed(_failure(backend, Kind.SILENCE, str(error))) from error
        except ValueError as error:
            raise ExchangeFailed(_failure(backend, Kind.BROKEN, str(error))) from error
        except (httpx.HTTPError, httpx.StreamError, OSError) as error:
            text = f"{type(error).__name__}: {error}".rstrip(": ")
            self._pool.failed(backend)
            self._pool.take_out(backend, f"a request failed, {text}")
            is_sent = not isinstance(error, httpx.ConnectError | httpx.ConnectTimeout)
            kind = Kind.BROKEN if is_sent else Kind.UNREACHABLE
            raise ExchangeFailed(_failure(backend, kind, text)) from error
        except ExchangeFailed as error:
            if error.failure.status is not None and error.failure.status >= 500:
                self._pool.failed(backend)
            raise
        finally:
            if response is not None:
                await response.aclose()

    async def _read(self, response: httpx.Response, most_bytes: int | None = None) -> bytes:
        most_bytes = self._options.max_answer_bytes if most_bytes is None else most_bytes
        content = bytearray()
        async for piece in response.aiter_bytes():
            content += piece
            if len(content) > most_bytes:
                raise ValueError(f"an answer of more than {most_bytes} bytes")
        return bytes(content)


def _failure(backend: Backend, kind: Kind, text: str) -> Failure:
    return Failure(role=backend.role, backend=backend.url, kind=kind, text=text)


def _http_status(backend: Backend, status: int, answer: bytes) -> Failure:
    return Failure(
        role=backend.role,
        backend=backend.url,
        kind=Kind.STATUS,
        status=status if 400 <= status <= 599 else 502,
        text=f"HTTP {status}: {answer[:300].decode(errors='replace').strip()}",
        answer=answer if answer.lstrip().startswith(b"{") else None,
    )


def _error_status(backend: Backend, error: Mapping[str, object], data: bytes) -> Failure:
    code = error.get("code")
    status = code if isinstance(code, int) and 400 <= code <= 599 else 500
    return _http_status(backend, status, msgspec.json.encode({"error": error}) if error else data)
