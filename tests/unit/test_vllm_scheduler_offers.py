"""What the scheduler's half of the store offers: blocks whose rows cannot change any more, each once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scheduler_world import (
    BLOCK,
    keep,
    opened_store,
    output_of,
    puts_of,
    request_of,
    schedulers,
    start,
)
from vllm.v1.core.sched.output import SchedulerOutput

from kvstrata.store.local import LocalStore
from kvstrata.vllm.scheduler_side import confirmed_tokens


@pytest.fixture
def local(tmp_path: Path) -> Iterator[LocalStore]:
    with opened_store(tmp_path / "store") as store:
        yield store


@pytest.fixture
def make(local: LocalStore) -> Iterator:
    with schedulers(local) as make:
        yield make


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
