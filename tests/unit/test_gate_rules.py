"""M1 and M2: when a physical slot may be overwritten."""

import pytest

from kvstrata.core.buffers import SlotId
from kvstrata.core.gate import GateState, Obligation, Outcome, PhysicalRange, SlotGate
from kvstrata.errors import GateViolation, LayoutError

A, B, C = SlotId(0), SlotId(1), SlotId(2)
SAVE = Obligation("save", "L1")
READER = Obligation("reader", ("peer", 7))


def gate_of(*ranges: tuple[int, int]) -> SlotGate:
    return SlotGate({SlotId(at): PhysicalRange(*r) for at, r in enumerate(ranges)})


def published(*obligations: Obligation) -> SlotGate:
    gate = gate_of((0, 10), (10, 10))
    gate.claim(A, 1)
    gate.publish(A, 1, obligations)
    return gate


def test_M1_a_slot_is_overwritten_only_after_save_and_every_reader():  # noqa: N802
    gate = published(SAVE, READER)
    with pytest.raises(
        GateViolation, match=r"slot 0 cannot go to layer 5: layer 1 held it.*reader.*save 'L1'"
    ):
        gate.claim(A, 5)
    assert gate.settle(A, SAVE, Outcome.DONE)
    with pytest.raises(GateViolation, match="reader"):
        gate.claim(A, 5)
    assert gate.settle(A, READER, Outcome.DONE)
    gate.claim(A, 5)
    assert gate.owner(A) == 5


@pytest.mark.parametrize("outcome", Outcome)
def test_M1_a_failed_or_fenced_reader_frees_the_slot_too(outcome):  # noqa: N802
    gate = published(READER)
    gate.settle(A, READER, outcome)
    gate.claim(A, 5)
    assert gate.pending(A) == frozenset()


def test_M1_a_refused_claim_changes_nothing():  # noqa: N802
    gate = published(SAVE)
    before = gate.statistics()
    with pytest.raises(GateViolation):
        gate.claim(A, 5)
    assert gate.statistics() == before
    assert (gate.owner(A), gate.state(A), gate.pending(A)) == (1, GateState.PUBLISHED, {SAVE})


def test_M1_obligations_are_fixed_when_published():  # noqa: N802
    gate = published(SAVE)
    with pytest.raises(
        GateViolation, match="publish by layer 1 of slot 0 is illegal: it is published by layer 1"
    ):
        gate.publish(A, 1, [READER])
    assert gate.pending(A) == {SAVE}


def test_M2_other_slots_are_untouched():  # noqa: N802
    gate = published(SAVE)
    gate.claim(B, 2)
    assert (gate.owner(B), gate.pending(B)) == (2, frozenset())


@pytest.mark.parametrize("second", [(9, 1), (0, 10), (5, 100), (3, 2)])
def test_M2_overlapping_slots_count_as_one(second):  # noqa: N802
    gate = gate_of((0, 10), second)
    gate.claim(A, 1)
    gate.publish(A, 1, [SAVE])
    with pytest.raises(GateViolation, match="slot 1 cannot go to layer 2: layer 1 held it"):
        gate.claim(B, 2)
    assert gate.settle(B, SAVE, Outcome.DONE)
    gate.claim(B, 2)
    assert gate.owner(A) == 2


def test_M2_overlap_reaches_through_a_third_slot():  # noqa: N802
    gate = gate_of((0, 10), (20, 10), (5, 20))
    gate.claim(A, 1)
    assert gate.state(B) is GateState.CLAIMED
    assert gate.owner(C) == 1


def test_M2_touching_slots_are_two():  # noqa: N802
    gate = gate_of((10, 10), (0, 10))
    gate.claim(A, 1)
    assert gate.state(B) is GateState.EMPTY


def test_a_short_slot_inside_a_long_one_does_not_hide_the_rest():
    gate = gate_of((0, 100), (10, 5), (90, 20))
    gate.claim(A, 1)
    assert gate.owner(C) == 1


def test_a_claim_behind_a_device_wait_keeps_the_obligations_pending():
    gate = published(SAVE, READER)
    with pytest.raises(GateViolation, match="save"):
        gate.claim(A, 5, ordered_behind=frozenset({READER}))
    gate.claim(A, 5, ordered_behind=frozenset({SAVE, READER}))
    assert gate.pending(A) == {SAVE, READER}
    gate.publish(A, 5, [])
    # Nothing says that layer 9's writes are behind these: its claim has to.
    with pytest.raises(GateViolation, match="save"):
        gate.claim(A, 9)
    assert gate.settle(A, SAVE, Outcome.DONE)
    assert gate.settle(A, READER, Outcome.FENCED)
    gate.claim(A, 9)
    assert gate.statistics().claims_behind_pending == 1


def test_ordering_behind_what_is_long_settled_is_harmless():
    gate = published(SAVE)
    gate.settle(A, SAVE, Outcome.DONE)
    gate.claim(A, 5, ordered_behind=frozenset({SAVE, READER}))
    assert gate.statistics().claims_behind_pending == 0


def test_unknown_and_repeated_settlements_are_refused_and_counted():
    gate = published(SAVE)
    assert not gate.settle(A, READER, Outcome.DONE)
    assert not gate.settle(B, SAVE, Outcome.DONE)
    assert gate.pending(A) == {SAVE}
    assert gate.settle(A, SAVE, Outcome.FAILED)
    assert not gate.settle(A, SAVE, Outcome.DONE)
    statistics = gate.statistics()
    assert statistics.rejected_settles == 3
    assert (statistics.settled_failed, statistics.settled_done) == (1, 0)


def test_claims_and_publications_alternate():
    gate = gate_of((0, 10))
    with pytest.raises(GateViolation, match="publish by layer 1 of slot 0 is illegal: it is empty"):
        gate.publish(A, 1, [])
    gate.claim(A, 1)
    with pytest.raises(
        GateViolation, match="claim by layer 2 of slot 0 is illegal: it is claimed by layer 1"
    ):
        gate.claim(A, 2)
    with pytest.raises(GateViolation, match="claim by layer 1"):
        gate.claim(A, 1)
    with pytest.raises(GateViolation, match="publish by layer 2"):
        gate.publish(A, 2, [])
    gate.publish(A, 1, [])
    gate.claim(A, 1)
    gate.check_integrity()


def test_one_settlement_never_counts_for_two_obligations():
    gate = gate_of((0, 10))
    gate.claim(A, 1)
    with pytest.raises(GateViolation, match="save 'L1' published twice"):
        gate.publish(A, 1, [SAVE, SAVE])
    gate.publish(A, 1, [SAVE])
    gate.claim(A, 1, ordered_behind=frozenset({SAVE}))
    with pytest.raises(GateViolation, match="save 'L1' published twice"):
        gate.publish(A, 1, [SAVE])
    gate.check_integrity()


def test_a_slot_the_gate_does_not_know_is_an_error():
    gate = gate_of((0, 10))
    for call in (
        lambda: gate.claim(B, 1),
        lambda: gate.publish(B, 1, []),
        lambda: gate.settle(B, SAVE, Outcome.DONE),
        lambda: gate.pending(B),
        lambda: gate.owner(B),
    ):
        with pytest.raises(GateViolation, match="slot 1 is unknown"):
            call()


@pytest.mark.parametrize("bad", [(-1, 10), (0, 0), (0, -1)])
def test_a_range_without_memory_is_refused(bad):
    with pytest.raises(LayoutError, match=f"slot 1 lies at {bad[0]} with {bad[1]} bytes"):
        gate_of((0, 10), bad)


def test_addresses_beyond_32_bits():
    gate = gate_of(((1 << 47) + (1 << 33), 1 << 33), (1 << 47, 1 << 33))
    gate.claim(A, 1)
    assert gate.state(B) is GateState.EMPTY
