"""Where the ranks of a KVPP group agree on every layer: its rows are ready, all have taken them, all go on.

Source: seed, KVPP, Full-layer broadcast and prefetch; issue: "a failure on one rank is agreed by all in that
step". A *turn* is one layer of one forward that has history. In it::

    owner                               every other rank
    offer: the rows are in the home ->  await_offer, then copies them out of the owner's memory
    decide: waits for all votes     <-  vote: landed, or failed and why
    agreed, or aborted and why      ->  await_decision

So nobody computes on a layer that another rank lacks, and the owner overwrites no row that is still read.
Only the owner decides a turn, and only when every rank has voted: a rank that gives up, dies or leaves the
forward without a vote can but abort it, and all raise the one reason that the owner wrote down. (A rank that
has voted and then waits too long for the decision gives up alone. It waits twice as long as the owner does,
so that this takes an owner that stops between its decision and telling it.)

Every rank has words of its own in a region of its own (`shared_words`); the others map it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvstrata.errors import DeadlineExceeded, GateViolation, KVStrataError, TransferFailed
from kvstrata.memory.allocator import HostAllocator
from kvstrata.memory.processes import Holder, current_holder, may_be_alive
from kvstrata.memory.region import HostRegion, RegionHandle, open_region
from kvstrata.memory.shared_words import next_pause_s, order_memory

BOARD_BYTES = 4096
_REASON_OFFSET = 128
# Words, each a turn's number, but for the last three: a step, the bytes of the reason, a mark of `say_home`.
_OFFERED, _LANDED, _FAILED, _AGREED, _ABORTED, _LEFT, _REASON_BYTES, _HOME = range(8)
_FOR_GOOD = 2**62  # a step that no rank reaches

_LONGEST_PAUSE_S = 0.5e-3  # a layer takes about as long
_LIVENESS_CHECK_S = 0.2


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One layer of one forward. `number` counts up over steps, from 1, the same on every rank."""

    step: int
    number: int
    layer: int
    owner: int


@dataclass(frozen=True, kw_only=True)
class BoardHandle:
    """One rank's words, and whose they are; picklable."""

    region: RegionHandle
    holder: Holder


class OwnerBoard:
    """This rank's end of the board. One thread takes the turns, in ascending order; any may call `leave`.

    `deadline_s` bounds the wait for an offer and for the votes; a decision is waited for twice as long.
    """

    def __init__(
        self,
        allocator: HostAllocator,
        *,
        member: int,
        deadline_s: float,
        name: str = "owner-board",
        clock: Callable[[], float] = time.monotonic,
        pause: Callable[[float], None] = time.sleep,
        is_alive: Callable[[Holder], bool] = may_be_alive,
    ) -> None:
        self.member = member
        self._deadline_s = deadline_s
        self._clock = clock
        self._pause = pause
        self._is_alive = is_alive
        self._allocator = allocator
        self._region = allocator.alloc(BOARD_BYTES, name)
        self._opened: list[HostRegion] = []
        self._bytes: list[npt.NDArray[np.uint8]] = []
        self._words: list[npt.NDArray[np.int64]] = []
        self._holders: list[Holder] = []
        self._told: dict[int, int] = {}  # what this rank's own words are
        self._waited_s = 0.0
        self._closed = False

    @property
    def handle(self) -> BoardHandle:
        """Passed to `connect` on every rank."""
        return BoardHandle(region=self._region.handle, holder=current_holder())

    def connect(self, handles: Sequence[BoardHandle]) -> None:
        """Map every rank's words; `handles` are in the order of the group. Raises StoreUnavailable."""
        for member, handle in enumerate(handles):
            region = self._region
            if member != self.member:
                region = open_region(handle.region, huge_pages=False)
                self._opened.append(region)
            self._bytes.append(region.tensor().numpy())
            self._words.append(self._bytes[-1][:_REASON_OFFSET].view(np.int64))
            self._holders.append(handle.holder)

    @property
    def waited_s(self) -> float:
        """Time spent waiting for other ranks, in all turns together."""
        return self._waited_s

    def open(self, turn: Turn, failure: str | None) -> None:
        """Begin a turn: offer the rows as their owner, unless `failure` says that they are lacking, or wait
        for them. Raises as `await_offer`."""
        if turn.owner != self.member:
            self.await_offer(turn)
        elif failure is None:
            self.offer(turn)

    def settle(self, turn: Turn, failure: str | None) -> None:
        """End a turn: tell the others how it went here, and return if all have the layer.

        Otherwise raises the same on every rank, as `decide` does.
        """
        if turn.owner == self.member:
            self.decide(turn, failure)
        else:
            self.vote(turn, failure)
            self.await_decision(turn)

    def offer(self, turn: Turn) -> None:
        """As owner: say that the rows of earlier steps, and what a store brought, are in the home."""
        self._tell(_OFFERED, turn.number)

    def await_offer(self, turn: Turn) -> None:
        """Wait for the owner's rows. Raises what `decide` raised there, or why there will be no offer."""
        owner = turn.owner
        what = f"layer {turn.layer}: rank {self.member} waits for the rows of rank {owner}"
        self._wait(
            turn, (owner,), lambda _: self._word(owner, _OFFERED) >= turn.number, self._deadline_s, what
        )

    def vote(self, turn: Turn, failure: str | None) -> None:
        """Say that the rows have landed in this rank's window, or why they have not."""
        if failure is None:
            self._tell(_LANDED, turn.number)
        else:
            self._give_reason("F", failure)
            self._tell(_FAILED, turn.number)

    def decide(self, turn: Turn, failure: str | None) -> None:
        """As owner: wait for every rank's vote and tell all what comes of it. `failure` is the owner's own.

        Raises, as every other rank will, TransferFailed naming the layer and the rank that failed, ended or
        left, or DeadlineExceeded naming those that did not vote in time.
        """
        try:
            if failure is not None:
                raise self._failed(turn, self.member, failure)
            others = [member for member in range(len(self._words)) if member != self.member]
            what = f"layer {turn.layer}: rank {self.member} waits for its rows to land"
            self._wait(turn, others, lambda member: self._has_landed(turn, member), self._deadline_s, what)
        except KVStrataError as trouble:
            self._give_reason("D" if isinstance(trouble, DeadlineExceeded) else "F", str(trouble))
            self._tell(_ABORTED, turn.number)
            raise
        self._tell(_AGREED, turn.number)

    def await_decision(self, turn: Turn) -> None:
        """After a vote: return if all ranks have the layer, else raise what the owner raises."""
        owner = turn.owner
        what = f"layer {turn.layer}: rank {self.member} waits for the decision of rank {owner}"
        self._wait(
            turn, (owner,), lambda _: self._word(owner, _AGREED) >= turn.number, 2 * self._deadline_s, what
        )

    def say_home(self, mark: int) -> None:
        """Say that what this rank wrote up to `mark`, which only grows, is in its homes, for others."""
        if not self._closed:
            self._tell(_HOME, mark)

    def is_home(self, member: int, mark: int) -> bool:
        """Whether `member` has said so; what it wrote until then is visible here."""
        if self._word(member, _HOME) < mark:
            return False
        order_memory()
        return True

    def leave(self, step: int) -> None:
        """Say that this rank takes no further turn of `step`: whoever still waits for one need not."""
        if not self._closed:
            self._tell(_LEFT, step)

    def leave_for_good(self) -> None:
        """Say that this rank takes no turn any more."""
        if self._words:
            self.leave(_FOR_GOOD)

    def check_integrity(self) -> None:
        """Raise AssertionError if somebody else wrote this rank's words."""
        if not self._closed and self._words:
            for word, value in self._told.items():
                found = self._word(self.member, word)
                assert found == value, f"rank {self.member}'s word {word} is {found}, not {value}"

    def close(self) -> None:
        """Leave for good and give the memory up. Closing twice is harmless."""
        if self._closed:
            return
        self.leave_for_good()
        self._closed = True
        self._bytes.clear()
        self._words.clear()
        for region in self._opened:
            region.close()
        self._allocator.free(self._region)

    def _has_landed(self, turn: Turn, member: int) -> bool:
        if self._word(member, _FAILED) >= turn.number:
            raise self._failed(turn, member, self._reason(member)[1])
        return self._word(member, _LANDED) >= turn.number

    @staticmethod
    def _failed(turn: Turn, member: int, reason: str) -> TransferFailed:
        return TransferFailed(f"layer {turn.layer} failed on rank {member}: {reason}")

    def _wait(
        self,
        turn: Turn,
        members: Collection[int],
        is_there: Callable[[int], bool],
        deadline_s: float,
        what: str,
    ) -> None:
        """Wait for all `members`; what one of them did last counts, even if it left or died right after."""
        begun_s = asked_s = self._clock()
        pause_s = 0.0
        try:
            while missing := [member for member in members if not is_there(member)]:
                self._check_aborted(turn)
                now_s = self._clock()
                gone = {member for member in missing if self._word(member, _LEFT) >= turn.step}
                dead: set[int] = set()
                if now_s - asked_s >= _LIVENESS_CHECK_S:
                    asked_s = now_s
                    dead = {member for member in missing if not self._is_alive(self._holders[member])}
                order_memory()
                for member in gone | dead:
                    if not is_there(member):
                        self._check_aborted(turn)
                        ending = "ended" if member in dead else "left the forward"
                        raise self._failed(turn, member, f"it {ending} before it took part")
                if now_s - begun_s >= deadline_s:
                    ranks = ", ".join(f"rank {member}" for member in missing)
                    raise DeadlineExceeded(f"{what}; {ranks} did not take part", deadline_s)
                self._pause(min(pause_s, deadline_s))
                pause_s = next_pause_s(pause_s, longest_s=_LONGEST_PAUSE_S)
        finally:
            self._waited_s += self._clock() - begun_s
        order_memory()

    def _check_aborted(self, turn: Turn) -> None:
        if turn.owner == self.member or self._word(turn.owner, _ABORTED) < turn.number:
            return
        order_memory()
        kind, reason = self._reason(turn.owner)
        raise DeadlineExceeded(reason) if kind == "D" else TransferFailed(reason)

    def _give_reason(self, kind: str, reason: str) -> None:
        text = (kind + reason).encode(errors="replace")[: BOARD_BYTES - _REASON_OFFSET]
        own = self._bytes[self.member]
        own[_REASON_OFFSET : _REASON_OFFSET + len(text)] = np.frombuffer(text, np.uint8)
        self._words[self.member][_REASON_BYTES] = len(text)

    def _reason(self, member: int) -> tuple[str, str]:
        order_memory()
        size = self._word(member, _REASON_BYTES)
        text = self._bytes[member][_REASON_OFFSET : _REASON_OFFSET + size].tobytes().decode(errors="replace")
        return text[:1], text[1:]

    def _word(self, member: int, word: int) -> int:
        return int(self._words[member][word])

    def _tell(self, word: int, value: int) -> None:
        if value <= self._told.get(word, 0) and word != _LEFT:
            raise GateViolation(
                f"rank {self.member} cannot take turn {value} after turn {self._told[word]}: "
                "turns are taken once, in the order in which the layers run"
            )
        self._told[word] = value
        order_memory()
        self._words[self.member][word] = value
