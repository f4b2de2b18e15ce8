"""Messages of remote read that never leave an engine, by kind: set while it runs."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping
from typing import Any


class MessageLosses:
    """Loses the next messages of each kind on their way out of the endpoints of one process. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._to_lose: Counter[str] = Counter()
        self._loops: list[Any] = []

    def set(self, to_lose: Mapping[str, int], loops: list[Any]) -> None:
        """From now on lose so many messages of each kind, such as {"ReadDone": 1}."""
        with self._lock:
            self._to_lose = Counter(to_lose)
            for loop in loops:
                if loop not in self._loops:
                    self._loops.append(loop)
                    loop.send = self._wrap(loop.send)

    def left(self) -> int:
        """Return how many of them have not been lost yet."""
        with self._lock:
            return self._to_lose.total()

    def _wrap(self, send: Any) -> Any:
        def lossy(peer: str, message: Any) -> None:
            kind = type(message).__name__
            with self._lock:
                is_lost = self._to_lose[kind] > 0
                self._to_lose[kind] -= is_lost
            if not is_lost:
                send(peer, message)

        return lossy
