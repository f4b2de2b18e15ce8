"""The engines behind the proxy: who is in, who is out and why, how busy each is, who is next.

    state  move       next  when
    OUT    put_in     IN    a health check was answered
    IN     take_out   OUT   a request could not be exchanged, or health checks failed
    OUT    take_out   OUT   the reason is renewed
An engine begins OUT, "not checked yet". One that is IN but answers requests with errors rests: it is chosen
only where no other one is left, for a time that doubles with every failure in a row.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from kvstrata.proxy.failures import Role

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class BackendStatistics:
    """One engine as the proxy sees it now."""

    role: Role
    url: str
    is_in: bool
    why_out: str
    requests: int  # in flight
    tokens: int  # of their prompts, roughly
    served: int  # requests begun since the start


class Backend:
    """One engine. Only its Pool changes it."""

    def __init__(self, role: Role, url: str) -> None:
        self.role, self.url = role, url.rstrip("/")
        self.is_in, self.why_out = False, "not checked yet"
        self.tokens, self.served = 0, 0
        self.on_lost: dict[object, Callable[[str], None]] = {}  # one a request in flight
        self.failures_in_row, self.rests_until_s = 0, 0.0
        self.check_now = asyncio.Event()

    def __repr__(self) -> str:
        return f"{self.role} {self.url}"


class Pool:
    """All engines. Used from the event loop's thread only."""

    def __init__(
        self,
        prefill: Collection[str],
        decode: Collection[str],
        *,
        clock: Callable[[], float] = time.monotonic,
        first_rest_s: float = 1.0,
        longest_rest_s: float = 30.0,
    ) -> None:
        self._clock = clock
        self._first_rest_s, self._longest_rest_s = first_rest_s, longest_rest_s
        roles = ((Role.PREFILL, prefill), (Role.DECODE, decode))
        self.backends = tuple(Backend(role, url) for role, urls in roles for url in urls)
        self._by_name = {(backend.role, backend.url): backend for backend in self.backends}

    def named(self, role: Role, url: str) -> Backend:
        """Return the engine of that role and URL; KeyError if there is none."""
        return self._by_name[role, url]

    def choose(self, role: Role, avoid: Collection[str] = ()) -> str | None:
        """Return the URL of the ready engine with the fewest prompt tokens in flight; None if none is ready.

        This changes nothing. Engines that are equally busy take turns, by requests begun.
        """
        now_s = self._clock()
        ready = [b for b in self.backends if b.role is role and b.is_in and b.url not in avoid]
        least = min(
            ready, key=lambda b: (now_s < b.rests_until_s, b.tokens, len(b.on_lost), b.served), default=None
        )
        return None if least is None else least.url

    @contextmanager
    def work(self, backend: Backend, tokens: int, on_lost: Callable[[str], None]) -> Iterator[None]:
        """Count a request of `tokens` prompt tokens while the block runs.

        `on_lost(why)` is called, at most once, if the engine stops answering meanwhile.
        """
        ticket = object()
        backend.on_lost[ticket] = on_lost
        backend.tokens += tokens
        backend.served += 1
        try:
            yield
        finally:
            backend.tokens -= tokens
            backend.on_lost.pop(ticket, None)

    def succeeded(self, backend: Backend) -> None:
        """Take note that a request was answered."""
        backend.failures_in_row, backend.rests_until_s = 0, 0.0

    def failed(self, backend: Backend) -> None:
        """Take note that a request was not answered, for the engine's own fault, and let it rest."""
        rest_s = min(self._longest_rest_s, self._first_rest_s * 2.0 ** min(backend.failures_in_row, 30))
        backend.failures_in_row += 1
        backend.rests_until_s = self._clock() + rest_s

    def put_in(self, backend: Backend) -> None:
        """Let the engine have requests."""
        if not backend.is_in:
            log.info("%s is in", backend)
        backend.is_in, backend.why_out = True, ""

    def take_out(self, backend: Backend, why: str) -> None:
        """Give the engine no more requests until it is healthy, and have its health checked at once."""
        if backend.is_in:
            log.warning("%s is out: %s", backend, why)
            backend.check_now.set()
        backend.is_in, backend.why_out = False, why

    def lose(self, backend: Backend, why: str) -> None:
        """Take the engine out and tell the requests that wait for it."""
        self.take_out(backend, why)
        for on_lost in list(backend.on_lost.values()):
            on_lost(why)

    def is_ready(self) -> bool:
        """Whether an engine of each role that there are engines of is in."""
        return all(self.choose(role) is not None for role in {b.role for b in self.backends})

    def why_none(self, role: Role) -> str:
        """Say why no engine of the role is ready."""
        reasons = [f"{b.url} is out: {b.why_out}" for b in self.backends if b.role is role and not b.is_in]
        return "; ".join(reasons) or f"there is no {role} engine"

    def statistics(self) -> tuple[BackendStatistics, ...]:
        """Return every engine's state."""
        return tuple(
            BackendStatistics(
                role=b.role,
                url=b.url,
                is_in=b.is_in,
                why_out=b.why_out,
                requests=len(b.on_lost),
                tokens=b.tokens,
                served=b.served,
            )
            for b in self.backends
        )

    def check_integrity(self) -> None:
        """Assert what holds between any two calls."""
        for b in self.backends:
            assert b.is_in == (not b.why_out), b
            assert b.tokens >= 0, b
            assert (b.tokens == 0) == (not b.on_lost), b
