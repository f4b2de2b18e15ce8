"""A worker's half of remote read: prefill's side, decode's side or both, driven by the connector."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from .hooks import LayerHook
from .remote_receiver import Receiver
from .remote_sender import PublishingHook, Sender
from .remote_stats import added, receiver_counts, sender_counts
from .transfers import RemoteStep, StepTransfers


@dataclass(frozen=True, kw_only=True)
class TransferResults:
    """Requests whose transfers ended, each once; failed ones are in `received` too, as vLLM wants them."""

    sent: set[str] = field(default_factory=set)
    received: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)


class RemoteWorker:
    """Both ends of remote read in one worker, each where the engine has that role.

    An end whose thread has died is given up: its transfers count as failed, and the engine goes on alone.
    """

    def __init__(self, *, sender: Sender | None, receiver: Receiver | None, deadline_s: float) -> None:
        self.sender = sender
        self.receiver = receiver
        self._deadline_s = deadline_s
        self._is_idle = False

    def hook(self, inner: LayerHook, layer: int) -> LayerHook:
        """Return the layer's hook, which publishes what the layer wrote if this engine sends."""
        return inner if self.sender is None else PublishingHook(inner, self.sender, layer)

    def begin_step(self, transfers: StepTransfers) -> None:
        """A step begins; called before anything writes a block."""
        self._is_idle = not transfers.has_forward
        step = transfers.remote or RemoteStep()
        if self.sender is not None:
            self.sender.begin_step(step)
        if self.receiver is not None:
            self.receiver.begin_step(step)

    def end_step(self) -> None:
        """The step's rows are home."""
        if self.sender is not None:
            self.sender.end_step()

    def results(self, finished_requests: Collection[str]) -> TransferResults:
        """Return what ended since the last call."""
        sent = self.sender.sent(finished_requests) if self.sender is not None else set()
        if self.receiver is None:
            return TransferResults(sent=sent)
        received, failed = self.receiver.received(is_idle=self._is_idle and not sent)
        return TransferResults(sent=sent, received=received, failed=failed)

    def counts(self) -> dict[str, float]:
        """Return totals since start under the keys of the metrics."""
        sent = sender_counts(self.sender.statistics()) if self.sender is not None else {}
        received = receiver_counts(self.receiver.statistics()) if self.receiver is not None else {}
        return added(sent, received)

    def close(self) -> None:
        """End every transfer."""
        for side in (self.sender, self.receiver):
            if side is not None:
                side.close(self._deadline_s)

    def check_integrity(self) -> None:
        """Check both ends."""
        for side in (self.sender, self.receiver):
            if side is not None:
                side.check_integrity()
