"""One rank of the simulated decode engine: drives a real Consumer and its readers."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from kvstrata.core.shares import member_blocks, overlap
from kvstrata.remote.protocol.actions import CancelReads, Ending, Finish, LosePeer, Send, StartRead
from kvstrata.remote.protocol.handshake import check_hello
from kvstrata.remote.protocol.messages import AnyMessage, Hello, Open
from kvstrata.sim.pages import Pages
from kvstrata.sim.reads import PageCopy, Read
from kvstrata.sim.setting import TRANSPORT, Setting
from kvstrata.sim.transport import NamedTransport
from kvstrata.sim.world import Kind, Violation

if TYPE_CHECKING:
    from kvstrata.sim.decode import Decode, DecodeJob


class DecodeRank:
    """Its `expect` and `abort` are called through a pipe, in order."""

    def __init__(self, setting: Setting, engine: Decode, rank: int) -> None:
        self.setting = setting
        self.world = setting.world
        self.engine = engine
        self.rank = rank
        self.name = f"d{rank}"
        self.process = setting.process(self.name)
        self._transport = NamedTransport(TRANSPORT)
        setting.network.attach(self.name, self)
        self.start()

    def start(self) -> None:
        """Begin a life: a new epoch, nothing expected."""
        setting, options = self.setting, self.setting.options
        self.pages = Pages(len(options.planes), options.decode_blocks)
        self.machine = setting.parts.consumer(
            epoch=f"{self.name}-{self.process.life}",
            check_hello=self._check_hello,
            clock=self.process.clock,
            lease_s=options.decode_lease_s,
            resend_s=options.resend_s,
            wait_s=options.wait_s,
            read_attempts=options.read_attempts,
        )
        self.readers = setting.parts.readers(
            self.process, setting.network, options, self.engine.pool, self._read_ended
        )
        self.expected: dict[str, DecodeJob] = {}
        setting.expected[self.name] = self.expected
        self._opened: dict[str, set[int]] = {}  # members heard, by transfer
        self._aborted: set[str] = set()
        self._tickets: dict[str, bytes] = {}  # by peer
        self._reading: dict[int, tuple[str, int, int, int]] = {}
        self._begun: Counter[tuple[str, int, int, int]] = Counter()  # reads of a part
        self._speaker = ""
        self._tick_s = float("inf")

    def crash(self) -> None:
        """Lose everything, reads in flight included."""
        self.process.crash()
        self.readers.vanish()
        self.expected.clear()

    # What the engine's scheduler asks for

    def expect(self, job: DecodeJob) -> None:
        """Let prefill's ranks fill the job's blocks."""
        self.expected[job.transfer] = job
        self.machine.expect(
            job.transfer,
            first_block=job.first_block,
            end_block=len(job.blocks),
            layers=range(len(self.setting.options.layers)),
        )
        self.pump()

    def abort(self, transfer: str, reason: str) -> None:
        """Have a transfer end; its Finish says when."""
        self._aborted.add(transfer)
        self.machine.abort(transfer, reason)
        self.pump()

    # The machine

    def receive(self, peer: str, message: AnyMessage) -> None:
        """A message came from the network."""
        self.world.note(self.name, "hears", peer, message)
        if isinstance(message, Open) and message.transfer in self.expected:
            self._opened.setdefault(message.transfer, set()).add(message.member)
        self._speaker = peer
        self.machine.receive(peer, message)
        self.pump()

    def tick(self, at_s: float) -> None:
        """A timer of the machine came due."""
        if at_s == self._tick_s:
            self._tick_s = float("inf")
        self.machine.tick()
        self.pump()

    def pump(self) -> None:
        """Carry out what the machine asks for, and set its timer."""
        for action in self.machine.take_actions():
            match action:
                case Send():
                    self.setting.network.send(self.process, self.name, action.peer, action.message)
                case StartRead():
                    self._start_read(action)
                case CancelReads():
                    self.readers.cancel(action.transfer)
                case LosePeer():
                    self.readers.lose(action.peer)
                case Finish():
                    self.finish(action)
        self.machine.check_integrity()
        if not all(self.machine.is_expected(transfer) for transfer in self.expected):
            raise Violation("exactly once", f"{self.name} lost one of {sorted(self.expected)}")
        next_s = self.machine.next_tick_s()
        if next_s is None:
            if self.expected:
                raise Violation("P6", f"{self.name} waits for {sorted(self.expected)} without a deadline")
            return
        at_s = max(self.world.now_s, self.process.virtual_s(next_s))
        if at_s < self._tick_s:
            self._tick_s = at_s
            self.world.push(at_s, self.process, Kind.TICK, self.tick, (at_s,))

    def _check_hello(self, hello: Hello) -> str:
        transport = check_hello(
            hello,
            components=self.setting.layouts(),
            tp_rank=self.rank,
            tp_size=self.setting.options.d_tp,
            transports=(self._transport,),
            memfabric_protocol="sdma",
        )
        self._tickets[self._speaker] = hello.offers[0].ticket
        return transport

    def _start_read(self, action: StartRead) -> None:
        job = self.expected.get(action.transfer)
        if job is None:
            raise Violation("M3", f"{self.name} reads for {action.transfer}, which has ended")
        copies = [
            PageCopy(
                plane,
                action.blocks[position - action.first_block],
                self.engine.main_pages(self) if self._is_main(plane) else self.pages,
                job.blocks[position],
                (job.number, plane, position, self.setting.filled(job.request.tokens, position)),
            )
            for plane, first, end in self.wanted(action, job)
            for position in range(first, end)
        ]
        memory = self.setting.exported.get(self._tickets.get(action.peer, b""))
        self.world.note(self.name, "reads", action)
        part = (action.transfer, action.member, action.layer, action.part)
        self._reading[action.number] = part
        self._begun[part] += 1
        self.readers.submit(Read(action.number, action.peer, action.transfer, action.hold, memory, copies))

    def wanted(self, action: StartRead, job: DecodeJob) -> list[tuple[int, int, int]]:
        """Plane, first and end block of what this member supplies of a part to this rank."""
        main_rank, main_ranks = self.main_share()
        found = []
        for plane, component in self.setting.planes_of(action.layer):
            share = member_blocks(
                component,
                job.first_block,
                len(job.blocks),
                member=action.member,
                members=action.members,
                main_rank=main_rank,
                main_ranks=main_ranks,
            )
            found.append((plane, *overlap((action.first_block, action.end_block), share)))
        return found

    def main_share(self) -> tuple[int, int]:
        """Which of how many ranks this one is that share a main pool."""
        return (self.rank, self.setting.options.d_tp) if self.setting.options.shares_main else (0, 1)

    def _is_main(self, plane: int) -> bool:
        return self.setting.is_main(plane)

    def _read_ended(self, number: int, error: str | None, is_final: bool) -> None:
        self.world.note(self.name, "has read", number, error)
        part = self._reading.pop(number)
        if error is None:
            self.setting.landed[self.name].add(part)
        else:
            self._watch_failed(part, is_final=is_final)
        self.machine.read_finished(number, error, is_final=is_final)
        self.pump()

    def finish(self, action: Finish) -> None:
        """Tell the scheduler that a transfer is over on this rank."""
        self.world.note(self.name, "finishes", action.transfer, action.ending.value, action.reason)
        self.world.counts[f"finished {action.ending.value}"] += 1
        if self.expected.pop(action.transfer, None) is None:
            raise Violation(
                "exactly once", f"{self.name} finishes {action.transfer}, which it does not expect"
            )
        reads = self.readers.of_transfer(action.transfer)
        if reads:
            raise Violation("M3", f"{self.name} finishes {action.transfer} while {reads[0]} is not reported")
        if action.ending is Ending.ABORTED and action.transfer not in self._aborted:
            raise Violation("no reason", f"{self.name}: {action}, but nobody aborted it")
        self.setting.check_ending(self.name, action)
        self.world.release()
        self.engine.pipe.send(self.engine.rank_finished, self.rank, action.transfer, action.ending)

    # Checks

    def _watch_failed(self, part: tuple[str, int, int, int], *, is_final: bool) -> None:
        """P4: a part that could not be read is read again, or ends its transfer once other reads end."""
        begun = self._begun[part]
        may_try_again = not is_final and begun < self.setting.options.read_attempts
        if begun > self.setting.options.read_attempts:
            raise Violation("P4", f"{self.name} reads {part} for the {begun}th time")

        def is_over() -> bool:
            return part[0] not in self.expected or (may_try_again and self._begun[part] > begun)

        deadline_s = self.setting.options.read_deadline_s
        what = f"{part[0]} at {self.name}, of which a part could not be read,"
        self.setting.watch.within(deadline_s + 1.0, [self.process], is_over, what, grace_s=deadline_s)

    def fully_opened(self) -> list[str]:
        """Transfers that every member has opened: it depends on the members alone when these end."""
        return [t for t in self.expected if len(self._opened.get(t, ())) == self.setting.topology.ratio]

    def check_idle(self) -> None:
        """Raise Violation if anything is expected."""
        if self.expected:
            raise Violation("P7", f"{self.name} still expects {sorted(self.expected)}")
        self.machine.check_integrity()
