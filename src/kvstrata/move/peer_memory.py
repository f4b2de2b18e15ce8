"""KVPP on CPU ranks of one host: a layer is copied out of its owner's memory into this rank's scratch.

Source: seed, KVPP, Full-layer broadcast and prefetch. The owner's home is its own window, or its host pool
(with layerwise offload): then the owner's layers move too, and it alone saves.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvstrata.core.bundle import layout_digest
from kvstrata.core.layers import Component
from kvstrata.core.owners import OwnerPlan
from kvstrata.errors import BudgetError, DeadlineExceeded, LayoutError, StoreUnavailable
from kvstrata.memory.allocator import HostAllocator
from kvstrata.memory.owner_board import BoardHandle, OwnerBoard
from kvstrata.memory.pages import PageView, ascending_block_ids
from kvstrata.memory.peer_homes import HomesOffer, PeerHomes, offer_homes
from kvstrata.memory.region import HostRegion
from kvstrata.memory.shared_words import next_pause_s
from kvstrata.move.carrier import SAVE_LANE, PageTable
from kvstrata.move.engine import CopyEngine, CopyToken
from kvstrata.move.host_carrier import components
from kvstrata.move.owner_turns import OwnerStatistics, OwnerTurns, Payload
from kvstrata.move.plan import CopyPlan, concat, plan_block_copies
from kvstrata.move.step import Int64Array

Exchange = Callable[[object], Sequence[Any]]
"""Gives every rank what each rank gave, in the order of the group."""


@dataclass(frozen=True, kw_only=True)
class _Introduction:
    """What a rank tells the others when they meet."""

    plan: str
    num_blocks: int
    payload: str
    board: BoardHandle
    homes: HomesOffer


class PeerMemoryCarrier:
    """Brings target layers from their owner's shared memory; drafts never move.

    `homes` holds the pages of the layers that this rank owns, all in `regions`; where they are not the
    layer's window, the owner loads and saves. Every rank of the group makes its carrier at the same time:
    `exchange` is called twice. `deadline_s` bounds each wait for other ranks. Raises LayoutError or
    BudgetError where the ranks have planned differently, StoreUnavailable where one is out of reach.
    """

    def __init__(
        self,
        *,
        plan: OwnerPlan,
        member: int,
        windows: PageTable,
        homes: PageTable,
        regions: Sequence[HostRegion],
        exchange: Exchange,
        engine: CopyEngine,
        allocator: HostAllocator,
        deadline_s: float,
        payload: Payload = "referenced",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.moving = frozenset(plan.targets)
        self._plan = plan
        self._member = member
        self._windows = windows
        self._engine = engine
        self._payload = payload
        self._deadline_s = deadline_s
        self._bundles = {bundle.index: bundle for bundle in plan.bundles}
        owned = {
            (layer, component): homes[layer, component]
            for layer in plan.owned(member)
            for component in components(self._bundles[layer])
        }
        self._moves_own = {layer for (layer, part), view in owned.items() if view != windows[layer, part]}
        self._num_blocks = next(iter(windows.values())).num_blocks
        self._board = OwnerBoard(allocator, member=member, deadline_s=deadline_s, clock=clock)
        self._turns = OwnerTurns(plan=plan, engine=engine, meeting=self._board, clock=clock)
        self._peers: list[PeerHomes] = []
        self._homes = dict(owned)
        try:
            self._meet(offer_homes(owned, regions), exchange)
        except BaseException:
            self.close()
            raise
        self._loaded_bytes = self._saved_bytes = self._broadcasts = self._broadcast_bytes = 0
        self._forward = 0  # counted alike on all ranks: a step is begun on every one of them

    @property
    def peer_regions(self) -> list[HostRegion]:
        """The other ranks' memory that their homes lie in, as mapped here."""
        return [region for peer in self._peers for region in peer.regions]

    @property
    def load_deadline_s(self) -> float:
        """More than a load takes in which every wait lasts as long as it may."""
        return 4 * self._deadline_s

    def begin_step(self) -> None:
        self._turns.begin_step()
        self._forward += 1

    def load(self, layer: int, block_ids: Int64Array, *, after: Sequence[CopyToken]) -> CopyToken:
        if not block_ids.size:
            return self._turns.pass_over(layer, after=after)
        if self._payload == "all":
            block_ids = np.arange(self._num_blocks, dtype=np.int64)
        copies = self._copies(layer, block_ids)
        token = self._turns.take(layer, copies, after=after)
        self._loaded_bytes += copies.total_bytes
        if self._plan.owner_of(layer) == self._member:
            self._broadcasts += 1
            self._broadcast_bytes += len(block_ids) * self._bundles[layer].page_bytes
        return token

    def save(self, layer: int, block_ids: Int64Array, *, after: Sequence[CopyToken]) -> CopyToken | None:
        if self._plan.owner_of(layer) != self._member:
            return None
        mark = self._mark(layer)
        if not self._moves_own:
            self._board.say_home(mark)  # written in place, before it was released
            return None
        lane = self._engine.lane(SAVE_LANE)
        token = None
        if layer in self._moves_own:
            copies = concat(
                plan_block_copies(self._homes[key], self._windows[key], block_ids)
                for key in self._keys(layer)
            )
            token = lane.submit(copies, after=after, name=f"save of layer {layer}")
            self._saved_bytes += copies.total_bytes
        # In lane order: what lies in a window may not be announced before an earlier layer has come home.
        said = [token] if token is not None else []
        lane.call(lambda: self._board.say_home(mark), after=said, name=f"news of layer {layer}")
        return token

    def homed(self, layer: int) -> CopyToken | None:
        """Return the token after which the rows that another rank wrote in this forward are in its home.

        None for this rank's own layers. Meant for who reads the home from elsewhere: the token never fails;
        an owner that dies never fulfils it.
        """
        owner = self._plan.owner_of(layer) if layer in self.moving else self._member
        if owner == self._member:
            return None
        return _Homed(self._board, owner, self._mark(layer), f"rows of layer {layer} at rank {owner}")

    def home(self, layer: int, component: Component) -> PageView:
        return self._homes[layer, component]

    def end_step(self) -> None:
        self._turns.end_step()

    def statistics(self) -> OwnerStatistics:
        return OwnerStatistics(
            loaded_bytes=self._loaded_bytes,
            saved_bytes=self._saved_bytes,
            broadcasts=self._broadcasts,
            broadcast_bytes=self._broadcast_bytes,
            broadcast_s=self._turns.transfer_s,
            broadcast_wait_s=self._board.waited_s,
        )

    def check_integrity(self) -> None:
        self._board.check_integrity()

    def close(self) -> None:
        """Give up what was made and mapped; what a late copy may still touch stays mapped (M3)."""
        if not self._turns.is_idle:
            self._board.leave_for_good()
            return
        self._board.close()
        for peer in self._peers:
            peer.close()
        self._peers.clear()
        self._homes.clear()

    def _meet(self, homes: HomesOffer, exchange: Exchange) -> None:
        own = _Introduction(
            plan=f"{layout_digest(self._plan.bundles)} over {self._plan.group_size} ranks",
            num_blocks=self._num_blocks,
            payload=self._payload,
            board=self._board.handle,
            homes=homes,
        )
        met: Sequence[_Introduction] = exchange(own)
        for member, other in enumerate(met):
            if other.plan != own.plan or other.payload != own.payload or len(met) != self._plan.group_size:
                raise LayoutError(
                    f"ranks {self._member} and {member} of a KVPP group of {len(met)} planned differently: "
                    f"{own.plan}, {own.payload!r}, and {other.plan}, {other.payload!r}"
                )
            if other.num_blocks != own.num_blocks:
                raise BudgetError(
                    f"rank {self._member} of the KVPP group has {own.num_blocks} blocks and rank {member} "
                    f"has {other.num_blocks}",
                    needed=own.num_blocks,
                    available=other.num_blocks,
                )
        trouble = None
        try:
            self._reach(met)
        except Exception as error:  # whatever it is: the others wait for this rank's word
            trouble = str(error) or repr(error)
        for member, text in enumerate(exchange(trouble)):
            if text is not None:
                raise StoreUnavailable(f"rank {member} of the KVPP group cannot reach the others: {text}")

    def _reach(self, met: Sequence[_Introduction]) -> None:
        self._board.connect([other.board for other in met])
        for member, other in enumerate(met):
            if member != self._member:
                peer = PeerHomes(other.homes)
                self._peers.append(peer)
                self._homes.update(peer.views)

    def _mark(self, layer: int) -> int:
        return self._forward * len(self._plan.targets) + self._plan.ordinal(layer) + 1

    def _copies(self, layer: int, block_ids: Int64Array) -> CopyPlan:
        if self._plan.owner_of(layer) == self._member and layer not in self._moves_own:
            ascending_block_ids(block_ids, self._num_blocks)  # a wrong id is an error on every rank alike
            return CopyPlan.empty()
        return concat(
            plan_block_copies(self._windows[key], self._homes[key], block_ids) for key in self._keys(layer)
        )

    def _keys(self, layer: int) -> list[tuple[int, Component]]:
        return [(layer, component) for component in components(self._bundles[layer])]


class _Homed:
    """A CopyToken for rows that another rank takes home."""

    def __init__(self, board: OwnerBoard, owner: int, mark: int, name: str) -> None:
        self.name = name
        self._board = board
        self._owner = owner
        self._mark = mark

    def done(self) -> bool:
        return self._board.is_home(self._owner, self._mark)

    def wait(self, *, deadline_s: float, what: str) -> None:
        """Ask until it is so. Raises DeadlineExceeded."""
        begun_s, pause_s = time.monotonic(), 0.0
        while not self.done():
            if time.monotonic() - begun_s >= deadline_s:
                raise DeadlineExceeded(what, deadline_s)
            time.sleep(pause_s)
            pause_s = next_pause_s(pause_s, longest_s=2e-3)
