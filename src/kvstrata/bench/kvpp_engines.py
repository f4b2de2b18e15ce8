"""KVPP against plain vLLM and against itself, two engines of two ranks each at a time.

An engine of two ranks takes half a minute to start. So five are started, each once: comparisons that follow
each other have an engine in common.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Protocol, Self

from kvstrata.bench.turns import Turns, take_turns
from kvstrata.errors import KVStrataError
from kvstrata.terminal import Terminal

# vLLM's ranks look for work without a pause for a second after their last; then they sleep.
QUIET_S = 1.3


class RankedEngine(Protocol):
    """The part of an engine that is measured; `EngineProcess` is one."""

    def max_tokens(self) -> int:
        """Tokens that fit the engine's KV cache."""

    def prefill_s(self, prompt: Sequence[int]) -> float:
        """Time one prefill."""

    def decode(self, prompts: Sequence[Sequence[int]], *, new_tokens: int) -> Any:
        """Serve the prompts at once; the result is a `kvstrata.vllm.engines.Decoding`."""

    def worker_statistics(self) -> list[dict[str, Any]]:
        """Return kvstrata's statistics, one dict a rank."""


@dataclass(frozen=True, kw_only=True)
class EngineKind:
    """What is asked of an engine. `broadcast` is kvpp_broadcast; None is plain vLLM."""

    broadcast: str | None
    rank_bytes: int

    @property
    def name(self) -> str:
        """For people, and for the result file."""
        return "plain" if self.broadcast is None else self.broadcast


OpenEngine = Callable[[EngineKind], AbstractContextManager[RankedEngine]]


@dataclass(frozen=True, kw_only=True)
class Work:
    """What every engine is asked, and how often."""

    prompt: Sequence[int]
    new_tokens: int
    warm_ups: int
    repeats: int


@dataclass(frozen=True, kw_only=True)
class KvppRuns:
    """Every timed turn. Decode is seconds a token, behind a prefill that is not counted."""

    prefill: Mapping[str, Turns]  # by kvpp_broadcast, over plain vLLM
    decode: Turns  # `referenced` over plain vLLM
    growth: Mapping[str, Turns]  # by kvpp_broadcast: decode with many blocks over decode with few
    growth_tokens: Mapping[str, tuple[int, int]]  # that fit the engines of `growth`
    max_tokens: Mapping[str, int]  # that fit plain vLLM and `referenced` in one budget per rank
    ranks: Sequence[Mapping[str, Any]]  # statistics of `referenced`


def measure_engines(
    work: Work,
    open_engine: OpenEngine,
    terminal: Terminal,
    *,
    rank_bytes: int,
    growth: int,
    pause: Callable[[float], None] = time.sleep,
) -> KvppRuns:
    """Time prefill and decode against plain vLLM, and decode with `growth` times the bytes for blocks.

    Raises KVStrataError if two engines ever answer differently: their times could not be compared.
    """
    plain = EngineKind(broadcast=None, rank_bytes=rank_bytes)
    referenced, everything = (
        EngineKind(broadcast=name, rank_bytes=rank_bytes) for name in ("referenced", "all")
    )
    more_referenced, more_of_everything = (
        replace(kind, rank_bytes=growth * rank_bytes) for kind in (referenced, everything)
    )
    growing = f"{growth} times the blocks"
    with ComparedEngines(open_engine, work, terminal, pause) as engines:
        engines.compare(referenced, more_referenced)
        grown_referenced = engines.decode_turns(f"referenced, {growing}")
        engines.compare(plain, referenced)
        prefill_referenced = engines.prefill_turns("referenced against plain vLLM")
        decode = engines.decode_turns("referenced against plain vLLM")
        ranks = engines.other.worker_statistics()
        engines.compare(plain, everything)
        prefill_everything = engines.prefill_turns("all against plain vLLM")
        engines.compare(everything, more_of_everything)
        grown_everything = engines.decode_turns(f"all, {growing}")
    tokens = engines.max_tokens
    return KvppRuns(
        prefill={"referenced": prefill_referenced, "all": prefill_everything},
        decode=decode,
        growth={"referenced": grown_referenced, "all": grown_everything},
        growth_tokens={
            "referenced": (tokens[referenced], tokens[more_referenced]),
            "all": (tokens[everything], tokens[more_of_everything]),
        },
        max_tokens={"plain": tokens[plain], "kvpp": tokens[referenced]},
        ranks=ranks,
    )


class ComparedEngines:
    """The two engines that are being compared. Use it as a context manager."""

    def __init__(
        self, open_engine: OpenEngine, work: Work, terminal: Terminal, pause: Callable[[float], None]
    ) -> None:
        self._open_engine = open_engine
        self._work = work
        self._terminal = terminal
        self._pause = pause
        self._running: dict[EngineKind, tuple[ExitStack, RankedEngine]] = {}
        self.max_tokens: dict[EngineKind, int] = {}  # of every engine that was ever compared

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop_all_but()

    def compare(self, base: EngineKind, other: EngineKind) -> None:
        """Stop the engines of other kinds, start what is missing, and see that both answer alike."""
        self._stop_all_but(base, other)
        self.base, self.other = self._started(base), self._started(other)
        with self._terminal.step("warm-up, and do both do the same work?"):
            answers = [self._decode(engine).token_ids for engine in (self.base, self.other)]
        if answers[0] != answers[1]:
            raise KVStrataError(
                f"two engines of two ranks, {base.name} and {other.name}, answer differently; run "
                "`kvstrata demo`"
            )

    def prefill_turns(self, title: str) -> Turns:
        """Time prefills of the prompt."""
        prompt = self._work.prompt
        return self._turns(
            lambda engine: engine.prefill_s(prompt),
            warm_ups=self._work.warm_ups,
            title=f"{self._work.repeats} prefills of {len(prompt)} tokens each, by turns: {title}",
        )

    def decode_turns(self, title: str) -> Turns:
        """Time decoding behind the prompt, in seconds a token."""
        return self._turns(
            lambda engine: float(self._decode(engine).s_per_token),
            warm_ups=0,  # both have decoded these tokens when they were compared
            title=f"{self._work.repeats} times {self._work.new_tokens} tokens each, by turns: {title}",
        )

    def _turns(self, timed: Callable[[RankedEngine], float], *, warm_ups: int, title: str) -> Turns:
        return take_turns(
            lambda: timed(self.base),
            lambda: timed(self.other),
            warm_ups=warm_ups,
            repeats=self._work.repeats,
            terminal=self._terminal,
            title=title,
            quiet_s=QUIET_S,
            pause=self._pause,
        )

    def _decode(self, engine: RankedEngine) -> Any:
        return engine.decode([self._work.prompt], new_tokens=self._work.new_tokens)

    def _started(self, kind: EngineKind) -> RankedEngine:
        if kind not in self._running:
            stack = ExitStack()
            self._running[kind] = stack, stack.enter_context(self._open_engine(kind))
        engine = self._running[kind][1]
        self.max_tokens[kind] = engine.max_tokens()
        return engine

    def _stop_all_but(self, *kinds: EngineKind) -> None:
        for kind in [kind for kind in self._running if kind not in kinds]:
            stack, _ = self._running.pop(kind)
            stack.close()
