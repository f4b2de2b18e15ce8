"""One forward of a sparse-offloaded engine: which tokens decode through hot rows, which pass a window.

Worked out once a forward and used by every layer. Decode tokens, drafts under verification included, attend
to hot rows. Prompt tokens attend to their context piece by piece, as it passes through the window, and to the
rows of this forward where they were computed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch

from kvstrata.kernels.batch import BatchPlan, plan_selection
from kvstrata.kernels.selection import Int32Array, Int64Array


@dataclass(frozen=True, kw_only=True)
class WindowLimits:
    """What bounds a forward's parts, fixed at start."""

    block_tokens: int
    window_blocks: int  # of context that pass at a time
    capacity: int  # hot rows a layer
    topk: int
    decode_tokens: int  # a request with at most so many new tokens decodes: 1 + drafts


@dataclass(frozen=True, kw_only=True)
class TokenSet:
    """Some of a forward's tokens, and how they are taken out of its arrays: by a slice where they adjoin."""

    tokens: Int64Array  # [n], ascending

    @cached_property
    def at(self) -> slice | Int64Array:
        """The index into a numpy array [T, ...]."""
        tokens = self.tokens
        adjoin = tokens.size > 0 and int(tokens[-1]) - int(tokens[0]) == tokens.size - 1
        return slice(int(tokens[0]), int(tokens[-1]) + 1) if adjoin else tokens

    @cached_property
    def index(self) -> slice | torch.Tensor:
        """The index into a tensor [T, ...]."""
        return self.at if isinstance(self.at, slice) else torch.from_numpy(self.at)


@dataclass(frozen=True, kw_only=True)
class DecodeGroup(TokenSet):
    """Decode tokens whose selections fit the hot rows together."""

    plan: BatchPlan  # over the hot buffer as one block


@dataclass(frozen=True, kw_only=True)
class WindowPass:
    """Pieces of contexts that are in the window together, and the prompt tokens that may attend to them."""

    blocks: Int64Array  # [n], page i of the window holds block blocks[i]
    span: slice  # of the prompt part's tokens
    first: Int64Array  # [tokens of span], first position of the token's piece
    end: Int64Array
    base: Int64Array  # where the piece begins in the window, in rows
    plan: BatchPlan  # over the window as one block


@dataclass(frozen=True, kw_only=True)
class PromptPart(TokenSet):
    """The prompt tokens of a forward."""

    passes: tuple[WindowPass, ...]
    fresh_plan: BatchPlan  # over the forward's own rows as one block


@dataclass(frozen=True, kw_only=True)
class ForwardRows:
    """One forward, split. `token_request` and `block_table` are the batch's own."""

    token_request: Int64Array  # [T]
    context: Int64Array  # [R], tokens computed before
    block_table: Int32Array  # [R, blocks]
    block_tokens: int
    rows: Int64Array  # [n] host rows that this forward writes
    row_token: Int64Array  # [n] the token that each of them comes from
    decode: tuple[DecodeGroup, ...]
    prompt: PromptPart | None

    def is_same_batch(self, other: ForwardRows) -> bool:
        """Whether both split the same batch: vLLM makes one metadata object for each kind of layer."""
        return all(
            np.array_equal(mine, theirs)
            for mine, theirs in (
                (self.token_request, other.token_request),
                (self.context, other.context),
                (self.rows, other.rows),
                (self.row_token, other.row_token),
                (self.block_table, other.block_table),
            )
        )

    @cached_property
    def written(self) -> TokenSet:
        """The tokens whose rows are written."""
        return TokenSet(tokens=self.row_token)

    @cached_property
    def tokens(self) -> int:
        """Tokens that attend."""
        return int(self.token_request.size)


def forward_rows(
    *,
    query_start_loc: npt.NDArray[np.integer],  # [R + 1]
    seq_lens: npt.NDArray[np.integer],  # [R], new tokens included
    block_table: npt.NDArray[np.integer],  # [R, blocks]
    slot_mapping: npt.NDArray[np.integer],  # [>=T], -1 = not written
    limits: WindowLimits,
) -> ForwardRows:
    """Split a batch. A request without context goes with the prompts, however few its tokens."""
    starts = query_start_loc.astype(np.int64)
    new = np.diff(starts)
    context = np.where(new > 0, seq_lens.astype(np.int64)[: new.size] - new, 0)
    assert context.min(initial=0) >= 0, "a sequence is at least as long as its new tokens"
    decodes = (new > 0) & (new <= limits.decode_tokens) & (context > 0)
    prompts = (new > 0) & ~decodes
    token_request = np.repeat(np.arange(new.size), new)
    table = np.ascontiguousarray(block_table[: new.size], dtype=np.int32)
    written = slot_mapping[: token_request.size].astype(np.int64)
    row_token = np.flatnonzero(written >= 0)
    return ForwardRows(
        token_request=token_request,
        context=context,
        block_table=table,
        block_tokens=limits.block_tokens,
        rows=written[row_token],
        row_token=row_token,
        decode=tuple(_decode_groups(np.flatnonzero(decodes[token_request]), limits)),
        prompt=_prompt_part(prompts, new, context, token_request, table, limits) if prompts.any() else None,
    )


def _decode_groups(tokens: Int64Array, limits: WindowLimits) -> Iterator[DecodeGroup]:
    each = limits.capacity // limits.topk
    for at in range(0, tokens.size, each):
        group = tokens[at : at + each]
        one = np.ones(group.size, dtype=np.int64)
        yield DecodeGroup(tokens=group, plan=_plan_over(one, limits.capacity))


def _prompt_part(
    prompts: npt.NDArray[np.bool_],
    new: Int64Array,
    context: Int64Array,
    token_request: Int64Array,
    table: Int32Array,
    limits: WindowLimits,
) -> PromptPart:
    requests = np.flatnonzero(prompts)
    counts = new[requests]
    return PromptPart(
        tokens=np.flatnonzero(prompts[token_request]),
        passes=tuple(_passes(requests, counts, context[requests], table, limits)),
        fresh_plan=_plan_over(counts, int(token_request.size)),
    )


def _passes(
    requests: Int64Array, counts: Int64Array, context: Int64Array, table: Int32Array, limits: WindowLimits
) -> Iterator[WindowPass]:
    """Lay all contexts end to end, whole blocks each, and cut the row of blocks at the window's size."""
    size = limits.window_blocks
    held = -(-context // limits.block_tokens)
    first_block = np.cumsum(held) - held
    first_token = np.cumsum(counts) - counts
    total = int(held.sum())
    for low in range(0, total, size):
        high = min(low + size, total)
        inside = np.flatnonzero((first_block < high) & (first_block + held > low) & (held > 0))
        begin = np.maximum(first_block[inside], low)  # in the row of blocks
        stop = np.minimum(first_block[inside] + held[inside], high)
        blocks = [
            table[requests[at], begin[i] - first_block[at] : stop[i] - first_block[at]].astype(np.int64)
            for i, at in enumerate(inside)
        ]
        first = (begin - first_block[inside]) * limits.block_tokens
        end = np.minimum((stop - first_block[inside]) * limits.block_tokens, context[inside])
        lowest, highest = int(inside[0]), int(inside[-1])
        # Requests between two of the pass have no context: they take part and find nothing.
        members = np.arange(lowest, highest + 1)
        at_member = inside - lowest
        yield WindowPass(
            blocks=np.concatenate(blocks),
            span=slice(int(first_token[lowest]), int(first_token[highest] + counts[highest])),
            first=_by_token(first, at_member, counts[members]),
            end=_by_token(end, at_member, counts[members]),
            base=_by_token((begin - low) * limits.block_tokens, at_member, counts[members]),
            plan=_plan_over(counts[members], size * limits.block_tokens),
        )


def _by_token(values: Int64Array, at: Int64Array, counts: Int64Array) -> Int64Array:
    spread = np.zeros(counts.size, dtype=np.int64)
    spread[at] = values
    return np.repeat(spread, counts)


def _plan_over(counts: Int64Array, rows: int) -> BatchPlan:
    """Plan queries over `rows` rows that lie in one piece."""
    table = np.zeros((counts.size, 1), dtype=np.int32)
    return plan_selection(counts, table, rows, np.full(counts.size, rows, dtype=np.int64))


class FreshRows:
    """Which host rows the current forward writes, and from which of its tokens: one table for all layers."""

    def __init__(self, host_rows: int) -> None:
        self.table = np.full(host_rows, -1, dtype=np.int32)
        self._current: ForwardRows | None = None

    def known(self, forward: ForwardRows) -> ForwardRows:
        """Return the current forward if `forward` splits the same batch, else `forward`."""
        current = self._current
        return current if current is not None and current.is_same_batch(forward) else forward

    def enter(self, forward: ForwardRows) -> bool:
        """Make `forward` the current one; tell whether it was not so already."""
        if self._current is forward:
            return False
        self.leave()
        if forward.rows.size and not 0 <= forward.rows.min() <= forward.rows.max() < self.table.size:
            raise IndexError(f"host rows {forward.rows.min()}..{forward.rows.max()} of {self.table.size}")
        self.table[forward.rows] = forward.row_token
        self._current = forward
        return True

    def leave(self) -> None:
        """Forget the current forward: its rows are at home from here on."""
        if self._current is not None:
            self.table[self._current.rows] = -1
            self._current = None
