"""The consumer of remote read: every row of its table, parts, reads, the end."""

import itertools

import pytest
from remote_consumer_end import (
    ConsumerEnd,
    all_but_one_read,
    draining,
    ended,
    expected,
    reading,
    receiving,
)
from remote_end import END, FIRST, LAYERS, LEASE_S, RESEND_S

from kvstrata.remote.consumer.moves import CONSUMER_MOVES, ConsumerEvent, ConsumerState
from kvstrata.remote.protocol.actions import CancelReads, Ending, Finish, StartRead
from kvstrata.remote.protocol.messages import (
    Abort,
    AbortAck,
    Accept,
    Beat,
    Hello,
    Open,
    ReadDone,
    ReadFailed,
    Ready,
    Reject,
    Welcome,
)

S, E = ConsumerState, ConsumerEvent


def state_of(end: ConsumerEnd) -> ConsumerState:
    counts = end.machine.statistics()
    live = {S.EXPECTED: counts.waiting, S.RECEIVING: counts.receiving, S.DRAINING: counts.draining}
    assert sum(live.values()) <= 1
    return next((state for state, count in live.items() if count), S.ENDED)


# row: from where, what happens, what is done about it, how it ends
ROWS = {
    (S.EXPECTED, E.OPEN): (expected, lambda end: end.hear(0, Open), [Accept], None),
    (S.EXPECTED, E.BREAK): (expected, lambda end: end.machine.abort("t", "x"), [Finish], Ending.ABORTED),
    (S.RECEIVING, E.OPEN): (
        lambda: receiving(0),
        lambda end: end.hear(1, Hello) or end.hear(1, Open),
        [Welcome, Accept],
        None,
    ),
    (S.RECEIVING, E.COMPLETE): (
        all_but_one_read,
        lambda end: end.machine.read_finished(3),
        [ReadDone, Finish],
        Ending.DONE,
    ),
    (S.RECEIVING, E.BREAK): (
        receiving,
        lambda end: end.machine.abort("t", "x"),
        [Abort, Abort, Finish],
        Ending.ABORTED,
    ),
    (S.RECEIVING, E.BREAK_READING): (reading, lambda end: end.hear(1, Abort), [CancelReads], None),
    (S.DRAINING, E.DRAINED): (
        draining,
        lambda end: end.machine.read_finished(0),
        [Abort, Abort, Finish],
        Ending.ABORTED,
    ),
    (S.DRAINING, E.LATE_OPEN): (
        draining,
        lambda end: end.hear(2, Hello) or end.hear(2, Open),
        [Welcome, Reject],
        None,
    ),
    (S.DRAINING, E.LATE_READY): (draining, lambda end: end.hear(0, Ready, layer=1), [], None),
    (S.DRAINING, E.LATE_ABORT): (draining, lambda end: end.hear(0, Abort), [], None),
    (S.ENDED, E.LATE_OPEN): (ended, lambda end: end.hear(0, Open), [Reject], Ending.ABORTED),
    (S.ENDED, E.LATE_READY): (ended, lambda end: end.hear(0, Ready), [Reject], Ending.ABORTED),
    (S.ENDED, E.LATE_ABORT): (ended, lambda end: end.hear(0, Abort), [AbortAck], Ending.ABORTED),
    (S.ENDED, E.LATE_ABORT_ACK): (ended, lambda end: end.hear(0, AbortAck), [], Ending.ABORTED),
}


@pytest.mark.parametrize("row", CONSUMER_MOVES.rows, ids=lambda row: f"{row[0].name}-{row[1].name}")
def test_every_row_of_the_table_is_as_it_says(row):
    build, happens, asked, ending = ROWS[row]
    end = build()
    assert state_of(end) is row[0]
    happens(end)
    assert end.kinds() == asked
    assert state_of(end) is CONSUMER_MOVES.rows[row].to
    finished = end.finished().get("t")
    assert (finished and finished.ending) == ending
    assert end.machine.is_expected("t") == (ending is None)


def test_a_move_that_is_in_no_table_is_a_defect():
    with pytest.raises(AssertionError, match="OPEN is no move from ENDED"):
        CONSUMER_MOVES.after(S.ENDED, E.OPEN)


def test_a_transfer_from_expect_to_finish():
    end = ConsumerEnd(members=1)
    end.expect(layers=(0,))
    end.hear(0, Hello)
    (welcome,) = end.take()
    assert (welcome.epoch, welcome.peer_epoch, welcome.transport, welcome.lease_s) == (
        "c1",
        "p0",
        "shm",
        LEASE_S,
    )
    end.hear(0, Open)
    (accept,) = end.take()
    assert (accept.transfer, accept.member, accept.generation, accept.peer_epoch) == ("t", 0, 7, "p0")
    end.hear(0, Ready, end_block=4, blocks=(9, 8))
    (read,) = end.take()
    assert (read.peer, read.transfer, read.member, read.members) == ("P0", "t", 0, 1)
    assert (read.hold.slot, read.hold.generation, read.layer, read.part) == (0, 7, 0, 0)
    assert (read.first_block, read.end_block, read.blocks) == (2, 4, (9, 8))
    end.machine.read_finished(read.number)
    (answer,) = end.take()
    assert (type(answer), answer.layer, answer.part) == (ReadDone, 0, 0)
    end.hear(0, Ready, part=1, first_block=4)
    (read,) = end.take()
    end.machine.read_finished(read.number)
    assert end.kinds() == [ReadDone, Finish]
    assert end.finished()["t"] == Finish(transfer="t", ending=Ending.DONE, reason="")


def test_P5_a_part_without_blocks_is_read_and_answered_like_any_other():  # noqa: N802
    end = receiving(0, members=1)
    end.hear(0, Ready, layer=0, end_block=FIRST)
    end.hear(0, Ready, layer=0, part=1)
    end.hear(0, Ready, layer=0, part=2, first_block=END, blocks=())
    # Part 1 was said to be the last.
    assert end.kinds() == [StartRead, StartRead, CancelReads]
    empty = ConsumerEnd(members=1)
    empty.expect(first=END, layers=(0,))
    empty.hear(0, Hello)
    empty.hear(0, Open, first_block=END)
    empty.hear(0, Ready, first_block=END, blocks=())
    read = empty.take()[-1]
    assert read.blocks == ()
    empty.machine.read_finished(read.number)
    assert empty.kinds() == [ReadDone, Finish]


def test_P2_parts_in_any_order_and_repeated_ones_are_read_once_each():  # noqa: N802
    parts = [
        {"part": 0, "end_block": 3},
        {"part": 1, "first_block": 3, "end_block": 4},
        {"part": 2, "first_block": 4},
    ]
    for order in itertools.permutations(parts):
        end = ConsumerEnd(members=1)
        end.expect(layers=(0,))
        end.join(0)
        for part in (*order, *order):
            end.hear(0, Ready, **part)
        reads = end.reads()
        assert sorted(read.part for read in reads) == [0, 1, 2]
        for read in reads:
            end.machine.read_finished(read.number)
        assert end.kinds() == [ReadDone, ReadDone, ReadDone, Finish]
        assert end.dropped() == {"duplicate": 3}


def test_P4_as_many_distinct_members_as_were_announced_must_supply_everything():  # noqa: N802
    end = receiving(0, 1, members=3)
    for member in (0, 0, 1):
        end.hear(member, Open)
        for layer in LAYERS:
            end.hear(member, Ready, layer=layer)
        for read in (action for action in end.machine.take_actions() if isinstance(action, StartRead)):
            end.machine.read_finished(read.number)
    assert end.machine.is_expected("t")  # 0, 0, 1 of 3
    end.join(2)
    for layer in LAYERS:
        end.hear(2, Ready, layer=layer)
    for read in end.reads():
        assert end.machine.is_expected("t")
        end.machine.read_finished(read.number)
    assert end.finished()["t"].ending is Ending.DONE


def test_a_lost_accept_is_given_again():
    end = receiving()
    end.hear(0, Open)
    assert end.kinds() == [Accept]


def test_a_destination_registered_late_is_waited_for_by_the_producer():
    end = ConsumerEnd(members=1)
    end.hear(0, Hello)
    end.hear(0, Open)
    end.hear(0, Ready)
    assert end.kinds() == [Welcome]
    assert end.dropped() == {"early": 2}
    end.expect()
    end.hear(0, Open)
    assert end.kinds() == [Accept]


def test_a_failed_read_is_repeated_and_then_fails_everyone():
    end = receiving(read_attempts=3)
    end.hear(0, Ready)
    for attempt in range(2):
        (read,) = end.reads()
        assert read.number == attempt
        end.machine.read_finished(read.number, "connection lost")
    (read,) = end.reads()
    end.machine.read_finished(read.number, "connection lost")
    failed, abort, finish = end.take()
    assert (type(failed), failed.member, failed.layer, failed.part) == (ReadFailed, 0, 0, 0)
    assert (type(abort), abort.member) == (Abort, 1)
    assert finish.reason == "layer 0 part 0 of member 0 could not be read: connection lost"
    counts = end.machine.statistics()
    assert (counts.reads, counts.failed_reads, counts.retried_reads) == (3, 3, 2)


def test_a_read_that_works_the_second_time_is_as_good_as_any():
    end = receiving(0, members=1)
    for layer in LAYERS:
        end.hear(0, Ready, layer=layer)
    end.machine.read_finished(0, "timeout")
    for number in (1, 2):
        end.machine.read_finished(number)
    assert end.finished()["t"].ending is Ending.DONE


def test_a_read_of_a_revoked_hold_is_not_repeated():
    end = reading()
    end.machine.read_finished(0, "the hold was revoked", is_final=True)
    assert end.kinds() == [ReadFailed, Abort, Finish]


def test_a_lost_read_failed_is_made_up_for_by_a_reject():
    end = reading()
    end.machine.read_finished(0, "no", is_final=True)
    end.take()
    end.hear(0, Ready)
    (reject,) = end.take()
    assert (type(reject), reject.reason) == (
        Reject,
        "ended: layer 0 part 0 of member 0 could not be read: no",
    )


def test_M3_nothing_is_finished_or_told_while_a_read_is_in_flight():  # noqa: N802
    end = receiving()
    for layer in LAYERS:
        end.hear(0, Ready, layer=layer)
    end.take()
    end.hear(0, Abort)
    assert end.kinds() == [CancelReads]
    end.wait(3 * LEASE_S)
    assert set(end.kinds()) <= {Beat}
    end.machine.read_finished(0, "cancelled")
    assert end.kinds() == []
    end.machine.read_finished(1)
    ack, abort, finish = end.take()
    assert (type(ack), ack.member) == (AbortAck, 0)
    assert (type(abort), abort.member) == (Abort, 1)
    assert finish == Finish(transfer="t", ending=Ending.FAILED, reason="prefill aborted: because")


def test_a_draining_transfer_goes_on_beating_so_that_its_members_wait():
    end = draining()
    end.wait(LEASE_S / 4)
    assert end.kinds() == [Beat, Beat]


def test_the_first_reason_for_an_end_stays():
    end = draining()
    end.hear(1, Abort)
    end.machine.abort("t", "again")
    end.hear(0, Hello, epoch="p0b")
    end.machine.read_finished(0)
    assert end.finished()["t"] == Finish(transfer="t", ending=Ending.ABORTED, reason="client left")


def test_an_abort_of_either_side_before_a_member_has_opened():
    end = expected()
    end.hear(0, Abort)
    assert end.kinds() == [Finish, AbortAck]
    assert end.finished()["t"].reason == "prefill aborted: because"
    end = expected()
    end.machine.abort("t", "client left")
    end.take()
    end.hear(0, Open)
    (reject,) = end.take()
    assert (type(reject), reject.reason) == (Reject, "ended: client left")


def test_an_abort_is_repeated_until_it_is_acknowledged_or_a_lease_has_passed():
    end = ended()
    end.hear(0, AbortAck)
    end.wait(RESEND_S)
    (abort,) = end.take()
    assert (type(abort), abort.member) == (Abort, 1)
    end.wait(LEASE_S)
    assert end.kinds().count(Abort) >= 2
    end.wait(10 * LEASE_S)
    assert end.kinds() == []
    assert end.machine.statistics().resent >= 3


def test_aborts_that_cross_end_both():
    end = ended()
    end.hear(0, Abort)
    end.hear(1, Abort)
    assert end.kinds() == [AbortAck, AbortAck]
    end.wait(LEASE_S)
    assert end.kinds() == []


def test_P1_an_abort_of_another_hold_is_acknowledged_and_changes_nothing():  # noqa: N802
    end = reading()
    end.hear(0, Abort, generation=6)
    end.hear(0, Abort, "unknown")
    assert end.kinds() == [AbortAck, AbortAck]
    assert end.machine.is_expected("t")
    assert end.dropped() == {"stale": 1, "unknown": 1}
