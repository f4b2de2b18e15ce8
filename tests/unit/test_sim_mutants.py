"""Every known defect is found within the seeds that CI runs, by a check that the defect concerns."""

import pytest

from kvstrata.errors import ConfigurationError
from kvstrata.sim.campaign import replay_command, run_seeds
from kvstrata.sim.mutants import MUTANTS, parts_of
from kvstrata.sim.run import REAL, run_seed

SEEDS = 2000
# Which invariants may betray a mutant. One that is found by another is found by accident.
FOUND_BY = {
    "gate-dropped": {"M1/M3"},
    "frees-under-writes": {"M3", "M1/M3"},
    "hold-kept": {"M1/M3"},
    "generation-ignored": {"P3"},
    "hold-unchecked": {"P3"},
    "unfenced": {"M3", "M4", "P3"},
    "answers-count-twice": {"P3"},
    "members-count-twice": {"M3", "M4"},
    "last-part-completes": {"M3", "M4"},
    "finishes-under-reads": {"M3"},
    "abort-frees-at-once": {"M3", "P3"},
    "one-rank-is-enough": {"M3", "M4", "P3"},
    "failure-ignored": {"M4"},
    "never-lapses": {"P7"},
    "keeps-refusals-to-itself": {"P7"},
    "publishes-before-writing": {"P3", "M1/M3", "M3"},
    "publishes-half-blocks": {"P3", "M1/M3"},
    "silent-without-blocks": {"no reason"},
    "restarts-under-its-old-epoch": {"P3", "M1/M3"},
    "takes-the-first-share": {"M4"},
}


def test_every_mutant_has_its_invariants():
    assert FOUND_BY.keys() == MUTANTS.keys()
    assert all(mutant.defect for mutant in MUTANTS.values())


@pytest.mark.parametrize("name", MUTANTS)
def test_the_mutant_is_found(name: str, record_property):
    campaign = run_seeds(0, SEEDS, mutant=name)
    assert campaign.failures, f"{name} was not found in {SEEDS} seeds"
    record_property("seeds", campaign.seeds)
    failure = campaign.failures[0]
    print(f"{name}: found after {campaign.seeds} seeds: {failure.problem}")
    assert failure.problem.split(":")[0] in FOUND_BY[name], failure.problem
    assert not run_seed(failure.seed).problem, "the seed fails without the defect"


def test_a_failure_says_how_to_repeat_it():
    failure = run_seeds(0, SEEDS, mutant="gate-dropped").failures[0]
    command = replay_command(failure.seed, "gate-dropped")
    report = failure.report(command)
    assert command == f"kvstrata sim --first-seed {failure.seed} --seeds 1 --mutant gate-dropped"
    for part in (f"seed {failure.seed}: M1/M3", "block_tokens = ", "last ", command):
        assert part in report
    again = run_seed(failure.seed, parts_of("gate-dropped"))
    assert (again.problem, again.trace) == (failure.problem, failure.trace)


def test_unknown_mutants_are_refused_by_name():
    assert parts_of("") is REAL
    with pytest.raises(ConfigurationError, match="'gate' is unknown; there are gate-dropped"):
        parts_of("gate")
