"""The scheduler's half of remote read: who waits for whom, and which blocks go out after which step."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
from vllm.v1.request import Request

from kvstrata.remote.metaserver import Advert, FailedAdvert
from kvstrata.vllm.remote_pulls import Here
from kvstrata.vllm.remote_scheduler import RemoteScheduler
from kvstrata.vllm.transfers import AbortTransfer, RemoteStep, SendPart

BLOCK = 4
URL = "http://127.0.0.1:1/v1/metaserver"
REMOTE = {"host": "10.0.0.2", "kv_port": 1000, "tp_size": 1, "dp_rank": 0, "first_block": 0}


class Metaserver:
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, Advert]] = []
        self.failed: list[FailedAdvert] = []
        self.cancelled: list[str] = []

    def send(self, url: str, advert: Advert) -> None:
        self.sent.append((url, advert))

    def take_failed(self) -> list[FailedAdvert]:
        failed, self.failed = self.failed, []
        return failed

    def cancel(self, transfer: str) -> None:
        self.cancelled.append(transfer)

    def close(self) -> None:
        pass


def scheduler(
    metaserver: Metaserver | None = None, *, tp_size: int = 1, roles: Any = None
) -> RemoteScheduler:
    roles = roles or {"producer", "consumer"}
    return RemoteScheduler(
        sends="producer" in roles,
        block_tokens=BLOCK,
        here=Here(host="127.0.0.1", kv_port=20000, tp_size=tp_size, dp_rank=0),
        metaserver=(metaserver or Metaserver()) if "consumer" in roles else None,
    )


def request_of(name: str, tokens: int, params: dict[str, Any] | None) -> Request:
    sampling = SamplingParams(max_tokens=10, extra_args={"kv_transfer_params": params} if params else None)
    return Request(
        request_id=name,
        prompt_token_ids=list(range(1, tokens + 1)),
        sampling_params=sampling,
        pooling_params=None,
    )


def pull(name: str, tokens: int, transfer: str = "t") -> Request:
    params = {"do_remote_prefill": True, "transfer_id": transfer, "metaserver": URL}
    return request_of(name, tokens, params)


def send(name: str, tokens: int, *, first_block: int = 0, tp_size: int = 1) -> Request:
    remote = REMOTE | {"first_block": first_block, "tp_size": tp_size}
    return request_of(name, tokens, {"do_remote_decode": True, "transfer_id": "t", "remote": remote})


def output_of(
    new: Sequence[tuple[Request, list[int], int, int]] = (),
    cached: Sequence[tuple[Request, list[int] | None, int, int]] = (),
    preempted: set[str] | None = None,
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
                pooling_params=None,
                block_ids=(blocks,),
                num_computed_tokens=computed,
                lora_request=None,
            )
            for request, blocks, computed, _ in new
        ],
        scheduled_cached_reqs=CachedRequestData(
            req_ids=[request.request_id for request, _, _, _ in cached],
            resumed_req_ids=set(),
            new_token_ids=[],
            all_token_ids={},
            new_block_ids=[None if blocks is None else (blocks,) for _, blocks, _, _ in cached],
            num_computed_tokens=[computed for _, _, computed, _ in cached],
            num_output_tokens=[0 for _ in cached],
        ),
        num_scheduled_tokens=scheduled,
        total_num_scheduled_tokens=sum(scheduled.values()),
        preempted_req_ids=preempted,
    )


def step(side: RemoteScheduler, output: SchedulerOutput | None = None, **more: Any) -> RemoteStep:
    return side.step(output or output_of(), **({"number": 1, "is_unsure": False} | more))


# Decode.


def test_a_prompt_is_asked_for_less_the_prefix_hit_and_advertised_once_workers_expect_it():
    metaserver = Metaserver()
    side = scheduler(metaserver)
    request = pull("r", 18)
    assert side.matched_tokens(request, 8) == 10
    assert side.allocated(request, [5, 6, 7, 8, 9], 10)
    assert metaserver.sent == [], "workers must know the destination first"
    (expect,) = step(side).expects
    assert (expect.request_id, expect.transfer, expect.first_block) == ("r", "t", 2)
    assert expect.block_ids == (7, 8, 9), "a block that is not full comes too"
    ((url, advert),) = metaserver.sent
    assert url == URL
    assert (advert.transfer_id, advert.first_block, advert.num_tokens) == ("t", 2, 18)
    assert (advert.host, advert.kv_port, advert.tp_size) == ("127.0.0.1", 20000, 1)
    assert advert.block_tokens == BLOCK


def test_vllm_may_ask_again_before_it_has_room():
    side = scheduler()
    request = pull("r", 18)
    assert side.matched_tokens(request, 8) == 10
    assert side.matched_tokens(request, 4) == 14
    assert side.allocated(request, [1, 2, 3, 4, 5], 14)
    (expect,) = step(side).expects
    assert expect.block_ids == (2, 3, 4, 5)


@pytest.mark.parametrize("ended", ["received", "finished"])
def test_a_request_is_asked_for_once_whatever_came_of_it(ended):
    side = scheduler()
    request = pull("r", 18)
    side.matched_tokens(request, 0)
    side.allocated(request, [1, 2, 3, 4, 5], 18)
    step(side)
    if ended == "received":
        side.received({"r"})
    assert side.matched_tokens(request, 0) == 0, "preempted, or its transfer failed: it is computed here"


def test_a_second_request_of_the_same_transfer_computes_its_prompt_itself():
    side = scheduler()
    first, second = pull("r-0", 18), pull("r-1", 18)
    side.matched_tokens(first, 0)
    side.allocated(first, [1, 2, 3, 4, 5], 18)
    assert side.matched_tokens(second, 0) == 0


@pytest.mark.parametrize(("tokens", "computed"), [(4, 0), (1, 0), (18, 16), (18, 6), (12, 8)])
def test_what_is_hardly_worth_a_transfer_is_computed_here(tokens, computed):
    side = scheduler()
    assert side.matched_tokens(pull("r", tokens), computed) == 0
    assert step(side) == RemoteStep()


def test_another_source_may_supply_it():
    side = scheduler()
    request = pull("r", 18)
    side.matched_tokens(request, 0)
    assert not side.allocated(request, [1, 2, 3, 4, 5], 0)
    assert step(side).expects == []


def test_an_abort_while_waiting_reaches_workers_and_metaserver():
    metaserver = Metaserver()
    side = scheduler(metaserver)
    request = pull("r", 18)
    side.matched_tokens(request, 0)
    side.allocated(request, [1, 2, 3, 4, 5], 18)
    step(side)
    assert not side.finished(request), "vLLM itself keeps the blocks of a request that waits"
    assert step(side).aborts == [AbortTransfer(transfer="t", reason="request aborted")]
    assert metaserver.cancelled == ["t"]


def test_a_request_that_has_its_prompt_ends_without_an_abort():
    side = scheduler()
    request = pull("r", 18)
    side.matched_tokens(request, 0)
    side.allocated(request, [1, 2, 3, 4, 5], 18)
    step(side)
    side.received({"r"})
    side.finished(request)
    assert step(side).aborts == []


def test_an_advert_that_reaches_nobody_ends_the_wait():
    metaserver = Metaserver()
    side = scheduler(metaserver)
    metaserver.failed.append(FailedAdvert("t", "HTTP 500 four times"))
    assert step(side).aborts == [AbortTransfer(transfer="t", reason="metaserver: HTTP 500 four times")]
    assert side.statistics().undelivered_adverts == 1


def test_an_engine_that_only_sends_pulls_nothing():
    side = scheduler(roles={"producer"})
    assert side.matched_tokens(pull("r", 18), 0) == 0


def test_nonsense_in_the_parameters_is_counted_and_the_prompt_computed_here():
    side = scheduler()
    request = request_of("r", 18, {"do_remote_prefill": True, "transfer_id": 7})
    assert side.matched_tokens(request, 0) == 0
    assert side.statistics().refused_params == 1


# Prefill.


def test_prefill_says_that_it_has_the_request_before_it_runs():
    side = scheduler()
    side.on_new_request(send("r", 18, first_block=1))
    (opening,) = step(side).opens
    assert (opening.transfer, opening.first_block, opening.end_block) == ("t", 1, 5)
    assert (opening.host, opening.kv_port) == ("10.0.0.2", 1000)


def test_chunks_go_out_block_by_block_and_the_last_one_whole():
    side = scheduler()
    request = send("r", 18)
    side.on_new_request(request)
    first = step(side, output_of(new=[(request, [7, 8], 0, 6)]))
    assert first.parts == [SendPart(transfer="t", first_block=0, block_ids=(7,), is_last=False)]
    second = step(side, output_of(cached=[(request, [9], 6, 3)]))
    assert second.parts == [SendPart(transfer="t", first_block=1, block_ids=(8,), is_last=False)]
    third = step(side, output_of(cached=[(request, None, 9, 1)]))
    assert third.parts == [], "no block became full"
    last = step(side, output_of(cached=[(request, [10, 11], 10, 8)]))
    assert last.parts == [SendPart(transfer="t", first_block=2, block_ids=(9, 10, 11), is_last=True)]


def test_what_decode_has_is_not_sent_and_what_prefill_had_is():
    side = scheduler()
    request = send("r", 18, first_block=2)
    side.on_new_request(request)
    # Sixteen tokens are prefill's own prefix hit, two are computed.
    last = step(side, output_of(new=[(request, [1, 2, 3, 4, 5], 16, 2)]))
    assert last.parts == [SendPart(transfer="t", first_block=2, block_ids=(3, 4, 5), is_last=True)]


def test_a_chunk_below_decodes_prefix_hit_sends_nothing():
    side = scheduler()
    request = send("r", 18, first_block=3)
    side.on_new_request(request)
    assert step(side, output_of(new=[(request, [1, 2], 0, 8)])).parts == []
    last = step(side, output_of(cached=[(request, [3, 4, 5], 8, 10)]))
    assert last.parts == [SendPart(transfer="t", first_block=3, block_ids=(4, 5), is_last=True)]


def test_blocks_of_a_sent_request_outlive_it_and_a_plain_one_has_none():
    side = scheduler()
    request = send("r", 8)
    side.on_new_request(request)
    step(side, output_of(new=[(request, [1, 2], 0, 8)]))
    assert side.finished(request)
    assert step(side).aborts == []
    assert not side.finished(request_of("plain", 8, None))


def test_an_abort_before_the_last_part_reaches_the_workers():
    side = scheduler()
    request = send("r", 18)
    side.on_new_request(request)
    step(side, output_of(new=[(request, [1, 2], 0, 6)]))
    assert side.finished(request)
    (abort,) = step(side).aborts
    assert abort.transfer == "t"


def test_a_preempted_request_gives_its_transfer_up_in_the_step_that_takes_its_blocks():
    side = scheduler()
    request = send("r", 18)
    side.on_new_request(request)
    step(side, output_of(new=[(request, [1, 2], 0, 6)]))
    preempted = step(side, output_of(preempted={"r"}))
    assert [abort.transfer for abort in preempted.aborts] == ["t"]
    later = step(side, output_of(cached=[(request, [1, 2, 3, 4, 5], 0, 18)]))
    assert later.parts == []


def test_parts_of_a_step_that_reads_from_a_store_wait_until_it_is_known_to_be_sound():
    side = scheduler()
    request = send("r", 8)
    side.on_new_request(request)
    assert step(side, output_of(new=[(request, [1, 2], 4, 4)]), number=3, is_unsure=True).parts == []
    side.step_done(2, is_sound=True)
    assert step(side, number=4).parts == []
    side.step_done(3, is_sound=True)
    (part,) = step(side, number=5).parts
    assert part == SendPart(transfer="t", first_block=0, block_ids=(1, 2), is_last=True, is_computed=True)


def test_parts_of_a_step_that_lost_a_block_are_never_sent():
    side = scheduler()
    request = send("r", 8)
    side.on_new_request(request)
    step(side, output_of(new=[(request, [1, 2], 4, 4)]), number=3, is_unsure=True)
    side.step_done(3, is_sound=False)
    after = step(side, number=4)
    assert after.parts == []
    assert [abort.transfer for abort in after.aborts] == ["t"]


@pytest.mark.parametrize(("p_tp", "d_tp"), [(1, 2), (3, 2)])
def test_a_topology_that_does_not_fit_is_not_opened(p_tp, d_tp):
    side = scheduler(tp_size=p_tp)
    request = send("r", 18, tp_size=d_tp)
    side.on_new_request(request)
    assert step(side).opens == []
    assert not side.finished(request)


def test_an_engine_that_only_pulls_sends_nothing():
    side = scheduler(roles={"consumer"})
    side.on_new_request(send("r", 18))
    assert step(side) == RemoteStep()


def test_a_sound_step_behind_one_that_is_not_known_yet_waits_with_it():
    side = scheduler()
    request = send("r", 12)
    side.on_new_request(request)
    step(side, output_of(new=[(request, [1, 2], 4, 4)]), number=3, is_unsure=True)
    assert step(side, output_of(cached=[(request, [3], 8, 4)]), number=4).parts == []
    side.step_done(3, is_sound=True)
    side.step_done(4, is_sound=True)
    parts = step(side, number=5).parts
    assert [(part.first_block, part.block_ids) for part in parts] == [(0, (1, 2)), (2, (3,))]
