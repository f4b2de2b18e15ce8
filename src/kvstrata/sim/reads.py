"""A consumer's readers and the transport under them: pages are copied one after another in virtual time.

What `transports.base` asks of a transport is what this one does: it looks at the hold before the first and
after the last page, ends within its deadline, and writes nothing once it has reported. Reads can be slow,
fail, or be stuck until their deadline, and go on copying from memory that was given up meanwhile: only the
second look at the hold tells.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvstrata.remote.holds import Hold
from kvstrata.sim.network import Network
from kvstrata.sim.options import Options
from kvstrata.sim.pages import BlockPool, Content, Exported, Pages
from kvstrata.sim.world import Process, Violation

_POLL_S = 0.1
"""How often a read that cannot move looks again."""


@dataclass(frozen=True, slots=True)
class PageCopy:
    """One page of a read, and what has to have landed when the read reports success."""

    plane: int
    source: int
    into: Pages
    block: int
    expected: Content


class Read:
    """One read of one part; `memory` is None if its producer was never heard of."""

    def __init__(
        self,
        number: int,
        peer: str,
        transfer: str,
        hold: Hold,
        memory: Exported | None,
        copies: Sequence[PageCopy],
    ) -> None:
        self.number = number
        self.peer = peer
        self.transfer = transfer
        self.hold = hold
        self.memory = memory
        self.copies = copies
        self.source_pages = frozenset((copy.plane, copy.source) for copy in copies)
        self.source_blocks = frozenset(copy.source for copy in copies)
        self.copied = 0
        self.ends_s = 0.0
        self.is_stuck = False
        self.is_cancelled = False
        self.fails_at = -1  # the page before which it fails

    def __str__(self) -> str:
        return f"read {self.number} of {self.transfer} from {self.peer}"


Report = Callable[[int, str | None, bool], None]


class Readers:
    """The reader threads of one consumer: one read a peer at a time, several peers at once."""

    def __init__(
        self, process: Process, network: Network, options: Options, pool: BlockPool, report: Report
    ) -> None:
        """`report(number, error, is_final)` is called by an event of its own, exactly once a read."""
        self._process = process
        self._network = network
        self._options = options
        self._pool = pool
        self._report = report
        self._waiting: dict[str, deque[Read]] = {}
        self._running: dict[str, Read] = {}

    def submit(self, read: Read) -> None:
        """Read it once its peer and a thread are free."""
        self._waiting.setdefault(read.peer, deque()).append(read)
        self._process.after(0.0, self._begin)

    def cancel(self, transfer: str) -> None:
        """End reads of the transfer soon: those that wait at once, those that run at their next page."""
        for queue in self._waiting.values():
            for read in [read for read in queue if read.transfer == transfer]:
                queue.remove(read)
                self._answer(read, "its transfer ended", is_final=True)
        for read in self._running.values():
            if read.transfer == transfer:
                read.is_cancelled = True

    def lose(self, peer: str) -> None:
        """The producer is gone: give its connection up."""
        for read in self._waiting.pop(peer, ()):
            self._answer(read, "the producer is gone", is_final=True)
        if peer in self._running:
            self._running[peer].is_cancelled = True

    def of_transfer(self, transfer: str) -> list[Read]:
        """Reads that may still write to its destination, or begin to."""
        waiting = (read for queue in self._waiting.values() for read in queue)
        return [read for read in (*self._running.values(), *waiting) if read.transfer == transfer]

    def vanish(self) -> None:
        """The process has crashed, and its threads with it."""
        for read in self._running.values():
            self._let_go(read)
        self._running.clear()
        self._waiting.clear()

    def _begin(self) -> None:
        for peer, queue in self._waiting.items():
            if len(self._running) >= self._options.readers:
                return
            if queue and peer not in self._running:
                read = self._running[peer] = queue.popleft()
                self._start(read)

    def _start(self, read: Read) -> None:
        world, options = self._process.world, self._options
        random = world.random.random
        world.count("reads")
        read.ends_s = world.now_s + options.read_deadline_s
        memory = read.memory
        if memory is None or not memory.is_alive:
            self._process.after(options.network_s, self._end, read, "no such producer", False)
            return
        if not self.accepts(memory, read.hold):
            self._end(read, "the hold has ended", True)
            return
        memory.reads.append(read)
        if random() < options.read_failure:
            read.fails_at = int(random() * (len(read.copies) + 1))
        read.is_stuck = random() < options.read_stuck
        page_s = options.page_s
        if random() < options.read_slow:
            page_s = options.read_deadline_s * 0.4 * random()
            world.counts["slow reads"] += 1
        self._process.after(page_s * random(), self._move, read, page_s)

    def accepts(self, memory: Exported, hold: Hold) -> bool:
        """One look at the producer's word."""
        return memory.holds.is_valid(hold)

    def _move(self, read: Read, page_s: float) -> None:
        """Copy some pages, then wait for the next ones; report after the last."""
        world, memory = self._process.world, read.memory
        assert memory is not None
        random = world.random.random
        if world.now_s >= read.ends_s:
            self._end(read, "deadline", False)
        elif read.is_stuck:
            world.counts["stuck reads"] += 1
            self._process.after(read.ends_s - world.now_s, self._move, read, page_s)
        elif read.is_cancelled:
            self._end(read, "cancelled", False)
        elif self._options.needs_producer and self._is_blocked(memory):
            self._process.after(_POLL_S, self._move, read, page_s)
        elif read.fails_at == read.copied:
            self._end(read, "an error of the transport", False)
        elif read.copied < len(read.copies):
            # A fast read takes several pages at one moment: nothing can happen between them.
            several = 1 if page_s > 0.005 else 1 + int(random() * 4)
            for copy in read.copies[read.copied : read.copied + several]:
                self._copy(read, memory, copy)
            read.copied = min(read.copied + several, len(read.copies))
            if read.fails_at < read.copied:
                read.fails_at = -1
            self._process.after(page_s * (0.5 + random()), self._move, read, page_s)
        elif not memory.is_alive:
            self._end(read, "the producer is gone", False)
        elif not self.accepts(memory, read.hold):
            world.counts["reads revoked"] += 1
            self._end(read, "the hold has ended", True)
        else:
            self._end(read, None, False)

    def _is_blocked(self, memory: Exported) -> bool:
        owner = memory.process
        return owner.is_stopped or self._network.is_cut(owner.name, self._process.name)

    def _copy(self, read: Read, memory: Exported, copy: PageCopy) -> None:
        if self._pool.owner[copy.block] != read.transfer:
            raise Violation(
                "M3", f"{read} writes block {copy.block}, which {self._pool.owner[copy.block]} has"
            )
        self._process.world.counts["pages read"] += 1
        copy.into.put(copy.plane, copy.block, memory.pages.get(copy.plane, copy.source))

    def _end(self, read: Read, error: str | None, is_final: bool) -> None:
        self._let_go(read)
        del self._running[read.peer]
        if error is None:
            self.check_landed(read)
        self._answer(read, error, is_final)
        self._begin()

    def check_landed(self, read: Read) -> None:
        """P3: a read that reports success has moved every byte, and the right ones."""
        for copy in read.copies:
            landed = copy.into.get(copy.plane, copy.block)
            if landed != copy.expected:
                raise Violation("P3", f"{read} reports success, but {copy.expected} is {landed}")

    def _let_go(self, read: Read) -> None:
        if read.memory is not None and read in read.memory.reads:
            read.memory.reads.remove(read)

    def _answer(self, read: Read, error: str | None, is_final: bool) -> None:
        if error is not None:
            self._process.world.counts["reads failed"] += 1
        self._process.after(
            0.001 * self._process.world.random.random(), self._report, read.number, error, is_final
        )
