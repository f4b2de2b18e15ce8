"""When a physical slot may be overwritten (M1, M2).

One gate serves one rank. It holds no threads, locks or device objects: the caller reports what happened and
is told what is legal. Source: seed, Layerwise Prefill Offload, Reuse invariant.

    state      move                         next       condition
    EMPTY      claim(layer)                 CLAIMED    -
    CLAIMED    publish(layer, obligations)  PUBLISHED  same layer
    PUBLISHED  claim(layer)                 CLAIMED    every pending obligation settled, or waited for
                                                       on the device by what the claimer enqueues
Every other move raises GateViolation. `settle` is legal in every state and moves nothing: obligations left
behind by a claim that waits on the device stay pending until they are settled.
"""

import enum
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from kvstrata.core.buffers import SlotId
from kvstrata.errors import GateViolation, LayoutError

__all__ = [
    "GateState",
    "GateStatistics",
    "GateViolation",
    "Obligation",
    "Outcome",
    "PhysicalRange",
    "SlotGate",
]


class GateState(enum.Enum):
    """Where a slot is between being free, being filled and being drained."""

    EMPTY = "empty"
    CLAIMED = "claimed"
    PUBLISHED = "published"


_CLAIMABLE = frozenset({GateState.EMPTY, GateState.PUBLISHED})


class Outcome(enum.Enum):
    """How an obligation ended; each of them frees the memory, only DONE delivered the bytes."""

    DONE = "done"
    FAILED = "failed"
    FENCED = "fenced"  # the transport guarantees that it will touch the memory no more


@dataclass(frozen=True)
class PhysicalRange:
    """Memory `[start, start + size_bytes)` in bytes, in any one address space.

    A slot of strided pages covers what lies between its pages too, so interleaved slots count as one.
    """

    start: int
    size_bytes: int

    @property
    def end(self) -> int:
        """First byte behind the range."""
        return self.start + self.size_bytes


@dataclass(frozen=True)
class Obligation:
    """Someone still reads a slot: our own save, or a remote reader. `key` is unique among the pending."""

    kind: Literal["save", "reader"]
    key: Hashable


@dataclass(frozen=True, kw_only=True)
class GateStatistics:
    """Counts since construction; `published_obligations == settled_* + pending`."""

    claims: int
    claims_behind_pending: int  # of these, how many had to wait on the device
    publishes: int
    published_obligations: int
    settled_done: int
    settled_failed: int
    settled_fenced: int
    rejected_settles: int  # unknown or already settled
    pending: int


@dataclass
class _Memory:
    """One connected piece of memory: every slot that overlaps it counts as this one."""

    slots: tuple[SlotId, ...]
    state: GateState = GateState.EMPTY
    layer: int | None = None
    pending: set[Obligation] = field(default_factory=set)


class SlotGate:
    """Guards the slots of one plan. Not thread-safe: one thread owns it, others hand their outcomes over."""

    def __init__(self, ranges: Mapping[SlotId, PhysicalRange]) -> None:
        """Slots whose ranges overlap, directly or through others, count as one (M2)."""
        for slot, physical in ranges.items():
            if physical.start < 0 or physical.size_bytes < 1:
                raise LayoutError(
                    f"slot {slot} lies at {physical.start} with {physical.size_bytes} bytes; "
                    "it needs a start of at least 0 and a size of at least 1"
                )
        self._memory_of = {slot: memory for memory in _connected(ranges) for slot in memory.slots}
        self._counts: Counter[str] = Counter()
        self._settled: Counter[Outcome] = Counter()

    def claim(self, slot: SlotId, layer: int, *, ordered_behind: frozenset[Obligation] = frozenset()) -> None:
        """Give `slot` to `layer`, which may overwrite it from now on.

        Legal only if every pending obligation is in `ordered_behind`: those the caller's own writes are
        enqueued behind, on the device. Raises GateViolation naming slot, previous layer and what is pending.
        """
        memory = self._memory(slot)
        if memory.state not in _CLAIMABLE:
            raise self._illegal(f"claim by layer {layer}", slot, memory)
        unordered = memory.pending - ordered_behind
        if unordered:
            raise GateViolation(
                f"slot {slot} cannot go to layer {layer}: layer {memory.layer} held it and "
                f"{_listed(unordered)} are still pending"
            )
        self._counts["claims"] += 1
        self._counts["claims_behind_pending"] += bool(memory.pending)
        memory.state, memory.layer = GateState.CLAIMED, layer

    def publish(self, slot: SlotId, layer: int, obligations: Iterable[Obligation]) -> None:
        """State that `layer` has finished writing `slot` and who must be done before it is overwritten.

        The set is final: nobody may start to read the slot who is not in it. Raises GateViolation unless
        `layer` has claimed the slot since the last publish, and when an obligation is given twice or pending.
        """
        memory = self._memory(slot)
        if memory.state is not GateState.CLAIMED or memory.layer != layer:
            raise self._illegal(f"publish by layer {layer}", slot, memory)
        given = list(obligations)
        again = {obligation for obligation, count in Counter(given).items() if count > 1}
        again |= memory.pending.intersection(given)
        if again:
            # One settlement would otherwise count for two readers.
            raise GateViolation(f"slot {slot}, layer {layer}: {_listed(again)} published twice")
        memory.state = GateState.PUBLISHED
        memory.pending.update(given)
        self._counts["publishes"] += 1
        self._counts["published_obligations"] += len(given)

    def settle(self, slot: SlotId, obligation: Obligation, outcome: Outcome) -> bool:
        """End one obligation; return False, and count it, for one that is unknown or already ended (P2)."""
        memory = self._memory(slot)
        if obligation not in memory.pending:
            self._counts["rejected_settles"] += 1
            return False
        memory.pending.remove(obligation)
        self._settled[outcome] += 1
        return True

    def pending(self, slot: SlotId) -> frozenset[Obligation]:
        """Return what keeps `slot` from being overwritten, obligations of earlier layers included."""
        return frozenset(self._memory(slot).pending)

    def owner(self, slot: SlotId) -> int | None:
        """Return the layer that claimed the slot's memory last, None before the first."""
        return self._memory(slot).layer

    def state(self, slot: SlotId) -> GateState:
        """Return the state of the slot's memory."""
        return self._memory(slot).state

    def statistics(self) -> GateStatistics:
        """Return the counts since construction."""
        return GateStatistics(
            claims=self._counts["claims"],
            claims_behind_pending=self._counts["claims_behind_pending"],
            publishes=self._counts["publishes"],
            published_obligations=self._counts["published_obligations"],
            settled_done=self._settled[Outcome.DONE],
            settled_failed=self._settled[Outcome.FAILED],
            settled_fenced=self._settled[Outcome.FENCED],
            rejected_settles=self._counts["rejected_settles"],
            pending=sum(len(memory.pending) for memory in self._memories()),
        )

    def check_integrity(self) -> None:
        """Assert what holds between any two calls."""
        statistics = self.statistics()
        settled = statistics.settled_done + statistics.settled_failed + statistics.settled_fenced
        assert statistics.published_obligations == settled + statistics.pending, statistics
        claimed = sum(memory.state is GateState.CLAIMED for memory in self._memories())
        assert statistics.claims == statistics.publishes + claimed, statistics
        for memory in self._memories():
            assert (memory.state is GateState.EMPTY) == (memory.layer is None), memory
            assert memory.state is not GateState.EMPTY or not memory.pending, memory

    def _memories(self) -> list[_Memory]:
        return [memory for slot, memory in self._memory_of.items() if memory.slots[0] == slot]

    def _memory(self, slot: SlotId) -> _Memory:
        if slot not in self._memory_of:
            raise GateViolation(f"slot {slot} is unknown; this gate guards {sorted(self._memory_of)}")
        return self._memory_of[slot]

    @staticmethod
    def _illegal(move: str, slot: SlotId, memory: _Memory) -> GateViolation:
        held = "" if memory.layer is None else f" by layer {memory.layer}"
        return GateViolation(f"{move} of slot {slot} is illegal: it is {memory.state.value}{held}")


def _connected(ranges: Mapping[SlotId, PhysicalRange]) -> list[_Memory]:
    # Sorted by start, a range belongs to the piece before it exactly if it starts before that piece ends.
    pieces: list[tuple[SlotId, ...]] = []
    end = -1
    for slot in sorted(ranges, key=lambda slot: (ranges[slot].start, slot)):
        if ranges[slot].start < end:
            pieces[-1] = (*pieces[-1], slot)
        else:
            pieces.append((slot,))
        end = max(end, ranges[slot].end)
    return [_Memory(slots) for slots in pieces]


def _listed(obligations: Iterable[Obligation]) -> str:
    return ", ".join(sorted(f"{obligation.kind} {obligation.key!r}" for obligation in obligations))
