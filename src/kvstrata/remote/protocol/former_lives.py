"""Epochs that were replaced a while ago: what they said may still arrive and must not be believed."""

from __future__ import annotations

from collections.abc import Hashable


class FormerLives:
    """Remembers each for `keep_s`, not for ever.

    Messages may be reordered, so which of two lives is the later one is a guess, right but for a message that
    overtook a whole life. If it was wrong, the living one is believed again when this has passed.
    """

    def __init__(self, keep_s: float) -> None:
        self._keep_s = keep_s
        self._until_s: dict[Hashable, float] = {}

    def add(self, life: Hashable, now_s: float) -> None:
        """It was replaced now."""
        self._until_s = {other: until_s for other, until_s in self._until_s.items() if until_s > now_s}
        self._until_s[life] = now_s + self._keep_s

    def has(self, life: Hashable, now_s: float) -> bool:
        """Whether it was replaced not long ago."""
        return now_s < self._until_s.get(life, now_s)
