"""The consumer of remote read and its producers: lives, leases, waits."""

import pytest
from remote_consumer_end import (
    ConsumerEnd,
    done,
    draining,
    ended,
    expected,
    known,
    reading,
    receiving,
    refusing,
)
from remote_end import LAYERS, LEASE_S, WAIT_S

from kvstrata.errors import TransferFailed
from kvstrata.remote.consumer.peers import IDLE_LEASES, PEER_MOVES, PeerEvent, PeerState
from kvstrata.remote.protocol.actions import Ending, Finish, LosePeer, StartRead
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


def strange() -> ConsumerEnd:
    return ConsumerEnd()


PEER_ROWS = {
    (PeerState.UNKNOWN, PeerEvent.HELLO): (strange, lambda end: end.hear(0, Hello), [Welcome]),
    (PeerState.UNKNOWN, PeerEvent.MISMATCH): (refusing, lambda end: end.hear(0, Hello), [Refused]),
    (PeerState.UNKNOWN, PeerEvent.STRANGE): (strange, lambda end: end.hear(0, Beat), [Refused]),
    (PeerState.WELCOMED, PeerEvent.HELLO_AGAIN): (known, lambda end: end.hear(0, Hello), [Welcome]),
    (PeerState.WELCOMED, PeerEvent.RESTART): (
        known,
        lambda end: end.hear(0, Hello, epoch="p0b"),
        [LosePeer, Welcome],
    ),
    (PeerState.WELCOMED, PeerEvent.SILENCE): (known, lambda end: end.wait(IDLE_LEASES * LEASE_S), [LosePeer]),
    (PeerState.WELCOMED, PeerEvent.STRANGE): (known, lambda end: end.hear(0, Open, epoch="other"), [Refused]),
}


@pytest.mark.parametrize("row", PEER_MOVES.rows, ids=lambda row: f"{row[0].name}-{row[1].name}")
def test_every_row_of_the_peers_table_is_as_it_says(row):
    build, happens, asked = PEER_ROWS[row]
    end = build()
    assert end.machine.statistics().peers == (row[0] is PeerState.WELCOMED)
    happens(end)
    assert end.kinds() == asked
    is_known = PEER_MOVES.rows[row].to is PeerState.WELCOMED or row[1] is PeerEvent.RESTART
    assert end.machine.statistics().peers == is_known


@pytest.mark.parametrize(
    "wrong",
    [
        {"generation": 6},
        {"member": 1},
        {"member": 5},
        {"transfer": "u"},
        {"epoch": "p9"},
        {"peer_epoch": "c0"},
    ],
    ids=str,
)
def test_P1_a_part_of_another_life_hold_or_member_is_not_read(wrong):  # noqa: N802
    end = receiving()
    end.hear(0, Ready, **wrong)
    assert StartRead not in end.kinds()
    assert sum(end.dropped().values()) == 1
    assert end.machine.is_expected("t")


def test_messages_that_a_producer_never_sends_are_dropped():
    end = receiving()
    for kind in (Accept, ReadDone, ReadFailed, Reject):
        more = {Accept: {}, ReadDone: {"layer": 0, "part": 0}, Reject: {"reason": ""}}
        end.hear(0, kind, **more.get(kind, {"layer": 0, "part": 0, "reason": ""}))
    end.hear(0, AbortAck)
    end.hear(0, Refused, reason="")
    assert end.kinds() == []
    assert end.dropped() == {"unexpected": 6}
    stranger = ConsumerEnd()
    stranger.hear(0, AbortAck)
    stranger.hear(0, Accept)
    assert stranger.kinds() == []
    assert stranger.dropped() == {"stale": 2}


def test_P7_a_silent_member_ends_the_transfer_within_the_lease_and_is_lost():  # noqa: N802
    end = receiving()
    for _ in range(3):
        end.wait(LEASE_S * 0.6)
        end.hear(0, Beat)
        end.hear(1, Beat)
    end.wait(LEASE_S * 0.6)
    end.hear(0, Beat)
    end.take()
    end.wait(LEASE_S * 0.5)
    assert end.finished()["t"].reason == "member 1 of prefill said nothing of the transfer for 8 s"
    assert end.finished()["t"].ending is Ending.LAPSED
    assert [action.peer for action in end.log if isinstance(action, LosePeer)] == ["P1"]
    assert end.machine.statistics().lost_peers == 1


def test_a_member_that_speaks_of_other_transfers_lapses_and_is_not_lost():
    end = receiving(0, members=1)
    end.expect("u")
    for _ in range(4):
        end.wait(LEASE_S / 3)
        end.hear(0, Beat, transfers=("u",))
    assert end.finished()["t"].ending is Ending.LAPSED
    assert end.machine.statistics().lost_peers == 0


def test_a_member_that_has_supplied_everything_may_be_silent_or_restart():
    end = receiving()
    for layer in LAYERS:
        end.hear(0, Ready, layer=layer)
    for read in end.reads():
        end.machine.read_finished(read.number)
    for _ in range(6):
        end.wait(LEASE_S / 2)
        end.hear(1, Beat)
    assert end.machine.is_expected("t")
    end.take()
    end.wait(LEASE_S / 4)
    assert [beat.peer_epoch for beat in end.take() if isinstance(beat, Beat)] == ["p1"]
    end.hear(0, Hello, epoch="p0b")
    assert end.kinds() == [LosePeer, Welcome]
    for layer in LAYERS:
        end.hear(1, Ready, layer=layer)
    for read in end.reads():
        end.machine.read_finished(read.number)
    assert end.finished()["t"].ending is Ending.DONE


def test_a_restarted_prefill_fails_what_it_had_begun():
    end = receiving()
    end.hear(0, Hello, epoch="p0b")
    lose, abort, finish, welcome = end.take()
    assert lose == LosePeer(peer="P0")
    assert (type(abort), abort.member) == (Abort, 1)
    assert finish == Finish(transfer="t", ending=Ending.FAILED, reason="prefill restarted")
    assert welcome.peer_epoch == "p0b"


def test_P2_late_words_of_an_earlier_life_of_prefill_are_never_believed():  # noqa: N802
    end = receiving(0, members=1)
    end.hear(0, Hello, epoch="p0b")
    end.expect("u")
    end.hear(0, Open, "u", epoch="p0b")
    end.take()
    end.hear(0, Hello, epoch="p0")
    assert end.kinds() == []
    end.hear(0, Open, "u", epoch="p0")
    assert end.kinds() == [Refused]
    assert end.machine.is_expected("u")
    assert end.dropped() == {"stale": 2}


def test_the_later_life_taken_for_the_earlier_one_is_believed_again_after_a_lease():
    end = ConsumerEnd()
    end.hear(0, Hello, epoch="p0b")
    end.hear(0, Hello, epoch="p0a")  # an earlier life's, overtaken on its way
    end.hear(0, Hello, epoch="p0b")
    assert end.kinds() == [Welcome, LosePeer, Welcome]
    end.clock.now_s += LEASE_S
    end.hear(0, Hello, epoch="p0b")
    assert end.kinds() == [LosePeer, Welcome]


def test_a_mismatch_after_a_restart_still_ends_the_earlier_life():
    end = receiving(0, members=1)
    end.refuse = "block_tokens 16 at prefill, 32 at decode"
    end.hear(0, Hello, epoch="p0b")
    lose, finish, refused = end.take()
    assert (type(lose), type(finish)) == (LosePeer, Finish)
    assert (refused.reason, refused.is_stale) == ("block_tokens 16 at prefill, 32 at decode", False)
    assert end.machine.statistics().refused_hellos == 1


def test_a_producer_that_was_stopped_for_long_may_come_back():
    end = receiving(0, members=1)
    end.wait(LEASE_S)
    assert end.machine.statistics().peers == 0
    end.take()
    end.hear(0, Ready)
    (refused,) = end.take()
    assert (refused.is_stale, refused.epoch, refused.peer_epoch) == (True, "c1", "p0")
    end.hear(0, Hello)
    assert end.kinds() == [Welcome]
    end.hear(0, Ready)
    (reject,) = end.take()
    assert (type(reject), reject.generation) == (Reject, 7)


def test_P6_members_that_do_not_come_are_named():  # noqa: N802
    end = receiving(1, members=4)
    for _ in range(20):
        end.wait(WAIT_S / 19)
        end.hear(1, Beat)
    assert end.finished()["t"].ending is Ending.LAPSED
    assert end.finished()["t"].reason == "member 0, 2, 3 of 4 did not open within 60 s of the first"


def test_P6_nobody_at_all_ends_the_wait():  # noqa: N802
    end = expected()
    end.wait(WAIT_S)
    assert end.finished()["t"].reason == "no prefill opened the transfer within 60 s"


def test_P6_a_prefill_that_lives_and_publishes_nothing_ends_the_wait():  # noqa: N802
    end = receiving(0, members=1)
    end.hear(0, Ready, layer=0)
    end.machine.read_finished(0)
    for _ in range(100):
        assert end.machine.is_expected("t")
        end.wait(WAIT_S / 20)
        end.hear(0, Beat)
    assert end.finished()["t"].ending is Ending.LAPSED
    assert end.finished()["t"].reason == "nothing new for 300 s; missing is layer 1 of member 0"


@pytest.mark.parametrize("build", [expected, receiving, draining, ended])
def test_an_id_is_not_used_twice(build):
    with pytest.raises(TransferFailed, match="'t' is in use, or was lately"):
        build().expect()


def test_aborting_what_is_unknown_or_has_ended_does_nothing():
    end = done()
    end.machine.abort("t", "x")
    end.machine.abort("u", "x")
    assert end.kinds() == []


def test_one_failure_is_one_transfers_own():
    end = receiving(0, members=1)
    end.expect("u")
    end.hear(0, Open, "u", generation=17)
    end.hear(0, Ready)
    end.hear(0, Ready, "u", generation=17)
    end.take()
    end.machine.read_finished(0, "broken", is_final=True)
    assert end.finished().keys() == {"t"}
    end.hear(0, Ready, "u", generation=17, layer=1)
    for number in (1, 2):
        end.machine.read_finished(number)
    assert end.finished()["u"].ending is Ending.DONE


def test_in_the_end_nothing_is_pending():
    end = done()
    end.wait(IDLE_LEASES * LEASE_S)
    assert end.machine.next_tick_s() is None
    counts = end.machine.statistics()
    assert (counts.tombstones, counts.peers, counts.reading) == (0, 0, 0)


def test_the_end_of_a_read_that_is_not_in_flight_is_a_defect():
    end = reading()
    end.machine.read_finished(0)
    with pytest.raises(KeyError):
        end.machine.read_finished(0)
