"""The residency tables inside a machine that moves bytes: what a slot holds is what its host row holds now.

The oracle knows no policy. It keeps the bytes of the home and of the hot buffer, moves exactly what the
tables say, and looks at every slot they serve.
"""

from __future__ import annotations

from collections import Counter
from itertools import chain

import numpy as np
import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from kvstrata.core.eviction import POLICIES
from kvstrata.core.residency import Residency, ResidencyOverflow, ResidencyStatistics
from kvstrata.kernels.residency import ResidencyTable

ROW = st.integers(-1, 15)
EXAMPLES = 140
STEPS = 100
SETTINGS = settings(max_examples=EXAMPLES, stateful_step_count=STEPS, deadline=None)


class ResidencyMachine(RuleBasedStateMachine):
    """Steps of decode: rows are written, a selection is resolved, bytes move, slots are read."""

    steps = 0
    forgets_rewrites = False

    @initialize(
        capacity=st.integers(1, 8),
        host_rows=st.integers(3, 16),
        policy=st.sampled_from(sorted(POLICIES)),
    )
    def start(self, capacity, host_rows, policy):
        self.capacity, self.host_rows = capacity, host_rows
        self.reference = Residency(capacity, policy)
        self.table = ResidencyTable(host_rows=host_rows, capacity=capacity, policy=policy)
        self.written = 0
        # No two writes leave the same bytes, and a slot that was never filled holds none of them.
        self.home = [self.new_bytes() for _ in range(host_rows)]
        self.hot = [None] * capacity
        self.counts = Counter()

    def new_bytes(self):
        self.written += 1
        return self.written

    @rule(
        new=st.lists(st.tuples(ROW, st.booleans()), max_size=4),
        rows=st.lists(st.lists(ROW, min_size=3, max_size=3), max_size=3),
        near=st.lists(ROW, max_size=3),
    )
    def step(self, new, rows, near):
        type(self).steps += 1
        new_rows, fresh = self.write({row: on_device for row, on_device in new if 0 <= row < self.host_rows})
        rows = [[row if row < self.host_rows else -1 for row in token] for token in rows]
        near = [row for row in near if row < self.host_rows]
        selected = [row for token in rows for row in token if row >= 0]
        before = self.where()
        asked = np.array(rows, np.int64).reshape(len(rows), 3)
        if len(set(selected)) > self.capacity:
            with pytest.raises(ResidencyOverflow):
                self.reference.resolve(rows, fresh.__getitem__, near_rows=near)
            with pytest.raises(ResidencyOverflow):
                self.table.resolve(asked, fresh, near_rows=np.array(near, np.int64))
            assert self.where() == before
            return
        expected = self.reference.resolve(rows, lambda row: int(fresh[row]), near_rows=near)
        found = self.table.resolve(asked, fresh, near_rows=np.array(near, np.int64))
        loads = list(zip(found.load_rows.tolist(), found.load_slots.tolist(), strict=True))
        placements = list(zip(found.placed_index.tolist(), found.placed_slots.tolist(), strict=True))
        slots = found.slots.tolist()
        assert slots == [list(token) for token in expected.slots]
        assert (loads, placements) == (list(expected.loads), list(expected.placements))
        assert (found.selected, found.hits, found.evictions) == (
            expected.selected, expected.hits, expected.evictions,
        )  # fmt: skip
        self.move(loads, placements, new_rows)
        self.serve(rows, slots, before, loads, placements, fresh)
        self.count(selected, before, loads, placements)

    def write(self, new):
        """The step's own rows reach the home; some are also still on the device."""
        fresh = np.full(self.host_rows, -1, np.int32)
        new_rows = []
        for row, on_device in new.items():
            self.home[row] = self.new_bytes()
            if on_device:
                fresh[row] = len(new_rows)
                new_rows.append(self.home[row])
        if not self.forgets_rewrites:
            had_slots = sum(slot != -1 for row, slot in self.where().items() if row in new)
            assert self.reference.invalidate(new) == had_slots
            assert self.table.invalidate(np.array(list(new), np.int64)) == had_slots
            self.counts["invalidated"] += had_slots
        return new_rows, fresh

    def where(self):
        slots = self.table.resident(np.arange(self.host_rows)).tolist()
        assert slots == self.reference.resident(range(self.host_rows))
        return dict(enumerate(slots))

    def move(self, loads, placements, new_rows):
        for row, slot in loads:
            self.hot[slot] = self.home[row]
        for index, slot in placements:
            self.hot[slot] = new_rows[index]

    def serve(self, rows, slots, before, loads, placements, fresh):
        slot_of = {}
        for row, slot in zip(chain(*rows), chain(*slots), strict=True):
            assert (slot == -1) == (row < 0), "R5: -1 stays -1, and nothing else becomes it"
            if row >= 0:
                assert self.hot[slot] == self.home[row], "R4: the bytes served are the row's own, now"
                assert slot_of.setdefault(row, slot) == slot, "R5: a row named again names the same slot"
        moved = [row for row, _ in loads] + [int(np.flatnonzero(fresh == i)[0]) for i, _ in placements]
        assert len(moved) == len(set(moved)), "R5: nothing moves twice"
        for row, slot in slot_of.items():
            if before[row] != -1:
                assert slot == before[row], "R3: no row of the selection loses its slot"
                assert row not in moved, "R2: a hit moves no bytes"
            else:
                assert row in moved
        resident = self.where()
        after = [slot for slot in resident.values() if slot != -1]
        assert len(after) == len(set(after)), "R1: no slot has two rows"
        for row, slot in resident.items():
            assert slot == -1 or self.hot[slot] == self.home[row], "R4: for every resident row"
        self.reference.check_integrity()
        self.table.check_integrity()

    def count(self, selected, before, loads, placements):
        full = sum(slot != -1 for slot in before.values()) + len(loads) + len(placements)
        self.counts["resolves"] += 1
        self.counts["selected"] += len(selected)
        self.counts["misses"] += len(loads)
        self.counts["hits"] += len(selected) - len(loads)
        self.counts["placements"] += len(placements)
        self.counts["evictions"] += max(0, full - self.capacity)
        assert self.table.statistics() == self.reference.statistics()
        names = ResidencyStatistics.__dataclass_fields__
        assert self.table.statistics() == ResidencyStatistics(**{name: self.counts[name] for name in names})


def test_R1_to_R5_hold_after_every_step() -> None:  # noqa: N802
    ResidencyMachine.steps = 0
    run_state_machine_as_test(ResidencyMachine, settings=SETTINGS)
    assert ResidencyMachine.steps >= 10_000


def test_R4_the_machine_finds_an_owner_that_forgets_to_invalidate() -> None:  # noqa: N802
    class Forgetful(ResidencyMachine):
        forgets_rewrites = True

    with pytest.raises(AssertionError, match="R4"):
        run_state_machine_as_test(Forgetful, settings=settings(SETTINGS, phases=[Phase.generate]))
