"""The thread that holds a part back until its rows are in the home; the engine's own thread never waits."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from kvstrata.errors import DeadlineExceeded
from kvstrata.move.engine import CopyToken
from kvstrata.move.ledger import Ticket

FIRST_POLL_S = 0.0002
LAST_POLL_S = 0.005


@dataclass(frozen=True, kw_only=True)
class Part:
    """A part as `ProducerEndpoint.publish` takes it."""

    transfer: str
    layer: int
    first_block: int
    end_block: int
    blocks: tuple[int, ...]
    is_last: bool
    after: CopyToken | None


class Publish(Protocol):
    def __call__(self, part: Part, failure: str | None) -> None:
        """Publish the part, or end its transfer if its rows never reached the home. Must not raise."""


class Publisher:
    """Calls `publish` for every part in the order submitted, once its token has settled or is overdue."""

    def __init__(
        self,
        *,
        publish: Publish,
        is_wanted: Callable[[str], bool],
        deadline_s: float,
        clock: Callable[[], float],
    ) -> None:
        """`is_wanted` says of a transfer whether it is worth waiting for its parts."""
        self.waited_s = 0.0
        self._publish = publish
        self._is_wanted = is_wanted
        self._deadline_s = deadline_s
        self._clock = clock
        self._changed = threading.Condition()
        self._parts: deque[Part] = deque()
        self._is_closing = False
        self._thread = threading.Thread(target=self._serve, name="kvstrata-publish", daemon=True)
        self._thread.start()

    def submit(self, part: Part) -> None:
        """Queue a part; returns at once. Any thread."""
        with self._changed:
            self._parts.append(part)
            self._changed.notify()

    @property
    def is_alive(self) -> bool:
        """False if a defect ended the thread."""
        return self._is_closing or self._thread.is_alive()

    def close(self, *, deadline_s: float) -> bool:
        """Drop what waits and end the thread; False if it still waits for a token."""
        with self._changed:
            self._is_closing = True
            self._parts.clear()
            self._changed.notify()
        self._thread.join(deadline_s)
        return not self._thread.is_alive()

    def _serve(self) -> None:
        while (part := self._next()) is not None:
            must_wait = part.after is not None and self._is_wanted(part.transfer)
            self._publish(part, self._failure_of(part.after) if must_wait and part.after else None)

    def _next(self) -> Part | None:
        with self._changed:
            while not self._parts:
                if self._is_closing:
                    return None
                self._changed.wait()
            return self._parts.popleft()

    def _failure_of(self, token: CopyToken) -> str | None:
        started_s = self._clock()
        try:
            if isinstance(token, Ticket):
                # Not `wait`: the engine's own step must still be told of a failure.
                failure = token.outcome(self._deadline_s)
                return None if failure is None else f"{failure.origin} failed: {failure.cause}"
            self._poll(token, started_s)
        except BaseException as cause:  # a foreign token may raise anything; the part must be answered
            return str(cause) or repr(cause)
        finally:
            self.waited_s += self._clock() - started_s
        return None

    def _poll(self, token: CopyToken, started_s: float) -> None:
        """A device's `wait` would only order its streams, so the host asks until the rows are there."""
        pause_s = FIRST_POLL_S
        while not token.done():
            if self._is_closing or self._clock() - started_s > self._deadline_s:
                raise DeadlineExceeded(f"waiting for {token.name!r} before publishing", self._deadline_s)
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LAST_POLL_S)
