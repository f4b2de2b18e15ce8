"""Many seeds, in one process or several."""

from __future__ import annotations

import multiprocessing
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field

from kvstrata.sim.mutants import parts_of
from kvstrata.sim.run import Outcome, run_seed

_SEEDS_A_TASK = 50


@dataclass(kw_only=True)
class Campaign:
    """What came of many seeds. `failures` are in the order in which they were found."""

    mutant: str
    seeds: int = 0
    events: int = 0
    virtual_s: float = 0.0
    wall_s: float = 0.0
    counts: Counter[str] = field(default_factory=Counter)
    failures: list[Outcome] = field(default_factory=list)

    def add(self, outcome: Outcome) -> None:
        """Count one seed."""
        self.seeds += 1
        self.events += outcome.events
        self.virtual_s += outcome.virtual_s
        self.counts += outcome.counts
        if outcome.problem:
            self.failures.append(outcome)


def replay_command(seed: int, mutant: str = "") -> str:
    """What repeats one seed."""
    return f"kvstrata sim --first-seed {seed} --seeds 1" + (f" --mutant {mutant}" if mutant else "")


def run_seeds(
    first_seed: int,
    seeds: int,
    *,
    jobs: int = 1,
    mutant: str = "",
    max_failures: int = 1,
    on_progress: Callable[[Campaign], None] | None = None,
) -> Campaign:
    """Simulate `seeds` seeds from `first_seed` on; end early after `max_failures` failures.

    With several jobs, seeds run in processes of their own, and those under way when a failure is found are
    still counted. `on_progress` is called now and then. Raises ConfigurationError for an unknown mutant.
    """
    parts_of(mutant)
    campaign = Campaign(mutant=mutant)
    begun_s = time.perf_counter()
    batches = [
        range(start, min(start + _SEEDS_A_TASK, first_seed + seeds))
        for start in range(first_seed, first_seed + seeds, _SEEDS_A_TASK)
    ]
    for outcomes in _batches(batches, jobs, mutant, max_failures):
        for outcome in outcomes:
            campaign.add(outcome)
        campaign.wall_s = time.perf_counter() - begun_s
        if on_progress is not None:
            on_progress(campaign)
        if len(campaign.failures) >= max_failures:
            break
    return campaign


def _batches(batches: list[range], jobs: int, mutant: str, max_failures: int) -> Iterator[list[Outcome]]:
    if jobs == 1:
        for batch in batches:
            yield _run_batch(batch, mutant, max_failures)
        return
    # A fork of a process with threads (torch's, pytest's) may hang; a new interpreter cannot.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context) as pool:
        futures = [pool.submit(_run_batch, batch, mutant, max_failures) for batch in batches]
        try:
            for future in futures:
                yield future.result()
        finally:
            for future in futures:
                future.cancel()


def _run_batch(seeds: range, mutant: str, max_failures: int) -> list[Outcome]:
    outcomes: list[Outcome] = []
    failures = 0
    for seed in seeds:
        outcomes.append(run_seed(seed, parts_of(mutant)))
        failures += bool(outcomes[-1].problem)
        if failures >= max_failures:
            break
    return outcomes
