"""The scheduler's half of remote read: which requests wait for another engine, and which another waits for.

Decode (consumer) asks for the whole prompt less its own prefix hit, and tells the proxy's metaserver where
it waits; prefill (producer) tells its workers which blocks are complete after each step. What comes of a
transfer the workers decide: vLLM is told by them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm.logger import init_logger

from .remote_params import PullParams, SendParams, parse_params
from .remote_pulls import Here, Metaserver, Pulls
from .remote_sends import Sends
from .transfers import RemoteStep

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

logger = init_logger("vllm.kvstrata.remote")


@dataclass(frozen=True, kw_only=True)
class RemoteSchedulerStatistics:
    """Totals since start."""

    pulls: int  # requests whose prompt was asked of another engine
    sends: int  # requests whose prompt another engine asked for
    undelivered_adverts: int
    refused_params: int  # kv_transfer_params that made no sense; the prompt is computed here


class RemoteScheduler:
    """Answers vLLM's scheduler for transfers between engines. Its process's thread alone calls it."""

    def __init__(self, *, sends: bool, block_tokens: int, here: Here, metaserver: Metaserver | None) -> None:
        """`metaserver` is there exactly where the engine pulls prompts; `sends`: whether it sends them."""
        self._pulls = (
            Pulls(block_tokens=block_tokens, here=here, metaserver=metaserver) if metaserver else None
        )
        self._sends = Sends(block_tokens=block_tokens, tp_size=here.tp_size) if sends else None
        self._refused_params = 0

    def matched_tokens(self, request: Request, num_computed_tokens: int) -> int:
        """Return how many prompt tokens beyond ``num_computed_tokens`` another engine will supply.

        0 for none, and the second time: whatever came of its transfer, the rest is computed here.
        """
        params = self._params(request)
        if self._pulls is None or not isinstance(params, PullParams) or not _is_plain(request):
            return 0
        return self._pulls.matched_tokens(request, params, num_computed_tokens)

    def allocated(self, request: Request, block_ids: Sequence[int], num_external_tokens: int) -> bool:
        """Note the destination that vLLM gave a request, and ask for its prompt in the next step.

        Returns whether the external tokens are another engine's to supply.
        """
        return self._pulls is not None and self._pulls.allocated(request, block_ids, num_external_tokens)

    def received(self, request_ids: Collection[str]) -> None:
        """The workers are through with these transfers, well or not."""
        if self._pulls is not None:
            self._pulls.received(request_ids)

    def on_new_request(self, request: Request) -> None:
        """Tell the decode engine at once that its request has arrived: from then on it knows that we live."""
        params = self._params(request)
        if not isinstance(params, SendParams):
            return
        if self._sends is None or not _is_plain(request):
            logger.warning("%s: this engine sends no such prompts; computed for nobody", params.transfer)
            return
        self._sends.on_new_request(request, params)

    def step(self, output: SchedulerOutput, *, number: int, is_unsure: bool) -> RemoteStep:
        """Return this step's news for the workers; see `Sends.step` for ``is_unsure``."""
        news = RemoteStep()
        if self._sends is not None:
            self._sends.step(output, news, number=number, is_unsure=is_unsure)
        if self._pulls is not None:
            self._pulls.step(news)
        return news

    def step_done(self, number: int, *, is_sound: bool) -> None:
        """The workers have run step ``number``; ``is_sound``: no block that a store promised was lost."""
        if self._sends is not None:
            self._sends.step_done(number, is_sound=is_sound)

    def finished(self, request: Request) -> bool:
        """A request is over, finished or aborted; return whether its blocks must outlive it.

        On prefill they do until every worker has reported it sent. On decode vLLM sees to it itself.
        """
        if self._pulls is not None:
            self._pulls.finished(request)
        return self._sends is not None and self._sends.finished(request)

    def statistics(self) -> RemoteSchedulerStatistics:
        """Return totals since start."""
        return RemoteSchedulerStatistics(
            pulls=self._pulls.asked_prompts if self._pulls is not None else 0,
            sends=self._sends.opened if self._sends is not None else 0,
            undelivered_adverts=self._pulls.undelivered_adverts if self._pulls is not None else 0,
            refused_params=self._refused_params,
        )

    def close(self) -> None:
        """Stop sending adverts."""
        if self._pulls is not None:
            self._pulls.close()

    def _params(self, request: Request) -> PullParams | SendParams | None:
        try:
            return parse_params(request.kv_transfer_params)
        except ValueError as trouble:
            self._refused_params += 1
            logger.warning("request %s: %s; its prompt is computed here", request.request_id, trouble)
            return None


def _is_plain(request: Request) -> bool:
    """Whether the prompt's rows depend on its tokens only."""
    return request.prompt_embeds is None and not request.pooling_params and request.lora_request is None
