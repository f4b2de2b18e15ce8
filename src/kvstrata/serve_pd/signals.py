"""How a command that runs other processes learns that it shall end them."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def stop_on_signals() -> Iterator[threading.Event]:
    """Yield an event that SIGINT, SIGTERM and SIGHUP set, each time anew. Call it from the main thread."""
    stop = threading.Event()
    before = {number: signal.signal(number, lambda *_: stop.set()) for number in _SIGNALS}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
