"""Decode's side of remote read in one worker: where rows shall go, and which requests have theirs."""

from __future__ import annotations

import contextlib

from vllm.logger import init_logger

from kvstrata.errors import TransferFailed
from kvstrata.remote.consumer.endpoint import ConsumerEndpoint
from kvstrata.remote.endpoint_statistics import ConsumerEndpointStatistics
from kvstrata.remote.protocol.actions import Ending

from .transfers import RemoteStep

logger = init_logger("vllm.kvstrata.remote")

_IDLE_WAIT_S = 0.02
"""How long a step without tokens waits for a transfer to end: vLLM would step again at once.

Each such step costs milliseconds of a core that prefill may need; a request that comes meanwhile is as late.
"""


class Receiver:
    """Decode's side. One engine thread calls all methods, in step order."""

    def __init__(self, endpoint: ConsumerEndpoint) -> None:
        self._endpoint = endpoint
        self._request_of: dict[str, str] = {}
        self._refused: set[str] = set()  # requests

    def begin_step(self, step: RemoteStep) -> None:
        """Register the step's destinations, and give up what nobody waits for."""
        for expect in step.expects:
            try:
                self._endpoint.expect(
                    expect.transfer,
                    first_block=expect.first_block,
                    end_block=expect.first_block + len(expect.block_ids),
                    blocks=expect.block_ids,
                )
                self._request_of[expect.transfer] = expect.request_id
            except TransferFailed as trouble:
                logger.warning("request %s computes its prompt here: %s", expect.request_id, trouble)
                self._refused.add(expect.request_id)
        for abort in step.aborts:
            if abort.transfer in self._request_of:
                with contextlib.suppress(TransferFailed):  # of a dead endpoint; `received` deals with it
                    self._endpoint.abort(abort.transfer, abort.reason)

    def received(self, *, is_idle: bool) -> tuple[set[str], set[str]]:
        """Return the requests whose transfers ended and those of them that failed, each once."""
        received, self._refused = self._refused, set()
        failed = set(received)
        try:
            if is_idle and self._request_of and not received:
                self._endpoint.wait_finished(_IDLE_WAIT_S)
            for finish in self._endpoint.take_finished():
                request = self._request_of.pop(finish.transfer)
                received.add(request)
                if finish.ending is not Ending.DONE:
                    failed.add(request)
        except TransferFailed as trouble:
            if self._endpoint.statistics().reads.running:
                return received, failed  # still being written to: their blocks may not be used yet (M3)
            if self._request_of:
                logger.error("remote read is over on this decode rank, it computes prompts: %s", trouble)
            received.update(self._request_of.values())
            failed.update(self._request_of.values())
            self._request_of.clear()
        return received, failed

    def close(self, deadline_s: float) -> None:
        """End every transfer; nothing is written into this engine's memory afterwards."""
        self._endpoint.close(deadline_s=deadline_s)

    def statistics(self) -> ConsumerEndpointStatistics:
        """Return the endpoint's counts."""
        return self._endpoint.statistics()

    def check_integrity(self) -> None:
        """Check the endpoint."""
        self._endpoint.check_integrity()
