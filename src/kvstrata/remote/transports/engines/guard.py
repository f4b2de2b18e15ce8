"""How a reader knows that what it read was the request's: words of the owner, read over the same way.

The owner shows two pieces of memory beside its regions: a *board* with the export's identity, cleared when
the export is closed, and its table of holds. A reader fetches the identity and its hold's word before the
first byte and after the last: if both are right both times, no byte was overwritten in between (M1, M3). The
identity is random, so an address or a port that another process has taken over is not believed.
"""

from __future__ import annotations

import secrets

import numpy as np

from kvstrata.errors import TransferFailed
from kvstrata.memory.region import HostRegion
from kvstrata.remote.holds import Hold, HoldRevoked
from kvstrata.remote.transports.base import Destination
from kvstrata.remote.transports.engines.base import Engine, Patience

ID_BYTES = 16
_WORD_BYTES = 8
_BOARD_BYTES = 4096


class Board:
    """The owner's side: shows the export's identity until it is closed."""

    def __init__(self) -> None:
        self.export_id = secrets.token_bytes(ID_BYTES)
        self.region = HostRegion.create(_BOARD_BYTES, "remote-board", huge_pages=False)
        self._shown = self.region.tensor().numpy()[:ID_BYTES]
        self._shown[:] = np.frombuffer(self.export_id, dtype=np.uint8)
        self._is_open = True

    def check_integrity(self) -> None:
        """Assert that the identity is shown if, and only if, the export is open."""
        assert (self._shown.tobytes() == self.export_id) is self._is_open

    def close(self) -> None:
        """Show it no more; readers fail from then on. Harmless to repeat."""
        self._is_open = False
        self._shown[:] = 0
        self._shown = self._shown.copy()
        self.region.close()


class Guard:
    """The reader's side, of one export."""

    def __init__(self, *, export_id: bytes, board_address: int, holds_address: int, wait: str) -> None:
        """`wait` begins every message."""
        self._export_id = export_id
        self._board_address = board_address
        self._holds_address = holds_address
        self._wait = wait
        self._landing = np.zeros(ID_BYTES + _WORD_BYTES, dtype=np.uint8)
        at = self._landing.ctypes.data
        self.destination = Destination(address=at, size_bytes=len(self._landing))
        self._local = np.array([at, at + ID_BYTES], dtype=np.int64)
        self._size = np.array([ID_BYTES, _WORD_BYTES], dtype=np.int64)

    def check(self, engine: Engine, hold: Hold | None, patience: Patience) -> None:
        """Raise TransferFailed if this is not the export (any more), HoldRevoked if the hold is not valid.

        Without a hold only the export is looked at. Raises what `Engine.read` does, too.
        """
        self._landing[:] = 0  # what was there before proves nothing
        slot = 0 if hold is None else hold.slot
        remote = np.array([self._board_address, self._holds_address + slot * _WORD_BYTES], dtype=np.int64)
        engine.read(self._local, remote, self._size, patience)
        if self._landing[:ID_BYTES].tobytes() != self._export_id:
            raise TransferFailed(f"{self._wait}: the producer closed its export, or another took its place")
        if hold is not None and int(self._landing[ID_BYTES:].view(np.int64)[0]) != hold.generation:
            raise HoldRevoked(f"{self._wait}: the producer ended {hold}; its memory may be reused")
