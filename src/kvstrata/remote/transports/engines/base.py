"""What a library must offer to become a transport, and how long a read through it may wait.

The libraries differ in their calls only. Tickets, holds, deadlines, the owner's process and fencing are the
same for all of them, in the modules beside this one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from kvstrata.errors import DeadlineExceeded, TransferFailed
from kvstrata.remote.transports.base import Destination, Int64Array

RDMA_DEVICES = "/sys/class/infiniband"


class Patience:
    """Until when one read may wait, and what makes waiting useless before."""

    def __init__(self, wait: str, give_up_s: float, useless: Callable[[], str | None]) -> None:
        """`give_up_s` is a time of `time.monotonic`; `useless` says why waiting is, or None."""
        self.wait = wait
        self._give_up_s = give_up_s
        self._useless = useless

    @property
    def left_s(self) -> float:
        """Seconds that are left, never negative."""
        return max(0.0, self._give_up_s - time.monotonic())

    def check(self) -> None:
        """Raise TransferFailed if waiting is useless, DeadlineExceeded if the time is over."""
        reason = self._useless()
        if reason is not None:
            raise TransferFailed(f"{self.wait}: {reason}")
        if time.monotonic() >= self._give_up_s:
            raise DeadlineExceeded(self.wait)


class Engine(Protocol):
    """The reader's end of the library, open to one owner. One thread at a time uses it."""

    def read(self, local: Int64Array, remote: Int64Array, size: Int64Array, patience: Patience) -> None:
        """Copy `size[i]` bytes from the owner's address `remote[i]` to `local[i]` here, for all i.

        Returns when all have landed. Raises TransferFailed, or what `patience.check` raises; then bytes may
        still be on their way until `close`.
        """

    def tell(self) -> None:
        """Notify the owner that a read is over, where the library can; never waits, never raises."""

    def close(self) -> None:
        """Give the connection up. When it returns nothing writes to memory of this process any more."""


class Owner(Protocol):
    """The owner's end of the library: its memory can be read until `close`."""

    @property
    def peer(self) -> bytes:
        """What `EngineLibrary.open` needs on the other side."""

    def told(self) -> int:
        """How many reads the owner was notified of."""

    def close(self) -> None: ...


class EngineLibrary(Protocol):
    """A library by its name in `transfer_backend`. Making one imports nothing."""

    @property
    def name(self) -> str: ...

    @property
    def options(self) -> Mapping[str, str]:
        """What it was made with, for the process that serves."""

    def unusable(self) -> str | None:
        """None if it can be used here, else why not and what to install. Imports the library."""

    def serve(self, memory: Sequence[Destination], *, host: str) -> Owner:
        """Let others read `memory`. Raises ConfigurationError if the library refuses."""

    def open(self, peer: bytes, writable: Sequence[Destination], patience: Patience) -> Engine:
        """Open the way to an owner; reads land in `writable` only. Raises as `Engine.read` does."""
