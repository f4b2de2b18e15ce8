"""The gate against a log of events, replayed byte by byte for every question."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvstrata.core.buffers import SlotId
from kvstrata.core.gate import GateState, Obligation, Outcome, PhysicalRange, SlotGate
from kvstrata.errors import GateViolation

LAYERS = st.integers(0, 3)
OBLIGATIONS = [Obligation(kind, key) for kind in ("save", "reader") for key in range(3)]
ANY_OBLIGATIONS = st.sets(st.sampled_from(OBLIGATIONS), max_size=3)


def pieces_of(ranges):
    """Flood-fill bytes: slots are one piece if a walk over bytes they cover joins them."""
    bytes_of = {slot: set(range(r.start, r.start + r.size_bytes)) for slot, r in ranges.items()}
    pieces = {}
    for slot in ranges:
        reached, grown = {slot}, True
        while grown:
            covered = set().union(*(bytes_of[s] for s in reached))
            more = {s for s in ranges if bytes_of[s] & covered}
            grown, reached = more != reached, more
        pieces[slot] = frozenset(reached)
    return pieces


class GateMachine(RuleBasedStateMachine):
    """The oracle keeps no state of its own but the list of what was accepted."""

    @initialize(
        ranges=st.lists(
            st.tuples(st.integers(0, 12), st.integers(1, 5)).map(lambda r: PhysicalRange(*r)),
            min_size=1,
            max_size=5,
        )
    )
    def build(self, ranges):
        by_slot = {SlotId(at): r for at, r in enumerate(ranges)}
        self.gate = SlotGate(by_slot)
        self.pieces = pieces_of(by_slot)
        self.log = []
        self.rejected = 0

    def events(self, slot, *kinds):
        return [event for event in self.log if event[1] in self.pieces[slot] and event[0] in kinds]

    def owed(self, slot):
        owed = []
        for kind, _, what in self.events(slot, "owe", "settle"):
            owed.append(what) if kind == "owe" else owed.remove(what)
        assert len(owed) == len(set(owed)), "one obligation owed twice at a time"
        return set(owed)

    def last(self, slot):
        moves = self.events(slot, "claim", "publish")
        return (moves[-1][0], moves[-1][2]) if moves else ("nothing", None)

    def pick_slot(self, data):
        return data.draw(st.sampled_from(sorted(self.pieces)))

    @rule(data=st.data(), layer=LAYERS, behind=ANY_OBLIGATIONS)
    def claim(self, data, layer, behind):
        slot = self.pick_slot(data)
        legal = self.last(slot)[0] != "claim" and self.owed(slot) <= behind
        if not legal:
            with pytest.raises(GateViolation):
                self.gate.claim(slot, layer, ordered_behind=frozenset(behind))
            return
        self.gate.claim(slot, layer, ordered_behind=frozenset(behind))
        self.log.append(("claim", slot, layer))

    @rule(data=st.data(), layer=LAYERS)
    def claim_behind_everything(self, data, layer):
        slot = self.pick_slot(data)
        if self.last(slot)[0] == "claim":
            return
        self.gate.claim(slot, layer, ordered_behind=self.gate.pending(slot))
        self.log.append(("claim", slot, layer))

    @rule(data=st.data(), layer=LAYERS, obligations=st.lists(st.sampled_from(OBLIGATIONS), max_size=3))
    def publish(self, data, layer, obligations):
        self.try_to_publish(self.pick_slot(data), layer, obligations)

    @precondition(lambda self: any(self.last(slot)[0] == "claim" for slot in self.pieces))
    @rule(data=st.data(), obligations=ANY_OBLIGATIONS)
    def publish_what_is_claimed(self, data, obligations):
        slot = data.draw(st.sampled_from([s for s in sorted(self.pieces) if self.last(s)[0] == "claim"]))
        self.try_to_publish(slot, self.last(slot)[1], sorted(obligations, key=repr))

    def try_to_publish(self, slot, layer, obligations):
        distinct = len(set(obligations)) == len(obligations) and not self.owed(slot) & set(obligations)
        if self.last(slot) != ("claim", layer) or not distinct:
            with pytest.raises(GateViolation):
                self.gate.publish(slot, layer, obligations)
            return
        self.gate.publish(slot, layer, obligations)
        self.log.append(("publish", slot, layer))
        self.log += [("owe", slot, obligation) for obligation in obligations]

    @rule(data=st.data(), obligation=st.sampled_from(OBLIGATIONS), outcome=st.sampled_from(Outcome))
    def settle(self, data, obligation, outcome):
        slot = self.pick_slot(data)
        owed = obligation in self.owed(slot)
        assert self.gate.settle(slot, obligation, outcome) == owed
        if owed:
            self.log.append(("settle", slot, obligation))
        else:
            self.rejected += 1

    @invariant()
    def the_gate_knows_what_the_log_says(self):
        if not hasattr(self, "gate"):
            return
        names = {"nothing": GateState.EMPTY, "claim": GateState.CLAIMED, "publish": GateState.PUBLISHED}
        for slot in self.pieces:
            kind, layer = self.last(slot)
            assert self.gate.pending(slot) == self.owed(slot)
            assert self.gate.owner(slot) == layer
            assert self.gate.state(slot) is names[kind]
        self.gate.check_integrity()
        statistics = self.gate.statistics()
        kinds = [event[0] for event in self.log]
        assert statistics.claims == kinds.count("claim")
        assert statistics.publishes == kinds.count("publish")
        assert statistics.published_obligations == kinds.count("owe")
        assert statistics.rejected_settles == self.rejected


TestGate = GateMachine.TestCase
TestGate.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
