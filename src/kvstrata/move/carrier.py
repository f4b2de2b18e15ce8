"""What every carrier offers: it knows where a layer's rows persist and moves them into its window and back.

The pipeline (`layerwise.py`) decides when a layer moves, in which order and into which slot; a carrier, from
where and to where. Members: `host_carrier.HostCarrier` (home: this rank's host pool),
`peer_memory.PeerMemoryCarrier` and `broadcast.CollectiveCarrier` (home: the rank that owns the layer).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvstrata.core.layers import Component
from kvstrata.memory.pages import PageView
from kvstrata.move.engine import CopyToken
from kvstrata.move.step import Int64Array

LOAD_LANE = "load"
SAVE_LANE = "save"

PageTable = Mapping[tuple[int, Component], PageView]


@dataclass(frozen=True, kw_only=True)
class CarrierStatistics:
    """Totals since start. Carriers with more to tell derive from it."""

    loaded_bytes: int = 0
    """Bytes that loads wrote into this rank's windows."""
    saved_bytes: int = 0
    """Bytes that saves wrote into this rank's homes."""


class Carrier(Protocol):
    """Moves whole layers between home and window. One engine thread calls it, in the order of the lifecycle.

    Loads of one forward are started in the order in which the layers run, each layer once, unless the carrier
    says that it takes a layer again (drafts).
    """

    @property
    def moving(self) -> frozenset[int]:
        """The layers that must be loaded before they are used; all others stay where they are."""
        ...

    def begin_step(self) -> None:
        """Start a forward. Raises GateViolation while something of the one before still moves."""
        ...

    def load(self, layer: int, block_ids: Int64Array, *, after: Sequence[CopyToken]) -> CopyToken:
        """Start bringing blocks of a moving layer into its window, once every token in `after` is done.

        The caller has claimed the window. Without blocks nothing moves and nobody is waited for. The token
        ends by itself, in success or in failure, within the carrier's own deadlines.
        Raises IndexError for a block that does not exist and TransferFailed where nothing can be started;
        both before anything moves.
        """
        ...

    def save(self, layer: int, block_ids: Int64Array, *, after: Sequence[CopyToken]) -> CopyToken | None:
        """Start taking blocks home; None where nothing has to move: the window is the home, or another's is.

        Raises as `load` does.
        """
        ...

    def home(self, layer: int, component: Component) -> PageView:
        """Where a moving layer persists between steps; KeyError where this process cannot reach it."""
        ...

    def end_step(self) -> None:
        """Say that this rank takes no further part in the forward; legal again, and without a forward."""
        ...

    def statistics(self) -> CarrierStatistics: ...

    def check_integrity(self) -> None: ...

    def close(self) -> None:
        """Give up what the carrier made or opened. Only when nothing moves; closing twice is harmless."""
        ...
