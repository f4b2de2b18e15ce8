"""What a producer has published of a transfer, and which parts of it are not answered yet."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field


@dataclass(slots=True)
class PublishedPart:
    """One part that waits for its answer."""

    layer: int
    number: int
    first_block: int
    end_block: int
    blocks: tuple[int, ...]
    is_last: bool
    said_s: float  # when its Ready was sent last


@dataclass(slots=True)
class _Layer:
    end_block: int  # behind what is published
    parts: int = 0
    is_complete: bool = False  # the last part is published
    unanswered: dict[int, PublishedPart] = field(default_factory=dict)


class PublishedParts:
    """The parts of all layers of one transfer."""

    def __init__(self, layers: Iterable[int], first_block: int, end_block: int) -> None:
        assert 0 <= first_block <= end_block, (first_block, end_block)
        self._layers = {layer: _Layer(first_block) for layer in layers}
        self._end_block = end_block
        self._unanswered = 0
        assert self._layers, "a transfer has layers"

    @property
    def unanswered(self) -> int:
        """Parts published and not read."""
        return self._unanswered

    @property
    def is_all_read(self) -> bool:
        """Whether every layer's last part is published and every part is answered."""
        return not self._unanswered and all(layer.is_complete for layer in self._layers.values())

    def add(
        self,
        layer: int,
        first_block: int,
        end_block: int,
        blocks: tuple[int, ...],
        is_last: bool,
        now_s: float,
    ) -> PublishedPart:
        """Number the next part of a layer. AssertionError unless it continues where the last one ended."""
        where = f"layer {layer}, blocks {first_block}..{end_block}"
        at = self._layers.get(layer)
        assert at is not None, f"{where}: no layer of this transfer"
        assert not at.is_complete, f"{where}: the last part is published already"
        assert first_block == at.end_block, f"{where}: the part before ended at {at.end_block}"
        assert first_block <= end_block <= self._end_block, f"{where}: the transfer ends at {self._end_block}"
        assert len(blocks) == end_block - first_block, f"{where}: {len(blocks)} block ids"
        assert not is_last or end_block == self._end_block, f"{where}: the last ends at {self._end_block}"
        part = PublishedPart(layer, at.parts, first_block, end_block, blocks, is_last, now_s)
        at.unanswered[at.parts] = part
        at.parts += 1
        at.end_block, at.is_complete = end_block, is_last
        self._unanswered += 1
        return part

    def answer(self, layer: int, number: int) -> str | None:
        """Take a part for read; return why the answer was dropped, if it was."""
        at = self._layers.get(layer)
        if at is None or number >= at.parts:
            return "unexpected"
        if at.unanswered.pop(number, None) is None:
            return "duplicate"
        self._unanswered -= 1
        return None

    def waiting(self) -> Iterator[PublishedPart]:
        """Yield what is not answered, in order of layers and parts."""
        for layer in self._layers.values():
            yield from layer.unanswered.values()

    def clear(self) -> None:
        """Forget everything; nothing will be published or read any more."""
        self._layers.clear()
        self._unanswered = 0

    def check_integrity(self) -> None:
        """Assert that the counts agree."""
        assert self._unanswered == sum(1 for _ in self.waiting())
        for at in self._layers.values():
            assert all(number < at.parts for number in at.unanswered), at
            assert not at.is_complete or at.end_block == self._end_block, at
