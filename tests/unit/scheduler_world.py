"""What the tests of the scheduler's half of the store share: requests, steps, a store that outlives users."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from vllm import PoolingParams, SamplingParams
from vllm.lora.request import LoRARequest
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
from vllm.v1.request import Request

from kvstrata.store.base import Status, Store, StoreKey
from kvstrata.store.faulty import FaultyStore
from kvstrata.store.local import LocalStore
from kvstrata.store.testing import put_bytes
from kvstrata.vllm.scheduler_side import StoreScheduler
from kvstrata.vllm.transfers import StepTransfers

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


@contextmanager
def opened_store(path: Path) -> Iterator[LocalStore]:
    store = LocalStore.open(path, size_bytes=1 << 20)
    yield store
    assert store.statistics().leases == 0, "every lease was given back"
    store.check_integrity()
    store.close()


class Unclosed(FaultyStore):
    """Leaves closing to the fixture."""

    def close(self) -> None:
        pass


@contextmanager
def schedulers(local: LocalStore) -> Iterator[Callable[..., StoreScheduler]]:
    """Makes schedulers on that store, and closes them at the end."""
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


def start(scheduler: StoreScheduler, request: Request, blocks: list[int], scheduled: int) -> StepTransfers:
    scheduler.matched_tokens(request, 0)
    scheduler.allocated(request, blocks, 0)
    return scheduler.step(output_of(new=[(request, blocks, 0, scheduled)]))


def lose(scheduler: StoreScheduler, local: LocalStore, request: Request, blocks: list[int]) -> StepTransfers:
    """A step in which the request's first block comes from the store."""
    keep(local, request, [0], ranks=scheduler._ranks)
    assert scheduler.matched_tokens(request, 0) == BLOCK
    scheduler.allocated(request, blocks, BLOCK)
    return scheduler.step(output_of(new=[(request, blocks, 4, request.num_tokens - 4)]))
