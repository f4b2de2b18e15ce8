"""The window that a prompt chunk's context passes through: two buffers of whole blocks, shared by all layers.

Pieces of context are loaded from the host pool one ahead of the attention that reads them, within a layer and
into the next one, so the device never holds a whole layer (beyond the seed, which prefills elsewhere).
Nothing is saved from here: new rows go to their homes directly.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kvstrata.errors import DeadlineExceeded, TransferFailed
from kvstrata.memory.pages import PageView
from kvstrata.move.engine import CopyEngine, CopyToken
from kvstrata.move.forward_rows import WindowPass
from kvstrata.move.plan import plan_page_copies

PROMPT_LANE = "prompt"


@dataclass(frozen=True, kw_only=True)
class PromptWindowStatistics:
    """Totals since start."""

    prompt_loaded_bytes: int = 0
    prompt_wait_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class _Load:
    """A piece of one layer on its way into a buffer, or there."""

    layer: int
    number: int
    buffer: int
    token: CopyToken


class PromptWindow:
    """Feeds pieces of context to attention, layer by layer. One engine thread calls all methods.

    A buffer is loaded again only after `done` with what it held (M1); what a failed or broken-off forward
    left in flight is waited for before its buffer is used again (M3).
    """

    def __init__(
        self,
        *,
        homes: Mapping[int, PageView],
        buffers: Sequence[torch.Tensor],  # each [window blocks, block tokens, row]
        engine: CopyEngine,
        deadline_s: float,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._homes = homes
        self._buffers = buffers
        self._pages = [PageView.of_tensor(buffer) for buffer in buffers]
        self._engine = engine
        self._deadline_s = deadline_s
        self._clock = clock
        self._passes: Sequence[WindowPass] = ()
        self._due: deque[tuple[int, int]] = deque()
        self._loads: deque[_Load] = deque()
        self._free: deque[int] = deque(range(len(buffers)))
        self._stale: list[_Load] = []
        self._behind: Mapping[int, CopyToken] = {}
        self._totals: dict[str, Any] = dict(vars(PromptWindowStatistics()))

    def begin(
        self, passes: Sequence[WindowPass], layers: Sequence[int], behind: Mapping[int, CopyToken]
    ) -> None:
        """Start a forward of `layers` in the order given; every one of them will ask for every pass.

        `behind` maps layers to tokens that their loads must come after (rows that arrive from a store).
        """
        self.reset()
        self._passes = passes
        self._due.extend((layer, number) for layer in layers for number in range(len(passes)))
        self._behind = behind
        self._load_ahead()

    def take(self, layer: int, number: int) -> torch.Tensor:
        """Wait for piece `number` of `layer`, the next in order, and return the buffer as [1, rows, row].

        Raises DeadlineExceeded or TransferFailed; the pieces are then taken from the start by a next `begin`.
        """
        assert self._loads, f"layer {layer} asks for piece {number} of its context, and none is due"
        load = self._loads[0]
        assert (load.layer, load.number) == (layer, number), (
            f"layer {layer} asks for piece {number} of its context, due is {load.number} of {load.layer}"
        )
        begun = self._clock()
        try:
            load.token.wait(
                deadline_s=self._deadline_s, what=f"load of context piece {number} of layer {layer}"
            )
        finally:
            self._count(prompt_wait_s=self._clock() - begun)
        buffer = self._buffers[load.buffer]
        return buffer.view(1, -1, buffer.shape[-1])

    def done(self) -> None:
        """State that the piece taken last has been read; its buffer is loaded with a later one."""
        self._free.append(self._loads.popleft().buffer)
        self._load_ahead()

    def reset(self) -> None:
        """Forget the current forward; waits for loads that nobody took.

        Raises DeadlineExceeded for one that does not end; its buffer stays out of use until it has.
        """
        self._due.clear()
        self._stale.extend(self._loads)
        self._loads.clear()
        still: list[_Load] = []
        trouble: DeadlineExceeded | None = None
        for load in self._stale:
            try:
                load.token.wait(deadline_s=self._deadline_s, what=f"unused {load.token.name}")
            except TransferFailed:
                pass  # nobody reads it
            except DeadlineExceeded as late:
                trouble = late
                still.append(load)
                continue
            self._free.append(load.buffer)
        self._stale = still
        if trouble is not None:
            raise trouble

    def statistics(self) -> PromptWindowStatistics:
        """Return totals since start."""
        return PromptWindowStatistics(**self._totals)

    def check_integrity(self) -> None:
        """Check that every buffer is free, loaded or abandoned, and none of them twice."""
        held = [load.buffer for load in (*self._loads, *self._stale)]
        assert sorted([*held, *self._free]) == list(range(len(self._buffers))), (held, self._free)

    def _load_ahead(self) -> None:
        while self._due and self._free:
            layer, number = self._due.popleft()
            buffer = self._free.popleft()
            blocks = self._passes[number].blocks
            after = [self._engine.compute_done()]
            if layer in self._behind:
                after.append(self._behind[layer])
            try:
                copies = plan_page_copies(
                    self._pages[buffer], np.arange(blocks.size), self._homes[layer], blocks
                )
                token = self._engine.lane(PROMPT_LANE).submit(
                    copies, after=after, name=f"load of context piece {number} of layer {layer}"
                )
            except BaseException:
                self._free.append(buffer)
                raise
            self._loads.append(_Load(layer=layer, number=number, buffer=buffer, token=token))
            self._count(prompt_loaded_bytes=copies.total_bytes)

    def _count(self, **more: float) -> None:
        for name, value in more.items():
            self._totals[name] += value
