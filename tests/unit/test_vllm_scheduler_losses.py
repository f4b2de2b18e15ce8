"""The scheduler's half of a store that loses things, raises, or does not answer."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scheduler_world import (
    BLOCK,
    TWO,
    Unclosed,
    keep,
    lose,
    opened_store,
    output_of,
    request_of,
    schedulers,
)
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from kvstrata.errors import StoreError, StoreUnavailable
from kvstrata.store.base import Status, Store, StoreKey
from kvstrata.store.faulty import Call, LeaseFault, Script, on
from kvstrata.store.local import LocalStore
from kvstrata.store.testing import put_bytes
from kvstrata.vllm.connector import KVStrataConnector
from kvstrata.vllm.scheduler_side import StoreScheduler
from kvstrata.vllm.transfers import StepDone


@pytest.fixture
def local(tmp_path: Path) -> Iterator[LocalStore]:
    with opened_store(tmp_path / "store") as store:
        yield store


@pytest.fixture
def make(local: LocalStore) -> Iterator:
    with schedulers(local) as make:
        yield make


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


def test_the_connector_ends_the_step_that_the_workers_name_and_evicts_what_was_lost(local, make):
    scheduler, request = make(), request_of("a", range(18))
    number = lose(scheduler, local, request, [3, 4, 5, 6, 7]).number
    connector = KVStrataConnector.__new__(KVStrataConnector)
    connector._scheduler, connector._remote_scheduler = scheduler, None
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
