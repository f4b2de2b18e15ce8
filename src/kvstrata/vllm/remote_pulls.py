"""Decode's scheduler half of remote read: which requests wait for a prefill engine, and what it is told."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from kvstrata.remote.metaserver import Advert, FailedAdvert

from .remote_params import PullParams
from .transfers import AbortTransfer, Expect, RemoteStep

if TYPE_CHECKING:
    from vllm.v1.request import Request


class Metaserver(Protocol):
    """Where adverts are delivered, in the background; see `remote.metaserver`."""

    def send(self, url: str, advert: Advert) -> None:
        """Deliver `advert`, with retries inside a deadline. Never blocks."""

    def take_failed(self) -> list[FailedAdvert]:
        """Return what could not be delivered, each once."""

    def cancel(self, transfer: str) -> None:
        """Nobody waits for this transfer any more."""

    def close(self) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Here:
    """Where this engine's ranks listen for prefill's."""

    host: str
    kv_port: int
    tp_size: int
    dp_rank: int


@dataclass(kw_only=True)
class _Pull:
    """Decode: a request that waits for its prompt, or is about to."""

    params: PullParams
    first_block: int
    is_expected: bool = False


class Pulls:
    """Prompts asked of prefill engines. The scheduler's thread alone calls it."""

    def __init__(self, *, block_tokens: int, here: Here, metaserver: Metaserver) -> None:
        self.asked_prompts = 0
        self.undelivered_adverts = 0
        self._block_tokens = block_tokens
        self._here = here
        self._metaserver = metaserver
        self._pulls: dict[str, _Pull] = {}  # by request
        self._asked: set[str] = set()  # transfers of living requests that were asked for once
        self._transfer_of: dict[str, str] = {}  # request -> transfer, of those asked for
        self._expects: list[Expect] = []
        self._aborts: list[AbortTransfer] = []
        self._adverts: list[tuple[str, Advert]] = []

    def matched_tokens(self, request: Request, params: PullParams, num_computed_tokens: int) -> int:
        """Return how many prompt tokens beyond ``num_computed_tokens`` another engine will supply.

        0 for none, and the second time: whatever came of its transfer, the rest is computed here.
        """
        if params.transfer in self._asked:
            return 0
        wanted = request.num_prompt_tokens - num_computed_tokens
        # vLLM computes the last token in any case: less than a block is not worth a transfer.
        if num_computed_tokens % self._block_tokens or wanted <= self._block_tokens:
            return 0
        first_block = num_computed_tokens // self._block_tokens
        self._pulls[request.request_id] = _Pull(params=params, first_block=first_block)
        return wanted

    def allocated(self, request: Request, block_ids: Sequence[int], num_external_tokens: int) -> bool:
        """Note the destination that vLLM gave a request, and ask for its prompt in the next step.

        Returns whether the external tokens are another engine's to supply.
        """
        pull = self._pulls.get(request.request_id)
        if pull is None or pull.is_expected:
            return False
        if num_external_tokens == 0:  # vLLM took another source
            del self._pulls[request.request_id]
            return False
        pull.is_expected = True
        self._asked.add(pull.params.transfer)
        self._transfer_of[request.request_id] = pull.params.transfer
        end_block = -(-request.num_prompt_tokens // self._block_tokens)
        self._expects.append(
            Expect(
                request_id=request.request_id,
                transfer=pull.params.transfer,
                first_block=pull.first_block,
                block_ids=tuple(block_ids[pull.first_block : end_block]),
            )
        )
        advert = Advert(
            transfer_id=pull.params.transfer,
            request_id=request.request_id,
            first_block=pull.first_block,
            num_tokens=request.num_prompt_tokens,
            block_tokens=self._block_tokens,
            host=self._here.host,
            kv_port=self._here.kv_port,
            tp_size=self._here.tp_size,
            dp_rank=self._here.dp_rank,
        )
        self._adverts.append((pull.params.metaserver, advert))
        self.asked_prompts += 1
        return True

    def received(self, request_ids: Collection[str]) -> None:
        """The workers are through with these transfers, well or not."""
        for request_id in request_ids:
            self._pulls.pop(request_id, None)

    def step(self, news: RemoteStep) -> None:
        """Add what the workers must know in this step, and send the adverts of what they will expect."""
        for failed in self._metaserver.take_failed():  # no prefill will come: decode stops waiting for it
            self.undelivered_adverts += 1
            reason = f"metaserver: {failed.reason}"
            self._aborts.append(AbortTransfer(transfer=failed.transfer_id, reason=reason))
        news.expects += self._expects
        news.aborts += self._aborts
        adverts, self._adverts = self._adverts, []
        self._expects, self._aborts = [], []
        for url, advert in adverts:
            self._metaserver.send(url, advert)

    def finished(self, request: Request) -> None:
        """A request is over, finished or aborted; where it still waits, vLLM keeps its blocks meanwhile."""
        pull = self._pulls.pop(request.request_id, None)
        transfer = self._transfer_of.pop(request.request_id, None)
        if transfer is not None:
            self._asked.discard(transfer)
        if pull is not None and pull.is_expected:
            self._metaserver.cancel(pull.params.transfer)
            self._aborts.append(AbortTransfer(transfer=pull.params.transfer, reason="request aborted"))

    def close(self) -> None:
        """Stop sending adverts."""
        self._metaserver.close()
