"""A small world of remote read, made to be explored: two prefill ranks, one decode rank, any order.

A world is a value. Machines are interned: their states get numbers, and what a machine does in a state is
computed once. So a step of the world is a few look-ups, and whole graphs of states can be walked.

Messages arrive in the order in which they were sent, as over one connection. Time passes only when nothing
else can happen but the end of reads: messages are faster than timers. What is slower is tried by
`test_remote_machines.py`, and by the simulator.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import pickle
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from kvstrata.remote.consumer.machine import Consumer
from kvstrata.remote.consumer.reads import Reads
from kvstrata.remote.holds import Hold
from kvstrata.remote.producer.machine import Producer
from kvstrata.remote.protocol.actions import Ending, Send
from kvstrata.remote.protocol.handshake import Mismatch
from kvstrata.remote.protocol.messages import Accept, Hello

RANKS = 2

BLOCKS = (4, 5)
LEASE_S = 4.0
RESEND_S = 2.0
OPEN_WAIT_S = 5.0
WAIT_S = 5.0
READ_DEADLINE_S = 6.0
BOUND_S = 40.0
"""By then everything must have ended, in whatever order things happened."""


class Clock:
    """The time of a machine that is being stepped; travels with it."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def check_hello(hello: Hello) -> str:
    return "shm"


def make_producer(rank: int, life: int) -> Producer:
    hello = Hello(
        epoch=f"p{rank}.{life}",
        version=1,
        rank=rank,
        tp_size=RANKS,
        components=(),
        places=(),
        offers=(),
        lease_s=LEASE_S,
    )
    return Producer(hello=hello, clock=Clock(), lease_s=LEASE_S, resend_s=RESEND_S, open_wait_s=OPEN_WAIT_S)


def refuse_the_first(hello: Hello) -> str:
    """What a decode says whose caches are not laid out as those of prefill's rank 0."""
    if hello.rank == 0:
        raise Mismatch("page_bytes 512 at prefill, 528 at decode")
    return "shm"


def make_consumer(life: int, check_hello: Callable[[Hello], str] = check_hello) -> Consumer:
    return Consumer(
        epoch=f"c.{life}",
        check_hello=check_hello,
        clock=Clock(),
        lease_s=LEASE_S,
        resend_s=RESEND_S,
        wait_s=WAIT_S,
        read_attempts=2,
    )


# What does not influence what a machine does: counts, and how its pieces are joined.
_COUNTS = {"_counts", "_dropped", "_settled", "_finished", "begun", "retried", "landed", "failed"}
_WIRING = {"__orig_class__", "_clock", "_act", "act", "_read", "_check_hello", "_hello"}


_OUTSIDE = _COUNTS | _WIRING
_PLAIN = {type(None), bool, int, float, str, bytes}


def canonical(value):
    """A hashable value, equal for machines that behave alike."""
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is Reads:
        value = sorted((read_of(*what), what[2].attempts) for what in value._in_flight.values())
        kind = list
    if kind is dict:
        return frozenset((canonical(key), canonical(item)) for key, item in value.items())
    if kind in (list, tuple, deque):
        return tuple(map(canonical, value))
    if isinstance(value, enum.Enum | msgspec.Struct):
        return value
    return (kind, *(canonical(getattr(value, name)) for name in inside_of(kind, value)))


@functools.cache
def slots_of(kind):
    return tuple(field.name for field in dataclasses.fields(kind) if field.name not in _OUTSIDE)


def inside_of(kind, value):
    if not hasattr(value, "__dict__"):
        return slots_of(kind)
    return [name for name in vars(value) if name not in _OUTSIDE]


def read_of(transfer, member, part):
    """What a read reads; its number says less, and depends on the order of events."""
    return (transfer.transfer, member.number, part.layer, part.number)


class Sent(NamedTuple):
    """A message on its way, by number."""

    peer: str
    message: int


class Machines:
    """Every state of a machine that was ever reached, by number, and what it does in it."""

    def __init__(self) -> None:
        self._pickles: list[bytes] = []
        self._numbers: dict[object, int] = {}
        self._steps: dict[object, tuple[int, tuple[object, ...]]] = {}
        self._due_s: list[float | None] = []
        self._is_open: list[bool] = []
        self.messages: list[object] = []
        self._message_numbers: dict[object, int] = {}

    def __len__(self) -> int:
        return len(self._pickles)

    def intern(self, machine) -> int:
        key = canonical(machine)
        if key not in self._numbers:
            machine.check_integrity()
            self._numbers[key] = len(self._pickles)
            self._pickles.append(pickle.dumps(machine))
            self._due_s.append(machine.next_tick_s())
            self._is_open.append(bool(machine._transfers.open))
        return self._numbers[key]

    def step(self, number: int, now_s: float, call: str, *args, **kwargs) -> tuple[int, tuple[object, ...]]:
        """Return the state after a call at a time, and the actions; messages are numbers."""
        key = (number, now_s, call, args, tuple(kwargs.items()))
        if key not in self._steps:
            self._steps[key] = self._step(number, now_s, call, *args, **kwargs)
        return self._steps[key]

    def _step(self, number, now_s, call, *args, **kwargs):
        machine = pickle.loads(self._pickles[number])
        machine._clock.now_s = now_s
        if call == "receive":
            args = (args[0], self.messages[args[1]])
        if call == "read_finished":
            in_flight = machine._reads._in_flight.items()
            (args,) = [(at, *args[1:]) for at, what in in_flight if read_of(*what) == args[0]]
        getattr(machine, call)(*args, **kwargs)
        actions = machine.take_actions()
        return self.intern(machine), tuple(self._sent(a) if isinstance(a, Send) else a for a in actions)

    def _sent(self, action: Send) -> Sent:
        message = action.message
        if message not in self._message_numbers:
            self._message_numbers[message] = len(self.messages)
            self.messages.append(message)
        return Sent(action.peer, self._message_numbers[message])

    def is_accept(self, message: int) -> bool:
        return isinstance(self.messages[message], Accept)

    def is_open(self, number: int) -> bool:
        """Whether a transfer's end is still to come."""
        return self._is_open[number]

    def due_s(self, number: int) -> float | None:
        """When the machine wants to be ticked."""
        return self._due_s[number]


class Read(NamedTuple):
    """One read in flight: of which life of which rank, under which hold, and when it must be over."""

    what: tuple[str, int, int, int]
    rank: int
    life: int
    hold: Hold
    was_valid: bool
    deadline_s: float


class World(NamedTuple):
    """Everything there is. Channels are first in, first out; `up` leads to decode, `down` to prefill."""

    now_s: float
    producers: tuple[int, ...]
    consumer: int
    lives: tuple[int, ...]  # of the producers, then of the consumer
    up: tuple[tuple[int, ...], ...]
    down: tuple[tuple[int, ...], ...]
    published: tuple[int, ...]  # layers, of each rank
    accepted: tuple[bool, ...]
    holds: tuple[Hold | None, ...]  # valid ones, of each rank
    rows: tuple[str, ...]  # whose rows lie in the blocks of each rank
    offers: tuple[bool, ...]  # a new life of the rank is there and has not said Hello
    transfer: str = ""
    reads: tuple[Read, ...] = ()
    landed: frozenset = frozenset()  # in this life of the consumer
    settled: tuple[Ending | None, ...] = (None,) * RANKS
    finished: Ending | None = None
    is_deaf: bool = False  # decode hears nothing
    crashes: int = 0  # how many more may happen
    losses: int = 0
    aborts: int = 0
    read_errors: int = 0
    delays: int = 0  # how often time may pass while something is being read


def put(items: tuple, at: int, item) -> tuple:
    return (*items[:at], item, *items[at + 1 :])
