"""The producer of remote read: every row of its table, parts, answers, the end."""

import pytest
from remote_end import END, FIRST, LEASE_S, OPEN_WAIT_S, RESEND_S
from remote_producer_end import (
    SETTLED,
    ProducerEnd,
    aborting,
    active,
    all_read,
    ended,
    opening,
    refused_for,
    unwelcomed,
)

from kvstrata.errors import TransferFailed
from kvstrata.remote.holds import Hold
from kvstrata.remote.producer.moves import PRODUCER_MOVES, ProducerEvent, ProducerState
from kvstrata.remote.protocol.actions import Ending, Revoke, Settle
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
    Refused,
    Reject,
    Welcome,
)

S, E = ProducerState, ProducerEvent


def state_of(end: ProducerEnd) -> ProducerState:
    counts = end.machine.statistics()
    live = {S.OPENING: counts.opening, S.ACTIVE: counts.active, S.ABORTING: counts.aborting}
    assert sum(live.values()) <= 1
    return next((state for state, count in live.items() if count), S.ENDED)


IN_STATE = {S.OPENING: opening, S.ACTIVE: active, S.ABORTING: aborting, S.ENDED: ended}
# row: what happens, what is done about it, how it ends
ROWS = {
    (S.OPENING, E.ACCEPT): (lambda end: end.hear(Accept), [], None),
    (S.OPENING, E.GIVEN_UP): (lambda end: end.hear(Reject), SETTLED, Ending.FAILED),
    (S.OPENING, E.ABORTED): (lambda end: end.hear(Abort), [AbortAck, *SETTLED], Ending.ABORTED),
    (S.OPENING, E.STOP): (lambda end: end.machine.abort("t", "x"), [Abort], None),
    (S.OPENING, E.CALL_OFF): (lambda end: end.machine.abort("t", "x"), [*SETTLED, Abort], Ending.ABORTED),
    (S.OPENING, E.REFUSED): (lambda end: end.hear(Refused), [*SETTLED, Abort], Ending.FAILED),
    (S.OPENING, E.RESTARTED): (lambda end: end.hear(Refused, epoch="c2", is_stale=True), [Hello], None),
    (S.OPENING, E.NEVER): (lambda end: end.wait(OPEN_WAIT_S), None, Ending.LAPSED),
    (S.ACTIVE, E.ALL_READ): (all_read, SETTLED, Ending.DONE),
    (S.ACTIVE, E.GIVEN_UP): (lambda end: end.hear(ReadFailed), SETTLED, Ending.FAILED),
    (S.ACTIVE, E.ABORTED): (lambda end: end.hear(Abort), [AbortAck, *SETTLED], Ending.ABORTED),
    (S.ACTIVE, E.STOP): (lambda end: end.machine.abort("t", "x"), [Abort], None),
    (S.ACTIVE, E.RESTARTED): (
        lambda end: end.hear(Refused, epoch="c2", is_stale=True),
        SETTLED,
        Ending.FAILED,
    ),
    (S.ACTIVE, E.LATE): (lambda end: end.wait(LEASE_S), None, Ending.LAPSED),
    (S.ABORTING, E.STOPPED): (lambda end: end.hear(AbortAck), SETTLED, Ending.ABORTED),
    (S.ABORTING, E.ABORTED): (lambda end: end.hear(Abort), [AbortAck, *SETTLED], Ending.ABORTED),
    (S.ABORTING, E.RESTARTED): (
        lambda end: end.hear(Refused, epoch="c2", is_stale=True),
        [*SETTLED, Abort],
        Ending.FAILED,
    ),
    (S.ABORTING, E.UNHEARD): (lambda end: end.wait(LEASE_S), None, Ending.LAPSED),
    (S.ENDED, E.ENDED_ABORT): (lambda end: end.hear(Abort), [AbortAck], Ending.FAILED),
    (S.ENDED, E.ENDED_ABORT_ACK): (lambda end: end.hear(AbortAck), [], Ending.FAILED),
    (S.ENDED, E.ENDED_NEWS): (lambda end: end.hear(ReadDone), [Abort], Ending.FAILED),
}


BEGINS = {
    E.CALL_OFF: unwelcomed,
    E.REFUSED: unwelcomed,
    E.ENDED_ABORT_ACK: lambda: refused_for(0.0),
}
"""Where it is not the state alone that decides."""


@pytest.mark.parametrize("row", PRODUCER_MOVES.rows, ids=lambda row: f"{row[0].name}-{row[1].name}")
def test_every_row_of_the_table_is_as_it_says(row):
    state, event = row
    end = BEGINS.get(event, IN_STATE[state])()
    assert state_of(end) is state
    happens, done, ending = ROWS[row]
    happens(end)
    assert state_of(end) is PRODUCER_MOVES.rows[row].to
    if done is not None:
        assert end.kinds() == done
    settled = end.settled().get("t")
    assert (settled and settled.ending) == ending
    assert end.machine.is_open("t") == (ending is None)


def test_a_move_that_is_in_no_table_is_a_defect():
    with pytest.raises(AssertionError, match="ACCEPT is no move from ENDED"):
        PRODUCER_MOVES.after(S.ENDED, E.ACCEPT)


def test_a_transfer_from_hello_to_settle():
    end = ProducerEnd()
    end.open()
    assert end.kinds() == [Hello]
    end.publish(layer=0, end=4)
    assert end.kinds() == []
    end.hear(Welcome)
    (opened,) = end.take()
    assert (opened.peer_epoch, opened.member, opened.members) == ("c1", 1, 2)
    assert (opened.hold_slot, opened.generation, opened.first_block, opened.end_block) == (3, 7, FIRST, END)
    end.hear(Accept)
    (first,) = end.take()
    assert (first.layer, first.part, first.first_block, first.end_block) == (0, 0, 2, 4)
    assert (first.blocks, first.is_last) == ((42, 43), False)
    end.publish(layer=0, first=4)
    end.publish(layer=1)
    second, other = end.take()
    assert (second.part, second.blocks, second.is_last) == (1, (44,), True)
    assert (other.layer, other.part, other.is_last) == (1, 0, True)
    end.hear(ReadDone, layer=0, part=1)
    end.hear(ReadDone, layer=1, part=0)
    assert end.kinds() == []
    end.hear(ReadDone, layer=0, part=0)
    assert end.take() == [
        Revoke(transfer="t", hold=Hold(slot=3, generation=7)),
        Settle(transfer="t", ending=Ending.DONE, reason=""),
    ]
    assert end.machine.statistics().unanswered_parts == 0


def test_P4_a_layer_whose_last_part_is_not_published_keeps_the_transfer_open():  # noqa: N802
    end = active(published=1)
    end.hear(ReadDone, layer=0)
    assert end.kinds() == []
    assert end.machine.is_open("t")


def test_P5_a_part_without_blocks_is_said_and_waited_for():  # noqa: N802
    end = ProducerEnd()
    end.open(first=END, end=END, layers=(4,))
    end.hear(Welcome)
    end.hear(Accept)
    end.take()
    end.publish(layer=4, first=END, end=END)
    (ready,) = end.take()
    assert (ready.blocks, ready.is_last) == ((), True)
    end.hear(ReadDone, layer=4)
    assert end.settled()["t"].ending is Ending.DONE


@pytest.mark.parametrize(
    ("publish", "problem"),
    [
        ({"layer": 9}, "no layer of this transfer"),
        ({"first": 3}, "ended at 2"),
        ({"first": 2, "end": 9, "is_last": False}, "ends at 5"),
        ({"end": 4, "is_last": True}, "the last ends at 5"),
    ],
)
def test_a_part_that_does_not_continue_is_a_defect(publish, problem):
    with pytest.raises(AssertionError, match=problem):
        active(published=0).publish(**publish)


def test_a_layer_is_not_published_twice():
    with pytest.raises(AssertionError, match="published already"):
        active().publish(layer=0, first=END, end=END)


def test_block_ids_must_be_as_many_as_blocks():
    with pytest.raises(AssertionError, match="1 block ids"):
        active(published=0).machine.publish(
            "t", layer=0, first_block=FIRST, end_block=END, blocks=(1,), is_last=True
        )


def test_publishing_after_the_end_or_into_an_abort_does_nothing():
    for end in (aborting(), ended()):
        end.publish(layer=0)
        end.publish("unknown")
        assert end.kinds() == []


@pytest.mark.parametrize("state", IN_STATE)
def test_an_id_is_not_used_twice(state):
    with pytest.raises(TransferFailed, match="'t' is in use, or was lately"):
        IN_STATE[state]().open(generation=8)


def test_P6_what_is_not_answered_is_repeated_ever_later():  # noqa: N802
    end = active()
    counts = []
    for _ in range(4):
        end.wait(RESEND_S)
        counts.append(end.kinds().count(Ready))
    assert counts == [2, 0, 2, 0]  # after 0.5 s, after 1 s more, then after 2 s
    end.hear(ReadDone, layer=0)
    end.wait(RESEND_S)
    assert end.kinds().count(Ready) == 1  # progress: soon again


def test_a_part_published_a_moment_ago_is_not_repeated_with_older_ones():
    end = active(published=1)
    end.wait(RESEND_S * 0.9)
    end.publish(layer=1)
    end.take()
    end.wait(RESEND_S * 0.2)
    assert [message.layer for message in end.take() if isinstance(message, Ready)] == [0]


def test_a_lost_hello_open_and_abort_are_repeated():
    end = ProducerEnd()
    end.open()
    end.take()
    end.wait(RESEND_S)
    assert end.kinds() == [Hello]
    end.hear(Welcome)
    end.take()
    end.wait(RESEND_S)
    assert end.kinds() == [Open]
    end.machine.abort("t", "x")
    end.take()
    end.wait(RESEND_S)
    assert end.kinds() == [Abort]


def test_a_lost_accept_is_made_up_for_by_the_next_one():
    end = opening(published=2)
    end.wait(RESEND_S)
    assert end.kinds() == [Open]
    end.hear(Accept)
    assert end.kinds() == [Ready, Ready]
    end.hear(Accept)
    assert end.kinds() == []
    assert end.dropped() == {"duplicate": 1}


def test_P2_duplicates_and_reordered_answers_are_harmless():  # noqa: N802
    end = active()
    end.hear(ReadDone, layer=1)
    end.hear(ReadDone, layer=1)
    assert end.machine.is_open("t")
    end.hear(ReadDone, layer=0)
    end.hear(ReadDone, layer=0)
    end.hear(Accept)
    assert end.settled()["t"].ending is Ending.DONE
    assert end.dropped() == {"duplicate": 1, "late": 2}


def test_answers_to_what_was_never_said_are_dropped():
    end = active(published=1)
    end.hear(ReadDone, layer=1)
    end.hear(ReadDone, layer=0, part=1)
    end.hear(ReadDone, layer=77)
    end.hear(AbortAck)
    assert end.dropped() == {"unexpected": 4}
    assert end.machine.is_open("t")
    early = opening(published=1)
    early.hear(ReadDone)
    assert early.dropped() == {"unexpected": 1}


def test_a_consumer_that_reads_on_after_the_end_is_told_now_and_then():
    end = ended()
    end.hear(Beat, transfers=("t",))
    end.hear(ReadDone)
    assert end.kinds() == [Abort]
    end.wait(RESEND_S)
    end.hear(Beat, transfers=("t",))
    assert end.kinds() == [Abort]


def test_a_consumer_that_still_has_other_members_is_not_told_that_a_done_one_has_ended():
    end = active()
    all_read(end)
    end.take()
    end.hear(Beat, transfers=("t",))
    end.hear(ReadDone)
    assert end.kinds() == []


def test_tombstones_are_given_up_and_then_nothing_is_pending():
    end = ended()
    end.wait(4 * LEASE_S)
    assert end.machine.statistics().tombstones == 0
    assert end.machine.next_tick_s() is None
    end.hear(Abort)
    assert end.kinds() == [AbortAck]
    assert end.dropped()["unknown"] == 1
