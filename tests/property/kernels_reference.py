"""A paged batch and what the kernels must make of it, said slowly: one token, one key, float64."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from hypothesis import strategies as st

BLOCK_TOKENS = (1, 7, 16, 64, 128)


@dataclass(frozen=True, kw_only=True)
class Request:
    history: int  # tokens already in the cache
    new: int  # query tokens of this step

    @property
    def length(self) -> int:
        return self.history + self.new


@dataclass(frozen=True, kw_only=True)
class Paged:
    """Requests' rows in a paged cache; every element that belongs to no context is NaN or 0xFF."""

    requests: list[Request]
    block_tokens: int
    rows: list[torch.Tensor]  # per request [length, width], as stored
    cache: torch.Tensor  # [B, N, width]
    block_table: torch.Tensor  # [R, max_blocks] int32

    @property
    def query_start_loc(self) -> torch.Tensor:
        return torch.tensor([0, *(r.new for r in self.requests)], dtype=torch.int32).cumsum(0)

    @property
    def seq_lens(self) -> torch.Tensor:
        return torch.tensor([r.length for r in self.requests], dtype=torch.int32)

    def tokens(self) -> list[tuple[int, int]]:
        """(request, position) of every query token."""
        return [(i, r.history + j) for i, r in enumerate(self.requests) for j in range(r.new)]


def page(
    requests: list[Request], rows: list[torch.Tensor], block_tokens: int, *, strided: bool, seed: int
) -> Paged:
    """Scatter the rows over blocks in random order, foreign ones among them; strided: gaps between blocks."""
    random = torch.Generator().manual_seed(seed)
    width, dtype = rows[0].shape[1], rows[0].dtype
    needed = [-(-r.length // block_tokens) for r in requests]
    blocks = sum(needed) + 3
    base = torch.empty(blocks, 3 if strided else 1, block_tokens, width, dtype=dtype)
    base.fill_(255 if dtype == torch.uint8 else float("nan"))
    cache = base[:, 1 if strided else 0]
    assert cache.is_contiguous() != (strided and blocks > 1)
    order = torch.randperm(blocks, generator=random).tolist()
    table = torch.full((len(requests), max(needed, default=0) + 2), -1, dtype=torch.int32)
    for i, count in enumerate(needed):
        for b in range(count):
            block = order.pop()
            table[i, b] = block
            part = rows[i][b * block_tokens : (b + 1) * block_tokens]
            cache[block, : part.shape[0]] = part
        if i % 2:
            table[i, count:] = order[0]  # a block of nobody's
    return Paged(requests=requests, block_tokens=block_tokens, rows=rows, cache=cache, block_table=table)


def requests(max_history: int, max_new: int) -> st.SearchStrategy[list[Request]]:
    def request(history: int, new: int) -> Request:
        return Request(history=history, new=new)

    one = st.builds(request, st.integers(0, max_history), st.integers(0, max_new))
    return st.lists(one.filter(lambda r: r.length > 0), min_size=1, max_size=4)


def attend(
    q: torch.Tensor, rows: torch.Tensor, positions: list[int], scale: float, rank: int
) -> torch.Tensor:
    """[H, rank] float64 of one token's q [H, width] over the given rows."""
    out = torch.zeros(q.shape[0], rank, dtype=torch.float64)
    if not positions:
        return out
    for h in range(q.shape[0]):
        scores = [scale * float(q[h].double() @ rows[p].double()) for p in positions]
        shares = [math.exp(s - max(scores)) for s in scores]
        for p, share in zip(positions, shares, strict=True):
            out[h] += share / sum(shares) * rows[p, :rank].double()
    return out


def index_scores(q: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor) -> list[float]:
    """One token's score of every key, float64; q [Hi, D], weights [Hi], keys [n, D]."""
    return [
        sum(float(weights[h]) * max(float(q[h].double() @ key.double()), 0.0) for h in range(q.shape[0]))
        for key in keys
    ]


def best(scores: list[float], topk: int) -> list[int]:
    """The topk highest, of equals the lowest position, in ascending order."""
    return sorted(sorted(range(len(scores)), key=lambda p: (-scores[p], p))[:topk])
