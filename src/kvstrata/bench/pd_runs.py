"""Time to first token through prefill and decode and of prefill alone, by turns; what is kept of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Protocol

from kvstrata.bench.decode_runs import QUIET_S
from kvstrata.demo.pd import PdCounters
from kvstrata.errors import KVStrataError
from kvstrata.terminal import Terminal


class TimedDeployment(Protocol):
    """The part of a deployment that is measured; `kvstrata.demo.pd_servers.PdServers` is one."""

    @property
    def proxy(self) -> str:
        """URL of the proxy."""

    @property
    def prefill(self) -> str:
        """URL of the prefill engine."""

    def seconds_to_first_token(self, url: str, prompt: Sequence[int]) -> float:
        """Time one streamed request for one token."""

    def settled_counters(self) -> PdCounters:
        """Return the counters once nothing is open any more, or once leases should have ended."""


@dataclass(frozen=True, kw_only=True)
class FirstTokenRuns:
    """Every timed turn of both; they took turns, prefill alone first."""

    prompt_tokens: int
    alone_s: tuple[float, ...]
    through_s: tuple[float, ...]  # through the proxy, prefill and decode
    counters: PdCounters  # of the timed and untimed turns

    @property
    def ratios(self) -> list[float]:
        """Through both over prefill alone, of turns that followed each other."""
        return [through / alone for through, alone in zip(self.through_s, self.alone_s, strict=True)]

    @property
    def ratio(self) -> float:
        """Median of `ratios`."""
        return median(self.ratios)

    def as_json(self) -> dict[str, Any]:
        """Return all of it for the result file."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "prefill_alone_s": list(self.alone_s),
            "prefill_decode_s": list(self.through_s),
            "ttft_ratio": self.ratios,
            "bytes_pulled_per_request": self.counters.bytes_pulled / self.counters.pulls_done,
        }


def first_tokens(
    deployment: TimedDeployment,
    prompt: Sequence[int],
    *,
    warm_ups: int,
    repeats: int,
    terminal: Terminal,
    pause: Callable[[float], None] = time.sleep,
) -> FirstTokenRuns:
    """Time the same prompt both ways, `warm_ups` times untimed and `repeats` times timed.

    The prefill engine is the same in both, so what differs is the proxy, decode and the reads between them.
    Raises KVStrataError if decode ever computed the prompt itself: that would be another measurement.
    """
    before = deployment.settled_counters()
    turns: list[tuple[float, float]] = []
    title = f"{repeats} times {len(prompt)} tokens to the first token, by turns"
    with terminal.step(title):
        for _ in range(warm_ups + repeats):
            times = []
            for url in (deployment.prefill, deployment.proxy):
                pause(QUIET_S)
                times.append(deployment.seconds_to_first_token(url, prompt))
            alone, through = times
            turns.append((alone, through))
        counters = deployment.settled_counters().since(before)
    if counters.pulls_done != len(turns):
        raise KVStrataError(
            f"decode read the KV of {counters.pulls_done} of {len(turns)} prompts and computed the others "
            "itself; run `kvstrata demo`"
        )
    timed = turns[warm_ups:]
    return FirstTokenRuns(
        prompt_tokens=len(prompt),
        alone_s=tuple(alone for alone, _ in timed),
        through_s=tuple(through for _, through in timed),
        counters=counters,
    )
