"""KVPP through shared memory, its ranks in threads: exact rows, failures told alike, homes in host pools."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvstrata.core.layers import Component
from kvstrata.errors import BudgetError, DeadlineExceeded, GateViolation, LayoutError, TransferFailed
from kvstrata.memory.owner_board import OwnerBoard, Turn
from kvstrata.move.faulty import IdleCarrier
from kvstrata.move.owner_testing.rank import OwnerRank, shm_carrier
from kvstrata.move.owner_testing.shape import OwnerShape, page_of
from kvstrata.move.owner_testing.threads import WAIT_S, OwnerThreads
from kvstrata.move.plan import CopyPlan
from kvstrata.move.step import StepBlocks


@pytest.fixture
def start() -> Iterator[Callable[..., OwnerThreads]]:
    groups: list[OwnerThreads] = []

    def make(size: int, **settings: Any) -> OwnerThreads:
        groups.append(OwnerThreads(size, **settings))
        return groups[-1]

    yield make
    for group in groups:
        group.close()


def run_requests(group: OwnerThreads) -> None:
    """Chunked prefill, decode, a prefix shared, blocks given to somebody else."""
    group.exact([], [0, 1, 2])
    group.exact([0, 1, 2], [2, 3])
    group.exact([0, 1, 2, 3], [3, 7])
    group.exact([0, 1], [4, 5])  # another request with the same prefix
    group.exact([], [7, 8])  # block 7 is somebody else's now
    group.exact([0, 1, 4, 5, 7, 8], [5, 8, 9])


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("home", ["window", "host"])
@pytest.mark.parametrize("payload", ["referenced", "all"])
def test_every_rank_reads_what_the_owners_hold(start, size, home, payload):
    group = start(size, home=home, payload=payload)
    run_requests(group)
    for rank in group.ranks:
        for layer in rank.plan.targets:  # the homes of all layers, seen from every rank
            page = page_of(rank.carrier.home(layer, Component.MAIN), 8)
            assert (page == rank.shape.pattern(layer, Component.MAIN, 8, int(rank.versions[8]))).all()


def test_a_group_larger_than_its_layers_works(start):
    run_requests(start(4, shape=OwnerShape(main_bytes=(64, 48), indexer_bytes=(0, 8))))


def test_bytes_are_counted_exactly_and_each_broadcast_once(start):
    group = start(2)
    group.exact([], [0, 1, 2])
    assert [rank.carrier.statistics().loaded_bytes for rank in group.ranks] == [0, 0]
    group.exact([0, 2], [3])
    group.exact([1], [3])
    plan = group.ranks[0].plan
    bundle_bytes = {bundle.index: bundle.page_bytes for bundle in plan.bundles}
    own = [sum(bundle_bytes[layer] for layer in plan.owned(member)) for member in (0, 1)]
    for member, rank in enumerate(group.ranks):
        counts = rank.statistics()
        assert counts["broadcasts"] == 2 * len(plan.owned(member))
        assert counts["broadcast_bytes"] == 3 * own[member]
        assert counts["loaded_bytes"] == 3 * own[1 - member]
        assert counts["saved_bytes"] == 0
        assert 0 < counts["broadcast_wait_s"] <= counts["broadcast_s"]


def test_mode_all_moves_every_allocated_block_whatever_is_referenced(start):
    group = start(2, payload="all")
    group.exact([], [0])
    group.exact([0], [1])
    plan, blocks = group.ranks[0].plan, group.ranks[0].shape.num_blocks
    others = sum(b.page_bytes for b in plan.bundles if b.index in plan.owned(1))
    assert group.ranks[0].carrier.statistics().loaded_bytes == blocks * others


def test_without_history_nothing_moves_and_no_rank_waits(start):
    group = start(3)
    for rank in group.ranks:  # one after the other: whoever waited for another would wait in vain
        outcome = rank.forward([], [0, 1])
        assert (outcome.error, outcome.wrong) == (None, ())
    assert [rank.statistics()["broadcast_s"] for rank in group.ranks] == [0, 0, 0]
    assert all("load" not in rank.engine.statistics().lanes for rank in group.ranks)


def test_the_owner_alone_saves_where_the_home_is_its_host_pool(start):
    group = start(2, home="host")
    group.exact([], [0, 1])
    group.exact([0, 1], [1])
    for rank in group.ranks:
        own = sum(b.page_bytes for b in rank.plan.bundles if b.index in rank.plan.owned(rank.member))
        targets = sum(b.page_bytes for b in rank.plan.bundles if not b.is_draft)
        counts = rank.statistics()
        assert counts["saved_bytes"] == 3 * own
        assert counts["loaded_bytes"] == 2 * targets


@pytest.mark.parametrize("home", ["window", "host"])
def test_rows_that_a_store_brings_to_the_owner_reach_every_rank_in_that_forward(start, home):
    group = start(3, home=home)
    group.exact([0, 1], [1, 2], arrivals=[0, 1])
    group.exact([0, 1, 2], [3])


@pytest.mark.parametrize("home", ["window", "host"])
def test_a_store_that_fails_the_owner_fails_every_rank_by_the_same_reason(start, home):
    group = start(3, home=home)
    group.exact([], [0, 1])
    outcomes = group.forward([0, 1], [1], failing_arrivals=[3])  # rank 1's layer
    assert len({outcome.error for outcome in outcomes}) == 1
    assert "layer 3 failed on rank 1: the store is gone" in str(outcomes[0].error)
    assert all(outcome.acquired[-1] == 2 for outcome in outcomes), "nobody goes into layer 3 alone"
    group.exact([], [0, 1])
    group.exact([0, 1], [2])


@pytest.mark.parametrize("home", ["window", "host"])
@pytest.mark.parametrize("member", [0, 2])
def test_a_copy_that_fails_on_one_rank_fails_all_by_the_same_reason_and_not_the_next_forward(
    start, member, home
):
    group = start(3, home=home)
    group.exact([], [0, 1])
    group.ranks[member].fail_next_copy("the bus is on fire")
    outcomes = group.forward([0, 1], [1])
    assert len({outcome.error for outcome in outcomes}) == 1
    assert f"failed on rank {member}: the bus is on fire" in str(outcomes[0].error)
    assert len({outcome.acquired for outcome in outcomes}) == 1
    group.exact([], [0, 1])
    group.exact([0, 1], [2])


def test_a_rank_that_breaks_off_fails_the_others_at_the_layer_it_did_not_reach(start):
    group = start(3)
    group.exact([], [0, 1])
    started = [group.start(member, [0, 1], [1], stop_after=1 if member == 2 else None) for member in range(3)]
    outcomes = [outcome.result(WAIT_S) for outcome in started]
    assert outcomes[2].error is None
    for outcome in outcomes[:2]:
        assert "layer 3 failed on rank 2: it left the forward before it took part" in str(outcome.error)
    group.exact([], [0, 1])
    group.exact([0, 1], [2])


def test_the_owner_does_not_go_on_while_a_rank_still_reads_its_rows(start):
    group = start(2)
    group.exact([], [0, 1])
    reading, may_end = threading.Event(), threading.Event()

    def hold() -> None:
        reading.set()
        assert may_end.wait(WAIT_S)

    group.ranks[1].faults.append(hold)
    outcomes = [group.start(member, [0, 1], [0, 1]) for member in range(2)]
    assert reading.wait(WAIT_S)
    with pytest.raises(TimeoutError):
        outcomes[0].result(0.3)  # it would overwrite block 0 of layer 0
    assert (group.ranks[0].versions[:2] == 2).all()
    page = page_of(group.ranks[0].homes[0, Component.MAIN], 0)
    assert (page == group.ranks[0].shape.pattern(0, Component.MAIN, 0, 1)).all()
    may_end.set()
    assert all(outcome.result(WAIT_S).wrong == () for outcome in outcomes)


def test_the_check_notices_an_owner_that_goes_on_while_a_rank_still_reads(start, monkeypatch):
    def decide_alone(board: OwnerBoard, turn: Turn, failure: str | None) -> None:
        board._tell(3, turn.number)

    monkeypatch.setattr(OwnerBoard, "decide", decide_alone)
    group = start(2)
    group.exact([], [0, 1])
    overwritten = threading.Event()
    owner, release = group.ranks[0].pipeline, group.ranks[0].pipeline.release

    def tell(layer: int, blocks: StepBlocks) -> None:
        release(layer, blocks)
        overwritten.set()

    monkeypatch.setattr(owner, "release", tell)
    group.ranks[1].faults.append(lambda: overwritten.wait(WAIT_S))
    assert "layer 0 main block 0 is not version 1" in group.forward([0, 1], [0, 1])[1].wrong


def test_a_rank_waits_for_what_a_store_brings_to_the_owner(start):
    group = start(2)
    group.exact([], [0, 1])
    may_arrive = threading.Event()
    group.ranks[0].before_arrival = lambda: may_arrive.wait(WAIT_S)
    outcomes = [group.start(member, [0, 2], [1], arrivals=[2]) for member in range(2)]
    with pytest.raises(TimeoutError):
        outcomes[1].result(0.3)
    may_arrive.set()
    assert [outcome.result(WAIT_S).wrong for outcome in outcomes] == [(), ()]


def test_the_check_notices_a_rank_that_does_not_wait_for_the_owners_rows(start, monkeypatch):
    monkeypatch.setattr(OwnerBoard, "await_offer", lambda board, turn: None)
    group = start(2)
    group.exact([], [0, 1])
    has_read = threading.Event()
    group.ranks[0].before_arrival = lambda: has_read.wait(WAIT_S)
    copies = group.ranks[1].engine._copy

    def copy(plan: CopyPlan) -> None:
        copies(plan)
        has_read.set()

    group.ranks[1].engine.lane("load")._runner = replace(
        group.ranks[1].engine.lane("load")._runner, copy=copy
    )
    assert "layer 0 main block 2 is not version 1" in group.forward([0, 2], [1], arrivals=[2])[1].wrong


def test_M3_memory_that_a_late_copy_may_touch_stays_mapped(start):  # noqa: N802
    group = start(2, deadline_s=0.5)
    group.exact([], [0, 1])
    reader = group.ranks[1]
    reading, may_end = threading.Event(), threading.Event()

    def hold() -> None:
        reading.set()
        assert may_end.wait(WAIT_S)

    reader.faults.append(hold)
    ids = np.array([0, 1], dtype=np.int64)
    group.ranks[0].carrier.load(0, ids, after=())
    token = reader.carrier.load(0, ids, after=())
    assert reading.wait(WAIT_S)
    with pytest.raises(DeadlineExceeded):
        reader.engine.close(0.01)
    reader.carrier.close()
    may_end.set()  # the copy runs on, out of the other rank's memory
    with pytest.raises(TransferFailed):
        token.wait(deadline_s=WAIT_S, what="the late load")


def test_a_rank_that_is_late_within_the_deadline_is_waited_for(start):
    group = start(3)
    group.exact([], [0, 1])
    early = [group.start(member, [0, 1], [1]) for member in (0, 1)]
    with pytest.raises(TimeoutError):
        early[0].result(0.3)
    late = group.start(2, [0, 1], [1])
    for outcome in (*early, late):
        assert outcome.result(WAIT_S).error is None
        assert outcome.result(WAIT_S).wrong == ()


@pytest.mark.parametrize("member", [0, 2])
def test_a_rank_that_is_late_past_the_deadline_fails_all_itself_included(start, member):
    group = start(3, deadline_s=0.5)
    group.exact([], [0, 1])
    early = [group.start(other, [0, 1], [1]) for other in range(3) if other != member]
    errors = [outcome.result(WAIT_S) for outcome in early]
    errors.append(group.start(member, [0, 1], [1]).result(WAIT_S))
    assert {outcome.kind for outcome in errors} <= {"DeadlineExceeded", "TransferFailed"}
    assert {outcome.acquired for outcome in errors} == {()}
    for outcome in errors[:-1]:
        assert outcome.kind == "DeadlineExceeded"
        assert "layer 0" in str(outcome.error)
        assert f"rank {member}" in str(outcome.error)


@pytest.mark.parametrize("home", ["window", "host"])
def test_the_check_notices_when_nothing_is_loaded(start, home):
    group = start(2, home=home, make=lambda rank: IdleCarrier(shm_carrier(rank)))
    group.exact([], [0, 1])
    assert all(outcome.wrong for outcome in group.forward([0, 1], [1]))


def test_a_layer_is_loaded_once_in_a_forward(start):
    group = start(2)
    rank = group.ranks[0]
    ids = np.array([0], dtype=np.int64)
    rank.carrier.begin_step()
    rank.carrier.load(0, ids, after=())
    with pytest.raises(GateViolation, match="layer 0 is loaded once in a forward"):
        rank.carrier.load(0, ids, after=())
    with pytest.raises(GateViolation, match="a new forward begins while 'load of layer 0' is pending"):
        rank.carrier.begin_step()
    other = group.ranks[1].carrier.load(0, ids, after=())
    other.wait(deadline_s=WAIT_S, what="the other rank's turn")


def test_a_block_that_does_not_exist_is_an_error_on_every_rank_before_anything_moves(start):
    group = start(2)
    for rank in group.ranks:
        with pytest.raises(IndexError, match="block id 10 "):
            rank.carrier.load(0, np.array([10], dtype=np.int64), after=())
    group.exact([], [0])
    group.exact([0], [1])


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"shape": OwnerShape(num_blocks=9)}, BudgetError, "10 blocks and rank 1 has 9|9 blocks and rank 0"),
        ({"shape": OwnerShape(draft_bytes=48)}, LayoutError, "planned differently"),
        ({"payload": "all"}, LayoutError, "'referenced'.*'all'|'all'.*'referenced'"),
    ],
)
def test_ranks_that_planned_differently_refuse_to_start(start, settings, error, message):
    group = start(2, per_rank={1: settings})
    for trouble in group.start_errors():
        assert isinstance(trouble, error)
        with pytest.raises(error, match=message):
            raise trouble


def test_a_home_outside_shared_memory_is_refused_by_its_layer(start):
    group = start(2, make=lambda rank: shm_carrier_without_regions(rank))
    assert "the home of layer 0 (main) lies in none of the 0 shared regions" in str(group.start_errors()[0])


def shm_carrier_without_regions(rank: OwnerRank) -> Any:
    class Elsewhere(type(rank)):  # type: ignore[misc]
        home_regions: tuple[()] = ()

    rank.__class__ = Elsewhere
    return shm_carrier(rank)
