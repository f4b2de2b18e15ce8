"""Memory of the simulated engines: pages that say what they are pages of, holds, and pools of blocks.

A page's content is `(writer, plane, position, filled)`: which computation of which request wrote it, which
cache of which layer it belongs to, its block number in the request and how many of its tokens are there. It
stands for a hash of all these without collisions: two pages are equal if and only if every byte of them is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from kvstrata.errors import TransferFailed
from kvstrata.remote.holds import Hold
from kvstrata.sim.world import Process, Violation

if TYPE_CHECKING:
    from kvstrata.sim.reads import Read

Content = tuple[int, int, int, int]


class Pages:
    """The caches of one rank: `num_blocks` pages for each plane, which is one component of one layer."""

    def __init__(self, planes: int, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._content: list[Content | None] = [None] * (planes * num_blocks)

    def get(self, plane: int, block: int) -> Content | None:
        """What the page holds."""
        return self._content[plane * self._num_blocks + block]

    def put(self, plane: int, block: int, content: Content | None) -> None:
        """Overwrite the page."""
        self._content[plane * self._num_blocks + block] = content


class Holds:
    """`remote.holds.HoldTable` without shared memory and with few slots, so that they are soon used again."""

    def __init__(self, slots: int = 16) -> None:
        self.words = [0] * slots
        self._free = list(range(slots - 1, -1, -1))
        self._granted = 0

    def grant(self) -> Hold:
        """As `HoldTable.grant`."""
        if not self._free:
            raise TransferFailed(
                f"remote read: all {len(self.words)} holds are taken; settle transfers first"
            )
        self._granted += 1
        hold = Hold(slot=self._free.pop(), generation=self._granted)
        self.words[hold.slot] = hold.generation
        return hold

    def revoke(self, hold: Hold) -> bool:
        """As `HoldTable.revoke`."""
        if self.words[hold.slot] != hold.generation:
            return False
        self.words[hold.slot] = 0
        self._free.append(hold.slot)
        return True

    def is_valid(self, hold: Hold) -> bool:
        """As `HoldTable.is_valid`."""
        return self.words[hold.slot] == hold.generation

    @property
    def live(self) -> int:
        """Holds that have not ended."""
        return len(self.words) - len(self._free)


class Exported:
    """One life of a producer's memory, as its readers see it."""

    def __init__(self, process: Process, pages: Pages, holds: Holds) -> None:
        self.process = process
        self.pages = pages
        self.holds = holds
        self.is_alive = True
        self.reads: list[Read] = []  # between their first and their last look at the hold

    def check_unread(self, blocks: Iterable[int], what: str) -> None:
        """Raise Violation if a read that takes its bytes for valid still reads one of `blocks`."""
        for read in self.reads:
            if self.holds.is_valid(read.hold):
                shared = read.source_blocks.intersection(blocks)
                if shared:
                    raise Violation("M1/M3", f"{what} blocks {sorted(shared)} under {read}")

    def overwrite(self, plane: int, block: int, content: Content, who: str) -> None:
        """Write a page. Raises Violation if a read that takes its bytes for valid still reads it (M1, M3)."""
        for read in self.reads:
            if (plane, block) in read.source_pages and self.holds.is_valid(read.hold):
                raise Violation("M1/M3", f"{who} overwrites block {block} of plane {plane} under {read}")
        self.pages.put(plane, block, content)


class BlockPool:
    """Block ids of an engine. Freed ids are handed out again at once, the last first."""

    def __init__(self, name: str, num_blocks: int) -> None:
        self._name = name
        self._free = list(range(num_blocks - 1, -1, -1))
        self.owner: list[str | None] = [None] * num_blocks

    @property
    def free(self) -> int:
        """Blocks that can be handed out."""
        return len(self._free)

    @property
    def used(self) -> int:
        """Blocks that somebody has."""
        return len(self.owner) - len(self._free)

    def take(self, count: int, owner: str) -> tuple[int, ...]:
        """Hand `count` blocks out; the caller has looked at `free`."""
        blocks = tuple(self._free.pop() for _ in range(count))
        for block in blocks:
            self.owner[block] = owner
        return blocks

    def give_back(self, blocks: Sequence[int], owner: str) -> None:
        """Take blocks back. Raises Violation if somebody else has one."""
        for block in reversed(blocks):
            if self.owner[block] != owner:
                raise Violation(
                    "exactly once", f"{owner} frees block {block} of {self._name}: {self.owner[block]} has it"
                )
            self.owner[block] = None
            self._free.append(block)
