"""KVPP over a collective: each layer is broadcast by its owner on a process group of its own.

Source: seed, KVPP, Full-layer broadcast and prefetch. The load lane issues all collectives of the group, in
the order in which the layers run: they are the same on every rank, and computation goes on beside them.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from kvstrata.core.layers import Component
from kvstrata.core.owners import OwnerPlan
from kvstrata.errors import ConfigurationError, LayoutError
from kvstrata.memory.owner_board import Turn
from kvstrata.memory.pages import PageView, ascending_block_ids
from kvstrata.memory.region import HostRegion
from kvstrata.move.carrier import LOAD_LANE, SAVE_LANE, PageTable
from kvstrata.move.engine import CopyEngine, CopyToken
from kvstrata.move.group_meeting import GroupMeeting
from kvstrata.move.host_carrier import components
from kvstrata.move.memcpy import copy_ranges
from kvstrata.move.operation import Copy
from kvstrata.move.owner_turns import OwnerStatistics, OwnerTurns, Payload
from kvstrata.move.plan import CopyPlan, concat, plan_block_copies, plan_page_copies
from kvstrata.move.step import Int64Array

STAGING_BYTES = 64 << 20


class CollectiveCarrier:
    """Brings target layers by one broadcast each; drafts never move.

    `group` is a process group of the KVPP ranks in their order, used by nobody else. `homes` holds the pages
    of the layers that this rank owns; where they are not the layer's window, the owner loads and saves.
    With `payload` "all" a layer's window is broadcast as it lies; with "referenced" the pages are packed into
    `staging_bytes` of memory allocated once, in several broadcasts where they do not fit one.
    `deadline_s` bounds each wait for other ranks, the broadcasts of a layer together. `copy` is for tests.
    """

    def __init__(
        self,
        *,
        plan: OwnerPlan,
        member: int,
        windows: PageTable,
        homes: PageTable,
        group: Any,
        engine: CopyEngine,
        deadline_s: float,
        payload: Payload = "referenced",
        staging_bytes: int = STAGING_BYTES,
        copy: Copy = copy_ranges,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.moving = frozenset(plan.targets)
        self._plan = plan
        self._member = member
        self._windows = windows
        self._homes = {
            key: homes[key] for key in windows if key[0] in plan.owned(member)
        }  # of another rank's layer this process cannot reach the home
        self._group = group
        self._engine = engine
        self._payload = payload
        self._deadline_s = deadline_s
        self._copy = copy
        self._clock = clock
        self._bundles = {bundle.index: bundle for bundle in plan.bundles}
        self._moves_own = {
            layer for layer in plan.owned(member) for key in self._keys(layer) if homes[key] != windows[key]
        }
        self._num_blocks = next(iter(windows.values())).num_blocks
        self._whole = (
            {layer: self._bundle_memory(layer) for layer in plan.targets} if payload == "all" else {}
        )
        self._staging = torch.empty(0, dtype=torch.uint8)
        self._staged_blocks = 0
        if payload == "referenced" and plan.targets:
            self._staged_blocks = min(staging_bytes // plan.largest_bundle_bytes, self._num_blocks)
            if self._staged_blocks < 1:
                raise ConfigurationError(
                    f"{staging_bytes} bytes to pack blocks for KVPP's broadcast hold none: one takes "
                    f"{plan.largest_bundle_bytes}"
                )
            self._staging = torch.empty(self._staged_blocks * plan.largest_bundle_bytes, dtype=torch.uint8)
        self._meeting = GroupMeeting(group, member=member, deadline_s=deadline_s, clock=clock)
        self._turns = OwnerTurns(plan=plan, engine=engine, meeting=self._meeting, clock=clock)
        self._loaded_bytes = self._saved_bytes = self._broadcasts = self._broadcast_bytes = 0

    @property
    def load_deadline_s(self) -> float:
        """More than a load takes in which every wait lasts as long as it may."""
        return 5 * self._deadline_s

    def begin_step(self) -> None:
        self._turns.begin_step()

    def load(self, layer: int, block_ids: Int64Array, *, after: Sequence[CopyToken]) -> CopyToken:
        self._meeting.check()
        if not block_ids.size:
            return self._turns.pass_over(layer, after=after)
        ascending_block_ids(block_ids, self._num_blocks)  # a wrong id is an error on every rank alike
        owner = self._plan.owner_of(layer)
        moved = np.arange(self._num_blocks, dtype=np.int64) if self._payload == "all" else block_ids
        bundle_bytes = len(moved) * self._bundles[layer].page_bytes
        if layer in self._moves_own:
            copies = self._own_copies(layer, moved, to_home=False)
            after = (
                self._engine.lane(LOAD_LANE).submit(copies, after=after, name=f"own load of layer {layer}"),
            )
        broadcast = self._send_whole if self._payload == "all" else self._send_referenced
        token = self._turns.take(layer, lambda turn: broadcast(turn, moved), after=after)
        if owner == self._member:
            self._broadcasts += 1
            self._broadcast_bytes += bundle_bytes
        if owner != self._member or layer in self._moves_own:
            self._loaded_bytes += bundle_bytes
        return token

    def save(self, layer: int, block_ids: Int64Array, *, after: Sequence[CopyToken]) -> CopyToken | None:
        if layer not in self._moves_own:
            return None
        copies = self._own_copies(layer, block_ids, to_home=True)
        token = self._engine.lane(SAVE_LANE).submit(copies, after=after, name=f"save of layer {layer}")
        self._saved_bytes += copies.total_bytes
        return token

    def home(self, layer: int, component: Component) -> PageView:
        return self._homes[layer, component]

    @property
    def peer_regions(self) -> list[HostRegion]:
        """None: the other ranks' memory is out of reach."""
        return []

    def homed(self, layer: int) -> CopyToken | None:
        """None: who cannot reach another rank's home need not know what is in it."""
        return None

    def end_step(self) -> None:
        self._turns.end_step()

    def statistics(self) -> OwnerStatistics:
        return OwnerStatistics(
            loaded_bytes=self._loaded_bytes,
            saved_bytes=self._saved_bytes,
            broadcasts=self._broadcasts,
            broadcast_bytes=self._broadcast_bytes,
            broadcast_s=self._turns.transfer_s,
            broadcast_wait_s=self._meeting.waited_s,
        )

    def check_integrity(self) -> None:
        """Every turn is agreed by all ranks, which is all there is to check."""

    def close(self) -> None:
        """The group is the caller's."""

    def _send_whole(self, turn: Turn, block_ids: Int64Array) -> None:
        self._send(turn, self._whole[turn.layer], self._deadline_s)

    def _send_referenced(self, turn: Turn, block_ids: Int64Array) -> None:
        """Piece by piece through the staging memory; a rank that fails takes part in the rest all the same.

        Else the others would wait for it in a broadcast, where nobody can be told.
        """
        end_s = self._clock() + self._deadline_s
        failure: Exception | None = None
        for ids in self._pieces(block_ids):
            size_bytes = len(ids) * self._bundles[turn.layer].page_bytes
            if turn.owner == self._member:
                failure = failure or self._try_copy(self._staging_copies(turn.layer, ids, pack=True))
            self._send(turn, self._staging[:size_bytes], end_s - self._clock())
            if turn.owner != self._member:
                failure = failure or self._try_copy(self._staging_copies(turn.layer, ids, pack=False))
        if failure is not None:
            raise failure

    def _send(self, turn: Turn, memory: torch.Tensor, deadline_s: float) -> None:
        self._meeting.join(
            lambda: dist.broadcast(memory, group=self._group, group_src=turn.owner, async_op=True),
            turn,
            f"waits for the broadcast of rank {turn.owner}",
            deadline_s,
        )

    def _pieces(self, block_ids: Int64Array) -> Iterator[Int64Array]:
        for first in range(0, len(block_ids), self._staged_blocks):
            yield block_ids[first : first + self._staged_blocks]

    def _try_copy(self, copies: CopyPlan) -> Exception | None:
        try:
            self._copy(copies)
        except Exception as error:
            return error
        return None

    def _staging_copies(self, layer: int, ids: Int64Array, *, pack: bool) -> CopyPlan:
        """Between the layer's pages `ids` and the staging memory, where its components lie one by one."""
        plans, address = [], self._staging.data_ptr()
        places = np.arange(len(ids), dtype=np.int64)
        for key in self._keys(layer):
            window = self._windows[key]
            staged = PageView(
                address=address,
                block_stride_bytes=window.page_bytes,
                page_bytes=window.page_bytes,
                num_blocks=len(ids),
            )
            address += staged.span_bytes
            plans.append(
                plan_page_copies(staged, places, window, ids)
                if pack
                else plan_page_copies(window, ids, staged, places)
            )
        return concat(plans)

    def _own_copies(self, layer: int, block_ids: Int64Array, *, to_home: bool) -> CopyPlan:
        pairs = [(self._homes[key], self._windows[key]) for key in self._keys(layer)]
        return concat(
            plan_block_copies(home if to_home else window, window if to_home else home, block_ids)
            for home, window in pairs
        )

    def _bundle_memory(self, layer: int) -> torch.Tensor:
        """The layer's window as bytes, all components and blocks. Raises LayoutError if it has gaps."""
        views = [self._windows[key] for key in self._keys(layer)]
        end = views[0].address
        for view in views:
            if view.address != end or not view.is_compact:
                raise LayoutError(
                    f"the caches of layer {layer} do not follow each other without a gap, and KVPP "
                    'broadcasts a layer as one piece; set kvpp_broadcast to "referenced"'
                )
            end += view.span_bytes
        size_bytes = end - views[0].address
        return torch.frombuffer(
            (ctypes.c_uint8 * size_bytes).from_address(views[0].address), dtype=torch.uint8
        )

    def _keys(self, layer: int) -> list[tuple[int, Component]]:
        return [(layer, component) for component in components(self._bundles[layer])]
