"""Sparse decode offload of one rank: the home of every layer's main KV is the host pool, its window are rows.

The lifecycle of a layer in a forward (seed section 4, Decode step)::

    begin_step -> acquire(layer) -> write(layer, new rows) -> attend(layer, ...) -> ... -> end_step

New rows go to their host slots and never to a full device cache. Decode tokens attend to hot rows, prompt
tokens to pieces of their context in the prompt window and to the forward's own rows; a prompt's parts are
joined by their softmax sums.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from kvstrata.core.layers import Component
from kvstrata.kernels.attention import join_parts
from kvstrata.kernels.batch import BatchPlan
from kvstrata.kernels.rows import write_rows
from kvstrata.kernels.selection import host_rows, select_fresh, select_piece
from kvstrata.memory.pages import PageView
from kvstrata.memory.step_fence import StepFence
from kvstrata.move.engine import CopyToken
from kvstrata.move.forward_rows import ForwardRows, FreshRows, PromptPart
from kvstrata.move.hot_path import HotPath, HotPathStatistics, Selection, Served
from kvstrata.move.prompt_window import PromptWindow, PromptWindowStatistics


class Attend(Protocol):
    """Sparse attention of a layer over rows in device memory."""

    def __call__(
        self,
        q: torch.Tensor,  # [t, H, row]
        cache: torch.Tensor,  # [1, rows, row]
        plan: BatchPlan,
        selected: torch.Tensor,  # [t, K] int32
        lse: torch.Tensor | None,  # [t, H] float32, written
    ) -> torch.Tensor:
        """Return [t, H, rank]."""


@dataclass(frozen=True, kw_only=True)
class WriteStatistics:
    """Totals since start of what the pipeline itself does."""

    steps: int = 0
    written_rows: int = 0
    written_bytes: int = 0
    write_s: float = 0.0
    store_wait_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class SparseStatistics(HotPathStatistics, PromptWindowStatistics, WriteStatistics):
    """All of a sparse-offloaded rank's totals since start."""


class SparsePipeline:
    """One rank's layers on the row window. One engine thread calls all methods, in lifecycle order.

    `homes` holds each layer's pages in the host pool as a tensor [blocks, block tokens, row]. Of the ranks
    that share a pool one `writes_home`; `fence` keeps them within a step of one another (M1).
    """

    def __init__(
        self,
        *,
        order: Sequence[int],
        drafts: frozenset[int],
        homes: Mapping[int, torch.Tensor],
        pages: Callable[[int, Component], PageView],
        hot: HotPath,
        window: PromptWindow,
        fresh: FreshRows,
        block_tokens: int,
        writes_home: bool,
        fence: StepFence | None,
        deadline_s: float,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._order = tuple(order)  # target layers, then drafts
        self._drafts = drafts
        self._homes = homes
        self._pages = pages
        self._hot = hot
        self._window = window
        self._fresh = fresh
        self._block_tokens = block_tokens
        self._writes_home = writes_home
        self._fence = fence
        self._deadline_s = deadline_s
        self._clock = clock
        self._step = 0
        self._is_open = False
        self._arrivals: Mapping[int, CopyToken] = {}
        self._new_rows: dict[int, torch.Tensor] = {}
        self._finished: set[int] = set()
        self._windowed: ForwardRows | None = None  # the one that the window was begun for
        self._totals: dict[str, Any] = dict(vars(WriteStatistics()))

    # The step.

    def begin_step(self) -> None:
        """Start a step; one that broke off is ended first.

        Raises DeadlineExceeded or TransferFailed where another rank of the pool does not get this far.
        """
        if self._is_open:
            self.end_step()
        if self._fence is not None:
            self._fence.begin(self._step + 1)
        self._step += 1
        self._is_open = True
        self._finished.clear()
        self._count(steps=1)

    def expect(self, block_ids: Sequence[int], arrivals: Mapping[int, CopyToken]) -> None:
        """Blocks are filled from outside in this step: layers wait for `arrivals`, and no row of them is hot.

        `arrivals` maps layers to tokens after which their homes hold the rows.
        """
        self._arrivals = arrivals
        if block_ids:
            first = np.asarray(block_ids, dtype=np.int64)[:, None] * self._block_tokens
            self._hot.overwrite((first + np.arange(self._block_tokens)).ravel(), arrivals)

    def end_step(self) -> None:
        """End the step: nothing is in flight any more. Legal again.

        Where something is, after its deadline, the other ranks of the pool are told so, and it is raised.
        """
        try:
            self._window.reset()
            self._hot.settle()
        except BaseException as trouble:
            if self._fence is not None:
                self._fence.fail(f"step {self._step} did not end: {trouble}")
            raise
        finally:
            self._fresh.leave()
            self._new_rows.clear()
            self._windowed = None
            self._arrivals = {}
        if self._is_open and self._fence is not None:
            self._fence.end(self._step)
        self._is_open = False

    # A layer.

    def known(self, forward: ForwardRows) -> ForwardRows:
        """Return the object that stands for `forward`'s batch in this step; the first of equals stays."""
        return self._fresh.known(forward)

    def acquire(self, layer: int) -> None:
        """Wait until rows that a store brings for `layer` are there."""
        token = self._arrivals.get(layer)
        if token is not None:
            begun = self._clock()
            token.wait(deadline_s=self._deadline_s, what=f"store rows of layer {layer}")
            self._count(store_wait_s=self._clock() - begun)

    def write(self, layer: int, forward: ForwardRows, new_rows: torch.Tensor) -> None:
        """Store the forward's new rows [>=T, row] of `layer` in their host slots; start its prompt loads."""
        self._fresh.enter(forward)
        self._begin_window(layer, forward)
        self._hot.enter(layer, forward)
        self._new_rows[layer] = new_rows
        if self._writes_home and forward.rows.size:
            begun = self._clock()
            home = self._homes[layer]
            write_rows(home, new_rows[forward.written.index], torch.from_numpy(forward.rows))
            self._count(
                written_rows=forward.rows.size,
                written_bytes=forward.rows.size * home.shape[-1] * home.element_size(),
                write_s=self._clock() - begun,
            )

    def attend(
        self,
        layer: int,
        forward: ForwardRows,
        q: torch.Tensor,
        rank: int,
        selection: Selection,
        attend: Attend,
    ) -> torch.Tensor:
        """Return attention of q [>=T, H, row] over each token's selected rows, [len(q), H, rank]."""
        new_rows = self._new_rows.pop(layer)
        decode = forward.decode
        if len(decode) == 1 and decode[0].tokens.size == q.shape[0]:  # the usual step: no copies of q and out
            for served in self._hot.serve(layer, forward, selection, new_rows):
                out = self._attend_hot(layer, served, q, attend)
            self._finished.add(layer)
            return out
        out = q.new_zeros(q.shape[0], q.shape[1], rank)
        for served in self._hot.serve(layer, forward, selection, new_rows):
            index = served.group.index
            out[index] = self._attend_hot(layer, served, q[index], attend)
        if forward.prompt is not None:
            index = forward.prompt.index
            out[index] = self._attend_prompt(
                layer, forward, forward.prompt, q[index].float(), rank, new_rows, selection, attend
            ).to(out.dtype)
        self._finished.add(layer)
        return out

    # What others ask.

    def ran_all_target_layers(self) -> bool:
        """Whether the forward got through; if not, its blocks lack rows and may not be shown to anyone."""
        return self._finished.issuperset(layer for layer in self._order if layer not in self._drafts)

    def home(self, layer: int, component: Component) -> PageView:
        """Return where the layer's full KV persists between steps."""
        return self._pages(layer, component)

    def statistics(self) -> SparseStatistics:
        """Return totals since start: this pipeline's, the hot rows' and the prompt window's."""
        return SparseStatistics(
            **self._totals, **vars(self._hot.statistics()), **vars(self._window.statistics())
        )

    def check_integrity(self) -> None:
        """Check every part that holds state."""
        self._hot.check_integrity()
        self._window.check_integrity()

    def _attend_hot(self, layer: int, served: Served, q: torch.Tensor, attend: Attend) -> torch.Tensor:
        hot = self._hot.buffer(layer).unsqueeze(0)
        return attend(q, hot, served.group.plan, torch.from_numpy(served.slots), None)

    def _attend_prompt(
        self,
        layer: int,
        forward: ForwardRows,
        prompt: PromptPart,
        q: torch.Tensor,
        rank: int,
        new_rows: torch.Tensor,
        selection: Selection,
        attend: Attend,
    ) -> torch.Tensor:
        """Attend to this forward's own rows, then to the pieces of context, and join."""
        positions = selection.positions[prompt.at]
        rows = host_rows(
            positions, forward.token_request[prompt.at], forward.block_table, forward.block_tokens
        )
        table = self._fresh.table
        # As the home will hold them: a cache of another dtype rounds.
        own = new_rows[: forward.tokens].to(self._homes[layer].dtype).contiguous().unsqueeze(0)
        out = q.new_empty(q.shape[0], q.shape[1], rank, dtype=torch.float32)
        lse = torch.empty(q.shape[0], q.shape[1], dtype=torch.float32)
        out.copy_(attend(q, own, prompt.fresh_plan, torch.from_numpy(select_fresh(rows, table)), lse))
        for number, piece in enumerate(prompt.passes):
            span = piece.span
            chosen = select_piece(positions[span], rows[span], table, piece.first, piece.end, piece.base)
            part_lse = torch.empty_like(lse[span])
            window = self._window.take(layer, number)
            part = attend(q[span], window, piece.plan, torch.from_numpy(chosen), part_lse)
            self._window.done()
            join_parts(out[span], lse[span], part.float(), part_lse)
        return out

    def _begin_window(self, layer: int, forward: ForwardRows) -> None:
        """Start a forward's prompt loads: for all target layers to come, or for one turn of a draft layer."""
        if forward.prompt is None or not forward.prompt.passes:
            return
        is_draft = layer in self._drafts
        if self._windowed is forward and not is_draft:
            return
        at = self._order.index(layer)
        coming = [layer] if is_draft else [n for n in self._order[at:] if n not in self._drafts]
        self._window.begin(forward.prompt.passes, coming, self._arrivals)
        self._windowed = forward

    def _count(self, **more: float) -> None:
        for name, value in more.items():
            self._totals[name] += value
