"""Prefill's scheduler half of remote read: which blocks of a prompt are complete after which step."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from vllm.logger import init_logger

from kvstrata.core.shares import Topology, ready_blocks
from kvstrata.errors import ConfigurationError

from .remote_params import SendParams
from .transfers import AbortTransfer, OpenSend, RemoteStep, SendPart

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

logger = init_logger("vllm.kvstrata.remote")


@dataclass(kw_only=True)
class _Send:
    """Prefill: a request whose blocks another engine reads."""

    request: Request
    params: SendParams
    block_ids: list[int] = field(default_factory=list)
    sent_tokens: int = 0  # leading tokens whose blocks have been published
    is_over: bool = False  # all published, or given up


class Sends:
    """Prompts that decode engines wait for. The scheduler's thread alone calls it."""

    def __init__(self, *, block_tokens: int, tp_size: int) -> None:
        self.opened = 0
        self._block_tokens = block_tokens
        self._tp_size = tp_size
        self._sends: dict[str, _Send] = {}  # by request
        self._news = RemoteStep()
        self._unsure: deque[tuple[int, list[SendPart]]] = deque()  # by step, oldest first

    def on_new_request(self, request: Request, params: SendParams) -> None:
        """Tell the decode engine at once that its request has arrived: from then on it knows that we live."""
        try:
            Topology(p_tp=self._tp_size, d_tp=params.tp_size)
        except ConfigurationError as trouble:
            logger.error("%s: nothing is sent: %s", params.transfer, trouble)
            return
        end_block = -(-request.num_prompt_tokens // self._block_tokens)
        if not params.first_block < end_block:
            logger.warning(
                "%s: decode asks for blocks from %d on, and the prompt has %d; nothing is sent",
                params.transfer,
                params.first_block,
                end_block,
            )
            return
        self._sends[request.request_id] = _Send(
            request=request, params=params, sent_tokens=params.first_block * self._block_tokens
        )
        self._news.opens.append(
            OpenSend(
                request_id=request.request_id,
                transfer=params.transfer,
                host=params.host,
                kv_port=params.kv_port,
                tp_size=params.tp_size,
                dp_rank=params.dp_rank,
                first_block=params.first_block,
                end_block=end_block,
            )
        )
        self.opened += 1

    def step(self, output: SchedulerOutput, news: RemoteStep, *, number: int, is_unsure: bool) -> None:
        """Add what the workers must know in this step.

        ``is_unsure``: rows that a store brings in step ``number`` may turn out lost, and with them whatever
        the step computes, on any rank. Its parts wait for `step_done`.
        """
        for request_id in output.preempted_req_ids or ():
            self._give_up(request_id, "preempted on the prefill engine")
        for new in output.scheduled_new_reqs:
            self._schedule(new.req_id, list(new.block_ids[0]), new.num_computed_tokens, output)
        cached = output.scheduled_cached_reqs
        for at, request_id in enumerate(cached.req_ids):
            send = self._sends.get(request_id)
            if send is None:
                continue
            added = cached.new_block_ids[at]
            blocks = [] if request_id in cached.resumed_req_ids else send.block_ids
            blocks = [*blocks, *(added[0] if added is not None else ())]
            self._schedule(request_id, blocks, cached.num_computed_tokens[at], output)
        if is_unsure or self._unsure:  # parts go out in the order of the prompt
            self._unsure.append((number, [part for part in self._news.parts if not part.is_computed]))
            self._news.parts = [part for part in self._news.parts if part.is_computed]
        news.opens += self._news.opens
        news.parts += self._news.parts
        news.aborts += self._news.aborts
        self._news = RemoteStep()

    def step_done(self, number: int, *, is_sound: bool) -> None:
        """The workers have run step ``number``; what it computed may be published unless a block was lost."""
        while self._unsure and self._unsure[0][0] <= number:
            for part in self._unsure.popleft()[1]:
                if is_sound:
                    self._news.parts.append(replace(part, is_computed=True))
                else:
                    reason = "the store lost a block that the prompt was computed from"
                    self._news.aborts.append(AbortTransfer(transfer=part.transfer, reason=reason))

    def finished(self, request: Request) -> bool:
        """A request is over, finished or aborted; whether its blocks must outlive it.

        They must until every worker has reported it sent.
        """
        send = self._sends.pop(request.request_id, None)
        if send is None:
            return False
        if not send.is_over:
            self._abort(send, "request aborted on the prefill engine")
        return True

    def _schedule(
        self, request_id: str, block_ids: list[int], computed_tokens: int, output: SchedulerOutput
    ) -> None:
        send = self._sends.get(request_id)
        if send is None:
            return
        send.block_ids = block_ids
        if send.is_over:
            return
        prompt = send.request.num_prompt_tokens
        done = min(computed_tokens + output.num_scheduled_tokens[request_id], prompt)
        is_last = done == prompt
        first, end = ready_blocks(
            transferred_tokens=send.sent_tokens,
            computed_tokens=done,
            block_tokens=self._block_tokens,
            is_finished=is_last,
            allocated_blocks=len(block_ids),
        )
        if end <= first and not is_last:
            return
        self._news.parts.append(
            SendPart(
                transfer=send.params.transfer,
                first_block=first,
                block_ids=tuple(block_ids[first:end]),
                is_last=is_last,
            )
        )
        send.sent_tokens, send.is_over = max(send.sent_tokens, end * self._block_tokens), is_last

    def _give_up(self, request_id: str, reason: str) -> None:
        send = self._sends.get(request_id)
        if send is not None:
            self._abort(send, reason)

    def _abort(self, send: _Send, reason: str) -> None:
        send.is_over = True
        self._news.aborts.append(AbortTransfer(transfer=send.params.transfer, reason=reason))
