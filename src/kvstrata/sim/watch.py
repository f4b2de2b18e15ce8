"""Deadlines that the simulated system has to keep: what must be over by when, or P7 does not hold."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvstrata.sim.world import Process, Violation, World

_GRACE_S = 1.0
"""After a stop: what lies in the sockets is answered, and timers run, within this."""


class Watch:
    """Raises Violation in the run when something is not over in time.

    A process that is stopped cannot keep a deadline: it has until some time after it goes on.
    """

    def __init__(self, world: World) -> None:
        self._world = world

    def within(
        self,
        seconds: float,
        processes: Sequence[Process],
        is_over: Callable[[], bool],
        what: str,
        *,
        grace_s: float = 0.0,
    ) -> None:
        """Expect `is_over()` after `seconds`, or `grace_s` and a second after the last stop of `processes`.

        A crash of one of them ends the watch: the memory is gone.
        """
        lives = [process.life for process in processes]
        self._world.at(seconds, self._look, processes, lives, is_over, what, grace_s + _GRACE_S)

    def _look(
        self,
        processes: Sequence[Process],
        lives: list[int],
        is_over: Callable[[], bool],
        what: str,
        grace_s: float,
    ) -> None:
        if lives != [process.life for process in processes] or is_over():
            return
        went_on_s = max(process.resumed_s for process in processes)
        if any(process.is_stopped for process in processes) or self._world.now_s < went_on_s + grace_s:
            self._world.at(grace_s, self._look, processes, lives, is_over, what, grace_s)
            return
        raise Violation("P7", f"{what} is not over at {self._world.now_s:.3f} s")
