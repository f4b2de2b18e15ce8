"""Two thousand simulated runs around the real machines, and that a run is worth looking at."""

import os
import subprocess
import sys
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.errors import TransferFailed
from kvstrata.remote.consumer.moves import CONSUMER_MOVES
from kvstrata.remote.consumer.peers import PEER_MOVES
from kvstrata.remote.holds import HoldTable
from kvstrata.remote.producer.moves import PRODUCER_MOVES
from kvstrata.remote.producer.session import SESSION_MOVES
from kvstrata.remote.protocol.moves import Moves
from kvstrata.sim.campaign import Campaign, replay_command, run_seeds
from kvstrata.sim.options import draw
from kvstrata.sim.pages import Holds
from kvstrata.sim.run import run_seed

SEEDS = 2000
# What has to have happened in them, or they prove little. Names as in the trace's counts.
HAPPENS = {
    *(f"settled {ending}" for ending in ("done", "failed", "aborted", "lapsed")),
    *(f"finished {ending}" for ending in ("done", "failed", "aborted", "lapsed")),
    *(f"fault {kind}" for kind in ("crash", "stop", "cut", "relayout")),
    *(f"cancelled while {stage}" for stage in ("waiting", "remote", "local", "decoding")),
    *(f"messages {fate}" for fate in ("lost", "doubled", "late", "to nobody")),
    *(f"requests {end}" for end in ("answered", "aborted", "failed")),
    *("reads failed", "reads revoked", "slow reads", "stuck reads"),
    *("preemptions", "prefill cancelled", "proxy retries", "recomputed", "adverts refused", "refusals"),
}


ONCE_FAILED = (10554,)
"""Beyond those: what longer campaigns found, and use rows of the tables that the others do not."""


@pytest.fixture(scope="module")
def visited() -> Counter:
    return Counter()


@pytest.fixture(scope="module")
def campaign(visited: Counter) -> Campaign:
    """Also counts, in `visited`, which row of which state table was used."""
    after = Moves.after

    def counted(self, state, event):
        visited[id(self), state, event] += 1
        return after(self, state, event)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Moves, "after", counted)
        campaign = run_seeds(0, SEEDS)
        for seed in ONCE_FAILED:
            campaign.failures.extend(run_seeds(seed, 1).failures)
        return campaign


@pytest.mark.slow
def test_no_seed_breaks_an_invariant(campaign: Campaign):
    shown = [failure.report(replay_command(failure.seed)) for failure in campaign.failures]
    assert not shown, shown[0]
    assert campaign.seeds == SEEDS


@pytest.mark.slow
def test_everything_that_can_happen_has_happened(campaign: Campaign):
    assert not HAPPENS - campaign.counts.keys()
    assert campaign.counts["finished done"] > campaign.counts["finished failed"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "moves",
    [PRODUCER_MOVES, CONSUMER_MOVES, SESSION_MOVES, PEER_MOVES],
    ids=["producer", "consumer", "session", "peer"],
)
def test_every_row_of_the_state_tables_was_used(campaign: Campaign, visited: Counter, moves: Moves):
    assert campaign.seeds
    assert not [row for row in moves.rows if not visited[(id(moves), *row)]]


def test_a_seed_is_repeated_exactly_in_another_interpreter():
    code = (
        "from kvstrata.sim.run import run_seed\n"
        "for seed in range(20):\n"
        "    print(*run_seed(seed, trace_events=None, keep_trace=True).trace, sep='\\n')"
    )
    here = [line for seed in range(20) for line in run_seed(seed, trace_events=None, keep_trace=True).trace]
    for hash_seed in ("1", "2"):
        # Sets of strings have another order there.
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        ran = subprocess.run(
            [sys.executable, "-c", code], check=True, capture_output=True, text=True, env=environment
        )
        assert ran.stdout.splitlines() == here


def test_several_processes_find_what_one_finds():
    one = run_seeds(0, 120)
    two = run_seeds(0, 120, jobs=2)
    assert (one.seeds, one.events, one.counts) == (two.seeds, two.events, two.counts)


def test_seeds_differ_in_what_they_simulate():
    drawn = [draw(seed) for seed in range(300)]
    assert {(options.p_tp, options.d_tp) for options in drawn} == {(1, 1), (2, 1), (2, 2), (4, 1), (4, 2)}
    assert 10 < sum(options.is_calm for options in drawn) < 60
    assert {len(options.layers) for options in drawn} == {1, 2, 3}
    assert draw(7) == draw(7)
    assert "p_tp = " in str(drawn[0])


@given(st.lists(st.one_of(st.just("grant"), st.integers(0, 5)), max_size=40))
def test_the_simulated_holds_are_those_of_the_real_table(steps: list[str | int]):
    real, fake = HoldTable(), Holds(slots=4)
    granted = []
    try:
        for step in steps:
            if step == "grant":
                try:
                    hold = fake.grant()
                except TransferFailed:
                    assert fake.live == 4
                    continue
                # Slots are the table's own affair; generations are not.
                granted.append((hold, real.grant()))
                assert granted[-1][0].generation == granted[-1][1].generation
            elif granted:
                one, other = granted[step % len(granted)]
                assert fake.revoke(one) == real.revoke(other)
            for one, other in granted:
                assert fake.is_valid(one) == real.is_valid(other)
            assert fake.live == real.statistics().live
    finally:
        real.close()
