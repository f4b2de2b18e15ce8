"""Leases: what ends them, and what a holder with an old one cannot do."""

import pytest

from kvstrata.core.lease import LeaseTable


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def table(clock):
    return LeaseTable(clock)


def test_a_live_lease_keeps_others_out(table, clock):
    lease = table.acquire("block", "a", 10)
    assert (lease.holder, lease.expires_at_s) == ("a", 110)
    clock.now_s = 109.9
    assert table.acquire("block", "b", 10) is None
    assert table.acquire("block", "a", 10) is None
    assert table.acquire("other", "b", 10) is not None
    assert table.statistics().refused_held == 2


def test_a_lease_ends_by_itself_and_never_blocks_reclaim(table, clock):
    first = table.acquire("block", "a", 10)
    clock.now_s = 110
    assert table.current("block") is None
    second = table.acquire("block", "b", 10)  # nobody has called expire
    assert second.generation > first.generation
    assert table.expire() == (first,)
    assert table.expire() == ()
    assert table.current("block") == second


def test_a_late_heartbeat_does_not_revive_a_lease(table, clock):
    lease = table.acquire("block", "a", 10)
    clock.now_s = 110
    assert table.renew(lease, 10) is None
    assert not table.release(lease)
    assert table.expire() == (lease,)
    assert table.statistics().rejected_stale == 2


def test_a_stale_generation_cannot_touch_its_successor(table, clock):
    first = table.acquire("block", "a", 10)
    assert table.release(first)
    second = table.acquire("block", "a", 10)
    assert table.renew(first, 1000) is None
    assert not table.release(first)
    assert table.current("block") == second
    assert table.statistics().rejected_stale == 2


def test_renewing_keeps_the_generation_and_any_copy_may_renew(table, clock):
    lease = table.acquire("block", "a", 10)
    clock.now_s = 105
    renewed = table.renew(lease, 10)
    assert (renewed.generation, renewed.expires_at_s) == (lease.generation, 115)
    clock.now_s = 112
    assert table.is_live(lease)
    assert table.renew(lease, 10).expires_at_s == 122
    assert table.expire() == ()
    assert table.release(renewed)


def test_a_renewal_may_shorten_a_lease(table, clock):
    lease = table.renew(table.acquire("block", "a", 100), 1)
    clock.now_s = 101
    assert table.expire() == (lease,)
    clock.now_s = 1000
    assert table.expire() == ()


def test_one_renewed_entry_does_not_block_the_reaper_of_others(table, clock):
    # Field fault: a reaper that stops at the first entry still alive.
    first = table.acquire("first", "a", 10)
    others = [table.acquire(n, "a", 10) for n in range(5)]
    for _ in range(3):
        clock.now_s += 3
        first = table.renew(first, 10)
    clock.now_s = 110
    assert table.expire() == tuple(others)
    assert table.is_live(first)


def test_generations_grow_over_release_and_expiry(table, clock):
    generations = []
    for turn in range(6):
        lease = table.acquire("block", "a", 10)
        generations.append(lease.generation)
        if turn % 2:
            table.release(lease)
        else:
            clock.now_s += 10
            table.expire()
    assert generations == sorted(set(generations))


@pytest.mark.parametrize("duration", [0, -1, float("inf"), float("nan")])
def test_a_lease_holds_for_a_while_and_ends(table, duration):
    with pytest.raises(ValueError, match="lease of"):
        table.acquire("block", "a", duration)
    lease = table.acquire("block", "a", 10)
    with pytest.raises(ValueError, match="lease of"):
        table.renew(lease, duration)
    assert table.current("block") == lease


def test_statistics_account_for_every_lease(table, clock):
    leases = [table.acquire(n, "a", 10 + n) for n in range(4)]
    table.release(leases[0])
    clock.now_s = 111
    statistics = table.statistics()
    assert (statistics.acquired, statistics.released, statistics.lapsed, statistics.live) == (4, 1, 1, 2)
    table.expire()
    assert (table.statistics().expired, table.statistics().lapsed) == (1, 0)
    table.check_integrity()
