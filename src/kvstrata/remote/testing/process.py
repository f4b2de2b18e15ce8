"""For tests: one side of remote read in a process of its own, to be killed, stopped and gone on with."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any

from kvstrata.remote.options import EndpointOptions
from kvstrata.remote.testing.memory import Shape
from kvstrata.remote.testing.sides import ConsumerSide, ProducerSide, poll_until
from kvstrata.remote.transports.registry import transport_for

START_S = 120.0  # imports, on a machine that does many other things
ANSWER_S = 60.0


class SideProcess:
    """A `ProducerSide` or `ConsumerSide` in another process; its methods are called by `ask`."""

    def __init__(
        self,
        side: type[ProducerSide] | type[ConsumerSide],
        *,
        transports: Sequence[str],
        options: EndpointOptions,
        shape: Shape,
        **more: Any,
    ) -> None:
        """Start it; `more` goes to the side's constructor. Returns at once: the first `ask` waits."""
        # Forked from a clean process that has imported and compiled everything: a start takes no seconds.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["kvstrata.remote.testing.preload"])
        self._pipe, theirs = context.Pipe()
        settings = more | {"options": options, "shape": shape}
        self._process = context.Process(
            target=_serve, args=(theirs, side, tuple(transports), settings), daemon=True
        )
        self._process.start()
        theirs.close()
        self._is_started = False

    def __enter__(self) -> SideProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

    @property
    def pid(self) -> int:
        """Of the process."""
        assert self._process.pid is not None
        return self._process.pid

    def ask(self, method: str, **arguments: Any) -> Any:
        """Call a method over there; raises AssertionError with what it raised, or if it does not answer."""
        self._pipe.send((method, arguments))
        deadline_s = ANSWER_S if self._is_started else START_S
        assert self._pipe.poll(deadline_s), f"{method}: no answer from process {self.pid} in {deadline_s} s"
        try:
            value, error = self._pipe.recv()
        except EOFError:
            raise AssertionError(f"{method}: process {self.pid} ended") from None
        self._is_started = True
        assert error is None, error
        return value

    def kill(self) -> None:
        """SIGKILL, whatever it is doing; harmless to repeat."""
        self._process.kill()
        self._process.join(ANSWER_S)

    def pause(self) -> None:
        """SIGSTOP, and return when it has stopped."""
        os.kill(self.pid, signal.SIGSTOP)
        stat = Path(f"/proc/{self.pid}/stat")
        poll_until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T", ANSWER_S, "it to stop")

    def resume(self) -> None:
        """SIGCONT."""
        os.kill(self.pid, signal.SIGCONT)


def _serve(pipe: Connection, make: type[Any], transports: Sequence[str], settings: dict[str, Any]) -> None:
    side = make(transports=[transport_for(name) for name in transports], **settings)
    while True:
        try:
            method, arguments = pipe.recv()
        except EOFError:
            return  # the test is over
        try:
            pipe.send((getattr(side, method)(**arguments), None))
        except Exception as error:
            pipe.send((None, f"{method}: {type(error).__name__}: {error}"))
