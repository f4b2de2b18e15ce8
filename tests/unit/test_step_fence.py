"""Who waits for whom at the step fence, what a wait's end says, and that it works between processes."""

from __future__ import annotations

import pickle
import random
import subprocess
import sys
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from kvstrata.errors import DeadlineExceeded, GateViolation, StoreUnavailable, TransferFailed
from kvstrata.memory.allocator import SharedMemoryAllocator
from kvstrata.memory.region import open_region
from kvstrata.memory.step_fence import StepFence, step_fence_bytes


class Machine:
    """Ranks of one fence in one process; a pause moves the clock and may let another rank do something."""

    def __init__(self, ranks: int, deadline_s: float = 5.0) -> None:
        self.now_s = 0.0
        self.pauses: list[float] = []
        self.meanwhile: Callable[[int], None] = lambda _: None
        self.allocator = SharedMemoryAllocator()
        shared = {"ranks": ranks, "deadline_s": deadline_s, "clock": lambda: self.now_s, "pause": self._pause}
        writer = StepFence.create(self.allocator, **shared)
        handle = pickle.loads(pickle.dumps(writer.handle))
        self.fences = [writer, *(StepFence.open(handle, rank=rank, **shared) for rank in range(1, ranks))]

    def step(self, rank: int, step: int) -> None:
        self.fences[rank].begin(step)
        self.fences[rank].end(step)

    def _pause(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now_s += seconds + 1e-6
        self.meanwhile(len(self.pauses))

    def close(self) -> None:
        for fence in self.fences:
            fence.close()


@pytest.fixture
def three() -> Iterator[Machine]:
    machine = Machine(3)
    yield machine
    for fence in machine.fences:
        fence.check_integrity()
    machine.close()


def test_nobody_waits_in_the_first_step_or_with_one_rank(three: Machine) -> None:
    for fence in three.fences:
        fence.begin(1)
    alone = Machine(1)
    for step in range(1, 50):
        alone.step(0, step)
    assert (three.pauses, alone.pauses) == ([], [])


def test_a_reader_waits_until_the_writer_has_ended_the_step_before(three: Machine) -> None:
    three.step(1, 1)
    three.fences[0].begin(1)
    three.meanwhile = lambda count: three.fences[0].end(1) if count == 3 else None
    three.fences[1].begin(2)
    assert len(three.pauses) == 3


def test_the_writer_waits_until_every_reader_has_ended_the_step_before(three: Machine) -> None:
    three.step(0, 1)
    three.step(2, 1)
    three.meanwhile = lambda count: three.step(1, 1) if count == 4 else None
    three.fences[0].begin(2)
    assert len(three.pauses) == 4


def test_readers_do_not_wait_for_each_other(three: Machine) -> None:
    three.step(0, 1)
    three.step(1, 1)
    three.fences[1].begin(2)
    assert three.pauses == []


def test_a_reader_may_end_a_step_that_the_writer_has_not_begun(three: Machine) -> None:
    three.step(1, 1)
    three.step(2, 1)
    three.step(0, 1)
    three.step(1, 2)
    three.step(2, 2)
    three.step(0, 2)
    assert three.pauses == []


def test_pauses_grow_to_a_limit_and_the_first_gives_way(three: Machine) -> None:
    three.step(1, 1)
    three.meanwhile = lambda count: three.step(0, 1) if count == 30 else None
    three.fences[1].begin(2)
    assert three.pauses[0] == 0.0
    assert three.pauses == sorted(three.pauses)
    assert three.pauses[1] < 1e-4
    assert three.pauses[-1] == three.pauses[-2] <= 5e-3
    counts = three.fences[1].statistics()
    assert (counts.ended_step, counts.waits) == (1, 1)
    assert counts.waited_s == pytest.approx(three.now_s)


@pytest.mark.parametrize(("rank", "late"), [(1, 0), (0, 2)])
def test_a_wait_past_its_deadline_names_both_steps_and_the_rank(three: Machine, rank: int, late: int) -> None:
    for other in {0, 1, 2} - {late}:
        three.step(other, 1)
    words = f"rank {rank} begins step 2 after rank {late} ends step 1, which has ended step 0: not finished "
    with pytest.raises(DeadlineExceeded, match=f"{words}within 5 s") as caught:
        three.fences[rank].begin(2)
    assert caught.value.seconds == 5.0
    assert 5.0 <= three.now_s < 5.1
    three.step(late, 1)
    three.fences[rank].begin(2)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_failed_rank_ends_the_others_waits_at_once_with_its_reason(three: Machine, rank: int) -> None:
    three.step(rank, 1)
    reason = "layer 3: ran out of höst rows"
    three.meanwhile = lambda count: three.fences[2 if rank == 0 else 0].fail(reason) if count == 2 else None
    with pytest.raises(TransferFailed, match=rf"rank {2 if rank == 0 else 0} failed: {reason}$"):
        three.fences[rank].begin(2)
    assert len(three.pauses) == 2


def test_a_failure_is_seen_without_waiting_and_its_first_reason_stays(three: Machine) -> None:
    three.fences[2].fail("the first")
    three.fences[2].fail("the second")
    for fence in three.fences:
        with pytest.raises(TransferFailed, match=r"rank 2 failed: the first$"):
            fence.begin(1)
    assert three.pauses == []


def test_a_long_reason_is_cut_and_harms_no_other_rank(three: Machine) -> None:
    three.step(2, 1)
    three.fences[1].fail("x" * 10_000)
    with pytest.raises(TransferFailed, match=r"rank 1 failed: x{100}"):
        three.fences[0].begin(1)
    three.fences[2].check_integrity()
    assert step_fence_bytes(3) == open_region(three.fences[0].handle).size_bytes


def test_an_empty_reason_is_a_failure_too(three: Machine) -> None:
    three.fences[1].fail("")
    with pytest.raises(TransferFailed, match="rank 1 failed"):
        three.fences[0].begin(1)


@pytest.mark.parametrize("step", [0, 1, 3, -1])
def test_a_rank_that_miscounts_is_told(three: Machine, step: int) -> None:
    for rank in range(3):
        three.step(rank, 1)
    with pytest.raises(GateViolation, match=f"rank 1 has ended step 1 and cannot begin step {step}"):
        three.fences[1].begin(step)


def test_a_step_ends_once_and_only_after_its_begin(three: Machine) -> None:
    with pytest.raises(GateViolation, match=r"begun step 0 .* cannot end step 1"):
        three.fences[1].end(1)
    three.step(1, 1)
    with pytest.raises(GateViolation, match="begun step 1 and ended step 1, and cannot end step 1"):
        three.fences[1].end(1)
    with pytest.raises(GateViolation, match="cannot end step 2"):
        three.fences[1].end(2)


def test_ranks_that_count_other_steps_are_told(three: Machine) -> None:
    words = open_region(three.fences[0].handle).tensor().numpy().view(np.int64)
    words[step_fence_bytes(1) // 8] = 4  # rank 1 has run ahead
    with pytest.raises(GateViolation, match="rank 0 begins step 1, but rank 1 has ended step 4"):
        three.fences[0].begin(1)
    with pytest.raises(AssertionError, match="rank 1's word is 4"):
        three.fences[1].check_integrity()
    words[step_fence_bytes(1) // 8] = 0


def test_no_schedule_lets_a_rank_begin_too_early() -> None:
    """Every rank tries at random; a rank may begin only what the rule allows, and somebody always can."""
    choose = random.Random(7)
    ranks = 4
    machine = Machine(ranks, deadline_s=0.0)
    begun, ended = [0] * ranks, [0] * ranks
    refused = 0
    for _ in range(4000):
        rank = choose.randrange(ranks)
        step = ended[rank] + 1
        if begun[rank] == step:
            machine.fences[rank].end(step)
            ended[rank] = step
            continue
        others = ended[1:] if rank == 0 else ended[:1]
        if min(others) >= step - 1:
            machine.fences[rank].begin(step)
            begun[rank] = step
        else:
            with pytest.raises(DeadlineExceeded):
                machine.fences[rank].begin(step)
            refused += 1
        assert max(begun) - min(ended) <= 2
    assert min(ended) > 200
    assert refused > 200
    machine.close()


def test_a_fence_of_other_ranks_is_refused(three: Machine) -> None:
    for rank, ranks in ((1, 2), (3, 3), (1, 4), (-1, 3)):
        with pytest.raises(ValueError, match=f"rank {rank} of {ranks}"):
            StepFence.open(three.fences[0].handle, rank=rank, ranks=ranks, deadline_s=1.0)


def test_closing_frees_the_memory_and_failing_afterwards_is_harmless() -> None:
    machine = Machine(2)
    handle = machine.fences[0].handle
    machine.close()
    machine.close()
    machine.fences[0].fail("too late")
    assert machine.allocator.statistics().regions == 0
    with pytest.raises(StoreUnavailable):
        StepFence.open(handle, rank=1, ranks=2, deadline_s=1.0)


READER = """
import pickle, sys
import numpy as np
from kvstrata.memory.region import open_region
from kvstrata.memory.step_fence import StepFence

fence_handle, rows_handle, steps = pickle.loads(bytes.fromhex(sys.argv[1]))
fence = StepFence.open(fence_handle, rank=1, ranks=2, deadline_s=60.0)
rows = open_region(rows_handle).tensor().numpy().view(np.int64)
for step in range(1, steps + 2):  # one more than the writer: it must not see the failure before its own end
    fence.begin(step)
    # The writer is at step - 1 or, at its next begin, held back by us: both halves can be read.
    seen = rows[(step - 1) % 2]
    if step > 1 and not (seen == step - 1).all():
        fence.fail(f"step {step} saw {set(seen.tolist())}")
        sys.exit(1)
    fence.end(step)
fence.fail("done on purpose")
"""


def test_a_reader_in_another_process_sees_every_row_of_the_step_before() -> None:
    steps, allocator = 300, SharedMemoryAllocator()
    fence = StepFence.create(allocator, ranks=2, deadline_s=60.0)
    region = allocator.alloc(2 * 4096 * 8, "rows")
    rows = region.tensor().numpy().view(np.int64).reshape(2, 4096)
    script = READER.replace(".view(np.int64)\n", ".view(np.int64).reshape(2, 4096)\n")
    arguments = pickle.dumps((fence.handle, region.handle, steps)).hex()
    with subprocess.Popen(
        [sys.executable, "-c", script, arguments], stderr=subprocess.PIPE, text=True
    ) as child:
        for step in range(1, steps + 1):
            fence.begin(step)
            # Begun means the reader has ended step - 1, so it no longer reads what step - 2 wrote.
            rows[step % 2] = step
            fence.end(step)
        _, errors = child.communicate(timeout=60)
    assert child.returncode == 0, errors
    with pytest.raises(TransferFailed, match="rank 1 failed: done on purpose"):
        fence.begin(steps + 1)
    fence.close()
