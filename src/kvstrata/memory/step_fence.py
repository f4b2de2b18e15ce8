"""One meeting a step of the ranks that share a host pool: rank 0 writes rows in it, the others read them.

Source: seed, Sparse Decode Offload, Decode step ("TP rank 0 allocates the shared host pool and writes the
new-token rows"). In step s a reader takes from the pool only rows of steps up to s-1; those of s it has
computed itself. So a reader begins s when the writer has ended s-1, and the writer begins s, in which it may
overwrite rows of blocks given to somebody else, when all readers have ended s-1. Nobody waits in mid-step. (A
draft layer may run several times a step and read what it wrote before in it: the tensor-parallel group's own
all-reduce lies between two runs.)

No lock is needed: what a rank did before `end` is ordered before its word (`shared_words`), so that a reader
who sees the word sees the rows.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from kvstrata.errors import DeadlineExceeded, GateViolation, TransferFailed
from kvstrata.memory.allocator import HostAllocator
from kvstrata.memory.region import HostRegion, RegionHandle, open_region
from kvstrata.memory.shared_words import next_pause_s, order_memory

WRITER = 0
"""The rank that makes the pool and writes its rows."""

# A rank has words of its own cache lines: no rank's store slows another rank's.
_RANK_BYTES = 512
_ENDED, _REASON_SIZE = 0, 1  # words: the last step ended; bytes of the reason + 1 once the rank has failed
_REASON_OFFSET = 64

_LONGEST_PAUSE_S = 2e-3  # a decode step takes longer, so waiting costs little beyond what is waited for


@dataclass(frozen=True, kw_only=True)
class StepFenceStatistics:
    ended_step: int
    waits: int
    """Times that `begin` had to pause at all."""
    waited_s: float


class StepFence:
    """This rank's end of the fence. One thread of the rank uses it, except `fail`, which any thread may call.

    Steps count from 1; each rank counts for itself, and all must take every step. `deadline_s` bounds each
    `begin`. Made by `create` on rank 0 and by `open` on the others; with one rank it never waits.
    """

    def __init__(
        self,
        region: HostRegion,
        *,
        rank: int,
        ranks: int,
        deadline_s: float,
        release: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        if not 0 <= rank < ranks or region.size_bytes != step_fence_bytes(ranks):
            raise ValueError(
                f"step fence: rank {rank} of {ranks} does not fit {region.size_bytes} bytes, which are for "
                f"{region.size_bytes // _RANK_BYTES} ranks"
            )
        self.rank = rank
        self._waits_for = tuple(range(1, ranks)) if rank == WRITER else (WRITER,)
        self._deadline_s = deadline_s
        self._clock = clock
        self._pause = pause
        self._handle = region.handle
        self._release = release
        self._bytes = region.tensor().numpy().reshape(ranks, _RANK_BYTES)
        self._words = self._bytes.view(np.int64)
        self._ended_step = 0
        self._begun_step = 0
        self._failing = threading.Lock()
        self._waits = 0
        self._waited_s = 0.0
        self._closed = False

    @classmethod
    def create(
        cls,
        allocator: HostAllocator,
        *,
        ranks: int,
        deadline_s: float,
        name: str = "step-fence",
        clock: Callable[[], float] = time.monotonic,
        pause: Callable[[float], None] = time.sleep,
    ) -> StepFence:
        """The writer's end; its `handle` goes to the other ranks. Raises BudgetError as any allocation."""
        region = allocator.alloc(step_fence_bytes(ranks), name)
        return cls(
            region,
            rank=WRITER,
            ranks=ranks,
            deadline_s=deadline_s,
            release=lambda: allocator.free(region),
            clock=clock,
            pause=pause,
        )

    @classmethod
    def open(
        cls,
        handle: RegionHandle,
        *,
        rank: int,
        ranks: int,
        deadline_s: float,
        clock: Callable[[], float] = time.monotonic,
        pause: Callable[[float], None] = time.sleep,
    ) -> StepFence:
        """A reader's end. Raises StoreUnavailable if its maker is gone, ValueError for other ranks."""
        region = open_region(handle, huge_pages=False)
        try:
            return cls(
                region,
                rank=rank,
                ranks=ranks,
                deadline_s=deadline_s,
                release=region.close,
                clock=clock,
                pause=pause,
            )
        except ValueError:
            region.close()
            raise

    @property
    def handle(self) -> RegionHandle:
        """Passed to `StepFence.open` in another process of this host."""
        return self._handle

    def begin(self, step: int) -> None:
        """Wait until this rank may do its part of `step`.

        Raises DeadlineExceeded naming the steps and the rank waited for, TransferFailed as soon as a rank has
        failed, and GateViolation where this rank or another is at a step that it cannot be at.
        """
        if step != self._ended_step + 1:
            raise GateViolation(
                f"step fence: rank {self.rank} has ended step {self._ended_step} and cannot begin step {step}"
            )
        self._check_failures()
        begun_s = self._clock()
        pause_s = 0.0
        for other in self._waits_for:
            while self._ended_by(other, step) < step - 1:
                waited_s = self._clock() - begun_s
                if waited_s >= self._deadline_s:
                    raise DeadlineExceeded(self._wait_name(step, other), self._deadline_s)
                # Give way once, then ever more rarely: the rank waited for may need this very core.
                self._pause(min(pause_s, self._deadline_s - waited_s))
                self._waits += pause_s == 0.0
                pause_s = next_pause_s(pause_s, longest_s=_LONGEST_PAUSE_S)
                self._check_failures()
        if pause_s:
            self._waited_s += self._clock() - begun_s
        self._begun_step = step
        order_memory()

    def end(self, step: int) -> None:
        """Say that this rank has done its part of `step`: its rows are written, or it has read what it needs.

        Copies to and from the pool must be finished. Raises GateViolation for a step that was not begun.
        """
        if not self._begun_step == step == self._ended_step + 1:
            raise GateViolation(
                f"step fence: rank {self.rank} has begun step {self._begun_step} and ended step "
                f"{self._ended_step}, and cannot end step {step}"
            )
        order_memory()
        self._words[self.rank, _ENDED] = step
        self._ended_step = step

    def fail(self, reason: str) -> None:
        """Make every other rank's `begin` raise TransferFailed with this `reason`, now and ever after.

        The first reason stays. Harmless after `close`.
        """
        text = reason.encode(errors="replace")[: _RANK_BYTES - _REASON_OFFSET]
        with self._failing:
            if self._closed or self._words[self.rank, _REASON_SIZE]:
                return
            place = slice(_REASON_OFFSET, _REASON_OFFSET + len(text))
            self._bytes[self.rank, place] = np.frombuffer(text, np.uint8)
            order_memory()
            self._words[self.rank, _REASON_SIZE] = len(text) + 1

    def statistics(self) -> StepFenceStatistics:
        return StepFenceStatistics(ended_step=self._ended_step, waits=self._waits, waited_s=self._waited_s)

    def check_integrity(self) -> None:
        """Raise AssertionError if somebody else wrote this rank's word."""
        if not self._closed:
            found = int(self._words[self.rank, _ENDED])
            assert found == self._ended_step, f"rank {self.rank}'s word is {found}, not {self._ended_step}"

    def close(self) -> None:
        """Give the memory up. A rank that closes early says so with `fail` first, or others wait for it."""
        with self._failing:
            if self._closed:
                return
            self._closed = True
            self._bytes = np.empty((0, _RANK_BYTES), dtype=np.uint8)
            self._words = self._bytes.view(np.int64)
        self._release()

    def _ended_by(self, other: int, step: int) -> int:
        ended = int(self._words[other, _ENDED])
        # It cannot be ahead: to begin step + 1 it waits for this rank's end of `step`.
        if ended > step:
            raise GateViolation(
                f"step fence: rank {self.rank} begins step {step}, but rank {other} has ended step {ended}: "
                "the ranks do not count the same steps"
            )
        return ended

    def _wait_name(self, step: int, other: int) -> str:
        return (
            f"step fence: rank {self.rank} begins step {step} after rank {other} ends step {step - 1}, "
            f"which has ended step {int(self._words[other, _ENDED])}"
        )

    def _check_failures(self) -> None:
        for rank in np.flatnonzero(self._words[:, _REASON_SIZE]):
            order_memory()
            size = int(self._words[rank, _REASON_SIZE]) - 1
            text = self._bytes[rank, _REASON_OFFSET : _REASON_OFFSET + size].tobytes()
            raise TransferFailed(f"step fence: rank {rank} failed: {text.decode(errors='replace')}")


def step_fence_bytes(ranks: int) -> int:
    """Bytes that the fence of so many ranks takes, beside the pool."""
    return ranks * _RANK_BYTES
