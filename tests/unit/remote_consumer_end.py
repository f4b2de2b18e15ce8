"""A consumer, in every state, with a test that speaks for the producers."""

import itertools

from remote_end import END, FIRST, LAYERS, LEASE_S, RESEND_S, WAIT_S, End, hello_of

from kvstrata.remote.consumer.machine import Consumer
from kvstrata.remote.protocol.actions import CancelReads, Finish, StartRead
from kvstrata.remote.protocol.handshake import Mismatch
from kvstrata.remote.protocol.messages import (
    Beat,
    Hello,
    Open,
    Ready,
    Stamped,
)


class ConsumerEnd(End):
    """A consumer; the test speaks for producers "P0", "P1", ... in their first life."""

    def __init__(self, *, read_attempts=3, members=2):
        super().__init__()
        self.members = members
        self.refuse = None
        self.machine = Consumer(
            epoch="c1",
            check_hello=self.check_hello,
            clock=self.clock,
            lease_s=LEASE_S,
            resend_s=RESEND_S,
            wait_s=WAIT_S,
            read_attempts=read_attempts,
        )

    def check_hello(self, hello):
        if self.refuse:
            raise Mismatch(self.refuse)
        return "shm"

    def expect(self, transfer="t", *, first=FIRST, end=END, layers=LAYERS):
        self.machine.expect(transfer, first_block=first, end_block=end, layers=layers)

    def hear(self, member, kind, transfer="t", /, *, epoch=None, peer_epoch="c1", **fields):
        epoch = epoch or f"p{member}"
        if kind is Hello:
            self.machine.receive(f"P{member}", hello_of(epoch, rank=member, **fields))
            return
        if issubclass(kind, Stamped):
            fields = {"transfer": transfer, "member": member, "generation": 7 + member} | fields
        if kind is Open:
            opened = {"members": self.members, "hold_slot": member, "first_block": FIRST, "end_block": END}
            fields = opened | fields
        if kind is Ready:
            fields = {"layer": 0, "part": 0, "first_block": FIRST, "end_block": END} | fields
            fields = {"is_last": fields["end_block"] == END} | fields
            fields = {"blocks": tuple(range(fields["first_block"], fields["end_block"]))} | fields
        if kind.__name__ == "Abort":
            fields = {"reason": "because"} | fields
        if kind is Beat and "transfers" not in fields:
            fields = {"transfers": (transfer,)}
        self.machine.receive(f"P{member}", kind(epoch=epoch, peer_epoch=peer_epoch, **fields))

    def join(self, *members, transfer="t"):
        """Hello and Open of each, and forget what was said about it."""
        for member in members:
            self.hear(member, Hello)
            self.hear(member, Open, transfer)
        self.log += self.machine.take_actions()

    def reads(self):
        """New reads; nothing else may have been asked for."""
        actions = self.take()
        assert all(isinstance(action, StartRead) for action in actions), actions
        return actions

    def all_reads(self):
        return [action for action in self.log if isinstance(action, StartRead)]

    def finished(self):
        """The Finish of every transfer so far, by id; each is the only one, and behind every read's end."""
        self.log += self.machine.take_actions()
        ends = [action for action in self.log if isinstance(action, Finish)]
        assert len({end.transfer for end in ends}) == len(ends)
        return {end.transfer: end for end in ends}


def expected() -> ConsumerEnd:
    end = ConsumerEnd()
    end.expect()
    end.hear(0, Hello)
    end.hear(1, Hello)
    end.take()
    return end


def receiving(*members: int, **options: int) -> ConsumerEnd:
    end = ConsumerEnd(**options)
    end.expect()
    end.join(*(members or (0, 1)))
    return end


def reading() -> ConsumerEnd:
    """Layer 0 of member 0 is being read, under number 0."""
    end = receiving()
    end.hear(0, Ready)
    end.take()
    return end


def draining() -> ConsumerEnd:
    end = reading()
    end.machine.abort("t", "client left")
    assert end.kinds() == [CancelReads]
    return end


def ended() -> ConsumerEnd:
    end = receiving()
    end.machine.abort("t", "client left")
    end.take()
    return end


def done() -> ConsumerEnd:
    end = receiving()
    land_everything(end)
    end.take()
    return end


def land_everything(end: ConsumerEnd) -> None:
    for member, layer in itertools.product(range(end.members), LAYERS):
        end.hear(member, Ready, layer=layer)
    for action in end.machine.take_actions():
        end.log.append(action)
        if isinstance(action, StartRead):
            end.machine.read_finished(action.number)


def all_but_one_read() -> ConsumerEnd:
    """Everything has landed but the read of number 3."""
    end = receiving()
    for member, layer in itertools.product((0, 1), LAYERS):
        end.hear(member, Ready, layer=layer)
    for number in range(3):
        end.machine.read_finished(number)
    end.take()
    return end


def refusing() -> ConsumerEnd:
    end = ConsumerEnd()
    end.refuse = "page_bytes 512 at prefill, 528 at decode"
    return end


def known() -> ConsumerEnd:
    end = ConsumerEnd()
    end.hear(0, Hello)
    end.take()
    return end
