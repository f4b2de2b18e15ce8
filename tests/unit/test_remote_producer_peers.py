"""The producer of remote read and its consumers: sessions, lives, leases."""

import msgspec
import pytest
from remote_end import LEASE_S, OPEN_WAIT_S
from remote_producer_end import (
    SETTLED,
    ProducerEnd,
    aborting,
    active,
    opening,
    refused_for,
    unwelcomed,
)

from kvstrata.remote.producer.session import SESSION_MOVES, SessionEvent, SessionState
from kvstrata.remote.protocol.actions import Ending, Send, Settle
from kvstrata.remote.protocol.messages import (
    Abort,
    AbortAck,
    Accept,
    Beat,
    Hello,
    Open,
    ReadFailed,
    Ready,
    Refused,
    Welcome,
)


def forgotten() -> ProducerEnd:
    """Decode welcomed this producer once, and knows it no more."""
    end = opening()
    end.hear(Refused, is_stale=True)
    end.take()
    return end


SESSION_ROWS = {
    (SessionState.CONNECTING, SessionEvent.WELCOME): (unwelcomed, lambda end: end.hear(Welcome), [Open]),
    (SessionState.CONNECTING, SessionEvent.REFUSE): (
        unwelcomed,
        lambda end: end.hear(Refused),
        [*SETTLED, Abort],
    ),
    (SessionState.WELCOMED, SessionEvent.RESTART): (
        opening,
        lambda end: end.hear(Refused, epoch="c2", is_stale=True),
        [Hello],
    ),
    (SessionState.WELCOMED, SessionEvent.REPLACE): (
        opening,
        lambda end: end.hear(Welcome, epoch="c2"),
        [Open],
    ),
    (SessionState.WELCOMED, SessionEvent.FORGET): (
        active,
        lambda end: end.hear(Refused, is_stale=True),
        [Hello],
    ),
    (SessionState.WELCOMED, SessionEvent.KNOW_AGAIN): (
        forgotten,
        lambda end: end.hear(Welcome),
        [Open],
    ),
    (SessionState.REFUSED, SessionEvent.RETRY): (
        lambda: refused_for(LEASE_S),
        lambda end: end.open("u", generation=8),
        [Hello],
    ),
    (SessionState.REFUSED, SessionEvent.RESTART): (
        lambda: refused_for(0),
        lambda end: end.hear(Refused, epoch="c2", is_stale=True),
        [],
    ),
}


@pytest.mark.parametrize("row", SESSION_MOVES.rows, ids=lambda row: f"{row[0].name}-{row[1].name}")
def test_every_row_of_the_sessions_table_is_as_it_says(row):
    build, happens, done = SESSION_ROWS[row]
    end = build()
    assert sessions_of(end) is row[0]
    happens(end)
    assert end.kinds() == done
    assert sessions_of(end) is SESSION_MOVES.rows[row].to


def test_what_a_refusal_ended_is_told_to_the_life_that_follows():
    """Simulator seed 10554: the refused transfer was expected by a decode that had just been restarted."""
    end = refused_for(0)
    end.hear(Refused, epoch="c2", is_stale=True)
    end.wait(LEASE_S / 4)
    told = [message for message in end.take() if isinstance(message, Abort)]
    assert told
    assert {message.peer_epoch for message in told} == {""}
    end.open("u", generation=8)
    assert end.kinds() == [Hello]


def test_that_it_is_not_known_to_the_life_that_refused_is_no_news():
    end = refused_for(0)
    end.hear(Refused, is_stale=True)
    assert sessions_of(end) is SessionState.REFUSED


def sessions_of(end: ProducerEnd) -> SessionState:
    counts = end.machine.statistics()
    if counts.welcomed_sessions:
        return SessionState.WELCOMED
    return SessionState.REFUSED if counts.refused_sessions else SessionState.CONNECTING


@pytest.mark.parametrize(
    "wrong",
    [
        {"generation": 6},
        {"member": 0},
        {"epoch": "c0"},
        {"peer_epoch": "p0"},
        {"transfer": "other"},
        {"peer": "E"},
    ],
    ids=str,
)
def test_P1_a_message_of_another_life_hold_or_transfer_changes_nothing(wrong):  # noqa: N802
    for build in (opening, active, aborting):
        end = build()
        end.hear(ReadFailed, **wrong)
        assert end.kinds() == []
        assert sum(end.dropped().values()) == 1
        assert end.machine.is_open("t")


def test_a_producers_own_messages_come_back_and_are_dropped():
    end = active()
    said = [action.message for action in end.log if isinstance(action, Send)]
    for kind in (Hello, Open, Ready):
        message = next(message for message in said if isinstance(message, kind))
        end.machine.receive("D", msgspec.structs.replace(message, epoch="c1", peer_epoch="p1"))
    assert end.dropped() == {"unexpected": 3}


def test_an_abort_of_something_else_is_acknowledged_and_changes_nothing():
    end = active()
    end.hear(Abort, generation=6)
    end.hear(Abort, "unknown")
    acks = end.take()
    assert [type(ack) for ack in acks] == [AbortAck, AbortAck]
    assert [(ack.transfer, ack.generation, ack.peer_epoch) for ack in acks] == [
        ("t", 6, "c1"),
        ("unknown", 7, "c1"),
    ]
    assert end.machine.is_open("t")


def test_a_beat_that_names_the_transfer_keeps_it_and_one_that_does_not_does_not():
    end = active()
    for _ in range(5):
        end.wait(LEASE_S * 0.75)
        end.hear(Beat, transfers=("t",))
    assert end.machine.is_open("t")
    end.wait(LEASE_S * 0.75)
    end.hear(Beat, transfers=("u",))
    end.wait(LEASE_S * 0.3)
    assert end.settled()["t"].ending is Ending.LAPSED
    assert "decode said nothing of the transfer for 8 s" in end.settled()["t"].reason


def test_beats_go_to_every_welcomed_consumer_with_its_transfers():
    end = active()
    end.open("u", generation=8)
    end.open("v", generation=9, peer="E")
    end.open("w", generation=10, peer="F")
    end.hear(Welcome, peer="E")
    end.take()
    end.wait(LEASE_S / 4)
    beats = [
        action for action in end.machine.take_actions() if isinstance(getattr(action, "message", 0), Beat)
    ]
    assert [(beat.peer, beat.message.transfers) for beat in beats] == [("D", ("t", "u")), ("E", ("v",))]


def test_very_many_transfers_take_several_beats():
    end = active()
    for number in range(5000):
        end.open(f"x{number}", generation=100 + number)
    end.take()
    end.wait(LEASE_S / 4)
    beats = [message for message in end.take() if isinstance(message, Beat)]
    assert sum(len(beat.transfers) for beat in beats) == 5001
    assert max(len(beat.transfers) for beat in beats) <= 4096


def test_P7_a_silent_decode_frees_everything_within_the_lease():  # noqa: N802
    end = active()
    end.wait(LEASE_S - 0.01)
    assert end.machine.is_open("t")
    end.wait(0.02)
    assert end.settled()["t"].ending is Ending.LAPSED


def test_an_abort_ends_within_the_lease_though_decode_goes_on_beating():
    end = aborting()
    for _ in range(9):
        end.wait(LEASE_S / 8)
        end.hear(Beat, transfers=("t",))
    assert end.settled()["t"].ending is Ending.LAPSED
    assert "did not acknowledge the abort within 8 s; aborted for: client left" in end.settled()["t"].reason


def test_P7_no_decode_that_accepts_ends_the_wait_and_says_in_what_state():  # noqa: N802
    end = ProducerEnd()
    end.open()
    end.wait(OPEN_WAIT_S)
    assert end.settled()["t"].ending is Ending.LAPSED
    assert "no decode accepted the transfer in time; the session was connecting" in end.settled()["t"].reason


def test_a_mismatch_fails_with_the_reason_and_so_do_transfers_within_a_lease():
    end = refused_for(0)
    assert end.settled()["t"].reason == "refused by decode: page_bytes 512 at prefill, 528 at decode"
    end.hear(AbortAck)
    end.wait(LEASE_S / 2)
    end.open("u", generation=8)
    assert end.kinds() == [*SETTLED, Abort]
    assert "page_bytes 512 at prefill, 528 at decode" in end.settled()["u"].reason
    end.wait(LEASE_S)
    assert end.machine.statistics().settled[Ending.FAILED] == 2


def test_a_restarted_decode_fails_what_it_had_accepted_and_is_asked_about_the_rest():
    end = active()
    end.open("u", generation=8)
    end.take()
    end.hear(Refused, epoch="c2", is_stale=True)
    assert end.kinds() == [*SETTLED, Hello]
    assert end.settled()["t"] == Settle(transfer="t", ending=Ending.FAILED, reason="decode restarted")
    end.consumer_epoch = "c2"
    end.hear(Welcome)
    (opened,) = end.take()
    assert (opened.transfer, opened.peer_epoch) == ("u", "c2")
    end.hear(Accept, "u", generation=8)
    assert end.machine.is_open("u")
    assert end.machine.statistics().restarted_peers == 1


def test_P7_a_restarted_decode_that_does_not_know_the_rest_frees_it_within_a_lease():  # noqa: N802
    end = opening()
    end.hear(Refused, epoch="c2", is_stale=True)
    end.hear(Welcome, epoch="c2")
    end.wait(LEASE_S)
    assert end.settled()["t"].ending is Ending.LAPSED


def test_an_abort_between_two_lives_of_decode_needs_nobodys_agreement():
    end = opening()
    end.hear(Refused, epoch="c2", is_stale=True)
    end.take()
    end.machine.abort("t", "client left")
    assert end.kinds() == [*SETTLED, Abort]


def test_P2_late_words_of_an_earlier_life_of_decode_are_never_believed():  # noqa: N802
    end = opening()
    end.hear(Refused, epoch="c2", is_stale=True)
    end.hear(Welcome, epoch="c1")
    assert end.kinds() == [Hello]
    end.hear(Welcome, epoch="c2")
    assert end.kinds() == [Open]
    end.hear(Refused, epoch="c1", is_stale=True)
    end.hear(Refused, epoch="c1")
    end.hear(Welcome, epoch="c1")
    end.hear(Accept, epoch="c1")
    assert end.kinds() == []
    assert end.dropped() == {"late": 4, "stale": 1}


def test_the_later_life_taken_for_the_earlier_one_is_believed_again_after_a_lease():
    end = opening()
    end.hear(Welcome, epoch="c0")  # an earlier life's, overtaken on its way
    end.open("u", generation=8)
    end.take()
    end.hear(Refused, is_stale=True)
    assert end.kinds() == []
    end.clock.now_s += LEASE_S
    end.hear(Refused, is_stale=True)
    end.hear(Welcome)
    assert end.kinds() == [Hello, Open, Open]


def test_P2_a_repeated_refusal_of_the_life_that_welcomed_fails_nothing():  # noqa: N802
    end = active()
    for _ in range(3):
        end.hear(Refused, is_stale=True)
    assert end.kinds() == [Hello]  # one, not three
    end.hear(Welcome)
    assert end.machine.is_open("t")
    end.hear(Refused, reason="a mismatch, late")
    assert end.machine.is_open("t")


def test_the_longer_lease_counts_for_both_sides():
    end = ProducerEnd()
    end.open()
    end.hear(Welcome, lease_s=2 * LEASE_S)
    end.hear(Accept)
    end.wait(1.5 * LEASE_S)
    assert end.machine.is_open("t")
    end.wait(0.6 * LEASE_S)
    assert not end.machine.is_open("t")


@pytest.mark.parametrize("lease_s", [float("nan"), float("inf"), -1.0, 0.0, 1e9])
def test_a_lease_that_never_ends_is_not_believed(lease_s):
    end = ProducerEnd()
    end.open()
    end.hear(Welcome, lease_s=lease_s)
    end.hear(Accept)
    end.wait(LEASE_S)
    assert not end.machine.is_open("t")


def test_nothing_is_said_to_a_peer_that_no_transfer_needs():
    end = ProducerEnd()
    end.open()
    end.machine.abort("t", "x")
    end.wait(LEASE_S)
    end.take()
    end.wait(10 * LEASE_S)
    assert end.kinds() == []
    end.open("u", generation=8)
    assert end.kinds() == [Hello]
