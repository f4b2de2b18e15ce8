"""The moves of the small world, and what must hold after each."""

from __future__ import annotations

from collections.abc import Iterator

from remote_small_world import (
    BLOCKS,
    BOUND_S,
    RANKS,
    READ_DEADLINE_S,
    Machines,
    Read,
    Sent,
    World,
    check_hello,
    make_consumer,
    make_producer,
    put,
)

from kvstrata.remote.holds import Hold
from kvstrata.remote.protocol.actions import Ending, Finish, Revoke, Settle, StartRead

EITHER = (0,)
"""The rank that crashes or aborts: ranks differ by nothing but their numbers, so one stands for both."""


class Explorer:
    """Makes every move that is possible in a world."""

    check_hello = staticmethod(check_hello)  # decode's judgement of every Hello

    def __init__(self, *, layers: int = 3) -> None:
        self.machines = Machines()
        self.layers = range(layers)

    # The beginning

    def begin(self, **budget: int) -> World:
        """One transfer, expected by decode and opened by both ranks; `budget`: what may go wrong."""
        machines = self.machines
        producers = tuple(machines.intern(make_producer(rank, 0)) for rank in range(RANKS))
        world = World(
            now_s=0.0,
            producers=producers,
            consumer=machines.intern(make_consumer(0, self.check_hello)),
            lives=(0,) * (RANKS + 1),
            up=((),) * RANKS,
            down=((),) * RANKS,
            published=(0,) * RANKS,
            accepted=(False,) * RANKS,
            holds=(None,) * RANKS,
            rows=("",) * RANKS,
            offers=(False,) * RANKS,
            **budget,
        )
        return self.request(world, "first", generation=1)

    def request(self, world: World, transfer: str, *, generation: int) -> World:
        """A request whose rows are computed into the same blocks as all others."""
        assert world.holds == (None,) * RANKS, "the blocks are still held by another request"
        world = world._replace(
            transfer=transfer,
            published=(0,) * RANKS,
            accepted=(False,) * RANKS,
            settled=(None,) * RANKS,
            finished=None,
            landed=frozenset(),
        )
        world = self.consume(
            world, "expect", transfer, first_block=0, end_block=len(BLOCKS), layers=self.layers
        )
        for rank in range(RANKS):
            hold = Hold(slot=0, generation=generation)
            world = world._replace(holds=put(world.holds, rank, hold), rows=put(world.rows, rank, transfer))
            world = self.open(world, rank, transfer, hold)
        return world

    def offer(self, world: World, rank: int) -> World:
        """A new life of prefill says Hello, for a request that decode does not know."""
        world = world._replace(offers=put(world.offers, rank, False))
        return self.open(world, rank, "other", Hold(slot=1, generation=1))

    def open(self, world: World, rank: int, transfer: str, hold: Hold) -> World:
        return self.produce(
            world,
            rank,
            "open",
            transfer,
            peer="D",
            hold=hold,
            member=rank,
            members=RANKS,
            first_block=0,
            end_block=len(BLOCKS),
            layers=self.layers,
        )

    # A step of a machine

    def produce(self, world: World, rank: int, call: str, *args, **kwargs) -> World:
        """Have a producer called and its actions carried out."""
        number, actions = self.machines.step(world.producers[rank], world.now_s, call, *args, **kwargs)
        world = world._replace(producers=put(world.producers, rank, number))
        for action in actions:
            match action:
                case Sent(_, message):
                    world = world._replace(up=put(world.up, rank, (*world.up[rank], message)))
                case Revoke(transfer=transfer) | Settle(transfer=transfer) if transfer != world.transfer:
                    pass  # of a new life, see `offer`
                case Revoke():
                    assert world.holds[rank] == action.hold, "revoked twice"
                    world = world._replace(holds=put(world.holds, rank, None))
                case Settle(ending=ending):
                    assert world.holds[rank] is None, "settled before the hold was revoked"
                    assert world.settled[rank] is None, "settled twice"
                    # The blocks go to the next request at once.
                    world = world._replace(
                        settled=put(world.settled, rank, ending),
                        rows=put(world.rows, rank, "of another request"),
                    )
        return world

    def consume(self, world: World, call: str, *args, **kwargs) -> World:
        """Have the consumer called and its actions carried out."""
        number, actions = self.machines.step(world.consumer, world.now_s, call, *args, **kwargs)
        world = world._replace(consumer=number)
        for action in actions:
            match action:
                case Sent(peer, message):
                    rank = int(peer)
                    world = world._replace(down=put(world.down, rank, (*world.down[rank], message)))
                case StartRead():
                    world = self.start_read(world, action)
                case Finish(transfer=transfer, ending=ending):
                    assert world.finished is None, "finished twice"
                    assert not world.reads, "finished while a read may still write"
                    everything = {
                        (transfer, rank, layer, 0) for rank in range(RANKS) for layer in self.layers
                    }
                    assert ending is not Ending.DONE or world.landed == everything, (
                        "done, but something is missing"
                    )
                    world = world._replace(finished=ending)
        return world

    def start_read(self, world: World, start: StartRead) -> World:
        rank = int(start.peer)
        read = Read(
            (start.transfer, start.member, start.layer, start.part),
            rank,
            world.lives[rank],
            start.hold,
            world.holds[rank] == start.hold,
            world.now_s + READ_DEADLINE_S,
        )
        assert all(other.what != read.what for other in world.reads), "one part is read twice at a time"
        assert world.finished is None, "a read begins after the end"
        return world._replace(reads=tuple(sorted((*world.reads, read), key=lambda read: read.rank)))

    @staticmethod
    def first_reads(world: World) -> list[Read]:
        """Of each rank the one that is being carried out: a rank's rows are read one part at a time."""
        firsts = (next((read for read in world.reads if read.rank == rank), None) for rank in range(RANKS))
        return [read for read in firsts if read is not None]

    # The moves

    def moves(self, world: World) -> Iterator[tuple[str, World]]:
        """Yield every world that may be next, and how it comes about."""
        yield from self.faults(world)
        for rank in range(RANKS):
            is_publishing = world.published[rank] < len(self.layers)
            if world.down[rank]:
                # What prefill hears changes nothing but prefill: hearing it now stands for hearing it later.
                yield f"prefill {rank} hears", self.hear(world, rank)
                if not (is_publishing and self.machines.is_accept(world.down[rank][0])):
                    return
            if is_publishing and (world.accepted[rank] or world.down[rank]):
                # A part published now and heard later stands for one published later; before Accept it is
                # another case, since it then waits at prefill.
                yield f"prefill {rank} publishes", self.publish(world, rank)
                return
        for rank in range(RANKS):
            if world.up[rank]:
                message, rest = world.up[rank][0], world.up[rank][1:]
                heard = world._replace(up=put(world.up, rank, rest))
                if not world.is_deaf:
                    heard = self.consume(heard, "receive", str(rank), message)
                yield f"decode hears {rank}", heard
        for read in self.first_reads(world):
            yield f"read {read.what} ends", self.end_read(world, read)
        for rank in range(RANKS):
            if world.offers[rank]:
                yield f"prefill {rank} offers another request", self.offer(world, rank)
        if not any(world.up):
            yield from self.time(world)

    def hear(self, world: World, rank: int) -> World:
        message, rest = world.down[rank][0], world.down[rank][1:]
        accepted = world.accepted[rank] or self.machines.is_accept(message)
        world = world._replace(down=put(world.down, rank, rest), accepted=put(world.accepted, rank, accepted))
        return self.produce(world, rank, "receive", "D", message)

    def publish(self, world: World, rank: int) -> World:
        layer = world.published[rank]
        world = world._replace(published=put(world.published, rank, layer + 1))
        end_block = len(BLOCKS)
        return self.produce(
            world,
            rank,
            "publish",
            world.transfer,
            layer=layer,
            first_block=0,
            end_block=end_block,
            blocks=BLOCKS,
            is_last=True,
        )

    def end_read(self, world: World, read: Read, *, broken: bool = False) -> World:
        """A read is believed if its hold was valid before and after; then its rows must be the request's."""
        world = world._replace(reads=tuple(other for other in world.reads if other != read))
        is_alive = read.life == world.lives[read.rank]
        if broken or not is_alive:
            return self.consume(world, "read_finished", read.what, "connection lost")
        if not self.is_valid(world, read):
            return self.consume(world, "read_finished", read.what, "the hold was revoked", is_final=True)
        assert world.rows[read.rank] == read.what[0], "foreign rows were taken for the request's"
        world = world._replace(landed=world.landed | {read.what})
        return self.consume(world, "read_finished", read.what)

    def is_valid(self, world: World, read: Read) -> bool:
        """Whether the hold was valid before the read and is so after it."""
        return read.was_valid and world.holds[read.rank] == read.hold

    def time(self, world: World) -> Iterator[tuple[str, World]]:
        """Nothing else is left to do now: the next thing that is due."""
        machines = (*world.producers, world.consumer)
        if not world.reads and not any(self.machines.is_open(number) for number in machines):
            return
        due_s = [at for number in machines if (at := self.machines.due_s(number)) is not None]
        now_s = min(due_s)
        assert now_s <= BOUND_S, "something never ends"
        if world.reads:
            if not world.delays or any(read.deadline_s <= now_s for read in world.reads):
                return
            world = world._replace(delays=world.delays - 1)
        world = world._replace(now_s=max(now_s, world.now_s))
        for rank in range(RANKS):
            world = self.produce(world, rank, "tick")
        yield f"it is {now_s:g} s", self.consume(world, "tick")

    # What goes wrong

    def faults(self, world: World) -> Iterator[tuple[str, World]]:
        if world.losses:
            after = world._replace(losses=world.losses - 1)
            for rank in range(RANKS):
                if world.up[rank]:
                    yield (
                        f"lost on the way up from {rank}",
                        after._replace(up=put(world.up, rank, world.up[rank][1:])),
                    )
                if world.down[rank]:
                    yield (
                        f"lost on the way down to {rank}",
                        after._replace(down=put(world.down, rank, world.down[rank][1:])),
                    )
        if world.read_errors:
            after = world._replace(read_errors=world.read_errors - 1)
            for read in self.first_reads(world):
                yield f"read {read.what} breaks", self.end_read(after, read, broken=True)
        if world.aborts:
            after = world._replace(aborts=world.aborts - 1)
            if world.finished is None:
                yield "decode aborts", self.consume(after, "abort", world.transfer, "client left")
            for rank in EITHER:
                if world.settled[rank] is None:
                    yield (
                        f"prefill {rank} aborts",
                        self.produce(after, rank, "abort", world.transfer, "engine says so"),
                    )
        if world.crashes:
            after = world._replace(crashes=world.crashes - 1)
            for rank in EITHER:
                if world.settled[rank] is None:
                    for sent in range(len(world.up[rank]) + 1):
                        crashed = after._replace(up=put(world.up, rank, world.up[rank][:sent]))
                        yield f"prefill {rank} crashes", self.crash_producer(crashed, rank)
            if world.finished is None:
                crashed = self.crash_consumer(after)
                yield "decode crashes and is there again", crashed
                yield "decode crashes and stays away", crashed._replace(is_deaf=True)

    def crash_producer(self, world: World, rank: int) -> World:
        """A new life begins and knows nothing."""
        life = world.lives[rank] + 1
        return world._replace(
            producers=put(world.producers, rank, self.machines.intern(make_producer(rank, life))),
            lives=put(world.lives, rank, life),
            down=put(world.down, rank, ()),
            offers=put(world.offers, rank, True),
            published=put(world.published, rank, len(self.layers)),
            holds=put(world.holds, rank, None),
            rows=put(world.rows, rank, "of another life"),
            settled=put(world.settled, rank, Ending.FAILED),
        )

    def crash_consumer(self, world: World) -> World:
        """A new life begins and knows nothing; what was sent to the old one reaches the new one."""
        life = world.lives[RANKS] + 1
        return world._replace(
            consumer=self.machines.intern(make_consumer(life, self.check_hello)),
            lives=put(world.lives, RANKS, life),
            reads=(),
            landed=frozenset(),
            finished=Ending.FAILED,
        )

    # The end

    def check_final(self, world: World) -> None:
        """At the end nothing is open on any side, and the next request gets the same blocks and succeeds."""
        self.check_over(world)
        world = world._replace(crashes=0, losses=0, aborts=0, read_errors=0, is_deaf=False)
        world = self.request(world, "next", generation=9)
        while world.finished is None or None in world.settled:
            _, world = next(self.moves(world))
        assert (world.finished, *world.settled) == (Ending.DONE,) * (RANKS + 1), "the next request fails"

    def check_over(self, world: World) -> None:
        """Nothing is open on any side."""
        assert not world.reads
        assert world.finished is not None, "decode still waits"
        assert None not in world.settled, "prefill still waits"
        assert world.holds == (None,) * RANKS, "a hold is left"
        assert not any(self.machines.is_open(number) for number in (*world.producers, world.consumer))
