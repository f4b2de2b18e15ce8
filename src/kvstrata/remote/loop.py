"""The one thread of an endpoint: it owns the sockets and drives the machine.

A round waits until a message, a wake-up or the machine's next tick, hears everything that has come, ticks,
and carries the machine's actions out. It hears before it ticks: a process that was stopped for a while must
learn what its peers said meanwhile before it takes them for dead.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Generic, Protocol, TypeVar

from kvstrata.errors import DeadlineExceeded, TransferFailed
from kvstrata.remote.channels import Channel
from kvstrata.remote.protocol.codec import Codec, Dropped
from kvstrata.remote.protocol.messages import AnyMessage

logger = logging.getLogger("vllm.kvstrata.remote")

MAX_HEARD = 4 * 4096
"""Messages heard in one round: a flood must not keep the machine from its deadlines."""
QUIET_S = 0.05
"""After a round that came late: what lies in the kernel's buffers reaches the socket within this."""
MAX_CATCH_UP_S = 0.5

Outcome = TypeVar("Outcome")


class Driver(Protocol):
    """The endpoint, as its loop sees it. `perform` is called without the lock."""

    def receive(self, peer: str, message: AnyMessage) -> None: ...

    def tick(self) -> None: ...

    def next_tick_s(self) -> float | None: ...

    def perform(self) -> None:
        """Take the machine's actions under the lock and carry them out without it."""

    def died(self) -> None:
        """The loop runs no more: bring the endpoint into a state in which memory may be reused.

        Called with the lock held, so that nobody learns of the death before; may not wait.
        """


class Outcomes(Generic[Outcome]):
    """What the loop has to tell the engine, in order; any thread may call."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: list[Outcome] = []

    def add(self, outcome: Outcome) -> None:
        with self._changed:
            self._waiting.append(outcome)
            self._changed.notify_all()

    def take(self) -> list[Outcome]:
        """Return what was added since the last call."""
        with self._changed:
            taken, self._waiting = self._waiting, []
        return taken

    def wait(self, is_enough: Callable[[], bool], timeout_s: float) -> bool:
        """Wait until something can be taken or `is_enough`, which may take no lock; whether it came."""
        with self._changed:
            return bool(self._changed.wait_for(lambda: bool(self._waiting) or is_enough(), timeout_s))

    def wake(self) -> None:
        """Have everyone who waits look again."""
        with self._changed:
            self._changed.notify_all()


class EndpointLoop:
    """Runs a driver. Other threads enter the machine by `entered` and never touch the sockets."""

    def __init__(
        self,
        *,
        name: str,
        driver: Driver,
        channel: Channel,
        codec: Codec,
        clock: Callable[[], float],
        late_s: float,
    ) -> None:
        """A round that begins more than `late_s` after it was due catches up on messages first."""
        self.name = name
        self.counts: Counter[str] = Counter()
        self._driver = driver
        self._channel = channel
        self._codec = codec
        self._clock = clock
        self._late_s = late_s
        self._lock = threading.RLock()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._waking = threading.Lock()
        self._is_awake = False
        self._stopping = False
        self._cause: BaseException | None = None
        self._killed_by: BaseException | None = None
        self._thread = threading.Thread(target=self._serve, name=f"kvstrata-{name}", daemon=True)

    def start(self) -> None:
        """Begin; once."""
        self._thread.start()

    @property
    def is_over(self) -> bool:
        """Whether `check_alive` raises, or is about to; takes no lock."""
        return self._cause is not None or self._stopping or not self._thread.is_alive()

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Hold the lock of the machine; its new actions are carried out soon after.

        Raises TransferFailed if the thread is not there to do so.
        """
        with self._lock:
            self.check_alive()
            yield
        self.wake()

    @contextmanager
    def looking(self) -> Iterator[None]:
        """Hold the lock to read; works on a dead loop too."""
        with self._lock:
            yield

    def check_alive(self) -> None:
        """Raise TransferFailed naming the cause if the thread is dead or was stopped."""
        with self._lock:
            cause = self._cause
        if cause is not None:
            raise TransferFailed(f"{self.name} endpoint thread died: {cause!r}") from cause
        if self._stopping:
            raise TransferFailed(f"{self.name} endpoint was closed")
        if not self._thread.is_alive():
            raise TransferFailed(f"{self.name} endpoint thread died: it is not in process {os.getpid()}")

    def wake(self) -> None:
        """Have a round run now. Any thread."""
        with self._waking:
            if not self._is_awake and self._wake_fd >= 0:
                self._is_awake = True
                os.eventfd_write(self._wake_fd, 1)

    def send(self, peer: str, message: AnyMessage) -> None:
        """Encode and send. In the loop's thread only."""
        try:
            frames = self._codec.encode(message)
        except ValueError as error:
            # Its transfer ends by its lease; the others go on.
            self.counts["unsendable"] += 1
            logger.error("%s endpoint: to %s: %s", self.name, peer, error)
            return
        self._channel.send(peer, frames)

    def stop(self, *, deadline_s: float) -> None:
        """End the thread and close the sockets. Raises DeadlineExceeded if it does not end."""
        self._stopping = True
        if self._thread.is_alive():
            self.wake()
            self._thread.join(deadline_s)
            if self._thread.is_alive():
                raise DeadlineExceeded(f"ending the thread of the {self.name} endpoint", deadline_s)
        with self._waking:
            if self._wake_fd >= 0:
                os.close(self._wake_fd)
            self._wake_fd = -1

    def die(self, cause: BaseException) -> None:
        """End the endpoint for a defect found in another of its threads."""
        self._killed_by = cause
        self.wake()

    def _serve(self) -> None:
        try:
            while not self._stopping:
                self._round()
                if self._killed_by is not None:
                    raise self._killed_by
        except BaseException as cause:
            logger.exception("the thread of the %s endpoint died", self.name)
            with self._lock:
                self._cause = cause
                self._driver.died()
        finally:
            self._channel.close()

    def _round(self) -> None:
        with self._lock:
            due_s = self._driver.next_tick_s()
        self._channel.wait(None if due_s is None else due_s - self._clock(), self._wake_fd)
        self._clear_wake()
        self._hear()
        if due_s is not None and self._clock() - due_s > self._late_s:
            self._catch_up()
        with self._lock:
            due_s = self._driver.next_tick_s()
            if due_s is not None and due_s <= self._clock():
                self._driver.tick()
        self._driver.perform()
        self._channel.flush()

    def _hear(self) -> None:
        for _ in range(MAX_HEARD):
            received = self._channel.receive()
            if received is None:
                return
            peer, frames = received
            message = self._codec.decode(frames)
            if isinstance(message, Dropped):
                self._note_dropped(peer, message)
                continue
            with self._lock:
                self._driver.receive(peer, message)

    def _note_dropped(self, peer: str, dropped: Dropped) -> None:
        """The first of each kind is worth a line, or a wrong secret would look like silence."""
        self.counts[dropped.reason] += 1
        if self.counts[dropped.reason] == 1:
            logger.warning(
                "%s endpoint: dropped a message of %s (%s: %s); more of the kind are only counted",
                self.name,
                peer,
                dropped.reason,
                dropped.detail,
            )

    def _catch_up(self) -> None:
        """Hear until it has been quiet for a moment: sockets are filled by threads that were stopped too."""
        self.counts["late_rounds"] += 1
        end_s = self._clock() + MAX_CATCH_UP_S
        while self._clock() < end_s:
            heard = self._channel.wait(QUIET_S, self._wake_fd)
            if not self._clear_wake() and not heard:
                return
            self._hear()

    def _clear_wake(self) -> bool:
        """Before the work is looked at: who comes later wakes anew."""
        with self._waking:
            was_awake, self._is_awake = self._is_awake, False
            if was_awake:
                os.eventfd_read(self._wake_fd)
        return was_awake
