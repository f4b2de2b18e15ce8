"""Which hot rows go when room is needed: one priority a slot, those of the lowest (priority, slot) go.

| policy | priority of a slot | why |
|---|---|---|
| `lru` | number of the last resolve that selected it | the seed's rule |
| `frequency` | a count that fades, see `Frequency` | rows come back in bursts: fewer misses than `lru` |

A policy is deterministic and made of small integers, so that a kernel on any device gives the same slots.
Source: seed, Sparse Decode Offload, Decode step 4; the aging counters of page replacement (Tanenbaum,
Modern Operating Systems, "not frequently used with aging") for the count that fades.
"""

from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from typing import Protocol

LRU = "lru"
FREQUENCY = "frequency"
DEFAULT_POLICY = FREQUENCY

# Of the count that fades. Selected in every step it settles at 225, never selected at 0: it fits a byte.
SELECTED_CREDIT = 15
NEAR_CREDIT = 12
FADE_SHIFT = 4  # a count loses a sixteenth a resolve, rounded up: it halves in 11


class EvictionPolicy(Protocol):
    """Keeps one priority for each slot; `Residency` tells it what happened, in this order a resolve."""

    def touch(self, resident: Collection[int], selected: Collection[int], near: Collection[int]) -> None:
        """A resolve began: `selected` slots are hits; `near` slots were almost selected; both resident."""
        ...

    def place(self, slot: int) -> None:
        """`slot` was given to a row that the same resolve selects."""
        ...

    def priority(self, slot: int) -> int:
        """Of a resident slot; the lowest goes first, and of equals the lowest slot."""
        ...


class LeastRecentlyUsed:
    """Priority = number of the last resolve that selected the slot's row; near rows count for nothing."""

    def __init__(self, capacity: int) -> None:
        self._step = 0
        self._last_touch = [0] * capacity

    def touch(self, resident: Collection[int], selected: Collection[int], near: Collection[int]) -> None:
        self._step += 1
        for slot in selected:
            self.place(slot)

    def place(self, slot: int) -> None:
        self._last_touch[slot] = self._step

    def priority(self, slot: int) -> int:
        return self._last_touch[slot]


class Frequency:
    """Priority = a count that loses a sixteenth in every resolve and gains 15 when the row is selected.

    A row just below the selection's cut gains 12: scores drift, and it is likely to be selected soon.
    """

    def __init__(self, capacity: int) -> None:
        self._count = [0] * capacity

    def touch(self, resident: Collection[int], selected: Collection[int], near: Collection[int]) -> None:
        for slot in resident:
            self._count[slot] -= -(-self._count[slot] >> FADE_SHIFT)
        for slot in selected:
            self._count[slot] += SELECTED_CREDIT
        for slot in set(near) - set(selected):
            self._count[slot] += NEAR_CREDIT

    def place(self, slot: int) -> None:
        self._count[slot] = SELECTED_CREDIT

    def priority(self, slot: int) -> int:
        return self._count[slot]


def near_rows_per_token(topk: int) -> int:
    """How many rows just below the cut the indexer names for a selection of `topk`, for policies that ask.

    All of top-k would save 0.03 points of misses at twice the top-k, 0.5 at four times (calibrated trace),
    and the look-up reads each of them.
    """
    return topk // 2


POLICIES: Mapping[str, Callable[[int], EvictionPolicy]] = MappingProxyType(
    {LRU: LeastRecentlyUsed, FREQUENCY: Frequency}
)


def check_policy(name: str) -> str:
    """Return `name` if it is a policy; ValueError lists them otherwise."""
    if name not in POLICIES:
        raise ValueError(f"eviction policy {name!r} is unknown; choose one of {', '.join(sorted(POLICIES))}")
    return name
