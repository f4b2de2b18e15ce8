"""Who a process is among all ranks that hold KV."""

import itertools
from dataclasses import dataclass

_DIMENSIONS = ("tp", "pp", "pcp", "dcp", "dp")


@dataclass(frozen=True, kw_only=True)
class RankIdentity:
    """A rank in every dimension that decides which KV it holds.

    No field has a default: a key that leaves out a dimension serves one rank's KV to another.
    """

    tp_rank: int
    tp_size: int
    pp_rank: int
    pp_size: int
    pcp_rank: int
    pcp_size: int
    dcp_rank: int
    dcp_size: int
    dp_rank: int
    dp_size: int

    def __post_init__(self) -> None:
        for dimension, rank, size in self._positions():
            if type(rank) is not int or type(size) is not int:
                raise TypeError(f"{dimension} rank and size must be integers, not {rank!r} and {size!r}")
            if not 0 <= rank < size:
                raise ValueError(f"{dimension}_rank={rank} is outside 0..{dimension}_size-1={size - 1}")

    def key(self) -> str:
        """Return the part of a store key that names this rank, as `tp0of2.pp0of1.pcp0of1.dcp0of1.dp0of1`."""
        return ".".join(f"{dimension}{rank}of{size}" for dimension, rank, size in self._positions())

    def _positions(self) -> list[tuple[str, int, int]]:
        return [(d, getattr(self, f"{d}_rank"), getattr(self, f"{d}_size")) for d in _DIMENSIONS]


def all_ranks(
    tp_size: int, pp_size: int, pcp_size: int, dcp_size: int = 1, dp_size: int = 1
) -> tuple[RankIdentity, ...]:
    """Return every rank of the given sizes, the tensor-parallel rank varying fastest."""
    sizes = (tp_size, pp_size, pcp_size, dcp_size, dp_size)
    for dimension, size in zip(_DIMENSIONS, sizes, strict=True):
        if size < 1:
            raise ValueError(f"{dimension}_size={size} must be at least 1")
    # itertools.product varies its last factor fastest, so the dimensions go in reversed.
    combinations = itertools.product(*(range(size) for size in reversed(sizes)))
    return tuple(_identity(tuple(reversed(ranks)), sizes) for ranks in combinations)


def _identity(ranks: tuple[int, ...], sizes: tuple[int, ...]) -> RankIdentity:
    fields = {f"{d}_rank": rank for d, rank in zip(_DIMENSIONS, ranks, strict=True)}
    fields |= {f"{d}_size": size for d, size in zip(_DIMENSIONS, sizes, strict=True)}
    return RankIdentity(**fields)
