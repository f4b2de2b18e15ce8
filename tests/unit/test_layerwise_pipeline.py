"""The layerwise pipeline when copies fail, come late or are never used. Exactness: tests/property."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest

from kvstrata.core.gate import GateState, PhysicalRange, SlotGate
from kvstrata.core.layers import Component
from kvstrata.errors import DeadlineExceeded, GateViolation, TransferFailed
from kvstrata.move.carrier import LOAD_LANE, SAVE_LANE
from kvstrata.move.host_carrier import hosted_layers
from kvstrata.move.inline import InlineEngine
from kvstrata.move.layerwise import LayerwisePipeline
from kvstrata.move.memcpy import copy_ranges
from kvstrata.move.plan import CopyPlan
from kvstrata.move.step import StepBlocks
from kvstrata.move.testing import (
    POISON,
    Batch,
    Forward,
    Memory,
    Request,
    make_carrier,
    make_pipeline,
    make_plan,
)

BLOCKS, TOKENS = 8, 4


class Bench:
    """A pipeline, its gate, an engine whose copies fail on request, and a forward to run through them."""

    def __init__(self, memory: Memory, prefetch_layers: int) -> None:
        self.memory = memory
        self.failures = 0
        self.engine = InlineEngine(copy=self._copy)
        self.pipeline = make_pipeline(memory, self.engine, prefetch_layers=prefetch_layers)
        self.gate: SlotGate = self.pipeline._gate
        self.forward = Forward(memory, self.pipeline)
        self.layers = list(memory.plan.execution_order)

    def _copy(self, plan: CopyPlan) -> None:
        if self.failures:
            self.failures -= 1
            raise OSError("the bus is on fire")
        copy_ranges(plan)

    def lane(self, name: str):
        return self.engine.lane(name)

    def step(self, request: Request, new: int) -> None:
        batch = Batch.of([(request, request.computed, request.computed + new)])
        self.pipeline.begin_step()
        for layer in self.layers:
            self.forward.layer(layer, batch)
        self.pipeline.end_step()
        request.computed += new
        self.memory.poison_shared_windows()


@pytest.fixture
def bench() -> Iterator[Callable[..., Bench]]:
    made: list[Bench] = []

    def make(*, layers: int = 5, drafts: int = 0, shared: int | None = 1, prefetch: int = 1, **more) -> Bench:
        plan = make_plan(
            layers=layers,
            drafts=drafts,
            indexers=more.pop("indexers", [1, 2]),
            shared=shared,
            independent=more.pop("independent", [0]),
            tokens=TOKENS,
        )
        made.append(Bench(Memory(plan, blocks=BLOCKS, tokens=TOKENS, **more), prefetch))
        return made[-1]

    yield make
    for item in made:
        item.pipeline.check_integrity()
        item.engine.check_integrity()
        item.engine.close(1.0)
        item.memory.close()


def one(*blocks: int) -> np.ndarray:
    return np.array(blocks, dtype=np.int64)


PREFIX = StepBlocks(load=one(0), save=one(1))


def test_M1_a_load_never_overtakes_the_save_of_the_slots_last_layer(bench):  # noqa: N802
    it = bench(prefetch=0)
    it.step(Request(serial=1, blocks=[0, 1, 2]), 6)
    request = Request(serial=2, blocks=[3, 4, 5])
    it.step(request, 6)
    it.pipeline.begin_step()
    batch = Batch.of([(request, 6, 7)])
    it.forward.layer(0, batch)
    it.forward.layer(1, batch)
    it.lane(SAVE_LANE).held = True  # layer 1's rows have not left the shared buffer yet
    with pytest.raises(DeadlineExceeded, match="load of layer 2"):
        it.forward.layer(2, batch)
    assert it.lane(LOAD_LANE).ledger.statistics().pending == 1
    it.lane(SAVE_LANE).held = False
    for layer in (2, 3, 4):
        it.forward.layer(layer, batch)
    it.pipeline.end_step()


@pytest.mark.parametrize("prefetch", [0, 1, 2])
@pytest.mark.parametrize("ends_step", [True, False])
def test_a_failed_load_fails_its_step_by_name_and_not_the_next(bench, prefetch, ends_step):
    it = bench(prefetch=prefetch)
    request = Request(serial=1, blocks=[0, 1, 2])
    it.step(request, 6)
    it.pipeline.begin_step()
    batch = Batch.of([(request, 6, 7)])
    it.forward.layer(0, batch)
    it.failures = 1
    for _ in range(2):  # asked again, it must not answer that the prefix is there
        with pytest.raises(TransferFailed, match=r"load of layer 1.*the bus is on fire"):
            it.pipeline.acquire(1, batch.step_blocks(TOKENS))
    if ends_step:
        with pytest.raises(TransferFailed, match="load of layer 1"):
            it.pipeline.end_step()
        it.pipeline.begin_step()
    else:
        with pytest.raises(TransferFailed, match="load of layer 1"):
            it.pipeline.begin_step()
    assert not it.pipeline.ran_all_target_layers()
    it.pipeline.end_step()
    it.step(request, 1)
    assert request.computed == 7


def test_a_failed_save_fails_its_step_by_name_and_frees_the_slot(bench):
    it = bench(layers=3)
    request = Request(serial=1, blocks=[0, 1, 2])
    it.pipeline.begin_step()
    batch = Batch.of([(request, 0, 6)])
    for layer in (0, 1):
        it.forward.layer(layer, batch)
    it.failures = 1
    with pytest.raises(TransferFailed, match=r"save of layer 1.*the bus is on fire"):
        it.forward.layer(2, batch)
    with pytest.raises(TransferFailed, match="save of layer 1"):
        it.pipeline.end_step()
    assert it.gate.statistics().settled_failed == 1
    it.pipeline.begin_step()
    it.pipeline.end_step()
    it.step(Request(serial=2, blocks=[3, 4]), 6)


def test_M3_a_late_save_keeps_its_slot_until_it_ends(bench):  # noqa: N802
    it = bench(layers=3, shared=1, prefetch=0)
    request = Request(serial=1, blocks=[0, 1])
    batch = Batch.of([(request, 0, 3)])
    it.pipeline.begin_step()
    it.lane(SAVE_LANE).held = True
    for layer in (0, 1):
        it.forward.layer(layer, batch)
    for end in (it.pipeline.end_step, it.pipeline.end_step, it.pipeline.begin_step):
        with pytest.raises(DeadlineExceeded, match="save of layer 1"):
            end()
        assert it.gate.statistics().pending == 1
        it.pipeline.check_integrity()
    it.lane(SAVE_LANE).held = False
    it.step(request, 3)
    assert it.gate.statistics().pending == 0


def test_M3_a_late_load_keeps_its_slot_until_it_ends(bench):  # noqa: N802
    it = bench(layers=3, shared=1)
    it.pipeline.begin_step()
    it.lane(LOAD_LANE).held = True
    it.pipeline.acquire(0, PREFIX)
    it.pipeline.release(0, PREFIX)  # prefetches layer 1
    slot = it.memory.plan.slot_of(1)
    for end in (it.pipeline.end_step, it.pipeline.begin_step):
        with pytest.raises(DeadlineExceeded, match="unused load of layer 1"):
            end()
        assert it.gate.state(slot) is GateState.CLAIMED
    it.lane(LOAD_LANE).held = False
    it.step(Request(serial=1, blocks=[0, 1]), 6)


def test_a_prefetch_that_nobody_used_is_forgotten_with_its_step(bench):
    it = bench(layers=4, shared=3, prefetch=3, independent=[])
    request = Request(serial=1, blocks=[0, 1])
    it.step(request, 3)
    it.pipeline.begin_step()
    it.forward.layer(0, Batch.of([(request, 3, 4)]))  # 1 and 2 are on their way; 3 waits for the slot of 0
    it.pipeline.end_step()
    it.pipeline.check_integrity()
    it.memory.poison_shared_windows()
    it.step(request, 3)  # must load again what it had prefetched: the windows hold poison


def test_an_acquired_layer_that_was_never_released_gives_its_slot_back(bench):
    it = bench()
    it.pipeline.begin_step()
    it.pipeline.acquire(1, PREFIX)
    it.pipeline.end_step()
    assert it.gate.state(it.memory.plan.slot_of(1)) is GateState.PUBLISHED
    it.step(Request(serial=1, blocks=[0, 1]), 6)


def test_a_forward_with_history_starts_by_loading_the_first_layers(bench):
    it = bench(layers=4, shared=2, prefetch=1, independent=[])
    request = Request(serial=1, blocks=[0, 1])
    it.step(request, 3)
    before = it.pipeline.statistics()
    it.pipeline.begin_step()
    batch = Batch.of([(request, 3, 4)])
    it.pipeline.start_forward(batch.step_blocks(TOKENS))
    assert it.lane(LOAD_LANE).ledger.statistics().pending == 1
    for layer in it.layers:
        it.forward.layer(layer, batch)
    it.pipeline.end_step()
    counts = it.pipeline.statistics()
    assert counts.late_loads == before.late_loads
    assert counts.prefetched_loads - before.prefetched_loads == 4


def test_a_forward_without_history_starts_nothing(bench):
    it = bench(layers=4, shared=2, prefetch=2, independent=[])
    it.pipeline.begin_step()
    it.pipeline.start_forward(StepBlocks(load=one(), save=one(0)))
    assert it.engine.statistics().lanes == {}
    it.pipeline.end_step()


def test_the_next_layer_is_on_its_way_once_a_layer_may_be_written(bench):
    it = bench(layers=4, shared=2, prefetch=1, independent=[])
    it.pipeline.begin_step()
    it.pipeline.acquire(0, PREFIX)
    assert it.lane(LOAD_LANE).ledger.statistics().submitted == 2, "its own load and the next layer's"
    assert it.gate.owner(it.memory.plan.slot_of(1)) == 1
    it.pipeline.acquire(0, PREFIX)
    assert it.lane(LOAD_LANE).ledger.statistics().submitted == 2
    it.pipeline.release(0, PREFIX)
    it.pipeline.end_step()


def test_acquire_is_legal_again_and_loads_once(bench):
    it = bench(prefetch=0)
    it.pipeline.begin_step()
    for _ in range(3):
        it.pipeline.acquire(1, PREFIX)
    counts = it.pipeline.statistics()
    assert (counts.late_loads, counts.prefetched_loads) == (1, 0)
    assert counts.loaded_bytes == next(b.page_bytes for b in it.memory.plan.bundles if b.index == 1)
    it.pipeline.release(1, PREFIX)
    it.pipeline.end_step()


def test_M1_two_layers_cannot_hold_one_slot(bench):  # noqa: N802
    it = bench()
    it.pipeline.begin_step()
    it.pipeline.acquire(1, PREFIX)
    with pytest.raises(GateViolation, match="claim by layer 2"):
        it.pipeline.acquire(2, PREFIX)
    it.pipeline.release(1, PREFIX)
    it.pipeline.acquire(2, PREFIX)
    it.pipeline.release(2, PREFIX)
    it.pipeline.end_step()


def test_release_without_acquire_is_refused(bench):
    it = bench()
    it.pipeline.begin_step()
    with pytest.raises(GateViolation, match="publish by layer 1"):
        it.pipeline.release(1, PREFIX)
    it.engine.run_until_idle()
    assert it.lane(SAVE_LANE).ledger.statistics().submitted == 0, "no save of somebody else's rows"


def test_fault_6_a_block_that_does_not_exist_is_an_error_before_anything_moves(bench):
    it = bench()
    it.pipeline.begin_step()
    for wrong in (-1, BLOCKS):
        with pytest.raises(IndexError, match=f"block id {wrong} "):
            it.pipeline.acquire(1, StepBlocks(load=one(wrong), save=one(1)))
    it.pipeline.acquire(1, PREFIX)  # the slot was not taken by the failed tries
    it.pipeline.release(1, PREFIX)
    it.pipeline.end_step()


def test_a_lane_that_is_gone_does_not_leave_a_slot_taken(bench):
    it = bench()
    it.pipeline.begin_step()
    it.engine.close(1.0)
    with pytest.raises(TransferFailed, match="load"):
        it.pipeline.acquire(1, PREFIX)
    it.pipeline.end_step()
    it.pipeline.check_integrity()


def test_a_save_that_cannot_even_start_does_not_leave_a_slot_taken(bench):
    it = bench()
    it.pipeline.begin_step()
    it.pipeline.acquire(1, PREFIX)
    it.engine.close(1.0)
    with pytest.raises(TransferFailed, match="save"):
        it.pipeline.release(1, PREFIX)
    it.pipeline.end_step()
    it.pipeline.check_integrity()
    assert it.gate.statistics().pending == 0


def test_layers_with_a_buffer_of_their_own_never_move(bench):
    it = bench(shared=None, prefetch=4)
    it.step(Request(serial=1, blocks=[0, 1]), 7)
    assert it.engine.statistics().lanes == {}
    assert hosted_layers(it.memory.plan) == frozenset()
    assert it.memory.host is None
    assert it.pipeline.home(2, Component.INDEXER) == it.memory.windows[2, Component.INDEXER]


def test_a_slot_with_and_without_indexers_moves_each_layers_own_parts(bench):
    """Layer 2 has an indexer, 1 and 3 have none; the slot's indexer pages lie right behind its main pages."""
    it = bench(layers=4, shared=1, indexers=[2], independent=[0])
    it.step(Request(serial=1, blocks=list(range(BLOCKS))), BLOCKS * TOKENS)
    request = Request(serial=2, blocks=list(range(BLOCKS)), computed=BLOCKS * TOKENS - 1)
    it.pipeline.begin_step()
    batch = Batch.of([(request, request.computed, request.computed + 1)])
    for layer in it.layers:
        for key in it.memory.components:
            if key[0] == layer:
                it.memory.is_written[key][:] = True  # rows of the first request: every page to its last byte
        it.forward.layer(layer, batch)
    it.pipeline.end_step()
    saved = it.pipeline.statistics().saved_bytes
    main, indexer = TOKENS * 16, TOKENS * 8
    assert saved == 3 * main * (BLOCKS + 1) + indexer * (BLOCKS + 1)


def test_fault_5_drafts_are_loaded_for_every_pass_and_only_what_is_new(bench):
    it = bench(layers=3, drafts=1, shared=1, prefetch=2)
    draft = it.layers[-1]
    request = Request(serial=1, blocks=[0, 1, 2, 3])
    it.step(request, 6)
    before = it.pipeline.statistics().loaded_bytes
    it.pipeline.begin_step()
    for layer in it.layers[:-1]:
        it.forward.layer(layer, Batch.of([(request, 6, 7)]))
    targets = it.pipeline.statistics().loaded_bytes
    it.forward.layer(draft, Batch.of([(request, 6, 7)]))
    first_pass = it.pipeline.statistics().loaded_bytes - targets
    assert first_pass == 2 * TOKENS * 16, "blocks 0 and 1"
    for ahead in (7, 8):
        it.forward.layer(draft, Batch.of([(request, ahead, ahead + 1)]))
    assert it.pipeline.statistics().loaded_bytes - targets == first_pass, "the window still holds the rest"
    it.pipeline.end_step()
    assert before < targets


def test_a_draft_layer_is_never_prefetched(bench):
    it = bench(layers=3, drafts=1, shared=2, prefetch=4)
    request = Request(serial=1, blocks=[0, 1])
    it.step(request, 3)
    counts = it.pipeline.statistics()
    it.step(request, 1)
    late = it.pipeline.statistics().late_loads - counts.late_loads
    assert late >= 1
    it.pipeline.begin_step()
    for layer in it.layers[:-1]:
        it.forward.layer(layer, Batch.of([(request, 4, 5)]))
    assert it.layers[-1] not in it.pipeline._loading
    it.pipeline.end_step()


def test_counts_every_layer_load_once_and_times_the_waits(bench):
    ticks = iter(range(1000))
    it = bench(layers=5, shared=2, prefetch=1)
    pipeline = LayerwisePipeline(
        plan=it.memory.plan,
        windows=it.memory.windows,
        carrier=make_carrier(it.memory, it.engine),
        engine=it.engine,
        gate=SlotGate(it.memory.slot_ranges),
        prefetch_layers=1,
        deadline_s=1.0,
        clock=lambda: float(next(ticks)),
    )
    forward = Forward(it.memory, pipeline)
    request = Request(serial=1, blocks=[0, 1])
    pipeline.begin_step()
    for layer in it.layers:
        forward.layer(layer, Batch.of([(request, 0, 5)]))
    pipeline.end_step()
    counts = pipeline.statistics()
    assert counts.prefetched_loads + counts.late_loads == len(hosted_layers(it.memory.plan)) == 4
    assert counts.steps == 1
    assert counts.load_wait_s == 4, "one tick a wait"
    assert counts.save_wait_s == 1
    assert pipeline.ran_all_target_layers()


def test_external_rows_come_before_a_layers_load_and_before_an_independent_layers_turn(bench):
    it = bench(layers=3, shared=1, prefetch=1)
    memory, done = it.memory, []

    def arrive(layer: int) -> None:
        done.append(layer)
        view = it.pipeline.home(layer, Component.MAIN)
        row = np.full(TOKENS * 2, 1000 + layer, dtype=np.uint64)
        address = int(view.page_address(one(0))[0])
        copy_ranges(CopyPlan(dst=one(address), src=one(row.ctypes.data), size=one(row.nbytes)))

    lane = it.lane("store")
    arrivals = {
        layer: lane.call(lambda layer=layer: arrive(layer), name=f"rows of layer {layer}")
        for layer in it.layers
    }
    it.pipeline.begin_step(arrivals)
    for layer in it.layers:
        it.pipeline.acquire(layer, PREFIX)
        assert layer in done
        assert (memory.window_rows[layer, Component.MAIN][0] == 1000 + layer).all()
        it.pipeline.release(layer, PREFIX)
    it.pipeline.end_step()


def test_external_rows_that_fail_fail_the_layer_by_name(bench):
    it = bench(layers=3, shared=1, prefetch=0)

    def broken() -> None:
        raise OSError("no such row")

    lane = it.lane("store")
    it.pipeline.begin_step({layer: lane.call(broken, name=f"rows of {layer}") for layer in it.layers})
    with pytest.raises(TransferFailed, match=r"store rows of layer 0.*no such row"):
        it.pipeline.acquire(0, PREFIX)
    with pytest.raises(TransferFailed, match=r"load of layer 1.*no such row"):
        it.pipeline.acquire(1, PREFIX)
    with pytest.raises(TransferFailed, match="no such row"):
        it.pipeline.end_step()
    it.step(Request(serial=1, blocks=[0, 1]), 5)


def test_M2_slots_that_overlap_in_memory_take_turns(bench):  # noqa: N802
    """Slots with interleaved windows count as one: no prefetch into either beside the other."""
    it = bench(layers=4, shared=2, prefetch=3, independent=[])
    whole = PhysicalRange(start=0, size_bytes=1 << 20)
    pipeline = LayerwisePipeline(
        plan=it.memory.plan,
        windows=it.memory.windows,
        carrier=make_carrier(it.memory, it.engine),
        engine=it.engine,
        gate=SlotGate({slot.id: whole for slot in it.memory.plan.slots}),
        prefetch_layers=3,
        deadline_s=1.0,
    )
    forward = Forward(it.memory, pipeline)
    request = Request(serial=1, blocks=[0, 1, 2])
    for begin in range(0, 9, 3):
        pipeline.begin_step()
        for layer in it.layers:
            forward.layer(layer, Batch.of([(request, begin, begin + 3)]))
        pipeline.end_step()
        it.memory.poison_shared_windows()
        pipeline.check_integrity()
    assert pipeline.statistics().prefetched_loads == 9, (
        "one layer ahead, for the memory is free between turns"
    )


def test_integrity_notices_rows_outside_the_host_pools_pages(bench):
    it = bench()
    assert it.memory.host is not None
    view = it.memory.host.view(1, Component.MAIN)
    end = view.address + view.span_bytes
    good = np.zeros(1, dtype=np.uint64)
    for dst, src in ((good.ctypes.data, end), (end, np.full(1, POISON).ctypes.data)):
        copy_ranges(CopyPlan(dst=one(dst), src=one(src), size=one(8)))
    with pytest.raises(AssertionError, match="layer 1 main were overwritten"):
        it.pipeline.check_integrity()
    copy_ranges(CopyPlan(dst=one(end), src=one(good.ctypes.data), size=one(8)))


def test_a_released_layer_names_the_save_that_its_readers_must_wait_for(bench):
    made = bench()
    request = Request(serial=1, blocks=[0, 1])
    batch = Batch.of([(request, 0, TOKENS)])
    made.pipeline.begin_step()
    assert made.pipeline.saved(1) is None
    made.forward.layer(0, batch)
    made.forward.layer(1, batch)
    assert made.pipeline.saved(0) is None, "its window is its home: the rows are there"
    token = made.pipeline.saved(1)
    assert token is not None
    assert "save of layer 1" in token.name
    for layer in made.layers[2:]:
        made.forward.layer(layer, batch)
    made.pipeline.end_step()
    made.pipeline.begin_step()
    assert made.pipeline.saved(1) is None
    made.pipeline.end_step()
