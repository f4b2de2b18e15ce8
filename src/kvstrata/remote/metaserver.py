"""Decode tells the proxy where a prompt's KV is wanted: the advert, how it is signed, and who delivers it.

Source: seed, Joint Prefill and Decode Design, request flow, step 2. The reference counts an advert that the
metaserver answered with HTTP 500 as delivered; here it is sent again, with back-off, until a deadline.

The URL comes with the request and may be anybody's, so the secret itself never goes there: what is sent is a
signature of this one advert.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Annotated, Any

import httpx
import msgspec
from msgspec import Meta

from kvstrata.errors import DeadlineExceeded, TransferFailed
from kvstrata.remote.protocol.messages import Count, Short

MAX_ADVERT_BYTES = 16 << 10
_MAX_REASON_CHARACTERS = 300
_REPEATED = 409  # the metaserver has it: an answer got lost on the way
_TRY_AGAIN = frozenset({408, 425, 429})  # and every 5xx


class Advert(msgspec.Struct, frozen=True, kw_only=True):
    """Where and from which block on decode wants the KV of a prompt. Later versions may add fields."""

    transfer_id: Annotated[str, Meta(min_length=1, max_length=256)]
    request_id: Short
    host: Annotated[str, Meta(min_length=1, max_length=256)]
    kv_port: Annotated[int, Meta(ge=1, le=65535)]
    tp_size: Annotated[int, Meta(ge=1, le=1 << 16)]
    dp_rank: Count
    first_block: Count
    num_tokens: Count
    block_tokens: Annotated[int, Meta(ge=1, lt=1 << 31)]


def decode_advert(body: bytes) -> Advert:
    """Return the advert in a request's body; raises ValueError with what is wrong with it."""
    try:
        return msgspec.json.decode(body, type=Advert)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise ValueError(str(error) or type(error).__name__) from error


def authorization(secret: bytes, body: bytes) -> str:
    """Return the value of the Authorization header that goes with an advert's body."""
    return "Bearer " + hmac.new(secret, b"kvstrata advert\n" + body, hashlib.sha256).hexdigest()


def is_authorized(secret: bytes, body: bytes, header: str) -> bool:
    """Whether the sender of `body` knows the secret; takes the same time whatever the header says."""
    return hmac.compare_digest(authorization(secret, body).encode(), header.encode("utf-8", "replace"))


@dataclass(frozen=True)
class FailedAdvert:
    """An advert that nobody took: no prefill will happen for the transfer."""

    transfer_id: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class MetaserverStatistics:
    """Counts since construction; `sent == delivered + failed + cancelled + waiting`."""

    sent: int
    delivered: int
    failed: int
    cancelled: int
    waiting: int
    repeated: int  # attempts beyond the first of an advert


class MetaserverClient:
    """Delivers adverts from a thread of its own; one for an engine. Methods may be called from any thread.

    Adverts do not wait for each other: a proxy that hangs delays its own alone.
    """

    def __init__(
        self,
        secret: bytes,
        *,
        deadline_s: float = 30.0,
        attempt_s: float = 5.0,
        first_pause_s: float = 0.1,
        longest_pause_s: float = 2.0,
        most_waiting: int = 4096,
        clock: Callable[[], float] = time.monotonic,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        """`deadline_s` bounds all attempts for one advert; `jitter` returns a number from 0 up to 1."""
        self._secret = secret
        self._deadline_s, self._attempt_s = deadline_s, attempt_s
        self._first_pause_s, self._longest_pause_s = first_pause_s, longest_pause_s
        self._most_waiting = most_waiting
        self._clock, self._jitter = clock, jitter
        self._lock = threading.Lock()  # guards what follows
        self._counts: Counter[str] = Counter()
        self._waiting: dict[str, Callable[[str, str], object]] = {}  # transfer -> on_failed
        self._failed: list[FailedAdvert] = []
        self._is_closed = False
        self._cause: BaseException | None = None
        # Owned by the thread:
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="kvstrata-metaserver", daemon=True)
        self._thread.start()

    def send(self, url: str, advert: Advert, on_failed: Callable[[str, str], object] | None = None) -> None:
        """Deliver `advert` to `url` in the background, once per transfer.

        A failure is reported by `take_failed`, and at once by `on_failed(transfer_id, reason)` from this
        client's thread. Raises TransferFailed if the client was closed or its thread has died.
        """
        transfer = advert.transfer_id
        with self._lock:
            self._check_alive()
            if transfer in self._waiting:
                return
            self._counts["sent"] += 1
            is_full = len(self._waiting) >= self._most_waiting
            self._waiting[transfer] = on_failed or _nobody_listens
        if is_full:
            self._fail(transfer, f"{self._most_waiting} adverts are waiting already")
        else:
            self._call(lambda: self._start(transfer, self._deliver(url, advert)))

    def cancel(self, transfer: str) -> None:
        """Stop delivering: the request is gone. No-op, if it was delivered or has failed."""
        with self._lock:
            if self._waiting.pop(transfer, None) is None:
                return
            self._counts["cancelled"] += 1
        self._call(lambda: self._stop(transfer))

    def take_failed(self) -> list[FailedAdvert]:
        """Return the adverts that failed since the last call, each once."""
        with self._lock:
            failed, self._failed = self._failed, []
        return failed

    def statistics(self) -> MetaserverStatistics:
        """Return the counts since construction."""
        with self._lock:
            return MetaserverStatistics(
                sent=self._counts["sent"],
                delivered=self._counts["delivered"],
                failed=self._counts["failed"],
                cancelled=self._counts["cancelled"],
                waiting=len(self._waiting),
                repeated=self._counts["repeated"],
            )

    def check_integrity(self) -> None:
        """Assert what holds between any two calls."""
        counts = self.statistics()
        ended = counts.delivered + counts.failed + counts.cancelled
        assert counts.sent == ended + counts.waiting, counts

    def close(self, deadline_s: float = 5.0) -> None:
        """Fail what is waiting and end the thread. Raises DeadlineExceeded if it does not end."""
        with self._lock:
            was_closed, self._is_closed = self._is_closed, True
        if not was_closed and self._thread.is_alive():
            self._call(self._loop.stop)
        self._thread.join(deadline_s)
        if self._thread.is_alive():
            raise DeadlineExceeded("end of the metaserver client's thread", deadline_s)
        self._fail_all("the engine is shutting down")

    # Everything below runs in the thread, except _call, _fail and _fail_all, which run anywhere.

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            # Proxies of the environment are for the world outside, not for the machine beside this one.
            self._client = httpx.AsyncClient(timeout=None, trust_env=False, follow_redirects=False)
            self._loop.run_forever()
            self._loop.run_until_complete(self._wind_up())
        except BaseException as error:
            with self._lock:
                self._cause = error
            self._fail_all(f"the metaserver thread died: {error!r}")
        finally:
            self._loop.close()

    async def _wind_up(self) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._client.aclose()

    def _start(self, transfer: str, delivery: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(delivery, name=f"advert of {transfer}")
        self._tasks[transfer] = task
        task.add_done_callback(lambda done: self._ended(transfer, done))

    def _stop(self, transfer: str) -> None:
        task = self._tasks.get(transfer)
        if task is not None:
            task.cancel()

    def _ended(self, transfer: str, task: asyncio.Task[None]) -> None:
        if self._tasks.get(transfer) is task:
            del self._tasks[transfer]
        if not task.cancelled() and task.exception() is not None:
            self._fail(transfer, f"{task.exception()!r}")

    async def _deliver(self, url: str, advert: Advert) -> None:
        transfer, body = advert.transfer_id, msgspec.json.encode(advert)
        ends_s, pause_s, attempts = self._clock() + self._deadline_s, self._first_pause_s, 0
        reason = ""
        while True:
            attempts += 1
            left_s = max(ends_s - self._clock(), 0.001)
            status, latest = await self._attempt(url, body, min(self._attempt_s, left_s))
            # An attempt that the deadline cut short says less than the one before it.
            is_cut_short = status is None and left_s < self._attempt_s
            reason = reason if reason and is_cut_short else latest
            if status in (200, _REPEATED):
                return self._delivered(transfer)
            if status is not None and status < 500 and status not in _TRY_AGAIN:
                return self._fail(transfer, f"{url}: {reason}")
            # Half of the pause is chance, so that the engines do not all come back at once.
            next_s = pause_s * (0.5 + self._jitter() / 2)
            if self._clock() + next_s >= ends_s:
                return self._fail(
                    transfer,
                    f"advert to {url}: not delivered within {self._deadline_s:g} s "
                    f"({attempts} attempts; the last: {reason})",
                )
            await asyncio.sleep(next_s)
            pause_s = min(2 * pause_s, self._longest_pause_s)
            with self._lock:
                self._counts["repeated"] += 1

    async def _attempt(self, url: str, body: bytes, deadline_s: float) -> tuple[int | None, str]:
        """Return the HTTP status, None if there was none, and what to say about it; 400 for a bad URL."""
        headers = {"Content-Type": "application/json", "Authorization": authorization(self._secret, body)}
        try:
            async with (
                asyncio.timeout(deadline_s),
                self._client.stream("POST", url, content=body, headers=headers) as response,
            ):
                text = b""
                async for piece in response.aiter_bytes(_MAX_REASON_CHARACTERS):
                    text = piece
                    break
        except TimeoutError:
            return None, f"no answer within {deadline_s:.3g} s"
        except (httpx.UnsupportedProtocol, httpx.InvalidURL, UnicodeError) as error:
            return 400, f"not a URL to post to ({error})"
        except (httpx.HTTPError, OSError) as error:
            return None, f"{type(error).__name__}: {error}"
        return response.status_code, f"HTTP {response.status_code}: {text.decode(errors='replace').strip()}"

    def _delivered(self, transfer: str) -> None:
        with self._lock:
            if self._waiting.pop(transfer, None) is not None:
                self._counts["delivered"] += 1

    def _fail(self, transfer: str, reason: str) -> None:
        with self._lock:
            on_failed = self._waiting.pop(transfer, None)
            if on_failed is None:
                return
            self._counts["failed"] += 1
            self._failed.append(FailedAdvert(transfer, reason))
        on_failed(transfer, reason)

    def _fail_all(self, reason: str) -> None:
        with self._lock:
            transfers = list(self._waiting)
        for transfer in transfers:
            self._fail(transfer, reason)

    def _call(self, what: Callable[[], object]) -> None:
        try:
            self._loop.call_soon_threadsafe(what)
        except RuntimeError as error:  # the loop has ended: _fail_all has spoken or will
            if not self._is_closed:
                raise TransferFailed(f"the metaserver thread died: {self._cause!r}") from error

    def _check_alive(self) -> None:
        if self._is_closed:
            raise TransferFailed("the metaserver client is closed")
        if self._cause is not None:
            raise TransferFailed(f"the metaserver thread died: {self._cause!r}") from self._cause


def _nobody_listens(transfer: str, reason: str) -> None:
    """Stand in for `on_failed`: `take_failed` reports the failure anyway."""
