"""The threads that read on behalf of a consumer: one read a peer at a time, several peers at once.

Every read that is submitted is reported exactly once, whatever happens to it: a transfer's destination is
quarantined until then, so a report that never came would hold its blocks for ever.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from kvstrata.errors import DeadlineExceeded
from kvstrata.remote.holds import Hold, HoldRevoked
from kvstrata.remote.transports.base import Reader, ReadPlan

logger = logging.getLogger("vllm.kvstrata.remote")


class Unreadable(Exception):  # noqa: N818 - named for what happened
    """A read that cannot succeed however often it is tried."""


class ReadReport(Protocol):
    def __call__(self, number: int, error: str | None, *, is_final: bool) -> None:
        """The read is over and writes nothing any more; `error` is None if every byte landed."""


@dataclass(frozen=True, kw_only=True)
class ReadJob:
    """One part to read from `peer`. `plan` is called in the reading thread."""

    number: int
    peer: str
    transfer: str
    hold: Hold
    plan: Callable[[], ReadPlan]


@dataclass(kw_only=True, eq=False)
class _Connection:
    """The way to one peer, and what waits for it."""

    connect: Callable[[], Reader]
    jobs: deque[ReadJob] = field(default_factory=deque)
    running: ReadJob | None = None
    reader: Reader | None = None
    failures: int = 0  # of reads in a row
    is_lost: bool = False
    close_at_s: float | None = None  # a running read was cancelled: time to end by itself


@dataclass(frozen=True, kw_only=True)
class ReadPoolStatistics:
    """Counts since construction; `submitted == done + failed + cancelled + queued + running`."""

    submitted: int
    done: int
    failed: int
    cancelled: int  # reported without having begun
    queued: int
    running: int
    connects: int
    read_bytes: int
    read_s: float  # in readers, summed over the threads
    connect_s: float
    queued_s: float  # between submission and begin, summed over the reads


class ReadPool:
    """`readers` threads. Any thread may call any method; only `close` waits."""

    def __init__(
        self,
        *,
        readers: int,
        read_deadline_s: float,
        cancel_grace_s: float,
        report: ReadReport,
        clock: Callable[[], float],
    ) -> None:
        """A cancelled read that still runs after `cancel_grace_s` has its connection closed under it."""
        self._deadline_s = read_deadline_s
        self._grace_s = cancel_grace_s
        self._report = report
        self._clock = clock
        self._changed = threading.Condition()
        self._connections: dict[str, _Connection] = {}
        self._ready: deque[_Connection] = deque()  # with jobs and without a thread; each once
        self._submitted_s: dict[int, float] = {}
        self._counts: Counter[str] = Counter()
        self._seconds = {"read": 0.0, "connect": 0.0, "queued": 0.0}
        self._is_closing = False
        self._threads = [
            threading.Thread(target=self._serve, name=f"kvstrata-read-{n}", daemon=True)
            for n in range(readers)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, job: ReadJob, connect: Callable[[], Reader]) -> None:
        """Read when it is the peer's turn, over its connection or else one that `connect` makes."""
        with self._changed:
            self._counts["submitted"] += 1
            if not self._is_closing:
                connection = self._connections.setdefault(job.peer, _Connection(connect=connect))
                connection.connect = connect
                connection.jobs.append(job)
                self._submitted_s[job.number] = self._clock()
                self._offer(connection)
                return
        self._answer_unread([job], "the endpoint is closing")

    def cancel(self, transfer: str) -> None:
        """Report what waits of this transfer at once, and what runs soon."""
        with self._changed:
            unread = []
            for connection in self._connections.values():
                unread += [job for job in connection.jobs if job.transfer == transfer]
                connection.jobs = deque(job for job in connection.jobs if job.transfer != transfer)
                if connection.running is not None and connection.running.transfer == transfer:
                    connection.close_at_s = self._clock() + self._grace_s
        self._answer_unread(unread, "its transfer ended")

    def lose(self, peer: str) -> None:
        """Close the connection to a peer that is gone; what waits for it is reported at once."""
        with self._changed:
            connection = self._connections.pop(peer, None)
            if connection is None:
                return
            connection.is_lost = True
            unread, connection.jobs = list(connection.jobs), deque()
            reader = connection.reader
        self._answer_unread(unread, "the producer is gone")
        _close(reader)

    def next_tick_s(self) -> float | None:
        """When `tick` has something to do, on the clock."""
        with self._changed:
            times = [c.close_at_s for c in self._connections.values() if c.close_at_s is not None]
        return min(times, default=None)

    def tick(self) -> None:
        """Close connections under reads that were cancelled long enough ago."""
        now_s = self._clock()
        readers = []
        with self._changed:
            for connection in self._connections.values():
                if connection.close_at_s is not None and connection.close_at_s <= now_s:
                    connection.close_at_s = None
                    readers.append(connection.reader)
                    self._counts["closed_under_reads"] += 1
        for reader in readers:
            _close(reader)

    def statistics(self) -> ReadPoolStatistics:
        """Return the counts since construction."""
        with self._changed:
            counts, seconds = self._counts, self._seconds
            return ReadPoolStatistics(
                submitted=counts["submitted"],
                done=counts["done"],
                failed=counts["failed"],
                cancelled=counts["cancelled"],
                queued=len(self._submitted_s),
                running=counts["begun"] - counts["done"] - counts["failed"],
                connects=counts["connects"],
                read_bytes=counts["read_bytes"],
                read_s=seconds["read"],
                connect_s=seconds["connect"],
                queued_s=seconds["queued"],
            )

    def check_integrity(self) -> None:
        """Assert that every submitted read is somewhere, once."""
        counts = self.statistics()
        ended = counts.done + counts.failed + counts.cancelled
        assert counts.submitted == ended + counts.queued + counts.running, counts
        assert 0 <= counts.running <= len(self._threads), counts

    @property
    def is_alive(self) -> bool:
        """False if a defect ended a thread, whose read is then never reported."""
        return self._is_closing or all(thread.is_alive() for thread in self._threads)

    def stop(self) -> None:
        """Report everything that waits and close every connection; nothing new is read."""
        with self._changed:
            self._is_closing = True
            peers = list(self._connections)
            self._changed.notify_all()
        for peer in peers:
            self.lose(peer)

    def close(self, *, deadline_s: float) -> None:
        """Stop and end the threads.

        Raises DeadlineExceeded if a read still runs: its destination must stay mapped.
        """
        self.stop()
        end_s = self._clock() + deadline_s
        for thread in self._threads:
            thread.join(max(0.0, end_s - self._clock()))
        if any(thread.is_alive() for thread in self._threads):
            raise DeadlineExceeded("ending the reads of the decode endpoint", deadline_s)

    def _offer(self, connection: _Connection) -> None:
        if connection.jobs and connection.running is None and connection not in self._ready:
            self._ready.append(connection)
            self._changed.notify()

    def _answer_unread(self, jobs: list[ReadJob], error: str) -> None:
        with self._changed:
            self._counts["cancelled"] += len(jobs)
            for job in jobs:
                self._submitted_s.pop(job.number, None)
        for job in jobs:
            self._report(job.number, error, is_final=True)

    def _serve(self) -> None:
        while (taken := self._take()) is not None:
            connection, job = taken
            error: str | None = None
            is_final = False
            moved_bytes = 0
            try:
                moved_bytes = self._read(connection, job)
            except (Unreadable, HoldRevoked) as cause:
                error, is_final = str(cause), True
            except BaseException as cause:  # even SystemExit: the transfer waits for the report
                error = str(cause) or repr(cause)
                logger.debug("read %d of transfer %s failed", job.number, job.transfer, exc_info=True)
            self._end(connection, error, moved_bytes)
            self._report(job.number, error, is_final=is_final)

    def _take(self) -> tuple[_Connection, ReadJob] | None:
        with self._changed:
            while True:
                while self._ready:
                    connection = self._ready.popleft()
                    if connection.jobs:
                        job = connection.running = connection.jobs.popleft()
                        self._counts["begun"] += 1
                        self._seconds["queued"] += self._clock() - self._submitted_s.pop(job.number)
                        return connection, job
                if self._is_closing:
                    return None
                self._changed.wait()

    def _read(self, connection: _Connection, job: ReadJob) -> int:
        plan = job.plan()
        if not len(plan):
            return 0
        reader = self._reader_of(connection)
        started_s = self._clock()
        try:
            reader.read(plan, job.hold, deadline_s=self._deadline_s)
        finally:
            with self._changed:
                self._seconds["read"] += self._clock() - started_s
        return plan.total_bytes

    def _reader_of(self, connection: _Connection) -> Reader:
        reader = connection.reader
        if reader is None:
            started_s = self._clock()
            reader = connection.connect()
            with self._changed:
                self._counts["connects"] += 1
                self._seconds["connect"] += self._clock() - started_s
                connection.reader = reader
        if connection.is_lost:
            # Lost while it was being made: nobody else knows of it.
            reader.close()
            raise Unreadable("the producer is gone")
        return reader

    def _end(self, connection: _Connection, error: str | None, moved_bytes: int) -> None:
        with self._changed:
            connection.running = None
            connection.close_at_s = None
            self._counts["done" if error is None else "failed"] += 1
            self._counts["read_bytes"] += moved_bytes
            connection.failures = 0 if error is None else connection.failures + 1
            given_up = connection.reader if connection.failures > 1 else None
            if given_up is not None:
                connection.reader = None
            self._offer(connection)
        # One failure is a hold that ended or a bad moment, and mapping anew is dear; two may be the reader's.
        _close(given_up)


def _close(reader: Reader | None) -> None:
    if reader is not None:
        try:
            reader.close()
        except Exception:
            logger.exception("closing a reader failed")
