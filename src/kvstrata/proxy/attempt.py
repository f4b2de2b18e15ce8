"""One prompt's way through decode and prefill, attempt after attempt."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from kvstrata.proxy.backends import Pool
from kvstrata.proxy.bodies import Child, Job, decode_body, prefill_body
from kvstrata.proxy.dispatch import Attempts, Plan
from kvstrata.proxy.events import data_of
from kvstrata.proxy.failures import ExchangeFailed, Failure, Kind, Role
from kvstrata.proxy.metaserver import Metaserver
from kvstrata.proxy.metrics import ProxyMetrics
from kvstrata.proxy.options import ProxyOptions
from kvstrata.proxy.upstream import Upstream
from kvstrata.proxy.waits import Waits
from kvstrata.remote.metaserver import Advert

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Engines:
    """What an attempt works with; one for the proxy."""

    options: ProxyOptions
    pool: Pool
    metaserver: Metaserver
    upstream: Upstream
    metrics: ProxyMetrics
    clock: Callable[[], float]
    new_id: Callable[[], str]
    leftovers: set[asyncio.Task[None]] = field(default_factory=set)  # prefills that outlive their answer
    ending: asyncio.Event = field(default_factory=asyncio.Event)  # once set, requests end with an error

    async def close(self) -> None:
        """Cancel the prefills that are still running."""
        await _cancel(*self.leftovers)


async def answer_child(
    engines: Engines, job: Job, child: Child, headers: Mapping[str, str]
) -> AsyncGenerator[bytes]:
    """Yield the answer to one prompt: whole events of a stream, or one JSON body.

    Raises Refused when there is no answer, or no rest of it. Closing it, or cancelling, aborts both engines.
    """
    attempts = Attempts(
        most=engines.options.most_attempts,
        wants_remote=job.wants_remote,
        choose=engines.pool.choose,
        why_none=engines.pool.why_none,
    )
    while True:
        attempt = _Attempt(engines, job, child, headers, attempts, attempts.next())
        try:
            async with aclosing(attempt.pieces()) as pieces:
                async for piece in pieces:
                    yield piece
            return
        except ExchangeFailed as error:
            log.warning("request %s, attempt %d: %s", headers["X-Request-Id"], attempt.plan.number, error)
            engines.metrics.attempt_failed(error.failure)
            attempts.failed(error.failure)


class _Attempt:
    """One decode request and, once decode asks for the prompt's KV, one prefill request."""

    def __init__(
        self,
        engines: Engines,
        job: Job,
        child: Child,
        headers: Mapping[str, str],
        attempts: Attempts,
        plan: Plan,
    ) -> None:
        self._engines, self._job, self._child, self._headers = engines, job, child, headers
        self._attempts, self.plan = attempts, plan
        self._waits = Waits()
        self._began_s = engines.clock()
        self._has_advert = False

    async def pieces(self) -> AsyncGenerator[bytes]:
        """Yield what decode answers. Raises ExchangeFailed for decode, or for prefill if that came first."""
        if not self.plan.is_remote:
            async with aclosing(self._decode(None)) as pieces:
                async for piece in pieces:
                    yield piece
            return
        # An id of its own for every attempt: engines may still be busy with the last one.
        transfer = self._engines.new_id()
        if len(self._job.children) > 1:
            transfer = f"{transfer}-{self._child.number}"
        advert = self._engines.metaserver.expect(transfer)
        prefill = asyncio.create_task(self._prefill(advert), name=f"prefill of {transfer}")
        try:
            async with aclosing(self._decode(transfer)) as pieces:
                async for piece in pieces:
                    yield piece
            if self._has_advert:
                # Decode has all it needs; prefill is about to say so, and may have work left to save.
                self._leave(prefill)
        finally:
            self._engines.metaserver.forget(transfer)
            if prefill not in self._engines.leftovers:
                await _cancel(prefill)

    async def _decode(self, transfer: str | None) -> AsyncGenerator[bytes]:
        engines, child, url = self._engines, self._child, self.plan.decode
        backend = engines.pool.named(Role.DECODE, url)
        body = decode_body(child.body, transfer, engines.options.metaserver_url)
        with engines.pool.work(backend, child.load_tokens, self._lost(Role.DECODE, url, self._waits)):
            exchange = (backend, self._job.path, body, self._headers, self._waits)
            if self._job.is_stream:
                events = engines.upstream.events(*exchange, name=f"the next token of decode {url}")
            else:
                events = _once(engines.upstream.answer(*exchange, name=f"the answer of decode {url}"))
            async with aclosing(events):
                async for event in events:
                    if not self._attempts.has_spoken and (
                        not self._job.is_stream or data_of(event) is not None
                    ):
                        self._attempts.speak()
                        self._waits.disregard(Role.PREFILL)  # whatever it says now, decode has what it needs
                        engines.metrics.prompt_answered(by_prefill=self._has_advert)
                    yield event

    async def _prefill(self, expected: asyncio.Future[Advert]) -> None:
        """Wait for decode's advert; then have a prefill engine compute the prompt, or interrupt decode."""
        advert = await expected
        self._has_advert = True
        self._engines.metrics.advert_came(self._engines.clock() - self._began_s)
        try:
            await self._ask_prefill(advert)
        except ExchangeFailed as error:
            if self._attempts.has_spoken:
                log.warning("request %s, late: %s", self._headers["X-Request-Id"], error)
            else:
                self._waits.interrupt(error.failure)

    async def _ask_prefill(self, advert: Advert) -> None:
        engines, url = self._engines, self._attempts.prefiller()
        if url is None:
            why = engines.pool.why_none(Role.PREFILL)
            raise ExchangeFailed(Failure(role=Role.PREFILL, backend="", kind=Kind.NOBODY, text=why))
        backend, waits = engines.pool.named(Role.PREFILL, url), Waits()
        body = prefill_body(self._child.body, advert, is_chat=self._job.is_chat)
        with engines.pool.work(backend, self._child.load_tokens, self._lost(Role.PREFILL, url, waits)):
            await engines.upstream.answer(
                backend, self._job.path, body, self._headers, waits, name=f"the answer of prefill {url}"
            )

    def _lost(self, role: Role, url: str, waits: Waits) -> Callable[[str], None]:
        return lambda why: waits.interrupt(Failure(role=role, backend=url, kind=Kind.LOST, text=why))

    def _leave(self, prefill: asyncio.Task[None]) -> None:
        if not prefill.done():
            self._engines.leftovers.add(prefill)
            prefill.add_done_callback(self._engines.leftovers.discard)


async def _once(answer: Coroutine[Any, Any, bytes]) -> AsyncGenerator[bytes]:
    yield await answer


async def _cancel(*tasks: asyncio.Task[None]) -> None:
    for task in tasks:
        task.cancel()
    for outcome in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(outcome, Exception):
            log.error("a prefill task failed", exc_info=outcome)
