"""Heartbeats: what keeps open transfers alive, whatever else is said of them or gets lost."""

from __future__ import annotations

from collections.abc import Iterable

from kvstrata.remote.protocol.messages import Beat
from kvstrata.remote.protocol.moves import NEVER_S

BEATS_PER_LEASE = 4
BEAT_TRANSFERS = 4096
"""Named in one Beat, so that it fits into a frame whatever the ids."""


class Pulse:
    """When the next beats are due, while there is something to keep alive."""

    def __init__(self, lease_s: float) -> None:
        self.due_s = NEVER_S
        self._interval_s = lease_s / BEATS_PER_LEASE

    def start(self, now_s: float) -> None:
        """There is something to keep alive; nothing if there was before."""
        if self.due_s == NEVER_S:
            self.due_s = now_s + self._interval_s

    def is_due(self, now_s: float, *, go_on: bool) -> bool:
        """Whether to beat now, and set the next one if it goes on."""
        if now_s < self.due_s:
            return False
        self.due_s = now_s + self._interval_s if go_on else NEVER_S
        return True


def beats_of(transfers: Iterable[str], *, epoch: str, peer_epoch: str) -> list[Beat]:
    """Return one Beat, or several for very many transfers."""
    names = tuple(transfers)
    return [
        Beat(epoch=epoch, peer_epoch=peer_epoch, transfers=names[at : at + BEAT_TRANSFERS])
        for at in range(0, len(names), BEAT_TRANSFERS)
    ]
