"""One engine of a prefill/decode pair, in a process of its own that serves requests over a pipe.

Unlike an API server it starts in half the time and can be asked for statistics and integrity; the connectors,
sockets and shared memory are the real ones.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import warm_process
from engine_process import losing_objects_of
from engines import STATISTICS

if TYPE_CHECKING:
    from pd_losses import MessageLosses
    from pd_reads import ReadSwitch

# Generous: the machine may be busy, and a start may compile kernels.
START_DEADLINE_S = 360.0
CALL_DEADLINE_S = 180.0
END_DEADLINE_S = 60.0
_SHOWN_LOG = 4000

Serve = Callable[[Connection, dict[str, Any]], None]


def summed(ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the figures of the first rank, with numbers summed over the ranks."""
    return {
        key: sum(rank[key] for rank in ranks) if isinstance(value, (int, float)) else value
        for key, value in ranks[0].items()
    }


class PdEngine:
    """The parent's side of one engine process. Calls may come from several threads."""

    def __init__(
        self, name: str, arguments: dict[str, Any], *, cpus: str, log: Path, serve: Serve | None = None
    ) -> None:
        """Start the process; `cpus` is what vLLM binds its ranks to, `log` takes what it prints.

        `serve` is what the process runs.
        """
        self._connection, theirs = warm_process.CONTEXT.Pipe()
        self.name = name
        self.free_at_start = -1
        self._log = log
        changes = {
            "VLLM_LOGGING_LEVEL": "INFO",
            "VLLM_CPU_OMP_THREADS_BIND": cpus,
            "OMP_NUM_THREADS": "1",
        }
        self._process = warm_process.start(serve or _serve, theirs, arguments, changes=changes, log=log)
        theirs.close()
        self._lock = threading.Lock()
        self._news = threading.Condition()
        self._finished: dict[str, dict[str, Any]] = {}
        self._replies: dict[int, Any] = {}
        self._calls = 0
        self._error: str | None = None
        self._reader = threading.Thread(target=self._read, name=f"reader of {name}", daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def wait_until_ready(self) -> None:
        self.free_at_start = self.call("free_blocks", deadline_s=START_DEADLINE_S)

    @property
    def is_alive(self) -> bool:
        return self._process.is_alive()

    def log(self) -> str:
        """What the process has printed so far."""
        return self._log.read_text(errors="replace")

    def add(
        self, request_id: str, prompt: Sequence[int], new_tokens: int, params: dict[str, Any] | None
    ) -> None:
        self._send(("add", request_id, list(prompt), new_tokens, params))

    def abort(self, request_id: str) -> None:
        self._send(("abort", request_id))

    def answer(self, request_id: str, deadline_s: float = CALL_DEADLINE_S) -> dict[str, Any]:
        """Wait for a request to end: {"tokens", "cached", "reason"}."""
        return self._wait(lambda: self._finished.get(request_id), f"end of request {request_id}", deadline_s)

    def has_answered(self, request_id: str) -> bool:
        return request_id in self._finished

    def call(self, what: str, *arguments: Any, deadline_s: float = CALL_DEADLINE_S) -> Any:
        """Run a named call in the engine's process and return its result."""
        with self._lock:
            self._calls += 1
            number = self._calls
        self._send(("call", number, what, arguments))
        return self._wait(lambda: self._replies.get(number), f"call {what}", deadline_s)[0]

    def ranks(self, method: str) -> list[Any]:
        """What each rank answers to a method of its worker."""
        return list(self.call("ranks", method))

    def statistics(self) -> dict[str, Any]:
        """Figures of the first rank; numbers are summed over the ranks."""
        return summed(self.ranks(STATISTICS))

    def kill(self, signal_number: int = signal.SIGKILL) -> None:
        """Signal the process; after SIGKILL it is gone when this returns."""
        assert self.is_alive, f"the {self.name} engine has ended by itself"
        os.kill(self.pid, signal_number)
        if signal_number == signal.SIGKILL:
            self._process.join(30)
            assert not self._process.is_alive(), f"the {self.name} engine outlived SIGKILL"

    def begin_end(self) -> None:
        """Tell the process to end."""
        if self.is_alive:  # else its number may be another process's by now
            os.kill(self.pid, signal.SIGCONT)
        with contextlib.suppress(OSError):
            self._send(("end",))

    def close(self) -> None:
        """End the process. Raises AssertionError if it does not, and kills it and those that it started."""
        self.begin_end()
        self._process.join(END_DEADLINE_S)
        if self._process.is_alive():
            self._process.kill_family()
            raise AssertionError(f"the {self.name} engine did not end\n{self.log()[-_SHOWN_LOG:]}")

    def _send(self, message: Any) -> None:
        with self._lock:
            self._connection.send(message)

    def _read(self) -> None:
        while True:
            try:
                kind, key, value = self._connection.recv()
            except (EOFError, OSError):
                kind, key, value = "dead", "", "its process ended"
            with self._news:
                if kind == "finished":
                    self._finished[key] = value
                elif kind == "reply":
                    self._replies[key] = (value,)
                else:
                    self._error = str(value)
                self._news.notify_all()
            if kind == "dead":
                return

    def _wait(self, found: Any, what: str, deadline_s: float) -> Any:
        ends = time.monotonic() + deadline_s
        with self._news:
            while (value := found()) is None:
                assert self._error is None, (
                    f"{what}: the {self.name} engine failed: {self._error}\n{self.log()[-_SHOWN_LOG:]}"
                )
                left = ends - time.monotonic()
                assert left > 0, (
                    f"{what}: not within {deadline_s} s on the {self.name} engine\n{self.log()[-_SHOWN_LOG:]}"
                )
                self._news.wait(left)
        return value


def _serve(connection: Connection, arguments: dict[str, Any]) -> None:
    try:
        import pd_losses
        import pd_reads
        from vllm import LLM

        switch = pd_reads.ReadSwitch()
        pd_reads.install(switch)
        server = _Server(connection, LLM(**arguments), switch, pd_losses.MessageLosses())
        server.run()
    except BaseException as error:
        connection.send(("dead", "", f"{type(error).__name__}: {error}"))
        raise


class _Server:
    def __init__(self, connection: Connection, llm: Any, switch: ReadSwitch, losses: MessageLosses) -> None:
        self._connection = connection
        self._llm = llm
        self._engine = llm.llm_engine
        self._switch = switch
        self._messages = losses
        self._steps_left: int | None = None
        self._losses = contextlib.ExitStack()

    def run(self) -> None:
        while True:
            while self._connection.poll(0):
                message = self._connection.recv()
                if message[0] == "end":
                    begun_s = time.monotonic()
                    self._engine.engine_core.shutdown()
                    print(f"shut down within {time.monotonic() - begun_s:.1f} s", flush=True)
                    return
                self._handle(message)
            if not self._step():
                self._connection.poll(0.002)

    def _step(self) -> bool:
        """Run one engine step if vLLM has anything left to do, such as blocks that are still read."""
        core = self._engine.engine_core.engine_core
        if self._steps_left == 0 or not (core.scheduler.has_requests() or core.batch_queue):
            return False
        if self._steps_left is not None:
            self._steps_left -= 1
        for output in self._engine.step():
            if output.finished:
                completion = output.outputs[0]
                self._connection.send(
                    (
                        "finished",
                        output.request_id,
                        {
                            "tokens": list(completion.token_ids),
                            "cached": output.num_cached_tokens or 0,
                            "reason": completion.finish_reason,
                        },
                    )
                )
        return True

    def _handle(self, message: Any) -> None:
        if message[0] == "add":
            from vllm import SamplingParams

            _, request_id, prompt, new_tokens, params = message
            sampling = SamplingParams(
                temperature=0.0,
                max_tokens=new_tokens,
                ignore_eos=True,
                detokenize=False,
                extra_args={"kv_transfer_params": params} if params is not None else None,
            )
            self._engine.add_request(request_id, {"prompt_token_ids": prompt}, sampling)
        elif message[0] == "abort":
            self._engine.abort_request([message[1]])
        else:
            _, number, what, arguments = message
            self._connection.send(("reply", number, getattr(self, f"_call_{what}")(*arguments)))

    def _call_steps_left(self) -> int:
        return -1 if self._steps_left is None else self._steps_left

    def _call_allow_steps(self, steps: int | None) -> bool:
        """Run so many engine steps more, then stand still; endpoints go on. None: run for ever."""
        self._steps_left = steps
        return True

    def _call_set_reads(self, mode: str, after: int = 0, times: int = 1 << 30) -> bool:
        self._switch.set(mode, after=after, times=times)
        return True

    def _call_held_reads(self) -> int:
        return self._switch.held

    def _call_lose_messages(self, to_lose: dict[str, int]) -> bool:
        from kvstrata.vllm.worker import own_connector

        remote = own_connector()._remote
        assert remote is not None
        sides = [side for side in (remote.sender, remote.receiver) if side is not None]
        self._messages.set(to_lose, [side._endpoint._loop for side in sides])
        return True

    def _call_messages_to_lose(self) -> int:
        return self._messages.left()

    def _call_lose(self, rank: str | None) -> bool:
        """From now on, lose what this rank is about to fetch from the store; None: no more."""
        self._losses.close()
        self._losses.enter_context(losing_objects_of(rank))
        return True

    def _call_counter(self, name: str) -> float:
        """Value of one of vLLM's counters."""
        return float(sum(metric.value for metric in self._llm.get_metrics() if metric.name == name))

    def _call_ranks(self, method: str) -> Any:
        return self._llm.collective_rpc(method)

    def _call_num_blocks(self) -> int:
        return int(self._engine.vllm_config.cache_config.num_gpu_blocks)

    def _call_free_blocks(self) -> int:
        """Blocks that no request holds; those of the prefix cache count as free."""
        scheduler = self._engine.engine_core.engine_core.scheduler
        return int(scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    def _call_forget_prefixes(self) -> bool:
        return bool(self._llm.reset_prefix_cache())

    def _call_check_integrity(self) -> bool:
        """Let data path and remote read check themselves on every rank."""
        self._llm.collective_rpc(_check_integrity)
        return True


def _check_integrity(worker: Any) -> None:
    from kvstrata.vllm.worker import own_connector

    connector = own_connector()
    assert connector._data_path is not None
    connector._data_path.check_integrity()
    if connector._remote is not None:
        connector._remote.check_integrity()
