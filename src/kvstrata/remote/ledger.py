"""What an endpoint has open and what became of the rest: counted, timed, told to the log and the engine."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from kvstrata.errors import TransferFailed
from kvstrata.remote.loop import EndpointLoop, Outcomes
from kvstrata.remote.protocol.actions import Finish, Settle
from kvstrata.remote.timeline import Timeline, TimelineSums

logger = logging.getLogger("vllm.kvstrata.remote")


class Held(Protocol):
    """What the endpoint keeps of an open transfer."""

    @property
    def timeline(self) -> Timeline: ...


H = TypeVar("H", bound=Held)
O = TypeVar("O", Settle, Finish)  # noqa: E741 - an outcome


class Ledger(Generic[H, O]):
    """`opened == len(open) + sum(endings.values())`. Read and written under the loop's lock.

    `end` is called by the loop's thread alone; `take`, `wait` and `wake` need no lock.
    """

    def __init__(self, loop: EndpointLoop, clock: Callable[[], float]) -> None:
        self.open: dict[str, H] = {}
        self.opened = 0
        self.endings: Counter[str] = Counter()
        self.timeline = TimelineSums()
        self._loop = loop
        self._clock = clock
        self._outcomes: Outcomes[O] = Outcomes()

    def begin(self, transfer: str, held: H) -> None:
        """A transfer is open now."""
        self.open[transfer] = held
        self.opened += 1

    def end(self, outcome: O) -> None:
        """A transfer is over; the engine learns of it by `take`."""
        now_s = self._clock()
        with self._loop.looking():
            timeline = self.open.pop(outcome.transfer).timeline
            self.endings[outcome.ending.value] += 1
            self.timeline = self.timeline.plus(timeline, now_s)
        what = f"transfer {outcome.transfer} {outcome.ending.value}"
        if outcome.reason:
            logger.info("%s: %s", what, outcome.reason)
        logger.debug("%s: %s", what, timeline.describe(now_s))
        self._outcomes.add(outcome)

    def take(self) -> list[O]:
        """Return what ended since the last call."""
        return self._outcomes.take()

    def wait(self, timeout_s: float) -> bool:
        """Wait until `take` has something to return or the loop is over; whether it came."""
        return self._outcomes.wait(lambda: self._loop.is_over, timeout_s)

    def wake(self) -> None:
        """Have everyone who waits look again."""
        self._outcomes.wake()

    def drain(self, abort: Callable[[str], None], *, end_s: float) -> None:
        """Abort what is open and wait until it is over, until `end_s` at most; nobody else may `take`."""
        try:
            for transfer in list(self.open):
                abort(transfer)
            while self.open and not self._loop.is_over and self._clock() < end_s:
                self.take()
                self.wait(end_s - self._clock())
        except TransferFailed:
            pass  # the loop's thread died: nothing will end any more

    def check_integrity(self) -> None:
        """Assert that the counts agree; under the loop's lock."""
        assert self.opened == len(self.open) + sum(self.endings.values()), (self.opened, self.endings)
