"""Remote read in a small world, every order of events: two prefill ranks, three layers, two blocks.

In every world that can be reached: no settle without a revoke before it, no read of foreign rows that is
believed, no finish while something is being read or before everything has landed, each end once. In every
world in which nothing can happen any more: nothing is open, and the next request on the same blocks succeeds.
"""

import pytest
from remote_explorer import Explorer
from remote_small_world import refuse_the_first
from remote_walk import walk

from kvstrata.remote.consumer.moves import ConsumerEvent
from kvstrata.remote.consumer.transfer import ConsumerTransfer
from kvstrata.remote.producer.session import Session
from kvstrata.remote.producer.transfer import ProducerTransfer
from kvstrata.remote.protocol.actions import Ending, Revoke


def endings(explorer, **faults):
    seen = walk(explorer, explorer.begin(**faults), limit=20_000)
    return {(end.finished, *end.settled) for end in seen.finals}


@pytest.mark.parametrize("faults", [{}, {"losses": 1}], ids=str)
def test_without_a_fault_or_with_one_lost_message_all_is_done(faults):
    assert endings(Explorer(), **faults) == {(Ending.DONE,) * 3}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layers", "faults", "worlds"),
    [
        (3, {"crashes": 1, "losses": 1}, 113_920),
        (3, {"aborts": 1, "losses": 1}, 26_836),
        (2, {"read_errors": 2, "losses": 1}, 6_765),
        (1, {"delays": 5, "aborts": 1}, 5_952),
        (1, {"delays": 5, "crashes": 1}, 32_934),
    ],
    ids=str,
)
def test_whatever_goes_wrong_nothing_stays_open_and_no_foreign_row_is_taken(layers, faults, worlds):
    explorer = Explorer(layers=layers)
    seen = walk(explorer, explorer.begin(**faults), limit=2 * worlds)
    # Far fewer would mean that a part of the world has become unreachable.
    assert seen.worlds > worlds / 2
    endings = {end.finished for end in seen.finals}
    assert {Ending.DONE, Ending.FAILED} <= endings


class Refusing(Explorer):
    """Decode refuses one of prefill's ranks, so no request can ever succeed."""

    check_hello = staticmethod(refuse_the_first)

    def check_final(self, world):
        self.check_over(world)


@pytest.mark.parametrize("faults", [{}, {"losses": 1}], ids=str)
def test_a_refusal_ends_the_transfer_on_every_side_before_any_wait_is_over(faults):
    explorer = Refusing(layers=1)
    seen = walk(explorer, explorer.begin(**faults), limit=20_000)
    assert {end.finished for end in seen.finals} == {Ending.FAILED}
    assert {end.settled[0] for end in seen.finals} == {Ending.FAILED}
    assert Ending.LAPSED not in {end.settled[1] for end in seen.finals}


@pytest.mark.parametrize("faults", [{"aborts": 1, "losses": 1}, {"crashes": 1}], ids=str)
def test_a_refusal_and_whatever_else_goes_wrong_leave_nothing_open(faults):
    explorer = Refusing(layers=1)
    seen = walk(explorer, explorer.begin(**faults), limit=50_000)
    assert Ending.FAILED in {end.finished for end in seen.finals}
    assert Ending.DONE not in {end.finished for end in seen.finals}


class BlindReader(Explorer):
    """Believes every read, whatever became of its hold."""

    def is_valid(self, world, read):
        return True


class LateSweeper(Explorer):
    """Looks at the hold before a read only."""

    def is_valid(self, world, read):
        return read.was_valid


@pytest.mark.parametrize("broken", [BlindReader, LateSweeper])
def test_reads_that_do_not_look_at_the_hold_are_found(broken):
    explorer = broken(layers=1)
    with pytest.raises(AssertionError, match="foreign rows were taken"):
        walk(explorer, explorer.begin(delays=5, aborts=1), limit=50_000)


def found(monkeypatch, kind, name, broken, match, **faults):
    monkeypatch.setattr(kind, name, broken)
    explorer = Explorer(layers=2)
    with pytest.raises(AssertionError, match=match):
        walk(explorer, explorer.begin(**faults), limit=100_000)


def test_a_producer_that_settles_without_revoking_is_found(monkeypatch):
    settle = ProducerTransfer._settle

    def settle_only(self, event, ending, reason):
        act, self._act = self._act, lambda action: None if isinstance(action, Revoke) else act(action)
        settle(self, event, ending, reason)
        self._act = act

    found(monkeypatch, ProducerTransfer, "_settle", settle_only, "settled before the hold was revoked")


def test_a_consumer_that_does_not_drain_is_found(monkeypatch):
    def stop_at_once(self, ending, reason, now_s):
        if self.ending is None:
            self.ending, self.reason = ending, reason
            self._conclude(ConsumerEvent.BREAK, now_s)

    found(
        monkeypatch,
        ConsumerTransfer,
        "stop",
        stop_at_once,
        "while a read may still write|AssertionError",
        aborts=1,
    )


def test_a_consumer_that_counts_one_member_for_all_is_found(monkeypatch):
    landed = ConsumerTransfer.landed

    def landed_for_all(self, member, part, now_s):
        self.members_wanted = len(self.members)
        landed(self, member, part, now_s)

    found(monkeypatch, ConsumerTransfer, "landed", landed_for_all, "something is missing|AssertionError")


def test_a_producer_that_never_lapses_is_found(monkeypatch):
    found(monkeypatch, ProducerTransfer, "_lapse", lambda self: None, "leads to an end", crashes=1)


def test_a_producer_that_repeats_nothing_is_found(monkeypatch):
    found(monkeypatch, ProducerTransfer, "_repeat", lambda self, now_s: 0, "leads to an end", losses=1)


def test_a_refused_producer_that_does_not_tell_decode_is_found(monkeypatch):
    monkeypatch.setattr(ProducerTransfer, "_tell", lambda self, now_s: None)
    explorer = Refusing(layers=1)
    seen = walk(explorer, explorer.begin(), limit=20_000)
    assert Ending.LAPSED in {end.finished for end in seen.finals}


def test_a_session_that_repeats_no_hello_is_found(monkeypatch):
    found(monkeypatch, Session, "tick", lambda self, now_s: None, "leads to an end", losses=1)


def test_a_session_that_does_not_notice_a_restart_is_found(monkeypatch):
    found(
        monkeypatch,
        Session,
        "_stale",
        lambda self, message, now_s: None,
        "next request fails|never ends",
        crashes=1,
    )
