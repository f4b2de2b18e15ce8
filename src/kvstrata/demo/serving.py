"""One engine of the demonstration: what it is asked, and what is kept of its answers."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

from kvstrata.demo.prompt import DemoPrompt
from kvstrata.terminal import Terminal

ANSWER_TOKENS = 16


class Engine(Protocol):
    """The part of an engine that the demonstration uses; `kvstrata.vllm.engines.Engine` is one."""

    @property
    def max_tokens(self) -> int:
        """Tokens that fit the KV cache."""

    def answer(self, prompt: tuple[int, ...], *, max_new_tokens: int) -> Any:
        """Decode greedily; the result has `token_ids`, `text` and `seconds`."""

    def decode(self, prompts: list[tuple[int, ...]], *, new_tokens: int) -> Any:
        """Decode exactly `new_tokens` tokens for each; the result has `token_ids` and `s_per_token`."""

    def refusal(self, prompt: tuple[int, ...]) -> str | None:
        """Return the engine's words if it does not take the prompt."""

    def prefill_s(self, prompt: tuple[int, ...]) -> float:
        """Time one prefill."""

    def worker_statistics(self) -> list[dict[str, Any]]:
        """Return kvstrata's statistics, one dict a rank."""


# Opens an engine for (device budget in bytes, mode); mode is one of those below.
OpenEngine = Callable[[int, str], AbstractContextManager[Engine]]
PLAIN = "plain"
LAYERWISE, LOADS_SKIPPED = "layerwise", "loads skipped"
SPARSE, STALE_ROWS = "sparse", "stale rows"
TWO_RANKS, KVPP, BROADCASTS_SKIPPED = "two ranks", "kvpp", "broadcasts skipped"
WITHOUT_KVSTRATA = {PLAIN, TWO_RANKS}


@dataclass(frozen=True, kw_only=True)
class Decoded:
    """One decoding far beyond the answer. `counters` is what kvstrata's statistics grew by meanwhile."""

    token_ids: tuple[int, ...]
    s_per_token: float
    counters: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A prompt and an engine's greedy answer to it."""

    prompt: DemoPrompt
    token_ids: tuple[int, ...]
    text: str


@dataclass(frozen=True, kw_only=True)
class Served:
    """What one engine made of the prompt. `counters` is what kvstrata's statistics grew by for the answer."""

    device_kv_budget_bytes: int
    max_tokens: int
    refusal: str | None = None
    answer: str | None = None
    token_ids: tuple[int, ...] = ()
    prefill_s: tuple[float, ...] = ()  # one a run
    decoded: Decoded | None = None  # where it was asked for
    more: tuple[Asked, ...] = ()  # answers to further prompts, where they were asked
    counters: Mapping[str, float] = field(default_factory=dict)
    ranks: tuple[Mapping[str, Any], ...] = ()  # kvstrata's statistics at the end, in the order of the ranks

    @property
    def worker(self) -> Mapping[str, Any]:
        """The first rank's statistics; empty for plain vLLM."""
        return self.ranks[0] if self.ranks else {}

    @property
    def median_prefill_s(self) -> float | None:
        """Median over the runs, None if the engine did not take the prompt."""
        return statistics.median(self.prefill_s) if self.prefill_s else None

    @property
    def loaded_bytes(self) -> int:
        """Bytes that layerwise offload brought back to the device for the answer."""
        return int(self.counters.get("loaded_bytes", 0))

    @property
    def saved_bytes(self) -> int:
        """Bytes that layerwise offload saved to the host for the answer."""
        return int(self.counters.get("saved_bytes", 0))


@dataclass(frozen=True, kw_only=True)
class Servings:
    """Opens engines one after the other and asks each for the same prompt."""

    open_engine: OpenEngine
    prompt: DemoPrompt
    terminal: Terminal

    def serve(
        self,
        title: str,
        budget_bytes: int,
        mode: str,
        *,
        timed_prefills: int = 0,
        decode_tokens: int = 0,
        more_prompts: Sequence[DemoPrompt] = (),
    ) -> Served:
        """Return what one engine makes of the prompt, and then of `more_prompts`; raises what it raises."""
        with self.terminal.step(title), self.open_engine(budget_bytes, mode) as engine:
            return _ask(
                engine,
                self.prompt.token_ids,
                budget_bytes,
                has_worker=mode not in WITHOUT_KVSTRATA,
                timed_prefills=timed_prefills,
                decode_tokens=decode_tokens,
                more_prompts=more_prompts,
            )


def _ask(
    engine: Engine,
    prompt: tuple[int, ...],
    budget_bytes: int,
    *,
    has_worker: bool,
    timed_prefills: int,
    decode_tokens: int,
    more_prompts: Sequence[DemoPrompt],
) -> Served:
    refusal = engine.refusal(prompt)  # also the warm-up: the first prefill is never timed
    if refusal is not None:
        return Served(device_kv_budget_bytes=budget_bytes, max_tokens=engine.max_tokens, refusal=refusal)
    answer, counters = _counted(
        engine, lambda: engine.answer(prompt, max_new_tokens=ANSWER_TOKENS), has_worker=has_worker
    )
    prefill_s = tuple(engine.prefill_s(prompt) for _ in range(timed_prefills))
    decoded = None
    if decode_tokens:
        run, grown = _counted(
            engine, lambda: engine.decode([prompt], new_tokens=decode_tokens), has_worker=has_worker
        )
        decoded = Decoded(token_ids=tuple(run.token_ids[0]), s_per_token=run.s_per_token, counters=grown)
    return Served(
        device_kv_budget_bytes=budget_bytes,
        max_tokens=engine.max_tokens,
        answer=answer.text,
        token_ids=tuple(answer.token_ids),
        prefill_s=prefill_s,
        decoded=decoded,
        more=tuple(_asked(engine, more) for more in more_prompts),
        counters=counters,
        ranks=tuple(engine.worker_statistics()) if has_worker else (),
    )


def _asked(engine: Engine, prompt: DemoPrompt) -> Asked:
    answer = engine.answer(prompt.token_ids, max_new_tokens=ANSWER_TOKENS)
    return Asked(prompt=prompt, token_ids=tuple(answer.token_ids), text=answer.text)


def _counted(engine: Engine, ask: Callable[[], Any], *, has_worker: bool) -> tuple[Any, dict[str, float]]:
    """Return what `ask` returns, and what every statistic, summed over the ranks, grew by."""
    if not has_worker:
        return ask(), {}
    before = _totals(engine)
    result = ask()
    return result, {name: total - before.get(name, 0) for name, total in _totals(engine).items()}


def _totals(engine: Engine) -> dict[str, float]:
    totals: dict[str, float] = {}
    for rank in engine.worker_statistics():
        for name, value in rank.items():
            if isinstance(value, int | float) and not isinstance(value, bool):
                totals[name] = totals.get(name, 0) + value
    return totals


def mib(size_bytes: float) -> str:
    """Return a size for people, in MiB."""
    return f"{size_bytes / (1 << 20):.1f} MiB"
