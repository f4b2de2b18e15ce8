"""Producers, one consumer, their memory and a network between them that does what a test tells it.

Checks on the way what must always hold: a hold ends before its transfer is settled, no foreign row is
believed, nothing is written after the end, done means that everything has landed, and each end comes once.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvstrata.remote.consumer.machine import Consumer
from kvstrata.remote.holds import Hold
from kvstrata.remote.producer.machine import Producer
from kvstrata.remote.protocol.actions import (
    CancelReads,
    Ending,
    Finish,
    LosePeer,
    Revoke,
    Send,
    Settle,
    StartRead,
)
from kvstrata.remote.protocol.messages import Hello

LEASE_S = 8.0
RESEND_S = 0.5
OPEN_WAIT_S = 12.0
WAIT_S = 20.0
READ_ATTEMPTS = 2
HEALED_WITHIN_S = 6 * WAIT_S + 2 * OPEN_WAIT_S + 4 * LEASE_S
"""Every transfer ends within this once messages arrive again, or a side is gone."""


@dataclass
class Rank:
    """One life of one prefill rank."""

    number: int
    machine: Producer
    next_generation: int
    holds: dict[str, Hold] = field(default_factory=dict)  # of transfers that are not settled
    valid: set[int] = field(default_factory=set)  # generations
    ends: dict[tuple[str, int], int] = field(default_factory=dict)  # by transfer and layer: what is published
    settled: dict[str, Settle] = field(default_factory=dict)


@dataclass(frozen=True)
class InFlight:
    """A read, and whose rows it saw when it began."""

    start: StartRead
    rank: Rank
    was_valid: bool


@dataclass
class Request:
    """One transfer, as the two engines want it."""

    name: str
    members: int
    first_block: int
    end_block: int
    layers: tuple[int, ...]
    landed: dict[tuple[int, int], list[tuple[int, int, bool]]] = field(default_factory=dict)
    finish: Finish | None = None


class World:
    """What there is. Message i of `network` is on its way; nothing happens unless a method is called."""

    def __init__(self, members: int) -> None:
        self.now_s = 50.0
        self.members = members
        self.lives = 0
        self.network: list[tuple[str, str, object]] = []  # from, to, message
        self.reads: list[InFlight] = []
        self.requests: dict[str, Request] = {}
        self.by_epoch: dict[str, Rank] = {}
        self.ranks = [self.new_rank(number) for number in range(members)]
        self.consumer = self.new_consumer()

    def new_rank(self, number: int) -> Rank:
        self.lives += 1
        hello = Hello(
            epoch=f"p{number}-{self.lives}",
            version=1,
            rank=number,
            tp_size=self.members,
            components=(),
            places=(),
            offers=(),
            lease_s=LEASE_S,
        )
        machine = Producer(
            hello=hello,
            clock=lambda: self.now_s,
            lease_s=LEASE_S,
            resend_s=RESEND_S,
            open_wait_s=OPEN_WAIT_S,
        )
        self.by_epoch[hello.epoch] = Rank(number, machine, 1)
        return self.by_epoch[hello.epoch]

    def new_consumer(self) -> Consumer:
        self.lives += 1
        return Consumer(
            epoch=f"c-{self.lives}",
            check_hello=lambda hello: "shm",
            clock=lambda: self.now_s,
            lease_s=LEASE_S,
            resend_s=RESEND_S,
            wait_s=WAIT_S,
            read_attempts=READ_ATTEMPTS,
        )

    # What engines do

    def expect(self, request: Request) -> None:
        self.requests[request.name] = request
        self.consumer.expect(
            request.name, first_block=request.first_block, end_block=request.end_block, layers=request.layers
        )
        self.carry_out()

    def open(self, request: Request, number: int) -> None:
        rank = self.ranks[number]
        hold = Hold(slot=len(rank.holds), generation=rank.next_generation)
        rank.next_generation += 1
        rank.holds[request.name] = hold
        rank.valid.add(hold.generation)
        for layer in request.layers:
            rank.ends[request.name, layer] = request.first_block
        rank.machine.open(
            request.name,
            peer="D",
            hold=hold,
            member=number,
            members=request.members,
            first_block=request.first_block,
            end_block=request.end_block,
            layers=request.layers,
        )
        self.carry_out()

    def publishable(self) -> list[tuple[Rank, str, int]]:
        return [(rank, name, layer) for rank in self.ranks for name, layer in rank.ends if name in rank.holds]

    def publish(self, rank: Rank, name: str, layer: int, blocks: int, *, is_last: bool) -> None:
        """The next `blocks` blocks of a layer, or all that are left if they are the last."""
        request, first = self.requests[name], rank.ends[name, layer]
        end = request.end_block if is_last else min(first + blocks, request.end_block)
        rank.ends[name, layer] = end
        if is_last:
            del rank.ends[name, layer]
        rank.machine.publish(
            name,
            layer=layer,
            first_block=first,
            end_block=end,
            blocks=tuple(range(first, end)),
            is_last=is_last,
        )
        self.carry_out()

    def restart_rank(self, number: int) -> None:
        self.ranks[number] = self.new_rank(number)

    def restart_consumer(self) -> None:
        self.consumer = self.new_consumer()
        self.reads.clear()
        for request in self.requests.values():
            request.finish = request.finish or Finish(
                transfer=request.name, ending=Ending.FAILED, reason="dead"
            )

    # What the network and the readers do

    def deliver(self, at: int, *, again: bool = False) -> None:
        source, to, message = self.network[at] if again else self.network.pop(at)
        if to == "D":
            self.consumer.receive(source, message)
        else:
            self.ranks[int(to)].machine.receive("D", message)
        self.carry_out()

    def end_read(self, at: int, *, broken: bool = False) -> None:
        """A read ends; it is believed if its hold was valid before and is so now."""
        read = self.reads.pop(at)
        start, is_valid = read.start, read.start.hold.generation in read.rank.valid
        is_alive = read.rank is self.ranks[read.rank.number]
        if broken or not is_alive:
            self.consumer.read_finished(start.number, "connection lost")
        elif not (read.was_valid and is_valid):
            self.consumer.read_finished(start.number, "the hold was revoked", is_final=True)
        else:
            assert read.rank.holds[start.transfer] == start.hold, "foreign rows were taken for the request's"
            request, key = self.requests[start.transfer], (start.member, start.layer)
            request.landed.setdefault(key, []).append((start.part, start.first_block, start.end_block))
            self.consumer.read_finished(start.number)
        self.carry_out()

    def wait(self, seconds: float) -> None:
        """Time passes; every machine is ticked when it asks for it."""
        end_s = self.now_s + seconds
        while (due_s := self.due_s()) is not None and due_s <= end_s:
            self.now_s = max(self.now_s, due_s)
            for rank in self.ranks:
                rank.machine.tick()
            self.consumer.tick()
            self.carry_out()
        self.now_s = end_s

    def due_s(self) -> float | None:
        due_s = [rank.machine.next_tick_s() for rank in self.ranks] + [self.consumer.next_tick_s()]
        return min((at for at in due_s if at is not None), default=None)

    def settle_down(self) -> None:
        """Deliver everything in order, end every read, until nothing is left to do at this moment."""
        while self.network or self.reads:
            if self.network:
                self.deliver(0)
            else:
                self.end_read(0)

    def heal(self) -> None:
        """From now on nothing is lost, and time goes on."""
        end_s = self.now_s + HEALED_WITHIN_S
        self.settle_down()
        while self.now_s < end_s and not self.is_over():
            due_s = self.due_s()
            assert due_s is not None, "something is open and nothing is due"
            self.wait(max(0.0, due_s - self.now_s))
            self.settle_down()

    def is_over(self) -> bool:
        return all(request.finish for request in self.requests.values()) and not any(
            rank.holds for rank in self.ranks
        )

    # What the machines ask for

    def carry_out(self) -> None:
        for rank in self.ranks:
            rank.machine.check_integrity()
            for action in rank.machine.take_actions():
                self.carry_out_for(rank, action)
        self.consumer.check_integrity()
        for action in self.consumer.take_actions():
            match action:
                case Send(peer=peer, message=message):
                    self.network.append(("D", peer, message))
                case StartRead():
                    self.start_read(action)
                case Finish():
                    self.finish(action)
                case CancelReads() | LosePeer():
                    pass

    def carry_out_for(self, rank: Rank, action: object) -> None:
        match action:
            case Send(peer=peer, message=message):
                self.network.append((str(rank.number), peer, message))
            case Revoke(transfer=name, hold=hold):
                assert rank.holds[name] == hold
                rank.valid.remove(hold.generation)
            case Settle(transfer=name):
                assert rank.holds[name].generation not in rank.valid, "settled before the hold was revoked"
                assert name not in rank.settled, "settled twice"
                rank.settled[name] = action
                del rank.holds[name]  # from here on the blocks are another request's

    def start_read(self, start: StartRead) -> None:
        request = self.requests[start.transfer]
        # A reader's connection is to the life whose Hello was answered last.
        (epoch,) = [peer.epoch for peer in self.consumer._peers if peer.identity == start.peer]
        rank = self.by_epoch[epoch]
        assert request.finish is None, "a read begins after the end"
        assert all(
            (read.start.transfer, read.start.member, read.start.layer, read.start.part)
            != (start.transfer, start.member, start.layer, start.part)
            for read in self.reads
        ), "one part is read twice at a time"
        self.reads.append(InFlight(start, rank, start.hold.generation in rank.valid))

    def finish(self, finish: Finish) -> None:
        request = self.requests[finish.transfer]
        assert request.finish is None, "finished twice"
        assert all(read.start.transfer != finish.transfer for read in self.reads), "finished while being read"
        request.finish = finish
        if finish.ending is Ending.DONE:
            for member in range(request.members):
                for layer in request.layers:
                    parts = sorted(request.landed[member, layer])
                    assert [number for number, *_ in parts] == list(range(len(parts)))
                    ends = [request.first_block, *(end for *_, end in parts)]
                    assert [first for _, first, _ in parts] == ends[:-1], parts
                    assert ends[-1] == request.end_block, parts
