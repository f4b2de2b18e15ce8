"""What a consumer has been offered of a transfer by one member, and what of it has landed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from kvstrata.remote.protocol.messages import MAX_BLOCKS, Ready


@dataclass(slots=True)
class OfferedPart:
    """One part, from its first Ready on."""

    layer: int
    number: int
    first_block: int
    end_block: int
    is_last: bool
    blocks: tuple[int, ...]  # forgotten once it has landed
    attempts: int = 0  # reads begun
    is_done: bool = False


@dataclass(slots=True)
class _Layer:
    parts: dict[int, OfferedPart] = field(default_factory=dict)
    last: int | None = None  # number of the last part, once known
    done: int = 0

    @property
    def is_complete(self) -> bool:
        return self.last is not None and self.done == self.last + 1


class OfferedParts:
    """The parts of all layers that one member supplies."""

    def __init__(self, layers: Iterable[int], first_block: int, end_block: int) -> None:
        self._layers = {layer: _Layer() for layer in layers}
        self._first_block, self._end_block = first_block, end_block
        self._incomplete = len(self._layers)

    @property
    def is_complete(self) -> bool:
        """Whether every layer has its last part, and every part up to it has landed."""
        return not self._incomplete

    def incomplete_layers(self) -> Iterator[int]:
        """Yield the layers of which something is missing."""
        return (layer for layer, at in self._layers.items() if not at.is_complete)

    def known(self, layer: int, number: int) -> OfferedPart | None:
        """Return the part if it was offered before."""
        at = self._layers.get(layer)
        return None if at is None else at.parts.get(number)

    def offer(self, ready: Ready) -> OfferedPart | str:
        """Return the part, new or known before, or in words why it does not fit the transfer or other parts.

        Parts may come in any order; each must continue those beside it.
        """
        what = f"layer {ready.layer} part {ready.part}, blocks {ready.first_block}..{ready.end_block}"
        at = self._layers.get(ready.layer)
        if at is None:
            return f"{what}: decode expects no such layer"
        known = at.parts.get(ready.part)
        if known is not None:
            return known if _agree(known, ready) else f"{what}: the part was other blocks before"
        problem = self._problem(at, ready)
        if problem is not None:
            return f"{what}: {problem}"
        part = OfferedPart(
            ready.layer, ready.part, ready.first_block, ready.end_block, ready.is_last, ready.blocks
        )
        at.parts[ready.part] = part
        if ready.is_last:
            at.last = ready.part
        return part

    def land(self, part: OfferedPart) -> None:
        """Take the part for read."""
        assert not part.is_done, part
        part.is_done, part.blocks = True, ()
        at = self._layers[part.layer]
        at.done += 1
        self._incomplete -= at.is_complete

    def clear(self) -> None:
        """Forget everything; the transfer has ended."""
        self._layers.clear()
        self._incomplete = 0

    def check_integrity(self) -> None:
        """Assert that the counts agree, and that complete layers cover the transfer."""
        assert self._incomplete == sum(1 for _ in self.incomplete_layers())
        for at in self._layers.values():
            assert at.done == sum(part.is_done for part in at.parts.values()), at
            if at.is_complete:
                ends = [self._first_block]
                for number in range(len(at.parts)):
                    assert at.parts[number].is_done, at
                    assert at.parts[number].first_block == ends[-1], at
                    ends.append(at.parts[number].end_block)
                assert ends[-1] == self._end_block, at

    def _problem(self, at: _Layer, ready: Ready) -> str | None:
        if not self._first_block <= ready.first_block <= ready.end_block <= self._end_block:
            return f"the transfer has blocks {self._first_block}..{self._end_block}"
        if len(ready.blocks) != ready.end_block - ready.first_block:
            return f"{len(ready.blocks)} block ids"
        if ready.part >= MAX_BLOCKS:
            return f"a layer has at most {MAX_BLOCKS} parts"
        if at.last is not None and (ready.is_last or ready.part > at.last):
            return f"part {at.last} was said to be the last"
        if ready.is_last and at.parts and max(at.parts) > ready.part:
            return f"said to be the last, but there was part {max(at.parts)}"
        before, after = at.parts.get(ready.part - 1), at.parts.get(ready.part + 1)
        start = self._first_block if ready.part == 0 else before.end_block if before else None
        end = self._end_block if ready.is_last else after.first_block if after else None
        if start is not None and ready.first_block != start:
            return f"it should begin at block {start}"
        if end is not None and ready.end_block != end:
            return f"it should end at block {end}"
        return None


def _agree(part: OfferedPart, ready: Ready) -> bool:
    same_range = (part.first_block, part.end_block, part.is_last) == (
        ready.first_block,
        ready.end_block,
        ready.is_last,
    )
    return same_range and (part.is_done or part.blocks == ready.blocks)
