"""Holds: what a reader in another process sees of a producer's promise."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest

from kvstrata.errors import StoreUnavailable, TransferFailed
from kvstrata.remote.holds import HOLD_SLOTS, Hold, HoldTable, HoldView


@pytest.fixture
def table():
    table = HoldTable()
    yield table
    table.check_integrity()
    table.close()
    table.check_integrity()


@pytest.fixture
def view(table):
    view = HoldView.open(table.handle)
    yield view
    view.close()


def test_a_hold_is_valid_until_it_is_revoked(table, view):
    hold, other = table.grant(), table.grant()
    assert [table.is_valid(hold), view.is_valid(hold)] == [True, True]
    assert table.revoke(hold)
    assert [table.is_valid(hold), view.is_valid(hold)] == [False, False]
    assert view.is_valid(other)


def test_a_hold_ends_once(table):
    hold = table.grant()
    assert [table.revoke(hold), table.revoke(hold)] == [True, False]
    assert (table.statistics().revoked, table.statistics().live) == (1, 0)


def test_the_next_hold_of_a_slot_does_not_revive_the_last(table, view):
    old = table.grant()
    table.revoke(old)
    new = table.grant()
    assert new.slot == old.slot
    assert new.generation > old.generation
    assert [view.is_valid(old), view.is_valid(new)] == [False, True]
    assert not table.revoke(old)
    assert view.is_valid(new)


def test_a_hold_that_was_never_granted_is_not_valid(table, view):
    hold = table.grant()
    assert not view.is_valid(replace(hold, generation=hold.generation + 1))
    assert not view.is_valid(Hold(slot=HOLD_SLOTS - 1, generation=1))
    assert not table.is_valid(replace(hold, generation=1 << 64))


@pytest.mark.parametrize(("slot", "generation"), [(-1, 1), (HOLD_SLOTS, 1), (0, 0), (0, -5)])
def test_numbers_that_name_no_hold_are_refused(slot, generation):
    with pytest.raises(ValueError, match="is no hold"):
        Hold(slot=slot, generation=generation)


def test_a_full_table_says_so_and_goes_on_when_one_ends(table):
    holds = [table.grant() for _ in range(HOLD_SLOTS)]
    assert len({hold.slot for hold in holds}) == HOLD_SLOTS
    with pytest.raises(TransferFailed, match=f"all {HOLD_SLOTS} holds are taken"):
        table.grant()
    table.revoke(holds[7])
    assert table.grant().slot == holds[7].slot
    assert table.statistics().live == HOLD_SLOTS


def test_many_threads_get_holds_of_their_own(table):
    granted: list[Hold] = []

    def work():
        for _ in range(200):
            hold = table.grant()
            granted.append(hold)
            if len(granted) % 2:
                table.revoke(hold)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len({hold.generation for hold in granted}) == 800
    counts = table.statistics()
    assert counts.granted == 800 == counts.revoked + counts.live


def test_a_closed_table_has_no_valid_hold_for_anyone():
    table = HoldTable()
    view = HoldView.open(table.handle)
    held, ended = table.grant(), table.grant()
    table.revoke(ended)
    table.close()
    table.close()
    assert [table.is_valid(held), view.is_valid(held)] == [False, False]
    assert (table.statistics().granted, table.statistics().revoked, table.statistics().live) == (2, 2, 0)
    table.check_integrity()
    assert not table.revoke(held)
    with pytest.raises(TransferFailed, match="was closed"):
        table.grant()
    view.close()
    assert not view.is_valid(held)


def test_a_view_needs_a_table_that_is_there(table):
    with pytest.raises(TransferFailed, match="a hold table has"):
        HoldView.open(replace(table.handle, size_bytes=4096))
    with pytest.raises(StoreUnavailable):
        HoldView.open(replace(table.handle, label="kvstrata-remote-holds-0000"))
