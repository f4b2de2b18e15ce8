"""A switch on the way that decode's reads take: let them pass, hold them, fail them or move nothing.

It is set in the decode engine's own process, while the engine runs.
"""

from __future__ import annotations

import threading
import time

from kvstrata.errors import DeadlineExceeded, TransferFailed
from kvstrata.remote.transports.base import Transport
from kvstrata.remote.transports.faulty import Call, FaultyTransport, ReadFault

PASS = "pass"
NOTHING = ReadFault.NOTHING.value
HOLD = "hold"  # the read does not begin before the switch is set again
_FAULTS = {fault.value: fault for fault in (ReadFault.FAIL, ReadFault.TRUNCATE, ReadFault.NOTHING)}


class ReadSwitch:
    """What happens to the reads of one process. Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._mode = PASS
        self._after = 0
        self._times = 0
        self.held = 0

    def set(self, mode: str, *, after: int = 0, times: int = 1 << 30) -> None:
        """From now on `after` reads pass, `times` reads go as `mode` says, and the rest pass."""
        assert mode in (PASS, HOLD, *_FAULTS), mode
        with self._changed:
            self._mode, self._after, self._times = mode, after, times
            self._changed.notify_all()

    def script(self, call: Call) -> ReadFault | None:
        """Say what this read does, for a transport that fails as told; it waits here while it is held."""
        with self._changed:
            mode = self._draw()
            if mode == HOLD:
                self._wait_for_release(call)
        return _FAULTS.get(mode)

    def _draw(self) -> str:
        if self._mode == PASS or self._times == 0:
            return PASS
        if self._after > 0:
            self._after -= 1
            return PASS
        self._times -= 1
        return self._mode

    def _wait_for_release(self, call: Call) -> None:
        ends_s = time.monotonic() + call.deadline_s
        self.held += 1
        try:
            while self._mode == HOLD:
                if call.closed.is_set():
                    raise TransferFailed("the connection was closed under a held read")
                if time.monotonic() >= ends_s:
                    raise DeadlineExceeded("a held read", call.deadline_s)
                self._changed.wait(0.02)  # a close does not notify
        finally:
            self.held -= 1


def install(switch: ReadSwitch) -> None:
    """Put the switch before every transport that an engine of this process opens from now on."""
    from kvstrata.vllm import remote_open

    transports_for = remote_open.transports_for

    def switched(transfer_backend: str, **options: str) -> tuple[Transport, ...]:
        found = transports_for(transfer_backend, **options)
        return tuple(FaultyTransport(each, switch.script) for each in found)

    remote_open.transports_for = switched
