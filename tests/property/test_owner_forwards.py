"""Any stage, group and run of forwards: every rank reads what the owners hold, and byte counts are exact.

The ranks are threads of one process with their own memory. Each of them checks every page that it loads.
"""

from __future__ import annotations

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvstrata.move.faulty import IdleCarrier
from kvstrata.move.owner_testing.rank import shm_carrier
from kvstrata.move.owner_testing.shape import OwnerShape
from kvstrata.move.owner_testing.threads import OwnerThreads

BLOCKS = 6


@st.composite
def shapes(draw: st.DrawFn, *, is_uniform: bool) -> OwnerShape:
    layers = draw(st.integers(1, 7))
    pages = st.integers(1, 9).map(lambda words: words * 8)
    if is_uniform:
        main, indexer = (draw(pages),) * layers, (draw(pages),) * layers
    else:
        main = tuple(draw(pages) for _ in range(layers))
        indexer = tuple(draw(pages | st.just(0)) for _ in range(layers))
    return OwnerShape(main_bytes=main, indexer_bytes=indexer, num_blocks=BLOCKS)


@st.composite
def runs(draw: st.DrawFn) -> list[tuple[set[int], set[int]]]:
    """Forwards, each with the blocks it reads, all of them written before, and those it writes."""
    written: set[int] = set()
    forwards = []
    for _ in range(draw(st.integers(1, 6))):
        load = draw(st.sets(st.sampled_from(sorted(written)))) if written else set()
        save = draw(st.sets(st.integers(0, BLOCKS - 1), min_size=1))
        forwards.append((load, save))
        written |= save
    return forwards


@settings(deadline=None, max_examples=60, suppress_health_check=list(HealthCheck))
@given(
    st.data(), st.integers(2, 4), st.sampled_from(["window", "host"]), st.sampled_from(["referenced", "all"])
)
def test_every_rank_reads_what_the_owners_hold(data: st.DataObject, size: int, home: str, payload: str):
    shape = data.draw(shapes(is_uniform=home == "host"))
    forwards = data.draw(runs())
    group = OwnerThreads(size, shape=shape, home=home, payload=payload)
    try:
        moved = saved = turns = 0
        for load, save in forwards:
            group.exact(load, save)
            moved += BLOCKS if payload == "all" and load else len(load)
            saved += len(save)
            turns += bool(load)
        plan = group.ranks[0].plan
        targets = [bundle for bundle in plan.bundles if not bundle.is_draft]
        counts = [rank.carrier.statistics() for rank in group.ranks]
        assert sum(each.broadcasts for each in counts) == len(targets) * turns
        assert sum(each.broadcast_bytes for each in counts) == moved * sum(b.page_bytes for b in targets)
        for member, each in enumerate(counts):
            own = sum(b.page_bytes for b in targets if b.index in plan.owned(member))
            through = sum(b.page_bytes for b in targets) - (own if home == "window" else 0)
            assert each.loaded_bytes == moved * through
            assert each.saved_bytes == (saved * own if home == "host" else 0)
    finally:
        group.close()


def test_the_check_would_notice_rows_that_did_not_move():
    group = OwnerThreads(2, make=lambda rank: IdleCarrier(shm_carrier(rank)))
    try:
        group.forward(set(), {0})
        assert all(outcome.wrong for outcome in group.forward({0}, {1}))
    finally:
        group.close()
