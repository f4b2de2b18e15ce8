"""What one step's batch looks like to the kernels: worked out once, shared by every layer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class BatchPlan:
    """Where every query token of a step sits, and how the tokens are cut into tiles.

    A tile is a run of consecutive query tokens of ONE request, at most `tile_tokens` of them.
    Positions count from the start of the request; a token at position p may attend to 0..p.
    """

    tokens: int
    max_tile_tokens: int
    block_tokens: int
    block_table: torch.Tensor  # [requests, max_blocks] int32
    highest_block: int  # of those the step reads; -1 for an empty step
    token_request: torch.Tensor  # [tokens] int64
    token_position: torch.Tensor  # [tokens] int64
    tile_request: torch.Tensor  # [tiles] int64
    tile_start: torch.Tensor  # [tiles] int64, first query token
    tile_tokens: torch.Tensor  # [tiles] int64, how many
    tile_kv_tokens: torch.Tensor  # [tiles] int64, context of the tile's last token

    @cached_property
    def tiles(self) -> int:
        return int(self.tile_request.shape[0])

    @cached_property
    def max_kv_tokens(self) -> int:
        """The longest context any token of the step attends to; 0 for an empty step."""
        return int(self.tile_kv_tokens.max()) if self.tiles else 0

    def tile_groups(self, token_bytes: int, budget_bytes: int) -> Iterator[tuple[slice, slice]]:
        """(tiles, their tokens), in order, each group within budget_bytes at token_bytes a token.

        A group holds one tile at least, whatever the budget.
        """
        each = max(1, budget_bytes // (max(token_bytes, 1) * self.max_tile_tokens))
        if 0 < self.tiles <= each:
            yield slice(0, self.tiles), slice(0, self.tokens)
            return
        for first in range(0, self.tiles, each):
            end = min(first + each, self.tiles)
            last_token = int(self.tile_start[end - 1] + self.tile_tokens[end - 1])
            yield slice(first, end), slice(int(self.tile_start[first]), last_token)

    def pairs(self, tiles: slice) -> int:
        """How many (query token, context token) pairs the tiles span, up to a tile's own triangle."""
        return int(self._tile_pairs[tiles].sum())

    def tile_arguments(self, tiles: slice) -> tuple[Any, ...]:
        """(request, first token, tokens) of the tiles, and all tokens' positions, for the compiled loops."""
        return (*(array[tiles] for array in self._tile_arrays), self.token_position.numpy())

    @cached_property
    def _tile_pairs(self) -> Int64Array:
        pairs: Int64Array = (self.tile_tokens * self.tile_kv_tokens).numpy()
        return pairs

    @cached_property
    def _tile_arrays(self) -> tuple[Int64Array, Int64Array, Int64Array]:
        return self.tile_request.numpy(), self.tile_start.numpy(), self.tile_tokens.numpy()

    def page_arguments(self) -> tuple[Any, ...]:
        """(block table, tokens a block) for the compiled loops."""
        return self.block_table.numpy(), self.block_tokens


def plan_batch(
    query_start_loc_cpu: torch.Tensor,
    seq_lens_cpu: torch.Tensor,
    block_table: torch.Tensor,
    block_tokens: int,
    *,
    tile_tokens: int = 16,
) -> BatchPlan:
    """Lay out one step.

    query_start_loc_cpu [R+1] and seq_lens_cpu [R] are vLLM's (seq_lens includes the new tokens);
    block_table is [>=R, max_blocks]. A request without
    query tokens (padding) is not looked at further.
    """
    starts = np.asarray(query_start_loc_cpu, dtype=np.int64)
    requests = starts.shape[0] - 1
    counts = np.diff(starts)
    lengths = np.where(counts > 0, np.asarray(seq_lens_cpu, dtype=np.int64)[:requests], 0)
    assert min(block_tokens, tile_tokens) > 0
    assert starts[0] == 0
    assert (counts >= 0).all(), "query_start_loc must not decrease"
    assert (lengths >= counts).all(), "a sequence is at least as long as its new tokens"
    assert lengths.max(initial=0) <= block_table.shape[1] * block_tokens, "block table too narrow"

    token_request = np.repeat(np.arange(requests), counts)
    tokens = int(starts[-1])
    token_position = np.arange(tokens) - np.repeat(starts[1:] - lengths, counts)

    tile_request, tile_start, tile_end = _cut(starts, tile_tokens)
    tile_kv = tile_end - starts[tile_request + 1] + lengths[tile_request]

    table = block_table[:requests].to(torch.int32).contiguous()
    blocks = -(-lengths // block_tokens)
    read = table.numpy()[np.arange(table.shape[1]) < blocks[:, None]]
    assert read.min(initial=0) >= 0, "a block of a context is missing from the block table"

    return BatchPlan(
        tokens=tokens,
        max_tile_tokens=tile_tokens,
        block_tokens=block_tokens,
        block_table=table,
        highest_block=int(read.max(initial=-1)),
        token_request=torch.from_numpy(token_request),
        token_position=torch.from_numpy(token_position),
        tile_request=torch.from_numpy(tile_request),
        tile_start=torch.from_numpy(tile_start),
        tile_tokens=torch.from_numpy(tile_end - tile_start),
        tile_kv_tokens=torch.from_numpy(tile_kv),
    )


def _cut(starts: Int64Array, tile_tokens: int) -> tuple[Int64Array, Int64Array, Int64Array]:
    """Cut the tokens of every request r, starts[r]..starts[r + 1] - 1: each tile's request, start and end."""
    tiles = -(-np.diff(starts) // tile_tokens)
    request = np.repeat(np.arange(tiles.size), tiles)
    tile_in_request = np.arange(request.size) - np.repeat(np.cumsum(tiles) - tiles, tiles)
    start = starts[request] + tile_in_request * tile_tokens
    return request, start, np.minimum(start + tile_tokens, starts[request + 1])


def plan_selection(
    query_counts: Int64Array,
    block_table: npt.NDArray[np.int32],
    block_tokens: int,
    kv_tokens: Int64Array,
    *,
    tile_tokens: int = 16,
) -> BatchPlan:
    """Lay out query tokens whose selections point into memory that is not their request's own context.

    Source i (a request, or a piece of one) has query_counts[i] consecutive query tokens, which may select
    positions 0..kv_tokens[i]-1 of the rows that block_table[i] names. For sparse attention only: no token has
    a position of its own there.
    """
    starts = np.concatenate(([0], np.cumsum(query_counts)))
    tile_request, tile_start, tile_end = _cut(starts, tile_tokens)
    return BatchPlan(
        tokens=int(starts[-1]),
        max_tile_tokens=tile_tokens,
        block_tokens=block_tokens,
        block_table=torch.from_numpy(np.ascontiguousarray(block_table, dtype=np.int32)),
        highest_block=int(block_table.max(initial=-1)),
        token_request=torch.from_numpy(np.repeat(np.arange(query_counts.size), query_counts)),
        token_position=torch.from_numpy(np.repeat(kv_tokens - 1, query_counts)),
        tile_request=torch.from_numpy(tile_request),
        tile_start=torch.from_numpy(tile_start),
        tile_tokens=torch.from_numpy(tile_end - tile_start),
        tile_kv_tokens=torch.from_numpy(kv_tokens[tile_request]),
    )
