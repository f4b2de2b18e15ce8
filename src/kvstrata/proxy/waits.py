"""Waits with a name and a deadline, which somebody else may cut short."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from contextlib import suppress
from typing import TypeVar

from kvstrata.errors import DeadlineExceeded
from kvstrata.proxy.failures import ExchangeFailed, Failure, Role

T = TypeVar("T")


class Waits:
    """The waits of one task, one at a time. `interrupt` is called from other tasks of the same loop."""

    def __init__(self) -> None:
        self._failure: Failure | None = None
        self._limit: asyncio.Timeout | None = None

    def interrupt(self, failure: Failure) -> None:
        """End the present wait, and any later one, with this failure. The first one counts."""
        if self._failure is None:
            self._failure = failure
        if self._limit is not None:
            with suppress(RuntimeError):  # it is ending anyway
                self._limit.reschedule(0)

    def disregard(self, role: Role) -> None:
        """Forget an interruption for a failure of that role."""
        if self._failure is not None and self._failure.role is role:
            self._failure = None

    def _check(self) -> None:
        if self._failure is not None:
            raise ExchangeFailed(self._failure)

    async def until(
        self, awaitable: Awaitable[T], name: str, deadline_s: float, *, left_s: float | None = None
    ) -> T:
        """Return the awaited result. Raises ExchangeFailed if interrupted, else DeadlineExceeded(name).

        `left_s` is what is left of the deadline, if the wait began earlier.
        """
        left_s = deadline_s if left_s is None else left_s
        self._limit = asyncio.timeout(0 if self._failure is not None else left_s)
        try:
            async with self._limit:
                return await awaitable
        except TimeoutError:
            self._check()
            raise DeadlineExceeded(name, deadline_s) from None
        finally:
            self._limit = None
