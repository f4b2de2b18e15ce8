"""Which blocks travel from which prefill rank to which decode rank, and when.

Source: seed, Unequal Tensor Parallelism and Sparse Decode Offload (one main pool for the ranks of a DP rank).
A range of blocks is `(first, end)`, `end` behind the last one; an empty range has `first == end`.
"""

from dataclasses import dataclass

from kvstrata.core.layers import Component
from kvstrata.errors import ConfigurationError

BlockRange = tuple[int, int]

_LAST_PORT = 65535


def split_blocks(start: int, count: int, ranks: int) -> tuple[BlockRange, ...]:
    """Split blocks `start..start + count` over `ranks`; return one range a rank, by rank.

    The ranges are disjoint, contiguous and differ by one block at most. The first of them belongs to rank
    `start % ranks` and the next to the rank after it: so many short pieces do not all land on rank 0.
    """
    _check_at_least("start", start, 0)
    _check_at_least("count", count, 0)
    _check_at_least("ranks", ranks, 1)
    each, longer = divmod(count, ranks)
    shares: list[BlockRange] = [(start, start)] * ranks
    first = start
    for turn in range(ranks):
        end = first + each + (turn < longer)
        shares[(start + turn) % ranks] = (first, end)
        first = end
    return tuple(shares)


def overlap(part: BlockRange, share: BlockRange) -> BlockRange:
    """Return the blocks of `part` that lie in `share`; empty, and inside `part`, if there are none."""
    first = min(max(part[0], share[0]), part[1])
    return first, max(first, min(part[1], share[1]))


@dataclass(frozen=True)
class Topology:
    """Tensor-parallel sizes of a prefill engine and the decode engine that pulls from it."""

    p_tp: int
    d_tp: int

    def __post_init__(self) -> None:
        for size in (self.p_tp, self.d_tp):
            if type(size) is not int:
                raise TypeError(f"tensor-parallel sizes are integers, not {self.p_tp!r} and {self.d_tp!r}")
        if self.d_tp < 1 or self.p_tp < self.d_tp or self.p_tp % self.d_tp:
            raise ConfigurationError(
                f"prefill with tensor_parallel_size={self.p_tp} cannot feed decode with "
                f"tensor_parallel_size={self.d_tp}: the first must be a multiple of the second"
            )

    @property
    def ratio(self) -> int:
        """Prefill ranks that feed one decode rank: the members of its group of contributors."""
        return self.p_tp // self.d_tp

    def consumer_of(self, p_rank: int) -> int:
        """Return the decode rank that pulls from `p_rank`."""
        return self._checked(p_rank) // self.ratio

    def member_of(self, p_rank: int) -> int:
        """Return which member of its group `p_rank` is."""
        return self._checked(p_rank) % self.ratio

    def _checked(self, p_rank: int) -> int:
        if not 0 <= p_rank < self.p_tp:
            raise ValueError(f"prefill rank {p_rank} is outside 0..{self.p_tp - 1}")
        return p_rank


def control_port(kv_port: int, dp_rank: int, d_tp: int, tp_rank: int) -> int:
    """Return the port on which a decode rank listens: no two ranks of one engine have the same.

    Raises ConfigurationError naming `kv_port` if the port is outside 1..65535.
    """
    _check_at_least("dp_rank", dp_rank, 0)
    if not 0 <= tp_rank < d_tp:
        raise ValueError(f"tp_rank {tp_rank} is outside 0..{d_tp - 1}")
    port = kv_port + dp_rank * d_tp + tp_rank
    if kv_port < 1 or port > _LAST_PORT:
        raise ConfigurationError(
            f"kv_port={kv_port} gives port {port} to dp_rank {dp_rank}, tp_rank {tp_rank} of {d_tp}: every "
            f"port must lie in 1..{_LAST_PORT}; choose another kv_port"
        )
    return port


def member_blocks(
    component: Component,
    first: int,
    end: int,
    *,
    member: int,
    members: int,
    main_rank: int,
    main_ranks: int,
) -> BlockRange:
    """Return which blocks of a transfer of `first..end` this member supplies to this consumer.

    Indexers are split over the members. Main KV is the same on every member, so the first one sends it: of
    `main_ranks` consumers that share one main pool, each takes its share. `main_ranks` is 1, and `main_rank`
    0, where a consumer keeps main KV for itself. A part of the transfer is cut to the result by `overlap`.
    """
    if not 0 <= member < members:
        raise ValueError(f"member {member} is outside 0..{members - 1}")
    if not 0 <= main_rank < main_ranks:
        raise ValueError(f"main_rank {main_rank} is outside 0..{main_ranks - 1}")
    if component is Component.INDEXER:
        return split_blocks(first, end - first, members)[member]
    if member > 0:
        return first, first
    return split_blocks(first, end - first, main_ranks)[main_rank]


def ready_blocks(
    transferred_tokens: int,
    computed_tokens: int,
    block_tokens: int,
    is_finished: bool,
    allocated_blocks: int,
) -> BlockRange:
    """Return the blocks that are complete after a chunk and were not sent before it.

    `transferred_tokens` are at the consumer already, its own prefix hit included; a block that holds only
    some of them is sent again. A block that is not full waits for the next chunk, except on the last one
    (`is_finished`). Raises ValueError with both numbers for an end beyond the allocation.
    """
    _check_at_least("transferred_tokens", transferred_tokens, 0)
    _check_at_least("computed_tokens", computed_tokens, 0)
    _check_at_least("block_tokens", block_tokens, 1)
    first = transferred_tokens // block_tokens
    end = computed_tokens // block_tokens
    if is_finished:
        end = -(-computed_tokens // block_tokens)
    if end > allocated_blocks:
        raise ValueError(
            f"{computed_tokens} tokens end in block {end - 1}, but {allocated_blocks} blocks of "
            f"{block_tokens} tokens are allocated"
        )
    # The consumer's prefix hit may reach beyond what the first chunks compute.
    return first, max(first, end)


def _check_at_least(name: str, value: int, least: int) -> None:
    if type(value) is not int:
        raise TypeError(f"{name} is an integer, not {value!r}")
    if value < least:
        raise ValueError(f"{name}={value} must be at least {least}")
