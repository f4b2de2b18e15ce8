"""The scheduler's half of the store: what it reports as held, and what it leases for how long."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from scheduler_world import (
    BLOCK,
    ONE,
    TWO,
    Unclosed,
    keep,
    opened_store,
    output_of,
    request_of,
    schedulers,
)

from kvstrata.store.base import StoreKey
from kvstrata.store.faulty import LeaseFault, on
from kvstrata.store.local import LocalStore
from kvstrata.vllm.scheduler_side import StoreScheduler


@pytest.fixture
def local(tmp_path: Path) -> Iterator[LocalStore]:
    with opened_store(tmp_path / "store") as store:
        yield store


@pytest.fixture
def make(local: LocalStore) -> Iterator:
    with schedulers(local) as make:
        yield make


# What the store is said to hold.


def test_a_hit_is_the_leading_blocks_and_is_fetched_into_the_requests_own(local, make):
    scheduler, request = make(), request_of("a", range(15))
    keep(local, request, [0, 1])
    assert scheduler.matched_tokens(request, 0) == 2 * BLOCK
    scheduler.allocated(request, [7, 3, 9, 5], 2 * BLOCK)
    transfers = scheduler.step(output_of(new=[(request, [7, 3, 9, 5], 8, 7)]))
    assert [(fetch.block_id, set(fetch.leases)) for fetch in transfers.fetches] == [
        (7, set(ONE)),
        (3, set(ONE)),
    ]
    assert [lease.key.block_hash for fetch in transfers.fetches for lease in fetch.leases.values()] == [
        bytes(request.block_hashes[0]),
        bytes(request.block_hashes[1]),
    ]
    assert local.statistics().leases == 2, "held until the workers have answered"
    scheduler.step_done(transfers.number)
    assert local.statistics().leases == 0
    assert scheduler.statistics().hit_blocks == 2


@pytest.mark.parametrize(("held", "hit"), [([0, 1, 2], 3), ([0, 2], 1), ([1, 2], 0), ([], 0)])
def test_a_hit_ends_at_the_first_gap(local, make, held, hit):
    scheduler, request = make(), request_of("a", range(15))
    keep(local, request, held)
    assert scheduler.matched_tokens(request, 0) == hit * BLOCK
    assert local.statistics().leases == hit
    counts = local.statistics()
    assert (counts.hits, counts.misses) == (hit, 3 - len(held)), "what is missing is counted as missed"
    scheduler.finished("a")


@pytest.mark.parametrize(("tokens", "hit"), [(9, 2), (8, 1), (5, 1), (4, 0), (1, 0)])
def test_fault_25_one_token_is_left_to_compute(local, make, tokens, hit):
    scheduler, request = make(), request_of("a", range(tokens))
    keep(local, request, range(len(request.block_hashes)))
    assert scheduler.matched_tokens(request, 0) == hit * BLOCK


def test_fault_22_a_block_is_a_hit_only_where_every_rank_has_it(local, make):
    scheduler, request = make(ranks=TWO), request_of("a", range(15))
    keep(local, request, [0, 1, 2], ranks=TWO[:1])
    keep(local, request, [0, 2], ranks=TWO[1:])
    assert scheduler.matched_tokens(request, 0) == BLOCK
    scheduler.allocated(request, [4, 5, 6, 7], BLOCK)
    (fetch,) = scheduler.step(output_of(new=[(request, [4, 5, 6, 7], 4, 11)])).fetches
    assert {rank: lease.key.rank for rank, lease in fetch.leases.items()} == {rank: rank for rank in TWO}


def test_fault_4_blocks_of_other_ranks_are_no_hit(local, make):
    request = request_of("a", range(15))
    keep(local, request, [0, 1, 2], ranks=TWO)
    assert make(ranks=ONE).matched_tokens(request, 0) == 0


def test_a_hit_goes_on_where_vllms_own_prefix_cache_ends(local, make):
    scheduler, request = make(), request_of("a", range(15))
    keep(local, request, [1, 2])  # block 0 is vLLM's
    assert scheduler.matched_tokens(request, BLOCK) == 2 * BLOCK
    scheduler.allocated(request, [4, 5, 6, 7], 2 * BLOCK)
    fetches = scheduler.step(output_of(new=[(request, [4, 5, 6, 7], 12, 3)])).fetches
    assert [fetch.block_id for fetch in fetches] == [5, 6]


def test_fault_4_a_lora_request_has_no_hit_and_offers_nothing(local, make):
    """The block hash does not cover the adapter's weights."""
    plain, adapted = request_of("a", range(15)), request_of("b", range(15), lora=True)
    scheduler = make()
    keep(local, plain, [0, 1, 2])
    keep(local, adapted, [0, 1, 2])
    assert scheduler.matched_tokens(adapted, 0) == 0
    scheduler.allocated(adapted, [4, 5, 6, 7], 0)
    assert scheduler.step(output_of(new=[(adapted, [4, 5, 6, 7], 0, 15)])).puts == []
    assert scheduler.matched_tokens(plain, 0) == 3 * BLOCK
    scheduler.finished("a")


def test_a_pure_consumer_reads_and_offers_nothing(local):
    request = request_of("a", range(15))
    keep(local, request, [0])
    scheduler = StoreScheduler(
        store=Unclosed(local), namespace="model", ranks=ONE, block_tokens=BLOCK, lease_s=60.0, offers=False
    )
    assert scheduler.matched_tokens(request, 0) == BLOCK
    scheduler.allocated(request, [4, 5, 6, 7], BLOCK)
    transfers = scheduler.step(output_of(new=[(request, [4, 5, 6, 7], 4, 11)]))
    assert (len(transfers.fetches), transfers.puts) == (1, [])
    scheduler.close()


def test_a_prefix_that_ends_inside_a_block_has_no_hit(local, make):
    scheduler, request = make(), request_of("a", range(15))
    keep(local, request, [0, 1, 2])
    assert scheduler.matched_tokens(request, 6) == 0


def test_fewer_tokens_taken_than_offered_give_the_other_leases_back(local, make):
    scheduler, request = make(), request_of("a", range(15))
    keep(local, request, [0, 1, 2])
    assert scheduler.matched_tokens(request, 0) == 3 * BLOCK
    scheduler.allocated(request, [4, 5, 6, 7], BLOCK)
    assert local.statistics().leases == 1
    transfers = scheduler.step(output_of(new=[(request, [4, 5, 6, 7], 4, 11)]))
    assert [fetch.block_id for fetch in transfers.fetches] == [4]
    assert {put.block_id for put in transfers.puts} == {5, 6}, "what was not taken is computed, and offered"
    scheduler.step_done(transfers.number)


def test_none_taken_gives_every_lease_back(local, make):
    scheduler, request = make(), request_of("a", range(15))
    keep(local, request, [0, 1])
    scheduler.matched_tokens(request, 0)
    scheduler.allocated(request, [4, 5, 6, 7], 0)
    assert local.statistics().leases == 0
    assert scheduler.step(output_of(new=[(request, [4, 5, 6, 7], 0, 15)])).fetches == []


def test_a_request_without_room_is_asked_again_and_holds_one_lease_a_block(local, make):
    scheduler, request = make(), request_of("a", range(15))
    keep(local, request, [0, 1])
    for _ in range(5):
        assert scheduler.matched_tokens(request, 0) == 2 * BLOCK
        assert local.statistics().leases == 2
    local.remove(
        [StoreKey(namespace="model", rank=ONE[0], block_hash=bytes(request.block_hashes[1]))], force=True
    )
    assert scheduler.matched_tokens(request, 0) == BLOCK


def test_fault_14_an_abort_before_the_request_runs_gives_its_leases_back(local, make):
    scheduler, request = make(), request_of("a", range(15))
    keep(local, request, [0, 1])
    scheduler.matched_tokens(request, 0)
    scheduler.finished("a")
    assert local.statistics().leases == 0
    scheduler.finished("a")  # and again, and one that never was
    scheduler.finished("nobody")


def test_an_object_lost_between_lookup_and_lease_ends_the_hit(local, make):
    request = request_of("a", range(15))
    keep(local, request, [0, 1, 2])
    scheduler = make(store=Unclosed(local, on("acquire", 2, LeaseFault.LOST)))
    assert scheduler.matched_tokens(request, 0) == BLOCK
    assert local.statistics().leases == 1, "block 2 was leased behind the gap and given back"


@pytest.mark.parametrize("kind", ["embeds", "pooling"])
def test_rows_that_do_not_depend_on_tokens_alone_stay_out(local, make, kind):
    scheduler, plain = make(), request_of("a", range(15))
    keep(local, plain, [0, 1, 2])
    request = request_of("a", range(15), **{kind: True})
    assert scheduler.matched_tokens(request, 0) == 0
    scheduler.allocated(request, [4, 5, 6, 7], 0)
    assert scheduler.step(output_of(new=[(request, [4, 5, 6, 7], 0, 15)])).puts == []


# Leases and steps.


def test_fault_14_steps_without_an_answer_do_not_delay_the_leases_of_others(local, make):
    """vLLM drops the worker's output of a step without tokens."""
    scheduler, request = make(), request_of("a", range(15))
    keep(local, request, [0])
    for _ in range(3):
        scheduler.step(output_of())
    scheduler.matched_tokens(request, 0)
    scheduler.allocated(request, [4, 5, 6, 7], BLOCK)
    number = scheduler.step(output_of(new=[(request, [4, 5, 6, 7], 4, 11)])).number
    assert local.statistics().leases == 1
    scheduler.step(output_of())
    scheduler.step_done(number)
    assert local.statistics().leases == 0


def test_an_early_answer_keeps_the_leases_of_later_steps(local, make):
    scheduler = make()
    numbers = []
    for name in "ab":
        request = request_of(name, range(15))
        keep(local, request, [0])
        scheduler.matched_tokens(request, 0)
        scheduler.allocated(request, [4, 5, 6, 7], BLOCK)
        numbers.append(scheduler.step(output_of(new=[(request, [4, 5, 6, 7], 4, 11)])).number)
    scheduler.step_done(numbers[0])
    assert local.statistics().leases == 1
    scheduler.step_done(numbers[1])


def test_close_gives_back_what_is_matched_waiting_and_in_flight(local, make):
    scheduler = make()
    requests = [request_of(name, range(100 * at, 100 * at + 15)) for at, name in enumerate("abc")]
    for request in requests:
        keep(local, request, [0])
        scheduler.matched_tokens(request, 0)
    scheduler.allocated(requests[0], [1, 2, 3, 4], BLOCK)
    scheduler.step(output_of(new=[(requests[0], [1, 2, 3, 4], 4, 11)]))
    scheduler.allocated(requests[1], [5, 6, 7, 8], BLOCK)
    assert local.statistics().leases == 3
    scheduler.close()
    assert local.statistics().leases == 0
