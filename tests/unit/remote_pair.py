"""A producer and a consumer on one clock, and between them a network that loses what a test says."""

from collections import deque

from remote_end import END, FIRST, LAYERS, LEASE_S, OPEN_WAIT_S, RESEND_S, WAIT_S, Clock, hello_of

from kvstrata.remote.consumer.machine import Consumer
from kvstrata.remote.holds import Hold
from kvstrata.remote.producer.machine import Producer
from kvstrata.remote.protocol.actions import Finish, Send, Settle, StartRead
from kvstrata.remote.protocol.handshake import Mismatch


class Pair:
    """One rank of each side. Messages and reads take no time; everything else is up to the clock."""

    def __init__(self, *, refuse="", is_lost=lambda message, now_s: False):
        """`is_lost` says of each message whether it gets lost; `refuse` is why decode refuses prefill."""
        self.clock = Clock()
        self.refuse = refuse
        self.is_lost = is_lost
        self.lost = []
        self.finished = {}
        self.settled = {}
        self.producer = Producer(
            hello=hello_of(), clock=self.clock, lease_s=LEASE_S, resend_s=RESEND_S, open_wait_s=OPEN_WAIT_S
        )
        self.consumer = Consumer(
            epoch="c1",
            check_hello=self.check_hello,
            clock=self.clock,
            lease_s=LEASE_S,
            resend_s=RESEND_S,
            wait_s=WAIT_S,
            read_attempts=1,
        )

    def check_hello(self, hello):
        if self.refuse:
            raise Mismatch(self.refuse)
        return "shm"

    def expect(self, transfer="t"):
        self.consumer.expect(transfer, first_block=FIRST, end_block=END, layers=LAYERS)
        self.carry_out()

    def open(self, transfer="t", *, generation=7):
        self.producer.open(
            transfer,
            peer="D",
            hold=Hold(slot=3, generation=generation),
            member=0,
            members=1,
            first_block=FIRST,
            end_block=END,
            layers=LAYERS,
        )
        self.carry_out()

    def publish(self, transfer="t", *, layers=LAYERS):
        for layer in layers:
            self.producer.publish(
                transfer, layer=layer, first_block=FIRST, end_block=END, blocks=(40, 41, 42), is_last=True
            )
        self.carry_out()

    def wait(self, seconds):
        """Let time pass; each machine is ticked when it asks for it."""
        end_s = self.clock.now_s + seconds
        while (due_s := self.due_s()) is not None and due_s <= end_s:
            self.clock.now_s = max(self.clock.now_s, due_s)
            self.producer.tick()
            self.consumer.tick()
            self.carry_out()
        self.clock.now_s = end_s

    def due_s(self):
        due_s = [machine.next_tick_s() for machine in (self.producer, self.consumer)]
        return min((at for at in due_s if at is not None), default=None)

    def carry_out(self):
        """Do what the machines ask for, until they ask for nothing more at this moment."""
        actions = self.actions()
        while actions:
            receiver, sender, action = actions.popleft()
            match action:
                case Send(message=message):
                    if self.is_lost(message, self.clock.now_s):
                        self.lost.append(message)
                    else:
                        receiver.receive(sender, message)
                case StartRead():
                    self.consumer.read_finished(action.number)
                case Finish():
                    self.finished[action.transfer] = action
                case Settle():
                    self.settled[action.transfer] = action
            actions += self.actions()

    def actions(self):
        ways = ((self.producer, self.consumer, "P"), (self.consumer, self.producer, "D"))
        return deque(
            (receiver, sender, action)
            for machine, receiver, sender in ways
            for action in machine.take_actions()
        )
