"""A transfer that prefill ends before decode has welcomed it: decode is told, and believes no one else."""

import pytest
from remote_consumer_end import ConsumerEnd, draining, expected, reading, receiving
from remote_end import LEASE_S, RESEND_S, WAIT_S
from remote_pair import Pair
from remote_producer_end import ProducerEnd, aborting, refused_for, unwelcomed

from kvstrata.remote.protocol.actions import CancelReads, Ending, Finish
from kvstrata.remote.protocol.messages import (
    Abort,
    AbortAck,
    Hello,
    Open,
    Ready,
    Refused,
    Welcome,
)

MISMATCH = "page_bytes 512 at prefill, 528 at decode"


# Both machines


def test_a_refused_transfer_ends_on_both_sides_at_once_with_both_sides_values():
    pair = Pair(refuse=MISMATCH)
    pair.expect()
    pair.open()
    assert pair.settled["t"].reason == f"refused by decode: {MISMATCH}"
    assert pair.finished["t"] == Finish(
        transfer="t", ending=Ending.FAILED, reason=f"prefill aborted: refused by decode: {MISMATCH}"
    )
    pair.expect("u")
    pair.open("u", generation=8)  # within a lease of the refusal: no Hello before
    assert pair.finished["u"].ending is Ending.FAILED
    assert pair.producer.statistics().resent == 0


def test_a_refused_transfer_that_decode_expects_only_later_ends_within_a_lease_of_the_refusal():
    pair = Pair(refuse=MISMATCH)
    pair.open()
    pair.wait(LEASE_S / 2)
    pair.expect()
    pair.wait(LEASE_S / 4)
    assert pair.finished["t"].ending is Ending.FAILED


@pytest.mark.parametrize("kind", [Hello, Refused, Abort, AbortAck])
def test_a_refusal_is_told_though_any_message_of_it_is_lost(kind):
    pair = Pair(refuse=MISMATCH)
    pair.is_lost = lambda message, now_s: isinstance(message, kind) and not pair.lost
    pair.expect()
    pair.open()
    pair.wait(RESEND_S)
    assert len(pair.lost) == 1
    assert (pair.finished["t"].ending, pair.settled["t"].ending) == (Ending.FAILED, Ending.FAILED)
    resent = pair.producer.statistics().resent
    pair.wait(3 * LEASE_S)
    assert pair.producer.statistics().resent == resent, "it was acknowledged"


def test_a_refusal_of_which_no_abort_arrives_ends_the_wait_of_decode_as_before():
    pair = Pair(refuse=MISMATCH, is_lost=lambda message, now_s: isinstance(message, Abort))
    pair.expect()
    pair.open()
    pair.wait(0.99 * WAIT_S)
    assert pair.finished == {}
    assert pair.producer.next_tick_s() is None, "it has given up telling"
    pair.wait(0.02 * WAIT_S)
    assert pair.finished["t"].ending is Ending.LAPSED


def test_what_prefill_calls_off_before_decode_has_welcomed_it_ends_at_decode():
    pair = Pair(is_lost=lambda message, now_s: isinstance(message, Hello))
    pair.expect()
    pair.open()
    pair.producer.abort("t", "the client left")
    pair.carry_out()
    assert pair.settled["t"].ending is Ending.ABORTED
    assert pair.finished["t"].reason == "prefill aborted: the client left"


# Prefill


def test_an_abort_of_what_was_never_opened_is_repeated_until_it_is_acknowledged_or_for_a_lease():
    end = refused_for(0.0)
    end.wait(RESEND_S)
    (abort,) = end.take()
    assert (abort.peer_epoch, abort.member, abort.generation) == ("c1", 1, 7)
    end.hear(AbortAck)
    end.wait(LEASE_S)
    assert end.kinds() == []
    assert end.dropped() == {}
    unheard = refused_for(0.0)
    unheard.wait(LEASE_S)
    assert unheard.kinds().count(Abort) > 2
    unheard.wait(3 * LEASE_S)
    assert unheard.kinds() == []
    assert unheard.machine.next_tick_s() is None


def test_an_abort_before_any_word_of_decode_names_no_life_of_it():
    end = unwelcomed()
    end.machine.abort("t", "x")
    abort = end.take()[-1]
    assert (type(abort), abort.peer_epoch) == (Abort, "")
    end.hear(AbortAck, epoch="c5")
    end.wait(LEASE_S)
    assert end.kinds() == []


@pytest.mark.parametrize(
    "wrong",
    [{"generation": 6}, {"member": 0}, {"peer_epoch": "p0"}, {"transfer": "other"}, {"peer": "E"}],
    ids=str,
)
def test_P1_an_acknowledgement_of_something_else_stops_no_repeating(wrong):  # noqa: N802
    end = refused_for(0.0)
    end.hear(AbortAck, **wrong)
    assert sum(end.dropped().values()) == 1
    end.wait(RESEND_S)
    assert end.kinds() == [Abort]


def test_P2_a_late_acknowledgement_of_an_earlier_life_does_not_stop_the_telling_of_the_next():  # noqa: N802
    end = aborting()
    end.hear(Refused, epoch="c2", is_stale=True)
    assert end.settled()["t"].ending is Ending.FAILED
    end.take()
    end.hear(AbortAck, epoch="c1")
    assert end.dropped() == {"stale": 1}
    end.wait(RESEND_S)
    assert end.kinds() == [Abort]
    end.hear(AbortAck, epoch="c2")
    end.wait(LEASE_S)
    assert end.kinds() == []


def test_nothing_but_an_acknowledgement_is_heard_before_the_welcome():
    end = refused_for(0.0)
    end.hear(Abort)
    assert end.kinds() == []
    assert end.dropped() == {"stale": 1}


def test_a_transfer_after_a_refusal_is_welcome_again_when_decode_changes_its_mind():
    end = refused_for(LEASE_S)
    end.open("u", generation=8)
    assert Hello in end.kinds()
    end.hear(Welcome)
    (opened,) = [message for message in end.take() if isinstance(message, Open)]
    assert opened.transfer == "u"


# Decode


def unknown() -> ConsumerEnd:
    """A transfer is expected, no producer has said Hello."""
    end = ConsumerEnd()
    end.expect()
    end.take()
    return end


@pytest.mark.parametrize("peer_epoch", ["c1", ""])
def test_an_abort_of_a_life_that_is_not_welcome_ends_a_transfer_that_nobody_has_opened(peer_epoch):
    end = unknown()
    end.hear(0, Abort, peer_epoch=peer_epoch)
    assert end.kinds() == [Finish, AbortAck]
    assert end.finished()["t"] == Finish(
        transfer="t", ending=Ending.FAILED, reason="prefill aborted: because"
    )
    end.hear(0, Abort, peer_epoch=peer_epoch)
    assert end.kinds() == [AbortAck]


def test_it_ends_one_of_which_that_member_is_missing_too():
    end = receiving(0, members=2)
    end.hear(0, Ready)
    end.take()
    end.hear(1, Abort)
    assert end.kinds() == [CancelReads, AbortAck]
    end.machine.read_finished(0)
    assert end.finished()["t"].ending is Ending.FAILED


def test_P1_an_abort_for_an_earlier_life_of_decode_ends_nothing():  # noqa: N802
    end = unknown()
    end.hear(0, Abort, peer_epoch="c0")
    assert end.kinds() == [Refused]
    assert end.dropped() == {"stale": 1}
    assert end.machine.is_expected("t")


def test_P1_a_late_abort_of_an_earlier_life_of_prefill_ends_no_transfer():  # noqa: N802
    end = expected()
    end.hear(0, Hello, epoch="p0b")
    end.take()
    for transfer in ("t", "an earlier one"):
        end.hear(0, Abort, transfer, epoch="p0")
    assert end.kinds() == [Refused, Refused]
    assert end.dropped() == {"stale": 2}
    assert end.machine.is_expected("t")


def test_P1_an_abort_of_a_transfer_that_is_over_or_unknown_ends_no_other():  # noqa: N802
    end = unknown()
    end.machine.abort("t", "client left")
    end.take()
    end.expect("u")
    end.hear(0, Abort, "t")
    end.hear(0, Abort, "v")
    assert end.kinds() == [AbortAck, Refused]
    assert end.machine.is_expected("u")


@pytest.mark.parametrize("build", [reading, draining])
def test_P1_another_life_cannot_abort_what_a_member_supplies(build):  # noqa: N802
    end = build()
    end.hear(0, Abort, epoch="p9")
    assert end.kinds() == [Refused]
    assert end.dropped() == {"stale": 1}
    assert end.machine.is_expected("t")


def test_no_other_message_of_a_life_that_is_not_welcome_is_believed():
    end = unknown()
    end.hear(0, Open)
    end.hear(0, Ready)
    end.hear(0, AbortAck)
    assert end.kinds() == [Refused, Refused]
    assert end.dropped() == {"stale": 3}


def test_a_refused_producer_leaves_nothing_behind():
    end = ProducerEnd()
    end.open()
    end.hear(Refused)
    end.wait(10 * LEASE_S)
    assert end.machine.statistics().tombstones == 0
    assert end.machine.next_tick_s() is None
