"""What all calls of a `PooledStore` share: the client, its staging memory, the deadline, the clock."""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from kvstrata.errors import DeadlineExceeded, StoreError
from kvstrata.store.base import Status, StoreKey
from kvstrata.store.pool.calls import BoundedCalls
from kvstrata.store.pool.client import PoolClient, PoolRead, Span
from kvstrata.store.pool.envelope import (
    FIRST_READ_BYTES,
    LONGEST_HEAD_BYTES,
    STAMP_BYTES,
    Envelope,
    pool_key,
)
from kvstrata.store.pool.seldom import SeldomLog
from kvstrata.store.pool.staging import Room, Staging

logger = logging.getLogger(__name__)

_Result = TypeVar("_Result")

_left_open: list[PoolClient] = []

FAULTS = (StoreError, DeadlineExceeded)
"""What a call on the data path answers with BACKEND_DOWN."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolLimits:
    """How long and how much. `BACKEND_DOWN` or `FULL` is the answer beyond."""

    deadline_s: float = 5.0  # of one call of the library
    close_wait_s: float = 10.0  # for calls that were given up, before a pool is closed
    rest_s: float = 1.0  # without calls, after one was given up
    full_wait_s: float = 0.5  # for the pool to evict, before a put is answered FULL
    keep_every_s: float = 0.25  # leased objects are asked for this often
    hold_s: float = 1.0  # for how long each time; the pool's own lease time is not shorter
    read_lease_s: float = 1.0  # for one read, where a pool needs a lease for it
    glance_lease_s: float = 0.1  # the same, for one look at a head
    late_after_s: float = 60.0  # a reservation older than this counts as quarantined


class PoolSession:
    """One client and what goes with it. Any thread may call, in the process that opened it."""

    def __init__(
        self, client: PoolClient, *, staging_bytes: int, clock: Callable[[], float], limits: PoolLimits
    ) -> None:
        """Raises `StoreUnavailable` when the library gives no memory."""
        self.client = client
        self.clock = clock
        self.limits = limits
        self.staging = Staging(client.memory(staging_bytes), staging_bytes)
        self.calls = BoundedCalls(client.name, deadline_s=limits.deadline_s, rest_s=limits.rest_s)
        self._pid = os.getpid()
        self._is_closed = False
        self._log = SeldomLog(logger)

    def check_open(self) -> None:
        """Raise `StoreError` for a store that was closed or carried across a fork."""
        if os.getpid() != self._pid:
            raise StoreError(f"{self.client.name} was opened by another process: open it after the fork")
        if self._is_closed:
            raise StoreError(f"{self.client.name} was closed")

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._is_closed

    def run(self, what: str, call: Callable[[], _Result]) -> _Result:
        """Make a library call that uses no staging memory; raises one of FAULTS."""
        return self.calls.run(what, call, if_late=lambda: None)

    def run_in(self, room: Room, what: str, call: Callable[[], _Result]) -> _Result:
        """Make a library call that uses a room, which the caller keeps if the call returns in time.

        Raises one of FAULTS, and what the library raises. The room is not the caller's any more then: after
        `DeadlineExceeded` it comes back when the library lets go of it, else it is back already.
        """
        try:
            return self.calls.run(what, call, if_late=lambda: self.staging.give_back(room))
        except DeadlineExceeded:
            self.staging.quarantine(room)
            raise
        except BaseException:
            self.staging.give_back(room)
            raise

    def down(self, what: str, error: Exception) -> Status:
        """The answer of a call that met one of FAULTS."""
        self._log.warning(what, f"{self.client.name} does not answer to {what}: {error}")
        return Status.BACKEND_DOWN

    def envelopes(self, keys: Sequence[StoreKey], *, ttl_s: float | None = None) -> list[Envelope | Status]:
        """The heads of objects, which are held from eviction for `ttl_s` first. Raises one of FAULTS.

        None for `ttl_s`: they are only looked at. Any other is cut down to `hold_s`: who keeps a lease for
        longer asks again.
        """
        found = self._heads([(key, FIRST_READ_BYTES) for key in keys], ttl_s=ttl_s)
        longer = [(at, head) for at, head in enumerate(found) if isinstance(head, int)]
        rest = self._heads([(keys[at], head) for at, head in longer], ttl_s=None)
        for (at, _), head in zip(longer, rest, strict=True):
            found[at] = head
        return [Status.MISSING if isinstance(head, int) else head for head in found]

    def close(self) -> None:
        """Let go of the pool. Called once, in the process that opened it."""
        self.check_open()
        self._is_closed = True
        if not self.calls.await_stuck(timeout_s=self.limits.close_wait_s):
            # Libraries crash when they are closed under a call: this client stays until the process ends.
            logger.warning("%s is left open: calls that were given up still hang", self.client.name)
            _left_open.append(self.client)
            self.calls.close()
            return
        try:
            self.run("close", self.client.close)
        except FAULTS as error:
            self.down("close", error)
        self.calls.close()

    def _heads(
        self, wanted: Sequence[tuple[StoreKey, int]], *, ttl_s: float | None
    ) -> list[Envelope | int | Status]:
        """What the first bytes of objects say; a number of bytes where more of them are needed."""
        most = max(1, self.staging.size_bytes // 4 // LONGEST_HEAD_BYTES)
        answers: list[Envelope | int | Status] = []
        for at in range(0, len(wanted), most):
            answers += self._some_heads(wanted[at : at + most], ttl_s)
        return answers

    def _some_heads(
        self, wanted: Sequence[tuple[StoreKey, int]], ttl_s: float | None
    ) -> list[Envelope | int | Status]:
        sizes = [size_bytes for _, size_bytes in wanted]
        room = self.staging.take(sum(sizes), timeout_s=self.limits.deadline_s)
        if room is None:
            raise StoreError("no staging memory is free: calls that were given up hold it")
        addresses = [room.address + sum(sizes[:at]) for at in range(len(sizes))]
        names = [pool_key(key) for key, _ in wanted]
        reads = [
            PoolRead(key=name, spans=(Span(offset=0, address=address, size_bytes=size_bytes),))
            for name, address, size_bytes in zip(names, addresses, sizes, strict=True)
        ]

        hold_s = None if ttl_s is None else min(ttl_s, self.limits.hold_s)
        lease_s = self.limits.glance_lease_s

        def call() -> list[Status]:
            held = [Status.OK] * len(names) if hold_s is None else self.client.hold(names, ttl_s=hold_s)
            there = [at for at, status in enumerate(held) if status is Status.OK]
            read = self.client.read([reads[at] for at in there], lease_s=lease_s) if there else []
            for at, status in zip(there, read, strict=True):
                held[at] = status
            return held

        statuses = self.run_in(room, f"reading {len(wanted)} heads", call)
        answers: list[Envelope | int | Status] = []
        for (key, size_bytes), address, status in zip(wanted, addresses, statuses, strict=True):
            if status is not Status.OK:
                answers.append(status)
                continue
            head = Envelope.decode(key_digest(key), ctypes.string_at(address, size_bytes))
            answers.append(Status.MISSING if head is None else head)
        self.staging.give_back(room)
        return answers


def key_digest(key: StoreKey) -> bytes:
    """What a head says of its key."""
    return bytes.fromhex(pool_key(key).rpartition("-")[2])


def stamp_span(address: int) -> Span:
    """Reads an object's stamp."""
    return Span(offset=0, address=address, size_bytes=STAMP_BYTES)
