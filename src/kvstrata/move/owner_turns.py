"""How a rank takes its turns in KVPP, whatever moves the bytes: open, move, settle, in lane order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, Protocol

from kvstrata.core.owners import OwnerPlan
from kvstrata.errors import GateViolation, TransferFailed
from kvstrata.memory.owner_board import Turn
from kvstrata.move.carrier import LOAD_LANE, CarrierStatistics
from kvstrata.move.engine import CopyEngine, CopyToken
from kvstrata.move.ledger import AlreadyDone
from kvstrata.move.plan import CopyPlan

Payload = Literal["referenced", "all"]
"""The blocks that a forward's requests reference, or all allocated blocks as in the seed."""


@dataclass(frozen=True, kw_only=True)
class OwnerStatistics(CarrierStatistics):
    """Totals of a carrier that brings layers from their owners.

    `broadcast_s` less the pipeline's `load_wait_s` is what computation hid.
    """

    broadcasts: int = 0
    """Layers that this rank gave to the others; the sum over the ranks is one for each layer and forward."""
    broadcast_bytes: int = 0
    """Bytes of those, counted once however many ranks received them."""
    broadcast_s: float = 0.0
    """From the start of each load until every rank had the layer."""
    broadcast_wait_s: float = 0.0
    """Part of `broadcast_s` spent waiting for other ranks."""


class Meeting(Protocol):
    """How the ranks of a group agree on a turn. The load lane calls `open` and `settle`, in turn."""

    def open(self, turn: Turn, failure: str | None) -> None:
        """Return when the owner's rows may be taken. `failure`: why this rank cannot take part.

        Raises TransferFailed or DeadlineExceeded where they will not be.
        """
        ...

    def settle(self, turn: Turn, failure: str | None) -> None:
        """Return when all ranks have the layer; raise alike on all of them where one has not.

        Called whether or not `open` raised; `failure` is then its reason, or why this rank lacks the rows.
        """
        ...

    def leave(self, step: int) -> None:
        """Take no further part in `step`."""
        ...


class OwnerTurns:
    """Numbers this rank's turns, alike on all ranks, and runs them on the load lane.

    Only forwards with history have turns, so that all count the same whatever else a rank is made to run.
    """

    def __init__(
        self, *, plan: OwnerPlan, engine: CopyEngine, meeting: Meeting, clock: Callable[[], float]
    ) -> None:
        self._plan = plan
        self._engine = engine
        self._meeting = meeting
        self._clock = clock
        self._step = 0
        self._has_history = False
        self._last_number = 0
        self._last: tuple[CopyToken, ...] = ()  # the operations of the last turn
        self._broken: tuple[int, str] | None = None  # the step that failed, and why
        self._begun_s = 0.0
        self.transfer_s = 0.0
        """From the start of each turn to its end."""

    @property
    def is_idle(self) -> bool:
        """Whether the last turn has ended with all its parts, so that nothing moves.

        An engine that was closed too early fails what is to come and leaves what is running.
        """
        return all(_is_settled(token) for token in self._last)

    def begin_step(self) -> None:
        """Start a forward. Raises GateViolation while a turn of the one before is pending."""
        if not self.is_idle:
            raise GateViolation(f"a new forward begins while {self._last[-1].name!r} is pending")
        self._last = ()
        self._has_history = False

    def end_step(self) -> None:
        """Take no further part in the forward."""
        self._meeting.leave(self._step)

    def pass_over(self, layer: int, *, after: Sequence[CopyToken]) -> CopyToken:
        """For a forward without history: nothing moves, and nobody waits but for this rank's own `after`."""
        name = f"load of layer {layer}"
        if not after:
            return AlreadyDone(name)
        return self._engine.lane(LOAD_LANE).submit(CopyPlan.empty(), after=after, name=name)

    def take(
        self, layer: int, work: CopyPlan | Callable[[Turn], None], *, after: Sequence[CopyToken]
    ) -> CopyToken:
        """Take the turn of `layer`: agree that its rows are ready, do `work`, agree that all have them.

        Raises GateViolation for a layer out of order: each is loaded once in a forward.
        """
        turn = self._next(layer)
        lane = self._engine.lane(LOAD_LANE)
        name = f"load of layer {layer}"
        # Each operation runs behind the one before it, but not `after` it: the others must hear of a failure.
        ready = lane.call(_do_nothing, after=after, name=f"what the {name} comes after") if after else None
        opened = lane.call(lambda: self._open(turn, ready), name=f"start of the {name}")
        moved = None
        if not isinstance(work, CopyPlan):
            moved = lane.call(partial(work, turn), after=(opened,), name=f"broadcast of layer {layer}")
        elif len(work):
            moved = lane.submit(work, after=(opened,), name=f"copy of layer {layer}")
        token = lane.call(lambda: self._settle(turn, ready, opened, moved), name=name)
        self._last = (opened, *([moved] if moved else []), token)
        return token

    def _next(self, layer: int) -> Turn:
        ordinal, owner = self._plan.ordinal(layer), self._plan.owner_of(layer)
        step = self._step if self._has_history else self._step + 1
        number = step * len(self._plan.targets) + ordinal + 1
        if number <= self._last_number:
            raise GateViolation(f"layer {layer} is loaded once in a forward, and after the layers before it")
        self._has_history = True
        self._step, self._last_number = step, number
        return Turn(step=step, number=number, layer=layer, owner=owner)

    def _open(self, turn: Turn, ready: CopyToken | None) -> None:
        self._begun_s = self._clock()
        self._check_step(turn)
        self._meeting.open(turn, _failure(ready))

    def _settle(self, turn: Turn, *tokens: CopyToken | None) -> None:
        self._check_step(turn)
        failure = next((why for token in tokens if (why := _failure(token)) is not None), None)
        try:
            self._meeting.settle(turn, failure)
        except Exception as trouble:
            self._broken = (turn.step, str(trouble))
            raise
        finally:
            self.transfer_s += self._clock() - self._begun_s

    def _check_step(self, turn: Turn) -> None:
        """A turn that failed fails all later ones of its forward, on every rank, without another word."""
        if self._broken is not None and self._broken[0] == turn.step:
            raise TransferFailed(self._broken[1])


def _do_nothing() -> None:
    """Stands in a lane for what it comes after."""


def _is_settled(token: CopyToken) -> bool:
    try:
        return token.done()
    except TransferFailed:
        return True


def _failure(token: CopyToken | None) -> str | None:
    """Why an operation that the lane has run failed; None if it did not, or there was none."""
    if token is None:
        return None
    try:
        is_done = token.done()
    except TransferFailed as trouble:
        return str(trouble.__cause__ or trouble)
    assert is_done, f"{token.name!r} should have run before"
    return None
