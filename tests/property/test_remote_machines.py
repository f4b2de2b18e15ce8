"""Producers and a consumer on a network that loses, repeats and reorders; restarts, aborts, failed reads."""

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from remote_world import LEASE_S, RESEND_S, Request, World

from kvstrata.remote.protocol.actions import Ending

PICK = st.integers(0, 1 << 16)


class RemoteMachine(RuleBasedStateMachine):
    """Every rule is one thing that happens; `World` checks on the way."""

    @initialize(members=st.integers(1, 3))
    def build(self, members):
        self.world = World(members)
        self.count = 0

    @rule(
        blocks=st.tuples(st.integers(0, 3), st.integers(0, 4)),
        layers=st.integers(1, 3),
        is_late=st.booleans(),
        absent=st.none() | st.integers(0, 2),
    )
    def request(self, blocks, layers, is_late, absent):
        first, count = blocks
        request = Request(f"t{self.count}", self.world.members, first, first + count, tuple(range(layers)))
        self.count += 1
        self.world.requests[request.name] = request
        opening = [number for number in range(self.world.members) if number != absent]
        if is_late:
            for number in opening:
                self.world.open(request, number)
        self.world.expect(request)
        if not is_late:
            for number in opening:
                self.world.open(request, number)

    @precondition(lambda self: self.world.publishable())
    @rule(pick=PICK, blocks=st.integers(0, 2), is_last=st.booleans())
    def publish(self, pick, blocks, is_last):
        able = self.world.publishable()
        self.world.publish(*able[pick % len(able)], blocks, is_last=is_last)

    @precondition(lambda self: self.world.network)
    @rule(pick=PICK)
    def deliver(self, pick):
        self.world.deliver(pick % len(self.world.network))

    @precondition(lambda self: self.world.network)
    @rule(count=st.integers(1, 12))
    def deliver_the_oldest(self, count):
        for _ in range(min(count, len(self.world.network))):
            self.world.deliver(0)

    @precondition(lambda self: self.world.network)
    @rule(pick=PICK)
    def deliver_and_keep(self, pick):
        self.world.deliver(pick % len(self.world.network), again=True)

    @precondition(lambda self: self.world.network)
    @rule(pick=PICK)
    def lose(self, pick):
        del self.world.network[pick % len(self.world.network)]

    @rule()
    def everything_arrives(self):
        self.world.settle_down()

    @precondition(lambda self: self.world.reads)
    @rule(pick=PICK, broken=st.booleans())
    def end_read(self, pick, broken):
        self.world.end_read(pick % len(self.world.reads), broken=broken)

    @rule(leases=st.sampled_from([0.01, 0.07, 0.3, 1.0, 3.0]))
    def wait(self, leases):
        self.world.wait(leases * LEASE_S)

    @precondition(lambda self: self.world.requests)
    @rule(pick=PICK)
    def decode_aborts(self, pick):
        self.world.consumer.abort(f"t{pick % self.count}", "client left")
        self.world.carry_out()

    @precondition(lambda self: self.world.requests)
    @rule(pick=PICK, number=st.integers(0, 2))
    def prefill_aborts(self, pick, number):
        rank = self.world.ranks[number % self.world.members]
        rank.machine.abort(f"t{pick % self.count}", "engine says so")
        self.world.carry_out()

    @rule(number=st.integers(0, 2))
    def prefill_restarts(self, number):
        self.world.restart_rank(number % self.world.members)

    @rule()
    def decode_restarts(self):
        self.world.restart_consumer()

    @invariant()
    def memory_is_held_as_long_as_a_transfer_is_open(self):
        if hasattr(self, "world"):
            for rank in self.world.ranks:
                assert {hold.generation for hold in rank.holds.values()} == rank.valid
                assert all(rank.machine.is_open(name) for name in rank.holds)

    def teardown(self):
        """P7: whatever happened, all of it ends, and the next request succeeds."""
        if not hasattr(self, "world"):
            return
        world = self.world
        world.heal()
        assert world.is_over(), "something never ends"
        for rank in world.ranks:
            counts = rank.machine.statistics()
            assert counts.opening + counts.active + counts.aborting == 0
        counts = world.consumer.statistics()
        assert counts.waiting + counts.receiving + counts.draining + counts.reading == 0
        assert succeeds(world, "next")


def succeeds(world, name):
    request = Request(name, world.members, 0, 2, (0, 1))
    world.expect(request)
    for number in range(world.members):
        world.open(request, number)
        for layer in request.layers:
            world.publish(world.ranks[number], name, layer, 0, is_last=True)
    world.heal()
    return request.finish.ending is Ending.DONE


TestRemoteMachine = RemoteMachine.TestCase
TestRemoteMachine.settings = settings(
    max_examples=150,
    stateful_step_count=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)


@settings(max_examples=150, deadline=None)
@given(
    members=st.integers(1, 3),
    lost=st.lists(st.integers(0, 60), max_size=4),
    order=st.lists(PICK, max_size=120),
    repeat=st.sets(st.integers(0, 60), max_size=5),
)
def test_P2_a_few_losses_and_any_order_change_nothing(members, lost, order, repeat):  # noqa: N802
    world = World(members)
    request = Request("t", members, 1, 4, (0, 1, 2))
    world.expect(request)
    for number in range(members):
        world.open(request, number)
    picks = iter(order)
    delivered = 0
    for _ in range(400):
        for rank, name, layer in world.publishable()[:1]:
            world.publish(rank, name, layer, 1, is_last=next(picks, 0) % 2 == 0)
        if world.network:
            at = next(picks, 0) % len(world.network)
            delivered += 1
            if delivered in lost:
                del world.network[at]
                continue
            world.deliver(at, again=delivered in repeat)
        elif world.reads:
            world.end_read(next(picks, 0) % len(world.reads))
        elif request.finish and world.is_over():
            break
        else:
            world.wait(RESEND_S / 2)
    assert request.finish is not None
    assert request.finish.ending is Ending.DONE
    assert all(settle.ending is Ending.DONE for rank in world.ranks for settle in rank.settled.values())
