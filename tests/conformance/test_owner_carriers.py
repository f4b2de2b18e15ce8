"""What every carrier of KVPP promises, with a process a rank: exact rows, and failures that all ranks share.

Each rank checks every page it has loaded, and no two pages ever hold the same bytes. Four ranks are a group
of TP x PCP = 2 x 2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstrata.move.owner_testing.processes import CarrierName, OwnerProcesses
from kvstrata.move.owner_testing.rank import Outcome
from kvstrata.move.owner_testing.shape import OwnerShape

Start = Callable[..., OwnerProcesses]


@pytest.fixture(params=["shm", "collective"])
def carrier(request: pytest.FixtureRequest) -> CarrierName:
    return request.param


@pytest.fixture
def start(carrier: CarrierName, tmp_path: Path) -> Iterator[Start]:
    groups: list[OwnerProcesses] = []

    def make(size: int, **settings: Any) -> OwnerProcesses:
        place = str(tmp_path / f"meeting-{len(groups)}")
        groups.append(OwnerProcesses(size, carrier=carrier, meeting_place=place, **settings))
        return groups[-1]

    yield make
    for group in groups:
        group.close()


def exact(group: OwnerProcesses, *args: Any, **more: Any) -> None:
    """A forward that goes well on all ranks."""
    for outcome in group.ask_all("forward", *args, **more):
        assert outcome.error is None
        assert outcome.wrong == ()


def run_requests(group: OwnerProcesses) -> None:
    """Chunked prefill, decode, a prefix shared, blocks given to somebody else, a forward without history."""
    exact(group, [], [0, 1, 2])
    exact(group, [0, 1, 2], [2, 3])
    exact(group, [0, 1, 2, 3], [3, 7])
    exact(group, [0, 1], [4, 5])
    exact(group, [], [7, 8])
    exact(group, [0, 1, 4, 5, 7, 8], [5, 8, 9])


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("payload", ["referenced", "all"])
def test_every_rank_reads_what_the_owners_hold(start: Start, size: int, payload: str) -> None:
    run_requests(start(size, payload=payload))


@pytest.mark.parametrize("payload", ["referenced", "all"])
def test_homes_may_be_the_owners_host_pools(start: Start, payload: str) -> None:
    group = start(2, home="host", payload=payload)
    run_requests(group)
    exact(group, [0, 1, 6], [6], arrivals=[6])


def test_case_5_each_layer_is_broadcast_once_a_forward_and_bytes_are_counted_exactly(start: Start) -> None:
    shape = OwnerShape()
    group = start(4, shape=shape)
    exact(group, [], [0, 1, 2])
    assert all(counts["broadcast_bytes"] == 0 for counts in group.ask_all("statistics"))
    exact(group, [0, 2], [3])
    plan = shape.plan(4)
    bundle_bytes = {bundle.index: bundle.page_bytes for bundle in plan.bundles}
    targets = sum(bundle_bytes[layer] for layer in plan.targets)
    for member, counts in enumerate(group.ask_all("statistics")):
        own = sum(bundle_bytes[layer] for layer in plan.owned(member))
        assert counts["broadcasts"] == len(plan.owned(member))
        assert counts["broadcast_bytes"] == 2 * own
        assert counts["loaded_bytes"] == 2 * (targets - own)
        assert 0 < counts["broadcast_wait_s"] <= counts["broadcast_s"]


def test_case_5_without_history_nothing_moves_and_no_rank_waits_for_another(start: Start) -> None:
    group = start(2)
    for member in range(2):  # one after the other
        assert group.ask(member, "forward", [], [0, 1]).error is None
    assert [counts["broadcast_s"] for counts in group.ask_all("statistics")] == [0, 0]


def shared_error(outcomes: list[Outcome]) -> str:
    """The one reason of all ranks, none of which went into the layer."""
    assert len({outcome.acquired for outcome in outcomes}) == 1
    assert len({outcome.error for outcome in outcomes}) == 1
    return str(outcomes[0].error)


@pytest.mark.parametrize("payload", ["referenced", "all"])
def test_a_store_that_fails_the_owner_fails_every_rank_alike_and_not_the_next_forward(
    start: Start, payload: str
) -> None:
    group = start(4, payload=payload)
    exact(group, [], [0, 1])
    error = shared_error(group.ask_all("forward", [0, 1], [1], failing_arrivals=[3]))
    assert "layer 3 failed on rank 2: the store is gone" in error
    exact(group, [], [0, 1])
    exact(group, [0, 1], [2])


@pytest.mark.parametrize("home", ["window", "host"])
def test_case_5_a_copy_that_fails_on_one_rank_fails_all_alike_and_not_the_next_forward(
    start: Start, home: str
) -> None:
    group = start(4, home=home)
    exact(group, [], [0, 1])
    group.ask(1, "fail_next_copy", "the bus is on fire")
    error = shared_error(group.ask_all("forward", [0, 1], [1]))
    assert "failed on rank 1: the bus is on fire" in error
    exact(group, [], [0, 1])
    exact(group, [0, 1], [2])


def test_case_5_a_forward_that_breaks_off_everywhere_drains_what_was_on_its_way(start: Start) -> None:
    group = start(3)
    exact(group, [], [0, 1])
    exact(group, [0, 1], [1], stop_after=2)  # layer 3 was being loaded
    exact(group, [], [0, 1])
    exact(group, [0, 1], [2])


def test_case_5_a_new_forward_with_a_broadcast_pending_is_an_error(start: Start) -> None:
    group = start(2)
    said = group.ask(0, "begin_again_while_loading")
    assert said == "GateViolation: a new forward begins while 'load of layer 0' is pending"


@pytest.mark.parametrize("late", [0, 3])
def test_a_rank_that_is_late_within_the_deadline_is_waited_for(start: Start, late: int) -> None:
    group = start(4)
    exact(group, [], [0, 1])
    early = [member for member in range(4) if member != late]
    for member in early:
        group.send(member, "forward", [0, 1], [1])
    assert group.hears_nothing_from(early)
    group.send(late, "forward", [0, 1], [1])
    for member in range(4):
        outcome = group.answer(member)
        assert (outcome.error, outcome.wrong) == (None, ())


@pytest.mark.parametrize("late", [0, 2])
def test_a_rank_that_is_late_past_the_deadline_fails_all_itself_included(start: Start, late: int) -> None:
    group = start(3, deadline_s=1.0)
    assert all(outcome.error is None for outcome in group.ask_all("forward", [], [0, 1]))
    early = [member for member in range(3) if member != late]
    outcomes = group.ask_all("forward", [0, 1], [1], members=early)
    outcomes.append(group.ask(late, "forward", [0, 1], [1]))
    assert {outcome.acquired for outcome in outcomes} == {()}
    assert all(outcome.error is not None for outcome in outcomes)
    assert any(outcome.kind == "DeadlineExceeded" for outcome in outcomes)
    assert all("layer 0" in outcome.error for outcome in outcomes[:-1])


@pytest.mark.parametrize("dead", [0, 3])
def test_a_rank_that_is_killed_fails_the_others(start: Start, dead: int) -> None:
    group = start(4, deadline_s=5.0)
    assert all(outcome.error is None for outcome in group.ask_all("forward", [], [0, 1]))
    group.kill(dead)
    others = [member for member in range(4) if member != dead]
    outcomes = group.ask_all("forward", [0, 1], [1], members=others)
    assert {outcome.acquired for outcome in outcomes} == {()}
    assert all("layer 0" in str(outcome.error) for outcome in outcomes)


def test_a_rank_that_dies_in_the_middle_of_a_layer_fails_the_others_at_it(start: Start) -> None:
    group = start(4, deadline_s=5.0)
    assert all(outcome.error is None for outcome in group.ask_all("forward", [], [0, 1]))
    group.ask(3, "die_in_next_copy")
    for member in range(4):
        group.send(member, "forward", [0, 1], [1])
    group.await_death(3)
    outcomes = [group.answer(member) for member in range(3)]
    assert {outcome.acquired for outcome in outcomes} == {()}
    assert all("layer 0" in str(outcome.error) for outcome in outcomes)


def test_the_check_notices_when_nothing_is_loaded(start: Start) -> None:
    group = start(2, idle=True)
    exact(group, [], [0, 1])
    assert all(outcome.wrong for outcome in group.ask_all("forward", [0, 1], [1]))


@pytest.mark.parametrize("carrier", ["collective"], indirect=True)
def test_pages_that_do_not_fit_the_staging_memory_come_in_pieces(start: Start) -> None:
    group = start(2, staging_bytes=200)  # two blocks of the largest layer
    run_requests(group)


@pytest.mark.parametrize("carrier", ["collective"], indirect=True)
def test_a_rank_that_broke_off_alone_never_has_its_next_forward_taken_for_this_one(start: Start) -> None:
    group = start(3)
    exact(group, [], [0, 1])
    for member in range(2):
        group.send(member, "forward", [0, 1], [1])
    assert group.ask(2, "forward", [0, 1], [1], stop_after=1).error is None
    group.send(2, "forward", [0, 1], [1])
    for member in range(3):
        assert "ranks took turns 9 and 11 at once" in group.answer(member).error


@pytest.mark.parametrize("carrier", ["collective"], indirect=True)
def test_a_broken_group_refuses_every_later_forward_by_the_first_reason(start: Start) -> None:
    group = start(2, deadline_s=1.0)
    assert all(outcome.error is None for outcome in group.ask_all("forward", [], [0, 1]))
    group.kill(1)
    first = group.ask(0, "forward", [0, 1], [1])
    assert "layer 0" in str(first.error)
    for load in ([0, 1], []):
        assert "the KVPP group is broken since layer 0" in str(group.ask(0, "forward", load, [2]).error)
