"""Asks every engine for its health: puts it in, takes it out, gives it up."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress

import httpx

from kvstrata.proxy.backends import Backend, Pool
from kvstrata.proxy.options import ProxyOptions

log = logging.getLogger(__name__)


class HealthWatch:
    """One task an engine, from `start` to `stop`.

    An engine that says no, or refuses connections, is out at once. One that says nothing is out after
    `misses_until_out` checks and lost after `misses_until_lost`: it may be busy, or stopped.
    """

    def __init__(self, options: ProxyOptions, pool: Pool, client: httpx.AsyncClient) -> None:
        self._options, self._pool, self._client = options, pool, client
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begin to check; the first check of each engine is made at once."""
        self._tasks = [
            asyncio.create_task(self._watch(backend), name=f"health of {backend}")
            for backend in self._pool.backends
        ]

    async def stop(self) -> None:
        """End all checks."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _watch(self, backend: Backend) -> None:
        misses = 0
        while True:
            backend.check_now.clear()
            try:
                misses = await self._check(backend, misses)
            except Exception:  # a defect here must not leave an engine out for ever
                log.exception("health check of %s", backend)
                misses = 0
            # A request that fails wakes it up early; a dead engine would make that a busy loop but for the
            # state: only an engine that was in wakes it.
            with suppress(TimeoutError):
                # Not wait_for: that of Python 3.11 forgets a cancellation that comes with the event.
                async with asyncio.timeout(self._options.health_interval_s):
                    await backend.check_now.wait()

    async def _check(self, backend: Backend, misses: int) -> int:
        """Check once and return how many checks in a row have had no answer."""
        deadline_s = self._options.health_deadline_s
        # A task of its own, which nobody waits for once it is late: a library that forgets its cancellation
        # would else end the checks of this engine for good.
        asking = asyncio.create_task(self._ask(backend), name=f"health check of {backend}")
        try:
            await asyncio.wait({asking}, timeout=deadline_s)
        finally:
            asking.cancel()
        try:
            response = asking.result() if asking.done() else None
        except httpx.TimeoutException:
            response = None
        except Exception as error:  # whatever a library raises must not end the checks either
            self._pool.take_out(backend, f"health check: {type(error).__name__}: {error}".rstrip(": "))
            return 0
        if response is None:
            misses += 1
            why = f"no answer to {misses} health check{'s' * (misses > 1)} within {deadline_s:g} s"
            if misses >= self._options.misses_until_lost:
                self._pool.lose(backend, why)
            elif misses >= self._options.misses_until_out or not backend.is_in:
                self._pool.take_out(backend, why)
            return misses
        if response.status_code == 200:
            self._pool.put_in(backend)
        else:
            self._pool.take_out(backend, f"health check: HTTP {response.status_code}")
        return 0

    async def _ask(self, backend: Backend) -> httpx.Response:
        return await self._client.get(backend.url + "/health")
