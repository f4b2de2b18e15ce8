"""For tests of the sparse pipeline: ranks over real memory, attention that records the rows it was given.

A row says who it is, `(layer, host row, version, token)`, so a foreign or an old one betrays itself. The
oracle is what plain vLLM would have: a full cache of every layer.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kvstrata.core.bundle import ComponentSpec, build_bundles
from kvstrata.core.hot_row_plan import share_groups
from kvstrata.core.layers import Component, LayerId
from kvstrata.kernels.batch import BatchPlan
from kvstrata.kernels.gather import gather_rows
from kvstrata.kernels.residency import ResidencyTable
from kvstrata.memory.allocator import SharedMemoryAllocator
from kvstrata.memory.host_pool import MAIN_ONLY, HostPool
from kvstrata.memory.hot_rows import HotRows
from kvstrata.memory.rows import RowView
from kvstrata.memory.step_fence import StepFence
from kvstrata.move.forward_rows import ForwardRows, FreshRows, WindowLimits, forward_rows
from kvstrata.move.hot_path import HotLayer, HotPath, Selection
from kvstrata.move.inline import InlineEngine
from kvstrata.move.memcpy import copy_ranges
from kvstrata.move.plan import CopyPlan
from kvstrata.move.prompt_window import PromptWindow
from kvstrata.move.sparse import SparsePipeline

WIDTH = 4
POISON = -7.0
DEADLINE_S = 5.0

Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Span:
    """One request of a batch: tokens `begin`..`end`-1 of it are new, and lie in `blocks`."""

    blocks: Sequence[int]
    begin: int
    end: int


def split(spans: Sequence[Span], limits: WindowLimits, *, unwritten: Sequence[int] = ()) -> ForwardRows:
    """Split a batch given in vLLM's words; tokens in `unwritten` have no slot."""
    width = 1 + max((len(span.blocks) for span in spans), default=0)
    table = np.full((len(spans), width), -1, dtype=np.int32)
    slots: list[int] = []
    for at, span in enumerate(spans):
        table[at, : len(span.blocks)] = span.blocks
        for position in range(span.begin, span.end):
            block, offset = divmod(position, limits.block_tokens)
            slots.append(span.blocks[block] * limits.block_tokens + offset)
    for token in unwritten:
        slots[token] = -1
    starts = np.cumsum([0, *(span.end - span.begin for span in spans)])
    return forward_rows(
        query_start_loc=starts.astype(np.int32),
        seq_lens=np.array([span.end for span in spans], dtype=np.int32),
        block_table=table,
        slot_mapping=np.array([*slots, -1, -1], dtype=np.int64),  # vLLM pads
        limits=limits,
    )


def choose(spans: Sequence[Span], topk: int, seed: int, *, near: int = 0) -> Selection:
    """Select for every token up to `topk` positions, its own included, ascending, -1 among them.

    Early and late positions come often, as in life. `near` of the positions just below the cut, too.
    """
    rng = random.Random(seed)
    chosen, below = [], []
    for span in spans:
        for position in range(span.begin, span.end):
            likely = [*range(min(3, position + 1)), *range(max(0, position - 2), position + 1)]
            others = [rng.randint(0, position) for _ in range(rng.randint(0, topk))]
            few = rng.sample(likely, rng.randint(0, len(likely)))
            kept = sorted(set((few + others)[: rng.randint(0, topk)]))
            row = [*kept, *[-1] * (topk - len(kept))]
            if rng.random() < 0.3:  # -1 may stand anywhere
                places = sorted(rng.sample(range(topk), len(kept)))
                row = [-1] * topk
                for place, value in zip(places, kept, strict=True):
                    row[place] = value
            chosen.append(row)
            below.append([rng.randint(-1, position) for _ in range(near)])
    shape = (len(chosen), topk)
    return Selection(
        positions=np.array(chosen, dtype=np.int32).reshape(shape),
        near=np.array(below, dtype=np.int32).reshape(len(below), near) if near else None,
    )


class Home:
    """The host pool that ranks share, and the oracle."""

    def __init__(
        self,
        *,
        layers: int,
        drafts: int = 0,
        leaders: Sequence[int] = (0,),
        blocks: int,
        block_tokens: int,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """Layers among `leaders` have an indexer; the drafts come last."""
        specs = [
            ComponentSpec(
                name=f"layers.{index}.{component.value}",
                layer=LayerId(index, component, index >= layers),
                page_bytes=block_tokens * WIDTH * dtype.itemsize,
                block_tokens=block_tokens,
                layout=component.value,
            )
            for index in range(layers + drafts)
            for component in (Component.MAIN, Component.INDEXER)
            if component is Component.MAIN or index in leaders
        ]
        self.bundles = build_bundles(specs)
        self.groups = share_groups(self.bundles)
        self.order = tuple(range(layers + drafts))
        self.targets = self.order[:layers]
        self.drafts = self.order[layers:]
        self.block_tokens, self.dtype = block_tokens, dtype
        self.rows = blocks * block_tokens
        self.pool = HostPool(
            self.bundles, blocks, SharedMemoryAllocator(), layers=self.order, components=MAIN_ONLY
        )
        self.tensors = {
            layer: self.pool.tensor(layer, Component.MAIN, width=WIDTH, dtype=dtype) for layer in self.order
        }
        self.oracle = {layer: torch.zeros(self.rows, WIDTH, dtype=dtype) for layer in self.order}
        self._version = 0

    def new_rows(self, layer: int, forward: ForwardRows) -> torch.Tensor:
        """Return what the layer computes for the forward's tokens, and two rows of padding."""
        self._version += 1
        made = torch.full((forward.tokens + 2, WIDTH), POISON)
        row_of = dict(zip(forward.row_token.tolist(), forward.rows.tolist(), strict=True))
        for token in range(forward.tokens):
            made[token] = torch.tensor([layer, row_of.get(token, -1), self._version, token])
        return made

    def note(self, layer: int, forward: ForwardRows, new_rows: torch.Tensor) -> None:
        """A plain cache would hold these rows now."""
        self.oracle[layer][forward.rows] = new_rows[forward.row_token].to(self.dtype)

    def bring(self, layer: int, blocks: Sequence[int]) -> None:
        """A store fills blocks of a layer, at home and in the oracle."""
        self._version += 1
        for block in blocks:
            rows = torch.arange(block * self.block_tokens, (block + 1) * self.block_tokens)
            made = torch.stack([torch.tensor([layer, row, self._version, -1]) for row in rows.tolist()])
            self.tensors[layer][block] = made.to(self.dtype)
            self.oracle[layer][rows] = made.to(self.dtype)


class Rank:
    """One rank's pipeline, and attention that records. `between` is called where other threads may run."""

    def __init__(
        self,
        home: Home,
        limits: WindowLimits,
        *,
        writes_home: bool = True,
        fence: StepFence | None = None,
        policy: str = "lru",
        buffers: int = 2,
        hot_class: type[HotPath] = HotPath,
        window_class: type[PromptWindow] = PromptWindow,
        table_class: type[ResidencyTable] = ResidencyTable,
        fresh_class: type[FreshRows] = FreshRows,
        pipeline_class: type[SparsePipeline] = SparsePipeline,
        window_layer: Callable[[int], int] = lambda layer: layer,
    ) -> None:
        self.home, self.limits = home, limits
        self.engine = InlineEngine(copy=self._copy_pages)
        self.between: Callable[[], None] = lambda: None
        self.before_copy: Callable[[str, int], None] = lambda kind, layer: None
        self.copied = dict.fromkeys(home.order, 0)
        self.compared = 0
        hot = HotRows(dict.fromkeys(home.order, WIDTH), capacity_rows=limits.capacity, dtype=home.dtype)
        self.buffers = {layer: hot.buffer(layer) for layer in home.order}
        self.tables = {
            group: table_class(host_rows=home.rows, capacity=limits.capacity, policy=policy)
            for group in home.groups
        }
        self.fresh = fresh_class(home.rows)
        self._layer_at = {buffer.data_ptr(): layer for layer, buffer in self.buffers.items()}
        self.hot = hot_class(
            groups=self.tables,
            layers={
                layer: HotLayer(
                    buffer=buffer, hot=RowView.of_tensor(buffer), home=RowView.of_tensor(home.tensors[layer])
                )
                for layer, buffer in self.buffers.items()
            },
            fresh=self.fresh.table,
            engine=self.engine,
            copy_rows=self._copy_rows,
            deadline_s=DEADLINE_S,
        )
        shape = (limits.window_blocks, limits.block_tokens, WIDTH)
        self.window_buffers = [torch.full(shape, POISON, dtype=home.dtype) for _ in range(buffers)]
        self.window = window_class(
            homes={n: home.pool.view(window_layer(n), Component.MAIN) for n in home.order},
            buffers=self.window_buffers,
            engine=self.engine,
            deadline_s=DEADLINE_S,
        )
        self.pipeline = pipeline_class(
            order=home.order,
            drafts=frozenset(home.drafts),
            homes=home.tensors,
            pages=home.pool.view,
            hot=self.hot,
            window=self.window,
            fresh=self.fresh,
            block_tokens=limits.block_tokens,
            writes_home=writes_home,
            fence=fence,
            deadline_s=DEADLINE_S,
        )
        self.writes_home = writes_home
        self._padding = 0
        self._seen: list[list[list[list[float]]]] = []

    def write(self, layer: int, forward: ForwardRows, new_rows: torch.Tensor) -> None:
        """Acquire the layer and write its new rows."""
        self.pipeline.acquire(layer)
        self.pipeline.write(layer, forward, new_rows)
        if self.writes_home:
            self.home.note(layer, forward, new_rows)

    def attend(
        self, layer: int, forward: ForwardRows, new_rows: torch.Tensor, selection: Selection
    ) -> torch.Tensor:
        """Attend, and check that each token read its selected rows as they are now, each once (M4)."""
        tokens = forward.tokens
        self._padding = 2 - self._padding  # vLLM pads some batches
        length = tokens + self._padding
        q = torch.arange(length, dtype=torch.float32)[:, None, None].expand(-1, 1, WIDTH)
        self._seen = [[] for _ in range(tokens)]
        out = self.pipeline.attend(layer, forward, q.contiguous(), WIDTH, selection, self._record)
        assert out.shape == (length, 1, WIDTH)
        means = np.zeros((length, 1, WIDTH))  # padding and tokens that select nothing give zeros
        for token, wanted in enumerate(self._wanted(layer, forward, new_rows, selection)):
            got = [row for part in self._seen[token] for row in part]
            self.compared += len(wanted)
            assert got == wanted, f"M4: layer {layer}, token {token} reads {got}, plain vLLM {wanted}"
            if wanted:
                means[token] = np.mean(wanted, axis=0)
        assert np.allclose(out.numpy(), means, rtol=1e-3, atol=1e-3), "M4: parts are joined wrongly"
        return out

    def _wanted(
        self, layer: int, forward: ForwardRows, new_rows: torch.Tensor, selection: Selection
    ) -> Iterator[list[list[float]]]:
        """Yield each token's rows in order: decode in the selection's, prompts their forward's own first."""
        block_tokens = self.limits.block_tokens
        own = dict(zip(forward.rows.tolist(), forward.row_token.tolist(), strict=True))
        fresh, full = new_rows.to(self.home.dtype).tolist(), self.home.oracle[layer]
        decoding = {int(token) for group in forward.decode for token in group.tokens}
        for token, request in enumerate(forward.token_request.tolist()):
            table = forward.block_table[request].tolist()
            chosen = [position for position in selection.positions[token].tolist() if position >= 0]
            rows = [table[at // block_tokens] * block_tokens + at % block_tokens for at in chosen]
            if token not in decoding:
                rows.sort(key=lambda row: row not in own)
            yield [fresh[own[row]] if row in own else full[row].tolist() for row in rows]

    def _record(
        self,
        q: torch.Tensor,
        cache: torch.Tensor,
        plan: BatchPlan,
        selected: torch.Tensor,
        lse: torch.Tensor | None,
    ) -> torch.Tensor:
        """Give each row the same weight: a result is the mean of the rows read."""
        self.between()  # whatever is queued may overwrite now what is being read (M1)
        assert (plan.tokens, plan.block_tokens) == (q.shape[0], cache.shape[1])
        out = torch.zeros(q.shape[0], 1, WIDTH)
        for at, token in enumerate(q[:, 0, 0].long().tolist()):
            rows = cache[0, selected[at][selected[at] >= 0].long()].tolist()
            self._seen[token].append(rows)
            if rows:
                out[at] = torch.from_numpy(np.mean(rows, axis=0))
            if lse is not None:
                lse[at] = math.log(len(rows)) if rows else -math.inf
        return out

    def _copy_rows(self, dst: RowView, dst_rows: Int64Array, src: RowView, src_rows: Int64Array) -> None:
        layer = self._layer_at[dst.address]
        self.before_copy("rows", layer)
        self.copied[layer] += len(dst_rows)
        gather_rows(dst, dst_rows, src, src_rows)

    def _copy_pages(self, plan: CopyPlan) -> None:
        self.before_copy("pages", -1)
        copy_ranges(plan)

    def table_of(self, layer: int) -> ResidencyTable:
        """The table of the layer's share group."""
        return next(table for group, table in self.tables.items() if layer in group)

    def poison(self) -> None:
        """Overwrite what no later step may rely on: the window, and slots that hold no row."""
        for buffer in self.window_buffers:
            buffer.fill_(POISON)
        for group, table in self.tables.items():
            held = np.zeros(self.limits.capacity, dtype=bool)
            held[table.residents()[1]] = True
            for layer in group:
                self.buffers[layer][torch.from_numpy(~held)] = POISON

    def check(self) -> None:
        """Check integrity, and that every resident slot holds exactly its host row's bytes (R1, R4)."""
        self.pipeline.check_integrity()
        self.engine.check_integrity()
        for group, table in self.tables.items():
            rows, slots = table.residents()
            assert len(set(rows.tolist())) == len(set(slots.tolist())) == len(rows), "R1"
            for layer in group:
                held, wanted = self.buffers[layer][slots], self.home.oracle[layer][rows]
                assert torch.equal(held, wanted), f"R4: layer {layer}: {held.tolist()} for {wanted.tolist()}"
