"""A producer, in every state, with a test that speaks for the consumer."""

from remote_end import END, FIRST, LAYERS, LEASE_S, OPEN_WAIT_S, RESEND_S, End, hello_of

from kvstrata.remote.holds import Hold
from kvstrata.remote.producer.machine import Producer
from kvstrata.remote.protocol.actions import Revoke, Settle
from kvstrata.remote.protocol.messages import (
    Accept,
    ReadDone,
    ReadFailed,
    Refused,
    Reject,
    Stamped,
    Welcome,
)

SETTLED = [Revoke, Settle]


class ProducerEnd(End):
    """A producer; the test speaks for the consumer at "D"."""

    def __init__(self, **options):
        super().__init__()
        self.consumer_epoch = "c1"
        self.machine = Producer(
            hello=hello_of(), clock=self.clock, lease_s=LEASE_S, resend_s=RESEND_S, open_wait_s=OPEN_WAIT_S
        )

    def open(self, transfer="t", *, slot=3, generation=7, peer="D", layers=LAYERS, first=FIRST, end=END):
        hold = Hold(slot=slot, generation=generation)
        self.machine.open(
            transfer,
            peer=peer,
            hold=hold,
            member=1,
            members=2,
            first_block=first,
            end_block=end,
            layers=layers,
        )

    def publish(self, transfer="t", layer=0, first=FIRST, end=END, *, is_last=None):
        blocks = tuple(range(40 + first, 40 + end))
        is_last = end == END if is_last is None else is_last
        self.machine.publish(
            transfer, layer=layer, first_block=first, end_block=end, blocks=blocks, is_last=is_last
        )

    def hear(self, kind, transfer="t", *, epoch=None, peer_epoch="p1", peer="D", **fields):
        if issubclass(kind, Stamped):
            fields = {"transfer": transfer, "member": 1, "generation": 7} | fields
        if kind is Welcome:
            fields = {"version": 1, "transport": "shm", "lease_s": LEASE_S} | fields
        if kind in (ReadDone, ReadFailed):
            fields = {"layer": 0, "part": 0} | fields
        if kind in (Reject, ReadFailed, Refused) or kind.__name__ == "Abort":
            fields = {"reason": "because"} | fields
        epoch = epoch or self.consumer_epoch
        self.machine.receive(peer, kind(epoch=epoch, peer_epoch=peer_epoch, **fields))

    def settled(self):
        """The Settle of every transfer so far, by id; each is the only one, and a Revoke stands before it."""
        self.log += self.machine.take_actions()
        ends = {}
        for at, action in enumerate(self.log):
            if isinstance(action, Settle):
                assert action.transfer not in ends
                assert any(
                    isinstance(before, Revoke) and before.transfer == action.transfer
                    for before in self.log[:at]
                )
                ends[action.transfer] = action
        return ends


def opening(*, published=0) -> ProducerEnd:
    end = ProducerEnd()
    end.open()
    end.hear(Welcome)
    for layer in range(published):
        end.publish(layer=layer)
    end.take()
    return end


def active(*, published=2) -> ProducerEnd:
    end = opening(published=published)
    end.hear(Accept)
    end.take()
    return end


def aborting() -> ProducerEnd:
    end = active()
    end.machine.abort("t", "client left")
    end.take()
    return end


def ended() -> ProducerEnd:
    end = active()
    end.hear(Reject)
    end.take()
    return end


def all_read(end: ProducerEnd) -> None:
    end.hear(ReadDone, layer=0)
    end.hear(ReadDone, layer=1)


def unwelcomed() -> ProducerEnd:
    end = ProducerEnd()
    end.open()
    end.take()
    return end


def refused_for(seconds: float) -> ProducerEnd:
    end = unwelcomed()
    end.hear(Refused, reason="page_bytes 512 at prefill, 528 at decode")
    end.clock.now_s += seconds
    end.take()
    return end
