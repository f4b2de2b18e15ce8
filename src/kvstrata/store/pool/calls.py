"""Library calls with a deadline of ours: a call that blocks for longer is given up, not waited for.

| call | when it returns | what is said |
|---|---|---|
| in time | its result goes to the caller | result, or what it raised |
| given up | `if_late` runs in its thread | `DeadlineExceeded` |
| refused | it was never made | `StoreUnavailable` |

After a call was given up all others are refused for a while: a pool that does not answer costs its users
one deadline, not one each.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, TypeVar

from kvstrata.errors import DeadlineExceeded, StoreUnavailable

_Result = TypeVar("_Result")

STUCK_LIMIT = 8
"""Calls given up that may hang at the same time; above that every call is refused until one returns."""


class _Job:
    def __init__(self, call: Callable[[], Any], if_late: Callable[[], None]) -> None:
        self.call = call
        self.if_late = if_late
        self.ended = threading.Event()
        self.is_given_up = False
        self.result: Any = None
        self.error: BaseException | None = None


class BoundedCalls:
    """Thread-safe. Threads are made when needed, kept, and end with the process (they are daemons)."""

    def __init__(
        self,
        name: str,
        *,
        deadline_s: float,
        rest_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`name` says in errors whose calls these are; `rest_s` is for how long others are refused."""
        self._name = name
        self._deadline_s = deadline_s
        self._rest_s = rest_s
        self._clock = clock
        self._lock = threading.Lock()
        self._returned = threading.Condition(self._lock)
        self._idle: list[SimpleQueue[_Job | None]] = []
        self._rest_until = float("-inf")
        self._stuck = 0
        self._is_closed = False

    @property
    def stuck(self) -> int:
        """Calls given up that have not returned."""
        with self._lock:
            return self._stuck

    def run(self, what: str, call: Callable[[], _Result], *, if_late: Callable[[], None]) -> _Result:
        """Make a call and return its result; raise what it raises.

        Raises `DeadlineExceeded` when it does not return in time, and calls `if_late` as soon as it does,
        from another thread: until then it may use its buffers. Raises `StoreUnavailable` without having made
        the call; `if_late` does not run then.
        """
        job = _Job(call, if_late)
        self._take_thread(what).put(job)
        if not job.ended.wait(self._deadline_s):
            with self._lock:
                if not job.ended.is_set():
                    job.is_given_up = True
                    self._stuck += 1
                    self._rest_until = self._clock() + self._rest_s
                    raise DeadlineExceeded(f"{self._name}: {what}", self._deadline_s)
        if job.error is not None:
            raise job.error
        result: _Result = job.result
        return result

    def await_stuck(self, *, timeout_s: float) -> bool:
        """Wait for the calls that were given up; whether all have returned."""
        with self._returned:
            return self._returned.wait_for(lambda: self._stuck == 0, timeout_s)

    def close(self) -> None:
        """End the idle threads; calls are refused from now on."""
        with self._lock:
            self._is_closed = True
            idle, self._idle = self._idle, []
        for inbox in idle:
            inbox.put(None)

    def _take_thread(self, what: str) -> SimpleQueue[_Job | None]:
        with self._lock:
            if self._is_closed:
                raise StoreUnavailable(f"{self._name} was closed")
            if self._stuck >= STUCK_LIMIT:
                raise StoreUnavailable(f"{self._name}: {self._stuck} calls hang, so {what} was not tried")
            if self._clock() < self._rest_until:
                raise StoreUnavailable(f"{self._name} did not answer just now, so {what} was not tried")
            if self._idle:
                return self._idle.pop()
        inbox: SimpleQueue[_Job | None] = SimpleQueue()
        threading.Thread(target=self._work, args=(inbox,), name="kvstrata-pool-call", daemon=True).start()
        return inbox

    def _work(self, inbox: SimpleQueue[_Job | None]) -> None:
        while (job := inbox.get()) is not None:
            try:
                job.result = job.call()
            except BaseException as error:  # the caller's to see, whatever it is
                job.error = error
            with self._lock:
                job.ended.set()
                is_late = job.is_given_up
                self._stuck -= is_late
                self._returned.notify_all()
                if self._is_closed:
                    inbox.put(None)
                else:
                    self._idle.append(inbox)
            if is_late:
                job.if_late()
            del job  # and with it what the call closed over
