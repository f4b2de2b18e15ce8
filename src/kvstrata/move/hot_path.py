"""Decode through hot rows: resolve a selection, copy what is missing, serve slots.

Source: seed section 4, Decode step, 4 to 6.

Layers that share a top-k resolve once: the leader's answer is replayed by its followers, whose missing rows
are copied ahead while the leader computes. One residency table a share group, one hot buffer a layer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch

from kvstrata.errors import DeadlineExceeded, TransferFailed
from kvstrata.kernels.residency import ResidencyTable
from kvstrata.kernels.selection import Int32Array, Int64Array, host_rows
from kvstrata.memory.rows import RowView
from kvstrata.move.engine import CopyEngine, CopyToken
from kvstrata.move.forward_rows import DecodeGroup, ForwardRows

ROW_LANE = "rows"


class CopyRows(Protocol):
    """Copies rows of a layer's home into its hot buffer."""

    def __call__(self, dst: RowView, dst_rows: Int64Array, src: RowView, src_rows: Int64Array) -> None:
        """Copy row src_rows[i] to dst_rows[i]; returns when the bytes may be read."""


class Observer(Protocol):
    """Sees what the residency tables are asked, before they answer; for traces."""

    def resolving(
        self, layer: int, rows: Int64Array, fresh_rows: Int64Array, near_rows: Int64Array | None
    ) -> None:
        """The share group led by `layer` resolves `rows`; `fresh_rows` are those of the forward."""

    def rewritten(self, layer: int | None, rows: Int64Array) -> None:
        """Host rows were written: of the share group led by `layer`, or of all."""

    def close(self) -> None:
        """No more calls follow."""


@dataclass(frozen=True, kw_only=True)
class Selection:
    """What the indexer chose for one forward: the same for all layers of a share group."""

    positions: Int32Array  # [T, K], -1 = none
    near: Int32Array | None = None  # [T, W], positions just below the cut, -1 = none; the policy may use them


@dataclass(frozen=True, kw_only=True)
class HotLayer:
    """Where one layer's hot rows and home rows lie."""

    buffer: torch.Tensor  # [capacity, row]
    hot: RowView
    home: RowView


@dataclass(frozen=True, kw_only=True)
class Served:
    """Decode tokens whose selected rows are all resident, and in which slots."""

    group: DecodeGroup
    slots: Int32Array  # [g, K]
    load_rows: Int64Array
    load_slots: Int64Array
    placed_tokens: Int64Array
    placed_slots: Int64Array


@dataclass(frozen=True, kw_only=True)
class HotPathStatistics:
    """Totals since start; `hit_rows + missed_rows == selected_rows`.

    Bytes and their copy time count every layer, all else once a share group.
    """

    selected_rows: int = 0
    hit_rows: int = 0
    missed_rows: int = 0
    placed_rows: int = 0
    evicted_rows: int = 0
    invalidated_rows: int = 0
    miss_bytes: int = 0
    resolve_s: float = 0.0
    row_copy_s: float = 0.0


@dataclass(kw_only=True)
class _Group:
    """One share group and what its leader resolved in the current forward."""

    layers: tuple[int, ...]  # the leader first
    table: ResidencyTable
    forward: ForwardRows | None = None
    served: list[Served] = field(default_factory=list)
    missing: set[int] = field(default_factory=set)  # layers that have not copied all of `served` yet
    ahead: dict[int, CopyToken] = field(default_factory=dict)


class HotPath:
    """Hot rows of one rank's layers. One engine thread calls all methods."""

    def __init__(
        self,
        *,
        groups: Mapping[tuple[int, ...], ResidencyTable],
        layers: Mapping[int, HotLayer],
        fresh: Int32Array,
        engine: CopyEngine,
        copy_rows: CopyRows,
        deadline_s: float,
        observer: Observer | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`fresh` maps host rows to the current forward's tokens, -1 for all others (see FreshRows)."""
        self._groups = [_Group(layers=group, table=table) for group, table in groups.items()]
        self._group_of = {layer: group for group in self._groups for layer in group.layers}
        self._layers = layers
        self._fresh = fresh
        self._engine = engine
        self._copy_rows = copy_rows
        self._deadline_s = deadline_s
        self._observer = observer
        self._clock = clock
        self._arrivals: Mapping[int, CopyToken] = {}
        self._totals: dict[str, Any] = dict(vars(HotPathStatistics()))

    def enter(self, layer: int, forward: ForwardRows) -> None:
        """A forward reaches `layer`: rows it writes are no longer resident (R4).

        A group's leader begins anew each time: a draft layer may run the same batch again. Raises
        DeadlineExceeded where a copy of the forward before has not ended (M3).
        """
        group = self._group_of[layer]
        if group.forward is forward and layer != group.layers[0]:
            return
        self._mend(group)
        group.forward = forward
        if self._observer is not None:
            self._observer.rewritten(group.layers[0], forward.rows)
        taken = group.table.invalidate(forward.rows)
        if taken:
            self._count(invalidated_rows=taken)

    def overwrite(self, rows: Int64Array, arrivals: Mapping[int, CopyToken]) -> None:
        """A store writes host rows behind the layers' backs: none of them is resident any more.

        `arrivals` maps layers to tokens after which their homes hold the rows; holds until `settle`.
        """
        self._arrivals = arrivals
        if self._observer is not None:
            self._observer.rewritten(None, rows)
        for group in self._groups:
            self._count(invalidated_rows=group.table.invalidate(rows))

    def serve(
        self, layer: int, forward: ForwardRows, selection: Selection, new_rows: torch.Tensor
    ) -> Iterator[Served]:
        """Yield the forward's decode tokens, group by group, each with its rows resident in `layer`.

        A group's slots hold until the next one is asked for. new_rows [>=T, row] are the layer's own rows of
        this forward: those selected go to their slots directly, without a round trip through the host.
        Raises what copying raises; rows that did not arrive are not resident then.
        """
        group = self._group_of[layer]
        assert group.forward is forward, f"layer {layer} serves a forward that it did not enter"
        is_leader = layer == group.layers[0]
        for at, decode in enumerate(forward.decode):
            if is_leader:
                self._resolve(group, forward, decode, selection)
                self._copy(layer, group.served[at])
                if at == 0:
                    self._copy_ahead(group)
            elif at == 0 and layer in group.ahead:
                what = f"rows of layer {layer} copied ahead"
                group.ahead[layer].wait(deadline_s=self._deadline_s, what=what)
                del group.ahead[layer]
            else:
                self._copy(layer, group.served[at])
            served = group.served[at]
            if served.placed_slots.size:
                buffer = self._layers[layer].buffer
                placed = new_rows.index_select(0, torch.from_numpy(served.placed_tokens))
                buffer.index_copy_(0, torch.from_numpy(served.placed_slots), placed.to(buffer.dtype))
            yield served
        group.missing.discard(layer)

    def buffer(self, layer: int) -> torch.Tensor:
        """Return the hot buffer of a layer, [capacity, row]."""
        return self._layers[layer].buffer

    def settle(self) -> None:
        """End the forward: nothing is copied any more, and what a broken-off one left undone is forgotten.

        Raises DeadlineExceeded where a copy has not ended; call again before anything else.
        """
        late: DeadlineExceeded | None = None
        for group in self._groups:
            try:
                self._mend(group)
                group.forward = None
            except DeadlineExceeded as error:
                late = error
        self._arrivals = {}
        if late is not None:
            raise late

    def statistics(self) -> HotPathStatistics:
        """Return totals since start."""
        return HotPathStatistics(**self._totals)

    def check_integrity(self) -> None:
        """Check every table (R1), and that hits and misses add up."""
        for group in self._groups:
            group.table.check_integrity()
        now = self.statistics()
        assert now.hit_rows + now.missed_rows == now.selected_rows, now

    def _resolve(
        self, group: _Group, forward: ForwardRows, decode: DecodeGroup, selection: Selection
    ) -> None:
        begun = self._clock()

        requests, table, tokens = forward.token_request[decode.at], forward.block_table, forward.block_tokens
        rows = host_rows(selection.positions[decode.at], requests, table, tokens)
        near = None
        if selection.near is not None:
            near = host_rows(selection.near[decode.at], requests, table, tokens)
        if self._observer is not None:
            self._observer.resolving(group.layers[0], rows, forward.rows, near)
        found = group.table.resolve(rows, self._fresh, near_rows=near)
        # They are views of the table's memory; those used beyond its next call are copied.
        keep = np.copy if len(forward.decode) > 1 or len(group.layers) > 1 else np.asarray
        served = Served(
            group=decode,
            slots=keep(found.slots),
            load_rows=keep(found.load_rows),
            load_slots=keep(found.load_slots),
            placed_tokens=keep(found.placed_index),
            placed_slots=keep(found.placed_slots),
        )
        group.served.append(served)
        group.missing = set(group.layers)
        self._count(
            selected_rows=found.selected,
            hit_rows=found.hits,
            missed_rows=found.load_slots.size,
            placed_rows=served.placed_slots.size,
            evicted_rows=found.evictions,
            resolve_s=self._clock() - begun,
        )

    def _copy(self, layer: int, served: Served) -> None:
        if served.load_slots.size == 0:
            return
        at = self._layers[layer]
        begun = self._clock()
        self._copy_rows(at.hot, served.load_slots, at.home, served.load_rows)
        self._count(miss_bytes=served.load_slots.size * at.home.row_bytes, row_copy_s=self._clock() - begun)

    def _copy_ahead(self, group: _Group) -> None:
        """Copy the followers' missing rows on a lane of their own. Only a forward's first decode group:

        a later one takes over slots that a follower still reads for the first.
        """
        served = group.served[0]
        if served.load_slots.size == 0:
            return
        for layer in group.layers[1:]:
            at = self._layers[layer]

            def copy(at: HotLayer = at) -> None:
                self._copy_rows(at.hot, served.load_slots, at.home, served.load_rows)

            # The layer's own turn, before which a store's rows are waited for, has not come yet.
            after = [self._arrivals[layer]] if layer in self._arrivals else []
            lane = self._engine.lane(ROW_LANE)
            group.ahead[layer] = lane.call(copy, after=after, name=f"rows of layer {layer}")
            self._count(miss_bytes=served.load_slots.size * at.home.row_bytes)

    def _mend(self, group: _Group) -> None:
        """Leave a forward. If it broke off, rows are resident for some layers only: then for none.

        Raises DeadlineExceeded for copies that have not ended; they stay in `ahead` until they have (M3).
        """
        late: DeadlineExceeded | None = None
        for layer, token in list(group.ahead.items()):
            try:
                token.wait(deadline_s=self._deadline_s, what=f"unused rows of layer {layer}")
            except TransferFailed:
                pass  # nobody reads them
            except DeadlineExceeded as error:
                late = error
                continue
            del group.ahead[layer]
        if group.missing and group.forward is not None:
            for served in group.served:
                group.table.invalidate(served.load_rows)
                group.table.invalidate(group.forward.rows)
        group.missing.clear()
        group.served.clear()
        if late is not None:
            raise late

    def _count(self, **more: float) -> None:
        for name, value in more.items():
            self._totals[name] += value
