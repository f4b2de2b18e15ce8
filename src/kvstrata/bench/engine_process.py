"""An engine in a process of its own, so that two of them can take turns on one machine."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from kvstrata.errors import DeadlineExceeded, KVStrataError

if TYPE_CHECKING:
    from kvstrata.vllm.engines import Decoding

START_DEADLINE_S = 300.0
CALL_DEADLINE_S = 900.0
STOP_DEADLINE_S = 30.0


class EngineProcess:
    """Proxy of one engine; use it as a context manager. Calls are made one at a time, from one thread.

    `open_engine_arguments` go to `kvstrata.vllm.engines.open_engine` in the child, with `environment` set.
    """

    def __init__(
        self,
        name: str,
        open_engine_arguments: dict[str, Any],
        *,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._name = name
        context = multiprocessing.get_context("spawn")  # a forked child would inherit this process's threads
        self._connection, theirs = context.Pipe()
        self._process = context.Process(  # no daemon: those may have no children, and a rank is a process
            target=_serve,
            args=(theirs, open_engine_arguments, dict(environment or {})),
            name=f"kvstrata-bench-{name}",
        )
        self._process.start()
        theirs.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._connection.close()  # the child ends when it can read no more
        self._process.join(STOP_DEADLINE_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join(STOP_DEADLINE_S)

    def wait_until_ready(self) -> None:
        """Return when the engine has started. Call it once, before anything else."""
        self._receive("start", START_DEADLINE_S)

    def max_tokens(self) -> int:
        """Tokens that fit the engine's KV cache."""
        return int(self._call("max_tokens"))

    def prefill_s(self, prompt: Sequence[int]) -> float:
        """Time one prefill, measured in the engine's process."""
        return float(self._call("prefill_s", tuple(prompt)))

    def answer_ids(self, prompt: Sequence[int]) -> tuple[int, ...]:
        """Return 16 greedy tokens, to tell whether two engines do the same work."""
        return tuple(self._call("answer_ids", tuple(prompt)))

    def decode(self, prompts: Sequence[Sequence[int]], *, new_tokens: int) -> Decoding:
        """Serve the prompts at once, `new_tokens` tokens each; timed in the engine's process."""
        decoding: Decoding = self._call("decode", [tuple(prompt) for prompt in prompts], new_tokens)
        return decoding

    def worker_statistics(self) -> list[dict[str, Any]]:
        """Return kvstrata's statistics, one dict a rank."""
        return list(self._call("worker_statistics"))

    def _call(self, what: str, *arguments: Any) -> Any:
        self._connection.send((what, arguments))
        return self._receive(what, CALL_DEADLINE_S)

    def _receive(self, what: str, deadline_s: float) -> Any:
        if not self._connection.poll(deadline_s):
            raise DeadlineExceeded(f"{what} of the {self._name} engine", deadline_s)
        try:
            error, value = self._connection.recv()
        except EOFError:
            raise KVStrataError(f"the {self._name} engine's process ended during {what}") from None
        if error is not None:
            raise KVStrataError(f"the {self._name} engine failed during {what}: {error}")
        return value


def _serve(
    connection: Connection, open_engine_arguments: dict[str, Any], environment: dict[str, str]
) -> None:
    """Child: open the engine, answer calls until the other end closes."""
    os.environ.update(environment)
    try:
        from kvstrata.vllm.engines import open_engine

        with open_engine(**open_engine_arguments) as engine:
            calls: dict[str, Callable[..., Any]] = {
                "max_tokens": lambda: engine.max_tokens,
                "prefill_s": engine.prefill_s,
                "answer_ids": lambda prompt: engine.answer(prompt, max_new_tokens=16).token_ids,
                "decode": lambda prompts, new_tokens: engine.decode(prompts, new_tokens=new_tokens),
                "worker_statistics": engine.worker_statistics,
            }
            connection.send((None, None))
            while True:
                try:
                    what, arguments = connection.recv()
                except EOFError:
                    return
                connection.send((None, calls[what](*arguments)))
    except Exception as error:
        connection.send((f"{type(error).__name__}: {error}", None))
        raise
