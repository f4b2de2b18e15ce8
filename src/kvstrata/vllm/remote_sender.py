"""Prefill's side of remote read in one worker: publishes what layers wrote, says when blocks are free.

A layer's part goes out as soon as the layer is released and its save is submitted; draft layers, which run
several times a step, follow when the step ends.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator
from typing import TYPE_CHECKING

from vllm.logger import init_logger

from kvstrata.core.shares import Topology, control_port
from kvstrata.errors import ConfigurationError, TransferFailed
from kvstrata.move.engine import CopyToken
from kvstrata.remote.endpoint_statistics import ProducerEndpointStatistics
from kvstrata.remote.producer.endpoint import ProducerEndpoint

from .hooks import LayerHook
from .transfers import OpenSend, RemoteStep, SendPart

if TYPE_CHECKING:
    from .metadata import KVStrataMetadata

logger = init_logger("vllm.kvstrata.remote")


class Sender:
    """Prefill's side. One engine thread calls all methods, in step order."""

    def __init__(
        self,
        endpoint: ProducerEndpoint,
        *,
        rank: int,
        tp_size: int,
        targets: Collection[int],
        drafts: Collection[int],
        saved: Callable[[int], CopyToken | None],
    ) -> None:
        self._endpoint = endpoint
        self._rank = rank
        self._tp_size = tp_size
        self._targets = tuple(targets)
        self._drafts = tuple(drafts)
        self._saved = saved
        self._request_of: dict[str, str] = {}  # transfers not settled yet
        self._unsettled: dict[str, int] = {}  # request -> transfers not settled yet
        self._finished: set[str] = set()  # requests that are over for vLLM, of those in _request_of
        self._parts: list[SendPart] = []
        self._released: set[int] = set()

    def begin_step(self, step: RemoteStep) -> None:
        """Learn the step's news. What is aborted may have lost its blocks already: reads of it end now."""
        with self._giving_up():
            self._begin_step(step)

    def _begin_step(self, step: RemoteStep) -> None:
        for opening in step.opens:
            self._open(opening)
        for abort in step.aborts:
            if abort.transfer in self._request_of:
                self._endpoint.revoke(abort.transfer)
                self._endpoint.abort(abort.transfer, abort.reason)
        for part in step.parts:
            if part.is_computed:
                for layer in (*self._targets, *self._drafts):
                    self._publish(part, layer, after=None)
        self._parts = [part for part in step.parts if not part.is_computed]
        self._released.clear()

    def released(self, layer: int) -> None:
        """The layer's rows of this step are written, or on their way home."""
        if layer in self._released:
            return
        self._released.add(layer)
        if layer in self._drafts:
            return
        with self._giving_up():
            for part in self._parts:
                self._publish(part, layer, after=self._saved(layer))

    def end_step(self) -> None:
        """Everything is home: publish draft layers; what a broken forward did not write is nobody's."""
        parts, self._parts = self._parts, []
        if not parts:
            return
        missing = sorted({*self._targets, *self._drafts} - self._released)
        with self._giving_up():
            for part in parts:
                if missing:
                    self._endpoint.abort(part.transfer, f"layers {missing} did not run in the prompt's step")
                    continue
                for layer in self._drafts:
                    self._publish(part, layer, after=None)

    def sent(self, finished_requests: Collection[str]) -> set[str]:
        """Return requests that are over for vLLM and whose blocks nobody reads any more, each once."""
        known = set(self._request_of.values()) | set(self._unsettled)
        self._finished.update(known.intersection(finished_requests))
        with self._giving_up():
            for settled in self._endpoint.take_settled():
                self._settle(settled.transfer)
        over = {request for request in self._finished if self._unsettled[request] == 0}
        self._finished -= over
        for request in over:
            del self._unsettled[request]
        return over

    def close(self, deadline_s: float) -> None:
        """End every transfer."""
        self._endpoint.close(deadline_s=deadline_s)

    def statistics(self) -> ProducerEndpointStatistics:
        """Return the endpoint's counts."""
        return self._endpoint.statistics()

    def check_integrity(self) -> None:
        """Check the endpoint, and that every unsettled transfer belongs to a request."""
        self._endpoint.check_integrity()
        assert sum(self._unsettled.values()) == len(self._request_of), (self._unsettled, self._request_of)

    def _open(self, opening: OpenSend) -> None:
        """Open one transfer. What cannot be opened is not sent: decode computes that prompt itself."""
        self._unsettled[opening.request_id] = self._unsettled.get(opening.request_id, 0)
        if opening.transfer in self._request_of:
            logger.warning("transfer %s is open already; request %s sends nothing", *_named(opening))
            return
        topology = Topology(p_tp=self._tp_size, d_tp=opening.tp_size)
        consumer = topology.consumer_of(self._rank)
        try:
            self._endpoint.open(
                opening.transfer,
                host=opening.host,
                port=control_port(opening.kv_port, opening.dp_rank, opening.tp_size, consumer),
                member=topology.member_of(self._rank),
                members=topology.ratio,
                first_block=opening.first_block,
                end_block=opening.end_block,
            )
        except (TransferFailed, ConfigurationError) as trouble:
            logger.warning("transfer %s of request %s is not sent: %s", *_named(opening), trouble)
            return
        self._request_of[opening.transfer] = opening.request_id
        self._unsettled[opening.request_id] += 1

    def _settle(self, transfer: str) -> None:
        self._unsettled[self._request_of.pop(transfer)] -= 1

    @contextlib.contextmanager
    def _giving_up(self) -> Iterator[None]:
        """A dead endpoint has ended every hold: nobody takes what it reads for valid, so all is settled."""
        try:
            yield
        except TransferFailed as trouble:
            logger.error("remote read is over on this prefill rank, prompts are sent to nobody: %s", trouble)
            for transfer in list(self._request_of):
                self._settle(transfer)

    def _publish(self, part: SendPart, layer: int, *, after: CopyToken | None) -> None:
        self._endpoint.publish(
            part.transfer,
            layer=layer,
            first_block=part.first_block,
            end_block=part.first_block + len(part.block_ids),
            blocks=part.block_ids,
            is_last=part.is_last,
            after=after,
        )


class PublishingHook:
    """A layer's hook that also tells the sender when the layer is done."""

    def __init__(self, inner: LayerHook, sender: Sender, layer: int) -> None:
        self._inner = inner
        self._sender = sender
        self._layer = layer

    def acquire(self, metadata: KVStrataMetadata) -> None:
        """As the inner hook."""
        self._inner.acquire(metadata)

    def release(self, metadata: KVStrataMetadata) -> None:
        """As the inner hook; then the layer's rows are published."""
        self._inner.release(metadata)
        self._sender.released(self._layer)


def _named(opening: OpenSend) -> tuple[str, str]:
    return opening.transfer, opening.request_id
