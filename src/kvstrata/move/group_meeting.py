"""How the ranks of a torch process group agree on a KVPP turn: by reductions of a few integers."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from kvstrata.errors import DeadlineExceeded, KVStrataError, TransferFailed
from kvstrata.memory.owner_board import Turn

_REASON_BYTES = 512


class GroupMeeting:
    """The ranks of a process group agree by tiny reductions. Used by one lane only.

    A collective that some rank does not join cannot be taken back: from then on every turn fails, with the
    reason of the first. Only a restart of the engine helps.
    """

    def __init__(self, group: Any, *, member: int, deadline_s: float, clock: Callable[[], float]) -> None:
        self._group = group
        self._member = member
        self._deadline_s = deadline_s
        self._clock = clock
        self._broken: str | None = None
        self._refused: tuple[int, KVStrataError] | None = None  # the turn that was not opened, and why
        self.waited_s = 0.0
        """Time spent in agreements."""

    def open(self, turn: Turn, failure: str | None) -> None:
        try:
            self._agree(turn, failure, "is ready")
        except KVStrataError as trouble:
            self._refused = (turn.number, trouble)
            raise

    def settle(self, turn: Turn, failure: str | None) -> None:
        if self._refused is not None and self._refused[0] == turn.number:
            raise self._refused[1]  # agreed by all when it was opened
        self._agree(turn, failure, "has landed")

    def check(self) -> None:
        """Raise TransferFailed if the group is broken: a collective given up may still write a window."""
        if self._broken is not None:
            raise TransferFailed(f"the KVPP group is broken since {self._broken}")

    def leave(self, step: int) -> None:
        """Nobody can be told: whoever waits for this rank does so until its deadline."""

    def join(self, work: Callable[[], Any], turn: Turn, what: str, deadline_s: float) -> None:
        """Run one collective. Raises DeadlineExceeded and TransferFailed naming the layer and the wait."""
        self.check()
        begun_s = self._clock()
        wait = f"layer {turn.layer}: rank {self._member} of {dist.get_world_size(self._group)} {what}"
        try:
            pending = work()
            pending.wait(datetime.timedelta(seconds=deadline_s))
        except RuntimeError as error:
            late = self._clock() - begun_s >= deadline_s
            trouble: KVStrataError = (
                DeadlineExceeded(f"{wait}, and one of the other ranks is late or gone", deadline_s)
                if late
                else TransferFailed(f"{wait}, and a rank is gone: {error}")
            )
            self._broken = str(trouble)
            raise trouble from error

    def _agree(self, turn: Turn, failure: str | None, state: str) -> None:
        """Return if no rank has a failure; else raise the one of the highest rank, on all ranks."""
        begun_s = self._clock()
        mine = self._member + 1 if failure is not None else 0
        facts = torch.tensor([mine, turn.number, -turn.number], dtype=torch.int64)
        what = f"waits for all ranks to say that the layer {state}"
        try:
            self.join(
                lambda: dist.all_reduce(facts, op=dist.ReduceOp.MAX, group=self._group, async_op=True),
                turn,
                what,
                self._deadline_s,
            )
            failed, newest, oldest = int(facts[0]), int(facts[1]), -int(facts[2])
            if newest != oldest:
                self._broken = f"ranks took turns {oldest} and {newest} at once; one left its forward early"
                raise TransferFailed(f"layer {turn.layer}: {self._broken}")
            if failed:
                raise TransferFailed(self._reason(turn, failed - 1, failure))
        finally:
            self.waited_s += self._clock() - begun_s

    def _reason(self, turn: Turn, failed: int, failure: str | None) -> str:
        text = torch.zeros(_REASON_BYTES, dtype=torch.uint8)
        if failed == self._member:
            said = (failure or "").encode(errors="replace")[:_REASON_BYTES]
            text[: len(said)] = torch.frombuffer(bytearray(said), dtype=torch.uint8) if said else 0
        self.join(
            lambda: dist.broadcast(text, group=self._group, group_src=failed, async_op=True),
            turn,
            f"waits for the reason of rank {failed}",
            self._deadline_s,
        )
        said = bytes(text.numpy()).rstrip(b"\0")
        return f"layer {turn.layer} failed on rank {failed}: {said.decode(errors='replace')}"
