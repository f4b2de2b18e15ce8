"""Data-parallel replicas behind one engine client, in a process of its own that serves requests over a pipe.

vLLM starts an engine process for each replica. A request goes to the replica that the test names.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

from engines import STATISTICS, Outcome
from pd import AT_REST_DEADLINE_S, wait_for
from pd_engine import START_DEADLINE_S, PdEngine, summed
from rank_extension import CHECK_INTEGRITY, EXTENSION

COUNT = 2
TWO_REPLICAS = {"data_parallel_size": COUNT, **EXTENSION}  # engine arguments


class Replica:
    """One of an engine's replicas, with what a `pd.Pair` needs of an engine."""

    def __init__(self, engine: ReplicatedEngine, index: int) -> None:
        self.engine, self.index = engine, index
        self.name = f"{engine.name} replica {index}"

    def add(
        self, request_id: str, prompt: Sequence[int], new_tokens: int, params: dict[str, Any] | None
    ) -> None:
        self.engine.add_to(self.index, self._own(request_id), prompt, new_tokens, params)

    def answer(self, request_id: str) -> dict[str, Any]:
        return self.engine.answer(self._own(request_id))

    def call(self, what: str, *arguments: Any) -> Any:
        return self.engine.call(what, self.index, *arguments)

    def ranks(self, method: str) -> list[Any]:
        """What each rank of this replica answers to a method of its worker."""
        return list(self.call("ranks", method))

    def _own(self, request_id: str) -> str:
        """The client has one name for one request, and both replicas may have parts of one."""
        return f"{request_id}-{self.index}"

    def statistics(self) -> dict[str, Any]:
        """Figures of this replica's first rank; numbers are summed over its ranks."""
        return summed(self.ranks(STATISTICS))

    def check_at_rest(self) -> None:
        """Soon nothing of any transfer is left, no block is held, and all parts agree."""

        def is_at_rest() -> bool:
            statistics = self.statistics()
            open_ones = sum(statistics[key] for key in ("sends_open", "pulls_open", "quarantined_blocks"))
            return not open_ones and bool(self.call("forget_prefixes"))

        wait_for(is_at_rest, f"rest of the {self.name}", AT_REST_DEADLINE_S)
        self.ranks(CHECK_INTEGRITY)


class ReplicatedEngine(PdEngine):
    """The parent's side of the process. Arguments hold `TWO_REPLICAS`; `cpus` has a part for each rank."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, serve=_serve, **named)
        self._ranks = len(named["cpus"].split("|"))
        self.replicas = [Replica(self, index) for index in range(COUNT)]
        self._asked = 0

    def wait_until_ready(self) -> None:
        deadline_s = START_DEADLINE_S * max(1, self._ranks / 4)  # each rank imports vLLM
        for index in range(COUNT):
            self.call("ready", index, deadline_s=deadline_s)

    def add_to(
        self,
        index: int,
        request_id: str,
        prompt: Sequence[int],
        new_tokens: int,
        params: dict[str, Any] | None,
    ) -> None:
        self._send(("add", index, request_id, list(prompt), new_tokens, params))

    def ask(self, *prompts: Sequence[Sequence[int]], new_tokens: int) -> list[Outcome]:
        """Answers of the replicas, asked at the same time: the first prompts go to the first of them."""
        names: list[list[str]] = []
        for replica, own in zip(self.replicas, prompts, strict=True):
            names.append([])
            for prompt in own:
                self._asked += 1
                names[-1].append(f"asked-{self._asked}")
                replica.add(names[-1][-1], prompt, new_tokens, None)
        answers = [
            [replica.answer(name) for name in own] for replica, own in zip(self.replicas, names, strict=True)
        ]
        return [
            Outcome(
                tokens=[answer["tokens"] for answer in own],
                logprobs=[[] for _ in own],
                cached_tokens=[answer["cached"] for answer in own],
            )
            for own in answers
        ]


def _serve(connection: Connection, arguments: dict[str, Any]) -> None:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
    try:
        asyncio.run(_Server(connection).run(arguments))
    except BaseException as error:
        connection.send(("dead", "", f"{type(error).__name__}: {error}"))
        raise


class _Server:
    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self, arguments: dict[str, Any]) -> None:
        from vllm import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        self._engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
        try:
            while (message := await asyncio.to_thread(self._connection.recv))[0] != "end":
                work = self._add(*message[1:]) if message[0] == "add" else self._answer(*message[1:])
                task = asyncio.create_task(work)
                self._tasks.add(task)
                task.add_done_callback(self._done)
        finally:
            self._engine.shutdown()

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._connection.send(("dead", "", f"{type(error).__name__}: {error}"))

    async def _add(
        self, index: int, request_id: str, prompt: list[int], new_tokens: int, params: dict[str, Any] | None
    ) -> None:
        from vllm import SamplingParams

        sampling = SamplingParams(
            temperature=0.0,
            max_tokens=new_tokens,
            ignore_eos=True,
            detokenize=False,
            extra_args={"kv_transfer_params": params} if params is not None else None,
        )
        async for output in self._engine.generate(
            {"prompt_token_ids": prompt}, sampling, request_id=request_id, data_parallel_rank=index
        ):
            last = output
        completion = last.outputs[0]
        answer = {
            "tokens": list(completion.token_ids),
            "cached": last.num_cached_tokens or 0,
            "reason": completion.finish_reason,
        }
        self._connection.send(("finished", request_id, answer))

    async def _answer(self, number: int, what: str, arguments: Sequence[Any]) -> None:
        value = await getattr(self, f"_call_{what}")(*arguments)
        self._connection.send(("reply", number, value))

    async def _call_ready(self, index: int) -> bool:
        return bool(await self._of_replica(index, "get_supported_tasks"))

    async def _call_ranks(self, index: int, method: str) -> Any:
        return await self._of_replica(index, "collective_rpc", method, None, (), None)

    async def _call_forget_prefixes(self, index: int) -> bool:
        """Empty the replica's own prefix cache; False while a block is in use."""
        return bool(await self._of_replica(index, "reset_prefix_cache", False, False))

    async def _of_replica(self, index: int, method: str, *arguments: Any) -> Any:
        """The client's own call asks all replicas and drops all answers but one."""
        client = self._engine.engine_core
        return await client._call_utility_async(method, *arguments, engine=client.core_engines[index])
