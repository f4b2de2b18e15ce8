"""The scheduler's half of the store: what it reports, leases and offers, whatever vLLM and the store do."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from vllm import PoolingParams, SamplingParams
from vllm.lora.request import LoRARequest
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from kvstrata.errors import StoreError, StoreUnavailable
from kvstrata.store.base import Status, Store, StoreKey
from kvstrata.store.faulty import Call, FaultyStore, LeaseFault, Script, on
from kvstrata.store.local import LocalStore
from kvstrata.store.testing import put_bytes
from kvstrata.vllm.connector import KVStrataConnector
from kvstrata.vllm.scheduler_side import StoreScheduler, confirmed_tokens
from kvstrata.vllm.transfers import StepDone, StepTransfers

BLOCK = 4
ONE, TWO = ("tp0of1",), ("tp0of2", "tp1of2")
init_none_hash(sha256)


def request_of(
    name: str, tokens: Sequence[int], *, embeds: bool = False, pooling: bool = False, lora: bool = False
) -> Request:
    return Request(
        request_id=name,
        prompt_token_ids=None if embeds else list(tokens),
        prompt_embeds=torch.zeros(len(tokens), 8) if embeds else None,
        sampling_params=None if pooling else SamplingParams(max_tokens=100),
        pooling_params=PoolingParams(task="embed") if pooling else None,
        lora_request=LoRARequest("adapter", 1, "/adapters/one") if lora else None,
        block_hasher=get_request_block_hasher(BLOCK, sha256),
    )


def output_of(
    new: Sequence[tuple[Request, list[int], int, int]] = (),
    cached: Sequence[tuple[Request, list[int] | None, int, int]] = (),
    resumed: Sequence[Request] = (),
) -> SchedulerOutput:
    """A step; entries are (request, new block ids, computed tokens, scheduled tokens)."""
    scheduled = {request.request_id: count for request, _, _, count in [*new, *cached]}
    return dataclasses.replace(
        SchedulerOutput.make_empty(),
        scheduled_new_reqs=[
            NewRequestData(
                req_id=request.request_id,
                prompt_token_ids=request.prompt_token_ids,
                mm_features=[],
                sampling_params=request.sampling_params,
                pooling_params=request.pooling_params,
                block_ids=(blocks,),
                num_computed_tokens=computed,
                lora_request=None,
            )
            for request, blocks, computed, _ in new
        ],
        scheduled_cached_reqs=CachedRequestData(
            req_ids=[request.request_id for request, _, _, _ in cached],
            resumed_req_ids={request.request_id for request in resumed},
            new_token_ids=[],
            all_token_ids={},
            new_block_ids=[None if blocks is None else (blocks,) for _, blocks, _, _ in cached],
            num_computed_tokens=[computed for _, _, computed, _ in cached],
            num_output_tokens=[request.num_output_tokens for request, _, _, _ in cached],
        ),
        num_scheduled_tokens=scheduled,
        total_num_scheduled_tokens=sum(scheduled.values()),
    )


@pytest.fixture
def local(tmp_path: Path) -> Iterator[LocalStore]:
    store = LocalStore.open(tmp_path / "store", size_bytes=1 << 20)
    yield store
    assert store.statistics().leases == 0, "every lease was given back"
    store.check_integrity()
    store.close()


class Unclosed(FaultyStore):
    """Leaves closing to the fixture."""

    def close(self) -> None:
        pass


@pytest.fixture
def make(local: LocalStore) -> Iterator:
    made: list[StoreScheduler] = []

    def make(ranks: Sequence[str] = ONE, store: Store | None = None) -> StoreScheduler:
        made.append(
            StoreScheduler(
                store=store or Unclosed(local),
                namespace="model",
                ranks=ranks,
                block_tokens=BLOCK,
                lease_s=60.0,
            )
        )
        return made[-1]

    yield make
    for scheduler in made:
        scheduler.close()


def keep(store: Store, request: Request, blocks: Sequence[int], ranks: Sequence[str] = ONE) -> None:
    """Put blocks of a request's prefix into the store, for these ranks."""
    for at in blocks:
        for rank in ranks:
            key = StoreKey(namespace="model", rank=rank, block_hash=bytes(request.block_hashes[at]))
            assert put_bytes(store, key, bytes(64)) in (Status.OK, Status.EXISTS)


def puts_of(transfers: StepTransfers) -> list[tuple[str, int, bytes]]:
    return [(put.request_id, put.block_id, put.block_hash) for put in transfers.puts]


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


# What is offered.


def start(scheduler: StoreScheduler, request: Request, blocks: list[int], scheduled: int) -> StepTransfers:
    scheduler.matched_tokens(request, 0)
    scheduler.allocated(request, blocks, 0)
    return scheduler.step(output_of(new=[(request, blocks, 0, scheduled)]))


def test_fault_10_a_block_is_offered_by_the_step_that_completes_it_once(make):
    scheduler, request = make(), request_of("a", range(11))
    assert puts_of(start(scheduler, request, [5, 6], 6)) == [("a", 5, bytes(request.block_hashes[0]))]
    transfers = scheduler.step(output_of(cached=[(request, [7], 6, 5)]))
    assert puts_of(transfers) == [("a", 6, bytes(request.block_hashes[1]))]
    request.append_output_token_ids(100)
    assert scheduler.step(output_of(cached=[(request, None, 11, 1)])).puts == [], (
        "block 2: its last row is new"
    )
    request.append_output_token_ids(101)
    transfers = scheduler.step(output_of(cached=[(request, [8], 12, 1)]))
    assert puts_of(transfers) == [("a", 7, bytes(request.block_hashes[2]))]


def test_fault_19_a_resumed_request_offers_from_its_new_blocks(make):
    scheduler, request = make(), request_of("a", range(14))
    assert [put.block_id for put in start(scheduler, request, [1, 2], 6).puts] == [1]
    # Preempted, and back with other blocks.
    scheduler.matched_tokens(request, 0)
    scheduler.allocated(request, [6, 7, 8, 9], 0)
    output = output_of(cached=[(request, [6, 7, 8, 9], 0, 14)], resumed=[request])
    assert [put.block_id for put in scheduler.step(output).puts] == [7, 8], "block 0 was offered before"


def test_fault_19_a_resumed_request_may_fetch_what_it_offered(local, make):
    scheduler, request = make(), request_of("a", range(14))
    start(scheduler, request, [1, 2, 3, 4], 14)
    keep(local, request, [0, 1, 2])
    assert scheduler.matched_tokens(request, 0) == 3 * BLOCK
    scheduler.allocated(request, [6, 7, 8, 9], 3 * BLOCK)
    transfers = scheduler.step(output_of(cached=[(request, [6, 7, 8, 9], 12, 2)], resumed=[request]))
    assert [fetch.block_id for fetch in transfers.fetches] == [6, 7, 8]
    assert transfers.puts == []
    scheduler.step_done(transfers.number)


@pytest.mark.parametrize(
    ("what", "prompt", "outputs", "computed", "scheduled", "confirmed"),
    [
        ("a chunk of the prompt", 20, 0, 0, 8, 8),
        ("the rest of the prompt", 20, 0, 8, 12, 20),
        ("the first decode: the token's row is final, but nothing was sampled from it", 20, 1, 20, 1, 20),
        ("the second decode", 20, 2, 21, 1, 21),
        ("a decode with three drafts", 20, 2, 21, 4, 21),
        ("after two of three drafts were taken", 20, 5, 24, 4, 24),
        ("asynchronous: a placeholder's token is not known yet", 20, 2, 22, 1, 21),
        ("asynchronous, with drafts not verified yet", 20, 2, 25, 4, 21),
        ("a resumed request computing prompt and answer again", 20, 9, 0, 16, 16),
        ("its chunk across the prompt's end", 20, 9, 16, 12, 20),
        ("its chunk behind the prompt's end", 20, 9, 24, 4, 24),
        ("drafts behind the last chunk of a prompt", 20, 0, 16, 7, 20),
    ],
)
def test_confirmed_tokens(what, prompt, outputs, computed, scheduled, confirmed):
    request = request_of("a", range(prompt))
    request.append_output_token_ids([7] * outputs)
    assert confirmed_tokens(request, computed, scheduled) == confirmed, what


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    prompt=st.integers(1, 20),
    chunk=st.integers(1, 9),
    turns=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), max_size=25),
    is_async=st.booleans(),
)
def test_M4_no_block_is_offered_with_a_row_that_may_change(make, prompt, chunk, turns, is_async):  # noqa: N802
    """Decode with drafts, also scheduled one step ahead; `final` holds what no later step rewrites."""
    scheduler, request = make(), request_of("a", range(prompt))
    blocks = list(range(100, 140))
    scheduler.allocated(request, blocks, 0)
    offered: list[int] = []

    def run(output: SchedulerOutput, final: int) -> None:
        for name, block_id, block_hash in puts_of(scheduler.step(output)):
            at = block_id - 100
            assert (name, block_hash) == ("a", bytes(request.block_hashes[at]))
            assert (at + 1) * BLOCK <= final, f"block {at} offered, {final} rows are final"
            offered.append(at)

    computed = min(chunk, prompt)
    run(output_of(new=[(request, blocks, 0, computed)]), computed)
    while computed < prompt:
        now = min(chunk, prompt - computed)
        run(output_of(cached=[(request, None, computed, now)]), computed + now)
        computed += now
    token, waiting = 1000, None
    for drafts, accepted in turns:
        # The step before, if asynchronous, is answered only after this one was scheduled.
        sampled = 1 + min(drafts, accepted)
        if waiting is not None and not is_async:
            request.append_output_token_ids(waiting)
            waiting = None
        if waiting is None and request.num_output_tokens == 0:
            request.append_output_token_ids(token)
        ahead = 0 if waiting is None else len(waiting)
        known = request.num_tokens
        run(output_of(cached=[(request, None, known - 1 + ahead, 1 + drafts)]), max(prompt, known - 1))
        if waiting is not None:
            request.append_output_token_ids(waiting)
        waiting = [token := token + 1 for _ in range(sampled)]
    assert offered == sorted(set(offered)), "in order, each once"
    scheduler.finished("a")


# A store that loses things.


def lose(scheduler: StoreScheduler, local: LocalStore, request: Request, blocks: list[int]) -> StepTransfers:
    """A step in which the request's first block comes from the store."""
    keep(local, request, [0], ranks=scheduler._ranks)
    assert scheduler.matched_tokens(request, 0) == BLOCK
    scheduler.allocated(request, blocks, BLOCK)
    return scheduler.step(output_of(new=[(request, blocks, 4, request.num_tokens - 4)]))


def test_fault_11_a_lost_block_is_offered_again_by_the_request_that_mends_it_only(local, make):
    scheduler, request = make(), request_of("a", range(18))
    first = lose(scheduler, local, request, [3, 4, 5, 6, 7])
    twin = request_of("b", [*range(8), *range(70, 80)])
    scheduler.allocated(twin, [3, 4, 15, 16, 17], 0)
    bystander = request_of("c", range(90, 108))
    scheduler.allocated(bystander, [20, 21, 22, 23, 24], 0)
    scheduler.step(output_of(new=[(twin, [3, 4, 15, 16, 17], 8, 1), (bystander, [20, 21, 22, 23, 24], 0, 1)]))
    assert scheduler.step_done(first.number, {3}) == {3, 4, 5, 6, 7, 15, 16, 17}, "all that came of block 3"
    # vLLM lets the first compute block 3 again and holds the second's part of it for computed.
    output = output_of(cached=[(request, None, 0, 6), (twin, None, 8, 10), (bystander, None, 1, 17)])
    assert [(put.request_id, put.block_id) for put in scheduler.step(output).puts] == [
        ("a", 3),
        ("c", 20),
        ("c", 21),
        ("c", 22),
        ("c", 23),
    ]
    twin.append_output_token_ids(1)
    assert scheduler.step(output_of(cached=[(twin, None, 18, 1)])).puts == [], "computed from the lost block"
    # Preempted, it starts from what vLLM's prefix cache holds, and of this nothing came of a lost block.
    scheduler.allocated(twin, [25, 26, 27, 28, 29], 0)
    output = output_of(cached=[(twin, [25, 26, 27, 28, 29], 0, 18)], resumed=[twin])
    assert [put.block_id for put in scheduler.step(output).puts] == [27, 28]


def test_lost_blocks_of_nobody_are_still_nobodys_prefix(make):
    assert make().step_done(0, {9}) == {9}


def test_fault_22_with_several_ranks_a_read_block_is_offered_from_once_all_have_answered(local, make):
    """A rank that read its part well would publish rows computed from another rank's failed one."""
    scheduler, request, twin = (
        make(ranks=TWO),
        request_of("a", range(18)),
        request_of("b", [*range(8), *range(70, 80)]),
    )
    transfers = lose(scheduler, local, request, [3, 4, 5, 6, 7])
    assert transfers.puts == []
    scheduler.allocated(twin, [3, 4, 15, 16, 17], 0)  # shares blocks with the one that reads
    bystander = request_of("c", range(90, 108))
    scheduler.allocated(bystander, [20, 21, 22, 23, 24], 0)
    both = output_of(new=[(twin, [3, 4, 15, 16, 17], 8, 10), (bystander, [20, 21, 22, 23, 24], 0, 18)])
    assert {put.request_id for put in scheduler.step(both).puts} == {"c"}
    scheduler.step_done(transfers.number)
    request.append_output_token_ids(1)
    twin.append_output_token_ids(1)
    later = scheduler.step(output_of(cached=[(request, None, 18, 1), (twin, None, 18, 1)]))
    assert [(put.request_id, put.block_id) for put in later.puts] == [
        ("a", 4),
        ("a", 5),
        ("a", 6),
        ("b", 15),
        ("b", 16),
    ]


def test_with_one_rank_the_worker_knows_itself_and_a_step_in_flight_waits(local, make):
    scheduler, request = make(), request_of("a", range(18))
    keep(local, request, [0])
    scheduler.matched_tokens(request, 0)
    scheduler.allocated(request, [3, 4, 5, 6, 7], BLOCK)
    first = scheduler.step(output_of(new=[(request, [3, 4, 5, 6, 7], 4, 6)]))
    assert [put.block_id for put in first.puts] == [4]
    assert scheduler.step(output_of(cached=[(request, None, 10, 6)])).puts == [], "the first is not answered"
    scheduler.step_done(first.number)
    assert [put.block_id for put in scheduler.step(output_of(cached=[(request, None, 16, 2)])).puts] == [5, 6]


class Raising(Unclosed):
    """A store that answers calls of some kinds with an exception."""

    def __init__(self, inner: Store, *methods: str, error: Exception) -> None:
        super().__init__(inner)
        self._methods, self._error = methods, error

    def _maybe(self, method: str) -> None:
        if method in self._methods:
            raise self._error

    def contains(self, keys):
        self._maybe("contains")
        return super().contains(keys)

    def acquire(self, keys, *, ttl_s):
        self._maybe("acquire")
        return super().acquire(keys, ttl_s=ttl_s)

    def release(self, leases):
        super().release(leases)
        self._maybe("release")

    def clear(self, *, force=False):
        self._maybe("clear")
        return super().clear(force=force)

    def close(self):
        self._maybe("close")


@pytest.mark.parametrize("method", ["contains", "acquire"])
def test_M5_a_store_that_raises_is_a_miss_told_once_a_kind(local, make, caplog_vllm, method):  # noqa: N802
    request = request_of("a", range(15))
    keep(local, request, [0, 1])
    scheduler = make(store=Raising(local, method, error=StoreError("the disk left")))
    for _ in range(3):
        assert scheduler.matched_tokens(request, 0) == 0
    scheduler.allocated(request, [4, 5, 6, 7], 0)
    assert len(scheduler.step(output_of(new=[(request, [4, 5, 6, 7], 0, 15)])).puts) == 3, (
        "the request goes on"
    )
    assert scheduler.statistics().store_faults == 3
    told = [record.getMessage() for record in caplog_vllm if "the disk left" in record.getMessage()]
    assert len(told) == 1
    assert method in told[0]
    scheduler._store._error = StoreUnavailable("another kind")
    scheduler.matched_tokens(request, 0)
    assert any("another kind" in record.getMessage() for record in caplog_vllm)


def test_M5_a_store_that_raises_on_release_clear_and_close_stops_nobody(local, make):  # noqa: N802
    request = request_of("a", range(15))
    keep(local, request, [0, 1])
    scheduler = make(store=Raising(local, "release", "clear", "close", error=StoreError("gone")))
    assert scheduler.matched_tokens(request, 0) == 2 * BLOCK
    scheduler.finished("a")
    assert scheduler.clear() is False
    scheduler.close()
    assert scheduler.statistics().store_faults == 3


@pytest.mark.parametrize("status", [Status.BACKEND_DOWN, Status.PEER_LOST, Status.MISSING])
@pytest.mark.parametrize("method", ["contains", "acquire"])
def test_M5_a_store_that_does_not_answer_ends_the_hit(local, make, method, status):  # noqa: N802
    request = request_of("a", range(15))
    keep(local, request, [0, 1, 2])
    scheduler = make(store=Unclosed(local, on(method, 2, status)))
    assert scheduler.matched_tokens(request, 0) == BLOCK
    assert local.statistics().leases == 1


def test_clear_drops_what_nobody_reads(local, make):
    scheduler, request = make(), request_of("a", range(15))
    keep(local, request, [0, 1])
    assert scheduler.clear() is True
    assert scheduler.matched_tokens(request, 0) == 0


@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_churn_in_a_small_store_leaves_no_lease_behind(tmp_path_factory, data):
    """Requests come, wait, run, are aborted; objects are evicted under them; the store fails now and then."""
    local = LocalStore.open(tmp_path_factory.mktemp("store"), size_bytes=1 << 14)  # four granules of 4 KiB

    def script(call: Call) -> Status | LeaseFault | None:
        if call.method not in ("contains", "acquire"):
            return None
        return data.draw(st.sampled_from([None] * 8 + [Status.BACKEND_DOWN, LeaseFault.LOST]))

    scripted: Script = script
    scheduler = StoreScheduler(
        store=Unclosed(local, scripted), namespace="model", ranks=TWO, block_tokens=BLOCK, lease_s=60.0
    )
    waiting: list[Request] = []
    unanswered: list[int] = []
    for at in range(data.draw(st.integers(1, 20))):
        move = data.draw(st.sampled_from(["new", "new", "keep", "run", "abort", "answer"]))
        if move == "new":
            base = data.draw(st.sampled_from([0, 100, 200]))
            waiting.append(request_of(f"r{at}", range(base, base + data.draw(st.integers(1, 15)))))
        elif move == "keep" and waiting:
            request = data.draw(st.sampled_from(waiting))
            for rank in TWO:
                for block_hash in request.block_hashes:
                    key = StoreKey(namespace="model", rank=rank, block_hash=bytes(block_hash))
                    put_bytes(local, key, bytes(64))
        elif move == "run" and waiting:
            request = data.draw(st.sampled_from(waiting))
            hit = scheduler.matched_tokens(request, 0)
            assert hit < request.num_tokens
            if data.draw(st.booleans()):
                waiting.remove(request)
                taken = data.draw(st.sampled_from([hit, hit // BLOCK // 2 * BLOCK, 0]))
                blocks = list(range(-(-request.num_tokens // BLOCK)))
                scheduler.allocated(request, blocks, taken)
                transfers = scheduler.step(
                    output_of(new=[(request, blocks, taken, request.num_tokens - taken)])
                )
                assert len(transfers.fetches) == taken // BLOCK
                unanswered.append(transfers.number)
        elif move == "abort" and waiting:
            scheduler.finished(waiting.pop().request_id)
        elif move == "answer" and unanswered:
            scheduler.step_done(unanswered.pop(0))
    for request in waiting:
        scheduler.finished(request.request_id)
    for number in unanswered:
        scheduler.step_done(number)
    assert local.statistics().leases == 0
    local.check_integrity()
    local.close()


# Through the connector.


def test_the_connector_ends_the_step_that_the_workers_name_and_evicts_what_was_lost(local, make):
    scheduler, request = make(), request_of("a", range(18))
    number = lose(scheduler, local, request, [3, 4, 5, 6, 7]).number
    connector = KVStrataConnector.__new__(KVStrataConnector)
    connector._scheduler = scheduler
    evicted: list[set[int]] = []
    connector._kv_cache_manager = SimpleNamespace(evict_blocks=evicted.append)
    connector.update_connector_output(KVConnectorOutput())
    assert local.statistics().leases == 1, "an answer without a number ends nothing"
    answer = StepDone(number).aggregate(StepDone(number + 1))
    assert not KVConnectorOutput(kv_connector_worker_meta=answer).is_empty(), "vLLM would drop it"
    connector.update_connector_output(
        KVConnectorOutput(kv_connector_worker_meta=answer, invalid_block_ids={4})
    )
    assert local.statistics().leases == 0
    assert evicted == [{4, 5, 6, 7}]


@pytest.fixture
def caplog_vllm() -> Iterator[list[logging.LogRecord]]:
    """Records of vLLM's loggers, which do not propagate."""
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logger = logging.getLogger("vllm.kvstrata.scheduler")
    logger.addHandler(handler)
    yield records
    logger.removeHandler(handler)
