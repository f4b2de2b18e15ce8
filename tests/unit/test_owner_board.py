"""Who waits for whom at the owner board, and that one reason ends a turn on every rank."""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from kvstrata.errors import DeadlineExceeded, GateViolation, StoreUnavailable, TransferFailed
from kvstrata.memory.allocator import SharedMemoryAllocator
from kvstrata.memory.owner_board import OwnerBoard, Turn
from kvstrata.memory.processes import Holder

TURN = Turn(step=1, number=4, layer=3, owner=0)


class Machine:
    """Three ranks of one board in one process; a pause moves the clock and may let another rank act."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.pauses: list[float] = []
        self.meanwhile: dict[int, Callable[[], None]] = {}
        self.dead: set[int] = set()
        self.boards = [
            OwnerBoard(
                SharedMemoryAllocator(),
                member=member,
                deadline_s=5.0,
                clock=lambda: self.now_s,
                pause=self._pause,
                is_alive=lambda holder: holder.pid not in self.dead,
            )
            for member in range(3)
        ]
        handles = [
            dataclasses.replace(board.handle, holder=Holder(pid=member, start_ticks=0, pid_namespace=0))
            for member, board in enumerate(self.boards)
        ]
        for board in self.boards:
            board.connect(pickle.loads(pickle.dumps(handles)))

    def _pause(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now_s += seconds + 1e-6
        action = self.meanwhile.pop(len(self.pauses), None)
        if action:
            action()


@pytest.fixture
def it() -> Iterator[Machine]:
    machine = Machine()
    yield machine
    for board in machine.boards:
        board.check_integrity()
        board.close()
        board.close()


def test_a_turn_goes_well_when_all_have_voted_and_the_owner_has_decided(it: Machine) -> None:
    owner, *readers = it.boards
    owner.open(TURN, None)
    for reader in readers:
        reader.open(TURN, None)
        reader.vote(TURN, None)
    owner.settle(TURN, None)
    for reader in readers:
        reader.await_decision(TURN)
    assert it.pauses == []
    assert owner.waited_s == 0


def test_a_reader_waits_for_the_offer_and_gives_way_first(it: Machine) -> None:
    it.meanwhile[4] = lambda: it.boards[0].open(TURN, None)
    it.boards[1].open(TURN, None)
    assert it.pauses[0] == 0.0
    assert len(it.pauses) == 4
    assert it.pauses == sorted(it.pauses)
    assert it.boards[1].waited_s == pytest.approx(it.now_s)


def test_the_owner_waits_for_the_last_vote(it: Machine) -> None:
    it.boards[0].open(TURN, None)
    it.boards[2].vote(TURN, None)
    it.meanwhile[6] = lambda: it.boards[1].vote(TURN, None)
    it.boards[0].settle(TURN, None)
    assert len(it.pauses) == 6


def test_an_earlier_turn_says_nothing_of_a_later_one(it: Machine) -> None:
    it.boards[0].open(TURN, None)
    later = dataclasses.replace(TURN, number=5, layer=4)
    with pytest.raises(DeadlineExceeded, match="layer 4: rank 1 waits for the rows of rank 0"):
        it.boards[1].await_offer(later)
    assert 5.0 <= it.now_s < 5.1


def raised(act: Callable[[], None]) -> str:
    with pytest.raises((TransferFailed, DeadlineExceeded)) as caught:
        act()
    return f"{type(caught.value).__name__}: {caught.value}"


def test_a_reader_that_failed_fails_all_by_one_reason(it: Machine) -> None:
    owner, second, third = it.boards
    owner.open(TURN, None)
    third.vote(TURN, None)
    second.vote(TURN, "the bus is on fire")
    reasons = {raised(lambda: owner.settle(TURN, None))}
    reasons |= {raised(lambda reader=reader: reader.await_decision(TURN)) for reader in (second, third)}
    assert reasons == {"TransferFailed: layer 3 failed on rank 1: the bus is on fire"}


def test_an_owner_without_rows_offers_nothing_and_fails_all(it: Machine) -> None:
    owner, second, _ = it.boards
    owner.open(TURN, "no such row")
    it.meanwhile[3] = lambda: raised(lambda: owner.settle(TURN, "no such row")) and None
    assert raised(lambda: second.open(TURN, None)) == "TransferFailed: layer 3 failed on rank 0: no such row"
    assert len(it.pauses) == 3


def test_a_rank_that_never_votes_is_named_with_the_deadline_on_every_rank(it: Machine) -> None:
    owner, second, _ = it.boards
    owner.open(TURN, None)
    second.vote(TURN, None)
    said = raised(lambda: owner.settle(TURN, None))
    assert said == (
        "DeadlineExceeded: layer 3: rank 0 waits for its rows to land; rank 2 did not take part: "
        "not finished within 5 s"
    )
    assert raised(lambda: second.await_decision(TURN)) == said
    it.boards[2].open(TURN, None)  # the late one: the offer stands, but nobody goes on
    it.boards[2].vote(TURN, None)
    assert raised(lambda: it.boards[2].await_decision(TURN)) == said


def test_a_decision_is_waited_for_longer_than_the_owner_waits_for_votes(it: Machine) -> None:
    it.boards[0].open(TURN, None)
    it.boards[1].vote(TURN, None)
    assert "waits for the decision of rank 0" in raised(lambda: it.boards[1].await_decision(TURN))
    assert 10.0 <= it.now_s < 10.1


def test_a_dead_rank_is_noticed_long_before_the_deadline(it: Machine) -> None:
    it.boards[0].open(TURN, None)
    it.boards[1].vote(TURN, None)
    it.dead.add(2)
    said = raised(lambda: it.boards[0].settle(TURN, None))
    assert said == "TransferFailed: layer 3 failed on rank 2: it ended before it took part"
    assert it.now_s < 1.0
    assert raised(lambda: it.boards[1].await_decision(TURN)) == said


def test_what_a_rank_did_last_counts_though_it_died_or_left_right_after(it: Machine) -> None:
    it.boards[0].open(TURN, None)
    it.boards[1].vote(TURN, None)
    it.boards[2].vote(TURN, None)
    it.dead |= {0, 1, 2}
    it.boards[1].leave(1)
    it.boards[0].settle(TURN, None)
    it.boards[0].leave(1)
    it.boards[2].await_decision(TURN)


def test_a_rank_that_left_the_forward_is_not_waited_for(it: Machine) -> None:
    it.boards[0].open(TURN, None)
    it.boards[1].vote(TURN, None)
    it.boards[2].leave(TURN.step)
    said = raised(lambda: it.boards[0].settle(TURN, None))
    assert said == "TransferFailed: layer 3 failed on rank 2: it left the forward before it took part"
    assert len(it.pauses) == 0


def test_a_rank_that_left_an_earlier_forward_is_waited_for(it: Machine) -> None:
    it.boards[0].leave(TURN.step - 1)
    it.meanwhile[3] = lambda: it.boards[0].open(TURN, None)
    it.boards[1].open(TURN, None)
    assert len(it.pauses) == 3


def test_a_rank_that_closed_has_left_for_good(it: Machine) -> None:
    it.boards[0].close()
    far = dataclasses.replace(TURN, step=10**9, number=10**10)
    assert "layer 3 failed on rank 0: it left" in raised(lambda: it.boards[1].open(far, None))
    it.boards[0].leave(3)


def test_turns_are_taken_once_and_in_order(it: Machine) -> None:
    it.boards[0].open(TURN, None)
    for number in (4, 3):
        with pytest.raises(GateViolation, match=f"rank 0 cannot take turn {number} after turn 4"):
            it.boards[0].open(dataclasses.replace(TURN, number=number), None)


def test_a_reason_of_any_length_and_letters_arrives(it: Machine) -> None:
    it.boards[0].open(TURN, "ä\0" * 10_000)
    raised(lambda: it.boards[0].settle(TURN, "ä\0" * 10_000))
    assert "ä\0ä\0" in raised(lambda: it.boards[1].await_decision(TURN))


def test_a_strangers_write_is_noticed(it: Machine) -> None:
    it.boards[0].open(TURN, None)
    it.boards[1]._words[0][0] = np.int64(99)
    with pytest.raises(AssertionError, match="rank 0's word 0 is 99, not 4"):
        it.boards[0].check_integrity()
    it.boards[1]._words[0][0] = np.int64(4)


def test_a_board_whose_maker_is_gone_cannot_be_joined() -> None:
    gone = OwnerBoard(SharedMemoryAllocator(), member=0, deadline_s=1.0)
    handle = gone.handle
    gone.close()
    own = OwnerBoard(SharedMemoryAllocator(), member=1, deadline_s=1.0)
    with pytest.raises(StoreUnavailable):
        own.connect([handle, own.handle])
    own.close()
