"""Two engines decode the same prompts by turns; what is kept of every turn."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Protocol

from kvstrata.errors import KVStrataError
from kvstrata.terminal import Terminal

# After a run, OpenMP threads spin for a moment; the other engine's turn starts when they sleep.
QUIET_S = 0.4
ROW_COUNTERS = ("selected_rows", "hit_rows", "missed_rows", "placed_rows", "evicted_rows", "miss_bytes")


class Decoder(Protocol):
    """The part of an engine that is measured; `EngineProcess` is one."""

    def max_tokens(self) -> int:
        """Tokens that fit the engine's KV cache."""

    def decode(self, prompts: Sequence[Sequence[int]], *, new_tokens: int) -> Any:
        """Serve the prompts at once; the result is a `kvstrata.vllm.engines.Decoding`."""

    def worker_statistics(self) -> list[dict[str, Any]]:
        """Return kvstrata's statistics, one dict a rank."""


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Two engines on one machine."""

    plain: Decoder
    kvstrata: Decoder


@dataclass(frozen=True, kw_only=True)
class PairRuns:
    """Every timed turn of both; they took turns, plain first.

    `s_per_token` is None where the requests never decode all together. `rows` counts kvstrata's hot rows over
    its timed turns.
    """

    prompt_tokens: tuple[int, ...]
    generated_tokens: int  # by all requests of one turn
    plain_s: tuple[float, ...]  # from submission to the last token of all
    kvstrata_s: tuple[float, ...]
    plain_s_per_token: tuple[float | None, ...]
    kvstrata_s_per_token: tuple[float | None, ...]
    plain_max_tokens: int
    kvstrata_max_tokens: int
    rows: Mapping[str, float]
    worker: Mapping[str, Any]

    @property
    def tpot_ratios(self) -> list[float]:
        """kvstrata's time per output token over plain vLLM's, of turns that followed each other."""
        return [
            ours / plain
            for ours, plain in zip(self.kvstrata_s_per_token, self.plain_s_per_token, strict=True)
            if ours is not None and plain is not None
        ]

    @property
    def throughput_ratios(self) -> list[float]:
        """kvstrata's tokens a second over plain vLLM's, of turns that followed each other."""
        return [plain / ours for ours, plain in zip(self.kvstrata_s, self.plain_s, strict=True)]

    @property
    def tpot_ratio(self) -> float:
        """Median of `tpot_ratios`."""
        return median(self.tpot_ratios)

    @property
    def throughput_ratio(self) -> float:
        """Median of `throughput_ratios`."""
        return median(self.throughput_ratios)

    @property
    def hit_rate(self) -> float:
        """Selected rows that needed no copy from the host, over all selected rows."""
        selected = self.rows.get("selected_rows", 0)
        return self.rows.get("hit_rows", 0) / selected if selected else 0.0

    def as_json(self) -> dict[str, Any]:
        """Return all of it for the result file, rates included."""
        return {
            "prompt_tokens": list(self.prompt_tokens),
            "generated_tokens": self.generated_tokens,
            "plain_s": list(self.plain_s),
            "kvstrata_s": list(self.kvstrata_s),
            "plain_tokens_per_s": [self.generated_tokens / seconds for seconds in self.plain_s],
            "kvstrata_tokens_per_s": [self.generated_tokens / seconds for seconds in self.kvstrata_s],
            "throughput_ratio": self.throughput_ratios,
            "plain_s_per_token": list(self.plain_s_per_token),
            "kvstrata_s_per_token": list(self.kvstrata_s_per_token),
            "tpot_ratio": self.tpot_ratios,
            "plain_max_tokens": self.plain_max_tokens,
            "kvstrata_max_tokens": self.kvstrata_max_tokens,
            "rows": dict(self.rows),
            "worker": dict(self.worker),
        }


def by_turns(
    pair: Pair,
    prompts: Sequence[Sequence[int]],
    *,
    new_tokens: int,
    warm_ups: int,
    repeats: int,
    terminal: Terminal,
    title: str,
    pause: Callable[[float], None] = time.sleep,
) -> PairRuns:
    """Let both engines decode the prompts, `warm_ups` times untimed and `repeats` times timed.

    Raises KVStrataError if they ever answer differently.
    """
    engines = (pair.plain, pair.kvstrata)
    with terminal.step(title):
        for _ in range(warm_ups):
            _turn(engines, prompts, new_tokens, pause)
        before = _row_counters(pair.kvstrata)
        timed = [_turn(engines, prompts, new_tokens, pause) for _ in range(repeats)]
    after = _row_counters(pair.kvstrata)
    return PairRuns(
        prompt_tokens=tuple(len(prompt) for prompt in prompts),
        generated_tokens=len(prompts) * new_tokens,
        plain_s=tuple(plain.seconds for plain, _ in timed),
        kvstrata_s=tuple(ours.seconds for _, ours in timed),
        plain_s_per_token=tuple(_s_per_token(plain) for plain, _ in timed),
        kvstrata_s_per_token=tuple(_s_per_token(ours) for _, ours in timed),
        plain_max_tokens=pair.plain.max_tokens(),
        kvstrata_max_tokens=pair.kvstrata.max_tokens(),
        rows={name: count - before.get(name, 0) for name, count in after.items()},
        worker=pair.kvstrata.worker_statistics()[0],
    )


def ceiling_by_turns(
    scarce: Decoder,
    ample: Decoder,
    prompts: Sequence[Sequence[int]],
    *,
    new_tokens: int,
    warm_ups: int,
    repeats: int,
    terminal: Terminal,
    title: str,
    pause: Callable[[float], None] = time.sleep,
) -> list[float]:
    """Return tokens a second of plain vLLM with ample memory over those with scarce memory, for every turn.

    No way to save memory can bring more on this machine. Raises KVStrataError if they answer differently.
    """
    with terminal.step(title):
        turns = [_turn((scarce, ample), prompts, new_tokens, pause) for _ in range(warm_ups + repeats)]
    return [queued.seconds / together.seconds for queued, together in turns[warm_ups:]]


def table_rows(result: Mapping[str, Any]) -> list[tuple[str, str, str, str, str]]:
    """Return what, ratio, spread, hit rate and aim of every figure in a result file."""
    rows = []
    for batch in result["options"]["batches"]:
        rows.append(
            (
                f"time per output token, batch {batch}",
                f"{result[f'tpot_ratio.{batch}']:.3f}",
                _spread(result["runs"][f"batch.{batch}"]["tpot_ratio"]),
                f"{result[f'hit_rate.{batch}']:.1%}",
                "<= 1.08" if batch <= 4 else "-",
            )
        )
    rows.append(
        (
            "tokens/s where plain vLLM must queue",
            f"{result['throughput_ratio_constrained']:.2f}",
            _spread(result["runs"]["constrained"]["throughput_ratio"]),
            f"{result['hit_rate_constrained']:.1%}",
            ">= 3",
        )
    )
    rows.append(
        (
            "the same by plain vLLM with memory for all",
            f"{result['throughput_ceiling_constrained']:.2f}",
            _spread(result["runs"]["ceiling"]),
            "-",
            "the most",
        )
    )
    return rows


def _turn(
    engines: tuple[Decoder, Decoder],
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    pause: Callable[[float], None],
) -> tuple[Any, Any]:
    """Let one engine decode after the other."""
    decodings = []
    for engine in engines:
        pause(QUIET_S)
        decodings.append(engine.decode(prompts, new_tokens=new_tokens))
    first, second = decodings
    if first.token_ids != second.token_ids:
        raise KVStrataError(_difference(first.token_ids, second.token_ids))
    return first, second


def _spread(ratios: Sequence[float]) -> str:
    return f"{min(ratios):.2f} to {max(ratios):.2f}"


def _s_per_token(decoding: Any) -> float | None:
    try:
        return float(decoding.s_per_token)
    except ValueError:  # requests that queue do not decode all together
        return None


def _row_counters(engine: Decoder) -> dict[str, float]:
    ranks = engine.worker_statistics()
    return {name: sum(rank[name] for rank in ranks if name in rank) for name in ROW_COUNTERS}


def _difference(plain: Sequence[Sequence[int]], ours: Sequence[Sequence[int]]) -> str:
    for request, (expected, got) in enumerate(zip(plain, ours, strict=True)):
        for at, (a, b) in enumerate(zip(expected, got, strict=True)):
            if a != b:
                return (
                    f"the two engines answer differently: request {request}, token {at} is {a} with plain "
                    f"vLLM and {b} with kvstrata; run `kvstrata demo`"
                )
    return "the two engines answer differently; run `kvstrata demo`"
