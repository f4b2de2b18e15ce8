"""Synthetic top-k selections, to compare what hot rows of different sizes and policies miss.

A token's score is a fixed part plus a slow and a fast AR(1) process; beside the best scores the first and the
last tokens are always selected, and some picks are random. "calibrated" repeats the misses published for LRU
(about 30, 13.4 and 6.7 % with room for 1, 2 and 4 times top-k); "harder" changes more from step to step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from kvstrata.errors import ConfigurationError

TraceProfile = Literal["calibrated", "harder"]

SINK_TOKENS = 4
RECENT_TOKENS = 64
RANDOM_SHARE = 0.05


@dataclass(frozen=True, kw_only=True)
class ScoreProcess:
    """Standard deviations of a score's three parts, and how much of an AR(1) part a step keeps."""

    static_sigma: float
    slow_sigma: float
    slow_rho: float
    fast_sigma: float
    fast_rho: float


PROFILES: dict[str, ScoreProcess] = {
    "calibrated": ScoreProcess(
        static_sigma=1.0, slow_sigma=0.3, slow_rho=0.995, fast_sigma=0.45, fast_rho=0.7
    ),
    "harder": ScoreProcess(static_sigma=0.7, slow_sigma=0.5, slow_rho=0.995, fast_sigma=0.75, fast_rho=0.3),
}


def synthetic_trace(
    profile: TraceProfile, *, tokens: int = 32768, topk: int = 2048, steps: int, seed: int
) -> Iterator[tuple[NDArray[np.int32], NDArray[np.float32]]]:
    """Yield, for each step, the selected positions int32[topk], ascending, and all scores float32[tokens].

    The selected positions are the `topk` largest scores of the step, as an indexer would have it: a token
    that is picked whatever its process says (first, last, random) shows the score of a random good token.
    So a policy that reads scores learns nothing from them that it would not learn in an engine. Both arrays
    belong to the caller. The same arguments give the same trace.

    Raises ConfigurationError for an unknown profile, or a top-k that leaves no choice.
    """
    process = PROFILES.get(profile)
    if process is None:
        raise ConfigurationError(f"profile={profile!r}: use one of {', '.join(PROFILES)}")
    always = SINK_TOKENS + RECENT_TOKENS
    if not always < topk <= tokens // 2:
        raise ConfigurationError(
            f"topk={topk}: use more than {always}, the tokens that are always selected, "
            f"and at most half of tokens={tokens}"
        )
    return _steps(process, tokens, topk, steps, np.random.default_rng(seed))


def _steps(
    process: ScoreProcess, tokens: int, topk: int, steps: int, rng: np.random.Generator
) -> Iterator[tuple[NDArray[np.int32], NDArray[np.float32]]]:
    def noise() -> NDArray[np.float32]:
        return rng.standard_normal(tokens, dtype=np.float32)

    always = np.r_[0:SINK_TOKENS, tokens - RECENT_TOKENS : tokens]
    num_random = round(RANDOM_SHARE * topk)
    num_best = topk - len(always) - num_random
    static = process.static_sigma * noise()
    slow, fast = process.slow_sigma * noise(), process.fast_sigma * noise()
    for _ in range(steps):
        scores = static + slow + fast
        # From all tokens, good ones too, which makes a few of them no surprise.
        random = SINK_TOKENS + rng.choice(tokens - len(always), num_random, replace=False)
        forced = np.concatenate([always, random])
        scores[forced] = -np.inf
        best = np.argpartition(scores, tokens - num_best)[tokens - num_best :]
        scores[forced] = rng.choice(scores[best], len(forced))
        yield np.sort(np.concatenate([best, forced])).astype(np.int32), scores
        slow = _next(slow, process.slow_sigma, process.slow_rho, noise())
        fast = _next(fast, process.fast_sigma, process.fast_rho, noise())


def _next(
    value: NDArray[np.float32], sigma: float, rho: float, noise: NDArray[np.float32]
) -> NDArray[np.float32]:
    """Take an AR(1) process one step on; its standard deviation stays `sigma`."""
    return np.float32(rho) * value + np.float32(sigma * (1 - rho * rho) ** 0.5) * noise
