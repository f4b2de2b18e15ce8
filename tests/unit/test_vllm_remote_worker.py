"""A worker's half of remote read: what it publishes when, what it reports to vLLM, and an end that dies."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvstrata.errors import TransferFailed
from kvstrata.remote.protocol.actions import Ending, Finish, Settle
from kvstrata.vllm.remote_receiver import Receiver
from kvstrata.vllm.remote_sender import PublishingHook, Sender
from kvstrata.vllm.remote_worker import RemoteWorker
from kvstrata.vllm.transfers import AbortTransfer, Expect, OpenSend, RemoteStep, SendPart, StepTransfers

TARGETS, DRAFTS = (0, 1), (2,)


class Prefill:
    """Stands for a ProducerEndpoint: keeps what it is told."""

    def __init__(self) -> None:
        self.said: list[tuple[Any, ...]] = []
        self.settled: list[Settle] = []
        self.trouble: TransferFailed | None = None
        self.refuses_to_open = False

    def open(self, transfer: str, **where: Any) -> None:
        if self.refuses_to_open:
            raise TransferFailed("all holds are taken")
        self.said.append(("open", transfer, where["port"], where["member"], where["members"]))

    def publish(self, transfer: str, **part: Any) -> None:
        self._check()
        self.said.append(("publish", transfer, part["layer"], part["blocks"], part["after"]))

    def revoke(self, transfer: str) -> None:
        self._check()
        self.said.append(("revoke", transfer))

    def abort(self, transfer: str, reason: str) -> None:
        self._check()
        self.said.append(("abort", transfer))

    def take_settled(self) -> list[Settle]:
        self._check()
        settled, self.settled = self.settled, []
        return settled

    def settle(self, *transfers: str) -> None:
        self.settled += [Settle(transfer=name, ending=Ending.DONE, reason="") for name in transfers]

    def check_integrity(self) -> None:
        pass

    def _check(self) -> None:
        if self.trouble is not None:
            raise self.trouble


class Decode:
    """Stands for a ConsumerEndpoint."""

    def __init__(self) -> None:
        self.said: list[tuple[Any, ...]] = []
        self.finished: list[Finish] = []
        self.trouble: TransferFailed | None = None
        self.running = 0
        self.refused: set[str] = set()
        self.waits = 0

    def expect(self, transfer: str, *, first_block: int, end_block: int, blocks: tuple[int, ...]) -> None:
        if transfer in self.refused:
            raise TransferFailed("the id was used lately")
        assert end_block - first_block == len(blocks)
        self.said.append(("expect", transfer, first_block, blocks))

    def abort(self, transfer: str, reason: str) -> None:
        self.said.append(("abort", transfer))

    def wait_finished(self, timeout_s: float) -> bool:
        self.waits += 1
        return bool(self.finished)

    def take_finished(self) -> list[Finish]:
        if self.trouble is not None:
            raise self.trouble
        finished, self.finished = self.finished, []
        return finished

    def finish(self, transfer: str, ending: Ending = Ending.DONE) -> None:
        self.finished.append(Finish(transfer=transfer, ending=ending, reason=""))

    def statistics(self) -> Any:
        return SimpleNamespace(reads=SimpleNamespace(running=self.running))


def opening(transfer: str = "t", request: str = "r", *, tp_size: int = 1) -> OpenSend:
    return OpenSend(
        request_id=request,
        transfer=transfer,
        host="h",
        kv_port=1000,
        tp_size=tp_size,
        dp_rank=0,
        first_block=0,
        end_block=3,
    )


def part(first: int = 0, blocks: tuple[int, ...] = (7, 8, 9), **more: Any) -> SendPart:
    return SendPart(transfer="t", first_block=first, block_ids=blocks, **({"is_last": True} | more))


def sender_on(
    prefill: Prefill, *, rank: int = 0, tp_size: int = 1, drafts: tuple[int, ...] = DRAFTS
) -> Sender:
    return Sender(
        prefill,  # type: ignore[arg-type]
        rank=rank,
        tp_size=tp_size,
        targets=TARGETS,
        drafts=drafts,
        saved=lambda layer: f"save {layer}",  # type: ignore[arg-type,return-value]
    )


def test_a_layer_goes_out_behind_its_save_and_a_draft_layer_when_the_step_ends():
    prefill = Prefill()
    sender = sender_on(prefill)
    sender.begin_step(RemoteStep(opens=[opening()], parts=[part()]))
    assert prefill.said == [("open", "t", 1000, 0, 1)]
    sender.released(0)
    assert prefill.said[1:] == [("publish", "t", 0, (7, 8, 9), "save 0")]
    sender.released(1)
    sender.released(2)
    sender.released(2)  # a draft layer runs several times a step
    assert prefill.said[2:] == [("publish", "t", 1, (7, 8, 9), "save 1")]
    sender.end_step()
    assert prefill.said[3:] == [("publish", "t", 2, (7, 8, 9), None)]


def test_a_forward_that_breaks_off_shows_nobody_what_it_did_not_write():
    prefill = Prefill()
    sender = sender_on(prefill)
    sender.begin_step(RemoteStep(opens=[opening()], parts=[part()]))
    sender.released(0)
    sender.end_step()
    assert prefill.said[-1] == ("abort", "t")
    assert not any(said[0] == "publish" and said[2] == 2 for said in prefill.said)


def test_parts_of_an_earlier_step_go_out_at_once_in_all_layers():
    prefill = Prefill()
    sender = sender_on(prefill)
    sender.begin_step(RemoteStep(opens=[opening()]))
    sender.end_step()
    sender.begin_step(RemoteStep(parts=[part(is_computed=True)]))
    assert prefill.said[1:] == [("publish", "t", layer, (7, 8, 9), None) for layer in (0, 1, 2)]
    sender.end_step()
    assert len(prefill.said) == 4


def test_what_is_aborted_is_revoked_before_anything_else_happens_in_the_step():
    prefill = Prefill()
    sender = sender_on(prefill)
    sender.begin_step(RemoteStep(opens=[opening()]))
    sender.begin_step(RemoteStep(aborts=[AbortTransfer(transfer="t", reason="preempted")]))
    assert prefill.said[1:] == [("revoke", "t"), ("abort", "t")]


def test_an_abort_of_a_stranger_is_nobodys_business():
    prefill = Prefill()
    sender_on(prefill).begin_step(RemoteStep(aborts=[AbortTransfer(transfer="x", reason="")]))
    assert prefill.said == []


@pytest.mark.parametrize("order", ["settled first", "finished first"])
def test_a_request_is_sent_once_it_is_over_for_vllm_and_for_decode(order):
    prefill = Prefill()
    sender = sender_on(prefill)
    sender.begin_step(RemoteStep(opens=[opening()]))
    if order == "settled first":
        prefill.settle("t")
        assert sender.sent([]) == set(), "vLLM would free a running request's blocks"
        assert sender.sent(["r"]) == {"r"}
    else:
        assert sender.sent(["r", "other"]) == set()
        prefill.settle("t")
        assert sender.sent([]) == {"r"}
    assert sender.sent(["r"]) == set(), "each is named once"
    sender.check_integrity()


def test_members_of_unequal_ranks_speak_to_their_decode_rank():
    for rank, said in ((0, (1000, 0, 2)), (1, (1000, 1, 2)), (2, (1001, 0, 2)), (3, (1001, 1, 2))):
        prefill = Prefill()
        sender = sender_on(prefill, rank=rank, tp_size=4)
        sender.begin_step(RemoteStep(opens=[opening(tp_size=2)]))
        assert prefill.said == [("open", "t", *said)]


@pytest.mark.parametrize("why", ["no hold is free", "a port beyond all ports", "its id is open already"])
def test_what_cannot_be_opened_is_not_sent_and_the_engine_lives(why):
    prefill = Prefill()
    sender = sender_on(prefill)
    first = opening("t", "r")
    if why == "no hold is free":
        prefill.refuses_to_open = True
    elif why == "a port beyond all ports":
        first = OpenSend(**(vars(first) | {"kv_port": 65535, "dp_rank": 5}))
    else:
        sender.begin_step(RemoteStep(opens=[opening("t", "earlier")]))
    sender.begin_step(RemoteStep(opens=[first], parts=[]))
    assert sender.sent(["r"]) == {"r"}, "vLLM waits for the report in any case"


def test_a_dead_endpoint_settles_everything_for_its_holds_are_gone():
    prefill = Prefill()
    sender = sender_on(prefill)
    sender.begin_step(RemoteStep(opens=[opening()], parts=[part()]))
    prefill.trouble = TransferFailed("its thread died")
    sender.released(0)
    sender.end_step()
    assert sender.sent(["r"]) == {"r"}


def test_the_hook_tells_the_sender_after_the_layer_is_released():
    order: list[str] = []
    inner = SimpleNamespace(
        acquire=lambda _: order.append("acquire"), release=lambda _: order.append("release")
    )
    sender = SimpleNamespace(released=lambda layer: order.append(f"released {layer}"))
    hook = PublishingHook(inner, sender, 5)  # type: ignore[arg-type]
    hook.acquire(None)  # type: ignore[arg-type]
    hook.release(None)  # type: ignore[arg-type]
    assert order == ["acquire", "release", "released 5"]


def expect(transfer: str = "t", request: str = "r") -> Expect:
    return Expect(request_id=request, transfer=transfer, first_block=1, block_ids=(4, 5))


@pytest.mark.parametrize("ending", list(Ending))
def test_a_finished_transfer_is_reported_once_and_as_failed_unless_it_is_done(ending):
    decode = Decode()
    receiver = Receiver(decode)  # type: ignore[arg-type]
    receiver.begin_step(RemoteStep(expects=[expect()]))
    assert receiver.received(is_idle=False) == (set(), set())
    decode.finish("t", ending)
    assert receiver.received(is_idle=False) == ({"r"}, set() if ending is Ending.DONE else {"r"})
    assert receiver.received(is_idle=False) == (set(), set())


def test_an_idle_step_waits_only_while_something_may_come():
    decode = Decode()
    receiver = Receiver(decode)  # type: ignore[arg-type]
    receiver.received(is_idle=True)
    assert decode.waits == 0
    receiver.begin_step(RemoteStep(expects=[expect()]))
    receiver.received(is_idle=True)
    assert decode.waits == 1


def test_a_destination_that_is_refused_fails_its_request_alone():
    decode = Decode()
    decode.refused = {"t"}
    receiver = Receiver(decode)  # type: ignore[arg-type]
    receiver.begin_step(RemoteStep(expects=[expect(), expect("t2", "r2")]))
    assert receiver.received(is_idle=True) == ({"r"}, {"r"})
    decode.finish("t2")
    assert receiver.received(is_idle=True) == ({"r2"}, set())


def test_an_abort_goes_to_the_endpoint_while_the_transfer_is_open():
    decode = Decode()
    receiver = Receiver(decode)  # type: ignore[arg-type]
    aborts = [AbortTransfer(transfer="t", reason="request aborted")]
    receiver.begin_step(RemoteStep(expects=[expect()], aborts=aborts))
    assert decode.said[-1] == ("abort", "t")
    decode.finish("t", Ending.ABORTED)
    receiver.received(is_idle=False)
    receiver.begin_step(RemoteStep(aborts=aborts))
    assert len(decode.said) == 2


def test_a_dead_endpoint_fails_its_requests_once_nothing_writes_to_their_blocks():
    decode = Decode()
    receiver = Receiver(decode)  # type: ignore[arg-type]
    receiver.begin_step(RemoteStep(expects=[expect()]))
    decode.trouble, decode.running = TransferFailed("its thread died"), 1
    assert receiver.received(is_idle=False) == (set(), set())
    decode.running = 0
    assert receiver.received(is_idle=False) == ({"r"}, {"r"})


def test_a_worker_with_one_end_reports_that_end():
    prefill, decode = Prefill(), Decode()
    sends = RemoteWorker(sender=sender_on(prefill), receiver=None, deadline_s=1.0)
    sends.begin_step(StepTransfers(remote=RemoteStep(opens=[opening()])))
    prefill.settle("t")
    assert sends.results(["r"]).sent == {"r"}
    pulls = RemoteWorker(sender=None, receiver=Receiver(decode), deadline_s=1.0)  # type: ignore[arg-type]
    pulls.begin_step(StepTransfers(remote=RemoteStep(expects=[expect()])))
    decode.finish("t", Ending.LAPSED)
    results = pulls.results([])
    assert (results.received, results.failed, results.sent) == ({"r"}, {"r"}, set())
