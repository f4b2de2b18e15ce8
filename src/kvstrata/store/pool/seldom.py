"""Warnings about servers that are down: the first one at once, then one in a while: a log stays readable.

A pool that is down is asked again by every request, and many requests come in a second.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Hashable

EVERY_S = 10.0


class SeldomLog:
    """Any thread may warn."""

    def __init__(self, logger: logging.Logger, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._logger = logger
        self._clock = clock
        self._lock = threading.Lock()
        self._last_s: dict[Hashable, float] = {}
        self._unsaid: dict[Hashable, int] = {}

    def warning(self, about: Hashable, text: str) -> None:
        """Say `text`, unless something about the same was said less than EVERY_S ago; then it is counted."""
        with self._lock:
            now_s = self._clock()
            if now_s - self._last_s.get(about, float("-inf")) < EVERY_S:
                self._unsaid[about] = self._unsaid.get(about, 0) + 1
                return
            self._last_s[about] = now_s
            unsaid = self._unsaid.pop(about, 0)
        self._logger.warning("%s%s", text, f" ({unsaid} more like it were not logged)" if unsaid else "")
