"""An engine's steps over the ranks of one host pool, as the sparse state machine needs them."""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from typing import Any

from kvstrata.errors import DeadlineExceeded, TransferFailed
from kvstrata.memory.allocator import SharedMemoryAllocator
from kvstrata.memory.step_fence import StepFence
from kvstrata.move.forward_rows import WindowLimits
from kvstrata.move.hot_path import ROW_LANE
from kvstrata.move.prompt_window import PROMPT_LANE
from kvstrata.move.sparse_testing import Home, Rank, Span, choose, split

STORE_LANE = "store"
FAULTS = ("rows", "pages", "write", "attend", "arrival", "held rows", "held prompt")
BREAKS = (OSError, RuntimeError, TransferFailed, DeadlineExceeded)


def fail(*_: Any) -> None:
    """Be what an unreliable part does."""
    raise OSError("the bus is on fire")


class Engine:
    """Steps of one rank, or of several that share a home and run layer by layer beside each other.

    Whatever is queued runs at random moments, or when somebody waits for it.
    """

    def __init__(self, home: Home, limits: WindowLimits, *, ranks: int, seed: int, **parts: Any) -> None:
        self.home, self.limits = home, limits
        self.rng = random.Random(seed)
        self.fences: list[Any] = [None]
        if ranks > 1:
            shared = {"ranks": ranks, "deadline_s": 5.0}
            writer = StepFence.create(SharedMemoryAllocator(), **shared)
            self.fences = [
                writer,
                *(StepFence.open(writer.handle, rank=at, **shared) for at in range(1, ranks)),
            ]
        self.ranks = [
            Rank(home, limits, writes_home=at == 0, fence=fence, **parts)
            for at, fence in enumerate(self.fences)
        ]
        self.leaders = {group[0] for group in home.groups}
        self.heal()

    def heal(self) -> None:
        """Let nothing fail any more."""
        for rank in self.ranks:
            rank.before_copy = lambda kind, layer: None
            rank.between = functools.partial(self._run_some_copies, rank)
            for lane in (ROW_LANE, PROMPT_LANE):
                rank.engine.lane(lane).held = False

    def begin(self, brought: Sequence[int] = (), *, lost_layer: int | None = None) -> None:
        """Begin a step in which a store fills the blocks `brought`, except that it fails at `lost_layer`."""
        for rank in self.ranks:
            rank.pipeline.begin_step()
        for rank in self.ranks:
            rank.check()
            rank.poison()
        lane = self.ranks[0].engine.lane(STORE_LANE)
        arrivals = {}
        for layer in self.home.order if brought or lost_layer is not None else ():
            bring = fail if layer == lost_layer else functools.partial(self.home.bring, layer, brought)
            arrivals[layer] = lane.call(bring, name=f"rows of layer {layer}")
        for rank in self.ranks:
            rank.pipeline.expect(brought, arrivals)
        self._moved = [self._moves(rank) for rank in self.ranks]

    def layer(self, layer: int, spans: Sequence[Span], *, beside: bool | None = None, stop: str = "") -> None:
        """One layer's turn on all ranks, which write `beside` one another or when their own turn comes.

        `stop` breaks it off after "write", or in the middle of "attend".
        """
        if layer in self.leaders:
            self._selection = choose(spans, self.limits.topk, self.rng.randint(0, 1 << 30), near=2)
        turns = [(rank, rank.pipeline.known(split(spans, self.limits))) for rank in self.ranks]
        new_rows = self.home.new_rows(layer, turns[0][1])
        if beside is None:
            beside = self.rng.random() < 0.5
        if beside:
            for rank, forward in turns:
                rank.write(layer, forward, new_rows)
                rank.between()
            if stop == "write":
                raise RuntimeError("the forward broke")
        self.rng.shuffle(turns)
        for rank, forward in turns:
            if not beside:
                rank.write(layer, forward, new_rows)
            if stop == "attend":
                rank.between = fail
            rank.attend(layer, forward, new_rows, self._selection)
            rank.between()

    def break_at(self, fault: str, layer: int, spans: Sequence[Span]) -> bool:
        """Run the target layers with a fault from `layer` on; tell whether it broke the forward.

        All ranks get as far: a group of ranks does not outlive a forward that one of them leaves earlier.
        """
        try:
            for at in self.home.targets:
                rank = self.rng.choice(self.ranks)
                if at == layer and fault in ("rows", "pages"):
                    rank.before_copy = lambda kind, _: fail() if kind == fault else None
                elif at == layer and fault.startswith("held"):
                    rank.engine.lane(ROW_LANE if fault == "held rows" else PROMPT_LANE).held = True
                stop = fault if at == layer and fault in ("write", "attend") else ""
                self.layer(at, spans, beside=True, stop=stop)
        except BREAKS:
            return True
        return False

    def hangs(self) -> bool:
        """Whether a copy is stuck that a step must not end with (M3)."""
        lanes = [rank.engine.lane(name) for rank in self.ranks for name in (ROW_LANE, PROMPT_LANE)]
        return any(lane.held and lane.ledger.statistics().pending for lane in lanes)

    def end(self, *, whole: bool = True) -> None:
        """End the step; after a `whole` one each missed row was copied once for every layer (R2, R5)."""
        for rank in self.ranks:
            rank.pipeline.end_step()
        for rank, before in zip(self.ranks, self._moved, strict=True):
            rank.check()
            after = self._moves(rank)
            for group in self.home.groups if whole else ():
                missed = after[group] - before[group]
                for layer in group:
                    assert after[layer] - before[layer] == missed, f"R2: layer {layer}"

    def close(self) -> None:
        """Let go of all memory."""
        for rank, fence in zip(self.ranks, self.fences, strict=True):
            rank.engine.close(30.0)
            if fence is not None:
                fence.close()
        self.home.pool.close()

    def _moves(self, rank: Rank) -> dict[Any, int]:
        missed = {group: table.statistics().misses for group, table in rank.tables.items()}
        return {**missed, **rank.copied}

    def _run_some_copies(self, rank: Rank) -> None:
        for name in (ROW_LANE, PROMPT_LANE):
            if self.rng.random() < 0.4:
                rank.engine.lane(name).run_until_idle()
        if self.rng.random() < 0.2:
            self.ranks[0].engine.lane(STORE_LANE).run_until_idle()
