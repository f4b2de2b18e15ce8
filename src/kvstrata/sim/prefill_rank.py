"""One rank of the simulated prefill engine: computes layers, writes pages, and drives a real Producer."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvstrata.core.shares import ready_blocks
from kvstrata.remote.holds import Hold
from kvstrata.remote.protocol.actions import Ending, Revoke, Send, Settle
from kvstrata.remote.protocol.messages import (
    PROTOCOL_VERSION,
    Accept,
    AnyMessage,
    Hello,
    Place,
    Refused,
    TransportOffer,
)
from kvstrata.sim.pages import Exported, Pages
from kvstrata.sim.setting import PAGE_BYTES, TRANSPORT, Setting
from kvstrata.sim.world import Action, Kind, Violation

if TYPE_CHECKING:
    from kvstrata.sim.prefill import Chunk, Prefill, PrefillJob

_TOLD_S = 1.0
"""Decode hears of a refusal within this: several networks' delays, and a repetition."""


@dataclass(slots=True)
class Outgoing:
    """What a rank knows about a transfer that is not settled."""

    hold: Hold
    is_accepted: bool = False
    is_revoked: bool = False
    published: Counter[int] = field(default_factory=Counter)  # parts by layer
    complete: set[int] = field(default_factory=set)  # layers with their last part

    def add(self, layer: int, *, is_last: bool) -> None:
        """Note a part that is published."""
        self.published[layer] += 1
        if is_last:
            self.complete.add(layer)


class PrefillRank:
    """Its `open`, `compute` and `abort` are called through a pipe, one after another."""

    def __init__(self, setting: Setting, engine: Prefill, rank: int) -> None:
        self.setting = setting
        self.world = setting.world
        self.engine = engine
        self.rank = rank
        self.name = f"p{rank}"
        self.process = setting.process(self.name)
        self.peer = f"d{setting.topology.consumer_of(rank)}"
        self.member = setting.topology.member_of(rank)
        self.identity = ""
        self.start()

    def start(self, page_bytes: int = PAGE_BYTES) -> None:
        """Begin a life: nothing in memory, a new epoch, perhaps a new network identity."""
        setting, options, parts = self.setting, self.setting.options, self.setting.parts
        epoch = self.epoch()
        self.pages = Pages(len(options.planes), options.prefill_blocks)
        self.holds = parts.holds()
        self.memory = Exported(self.process, self.pages, self.holds)
        setting.exported[epoch.encode()] = self.memory
        setting.network.detach(self.identity)
        self.identity = self.name if options.keeps_identity else epoch
        setting.network.attach(self.identity, self)
        layouts = setting.layouts(page_bytes)
        place = Place(region=0, offset=0, block_stride_bytes=page_bytes, num_blocks=options.prefill_blocks)
        self.machine = parts.producer(
            hello=Hello(
                epoch=epoch,
                version=PROTOCOL_VERSION,
                rank=self.rank,
                tp_size=options.p_tp,
                components=layouts,
                places=(place,) * len(layouts),
                offers=(TransportOffer(name=TRANSPORT, ticket=epoch.encode()),),
                lease_s=options.lease_s,
            ),
            clock=self.process.clock,
            lease_s=options.lease_s,
            resend_s=options.resend_s,
            open_wait_s=options.open_wait_s,
        )
        self.unsettled: dict[str, Outgoing] = {}
        self._settled: set[str] = set()
        self._commands: deque[tuple[Action, tuple[Any, ...]]] = deque()
        self._is_computing = False
        self._published_s = 0.0
        self._tick_s = float("inf")

    def epoch(self) -> str:
        """The name of this life."""
        return f"{self.name}-{self.process.life}"

    def crash(self) -> None:
        """Lose everything; readers that have the memory mapped can tell."""
        self.process.crash()
        self.memory.is_alive = False
        self.unsettled.clear()

    # What the engine's scheduler asks for

    def command(self, action: Action, *args: Any) -> None:
        """Carry a command out in turn: the worker is busy while it computes."""
        if self._is_computing:
            self._commands.append((action, args))
        else:
            action(*args)

    def open(self, job: PrefillJob) -> None:
        """Offer a job's blocks to decode. What the prefix cache has of them is there already."""
        for position in range(job.request.prefill_hit_blocks):
            self._write(job, position, job.request.tokens)
        hold = self.holds.grant()
        self.unsettled[job.transfer] = Outgoing(hold)
        self.machine.open(
            job.transfer,
            peer=self.peer,
            hold=hold,
            member=self.member,
            members=self.setting.topology.ratio,
            first_block=job.first_block,
            end_block=len(job.blocks),
            layers=range(len(self.setting.options.layers)),
        )
        self.pump()
        if job.transfer not in self.unsettled:
            self._watch_refused(job.transfer)  # at once: its session was refused a moment ago

    def abort(self, job: PrefillJob, reason: str) -> None:
        """Stop offering a job's blocks."""
        self.machine.abort(job.transfer, reason)
        self.pump()

    def compute(self, chunks: tuple[Chunk, ...]) -> None:
        """Run one step: some tokens of some jobs, layer by layer."""
        self._is_computing = True
        self._after_layer(self._computed, chunks, 0)

    def _after_layer(self, action: Action, *args: Any) -> None:
        self.process.after(self.setting.options.layer_s * self.world.random.random(), action, *args)

    def _computed(self, chunks: tuple[Chunk, ...], layer: int) -> None:
        self.write_layer(chunks, layer)
        self.publish_soon(chunks, layer)
        if layer + 1 < len(self.setting.options.layers):
            self._after_layer(self._computed, chunks, layer + 1)
            return
        self.engine.pipe.send(self.engine.rank_computed, self.rank)
        self._is_computing = False
        while self._commands and not self._is_computing:
            action, args = self._commands.popleft()
            action(*args)

    def write_layer(self, chunks: tuple[Chunk, ...], layer: int) -> None:
        """The rows of a layer reach its home."""
        block_tokens = self.setting.options.block_tokens
        for chunk in chunks:
            for position in range(chunk.first_token // block_tokens, -(-chunk.end_token // block_tokens)):
                self._write(chunk.job, position, chunk.end_token, layer)

    def _write(self, job: PrefillJob, position: int, tokens: int, layer: int | None = None) -> None:
        block = job.blocks[position]
        if self.engine.pool.owner[block] != job.transfer:
            raise Violation(
                "M3", f"{self.name} writes block {block} for {job.transfer}, which has it no more"
            )
        filled = self.setting.filled(tokens, position)
        planes = self.setting.options.planes
        for plane in range(len(planes)):
            if layer is None or planes[plane][0] == layer:
                self.memory.overwrite(plane, block, (job.number, plane, position, filled), job.transfer)

    def publish_soon(self, chunks: tuple[Chunk, ...], layer: int) -> None:
        """Publish what the step added to a layer once its save is done; saves end in order."""
        delay_s = self.setting.options.layer_s * self.world.random.random()
        self._published_s = max(self._published_s, self.world.now_s + delay_s) + 1e-6
        # In order even after a stop, as one thread does it.
        self.world.push(self._published_s, self.process, Kind.MESSAGE, self._publish, (chunks, layer))

    def _publish(self, chunks: tuple[Chunk, ...], layer: int) -> None:
        for chunk in chunks:
            job = chunk.job
            first, end = self.ready(chunk)
            if first == end and not chunk.is_last and self.world.random.random() < 0.5:
                continue  # an empty part may be said or left out
            at = job.blocks[first:end]
            if job.transfer in self.unsettled:
                self.unsettled[job.transfer].add(layer, is_last=chunk.is_last)
            self.machine.publish(
                job.transfer, layer=layer, first_block=first, end_block=end, blocks=at, is_last=chunk.is_last
            )
        self.pump()

    def ready(self, chunk: Chunk) -> tuple[int, int]:
        """Which blocks of the transfer a chunk completes."""
        block_tokens = self.setting.options.block_tokens
        first_token = chunk.job.first_block * block_tokens
        done_before = max(first_token, chunk.first_token if chunk.is_begun else 0)
        blocks = len(chunk.job.blocks)
        return ready_blocks(done_before, chunk.end_token, block_tokens, chunk.is_last, blocks)

    # The machine

    def receive(self, peer: str, message: AnyMessage) -> None:
        """A message came from the network."""
        self.world.note(self.name, "hears", peer, message)
        if isinstance(message, Accept) and message.transfer in self.unsettled:
            self.unsettled[message.transfer].is_accepted = True
        transfers = sorted(self.unsettled)
        self.machine.receive(peer, message)
        self.pump()
        if isinstance(message, Refused) and not message.is_stale and message.peer_epoch == self.epoch():
            self.world.counts["refusals"] += 1
            if self.unsettled:
                # A life whose layout does not agree never will.
                raise Violation("P7", f"{self.name} is refused, yet has {sorted(self.unsettled)} open")
            for transfer in transfers:
                self._watch_refused(transfer)

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
                    self.setting.network.send(self.process, self.identity, action.peer, action.message)
                case Revoke():
                    self.holds.revoke(action.hold)
                    self.unsettled[action.transfer].is_revoked = True
                case Settle():
                    self._settle(action)
        self.machine.check_integrity()
        if not all(self.machine.is_open(transfer) for transfer in self.unsettled):
            raise Violation("exactly once", f"{self.name} lost one of {sorted(self.unsettled)}")
        if self.holds.live != len(self.unsettled):
            raise Violation("A1", f"{self.name}: {self.holds.live} holds, unsettled {sorted(self.unsettled)}")
        next_s = self.machine.next_tick_s()
        if next_s is None:
            if self.unsettled:
                raise Violation("P6", f"{self.name} waits for {sorted(self.unsettled)} without a deadline")
            return
        at_s = max(self.world.now_s, self.process.virtual_s(next_s))
        if at_s < self._tick_s:
            self._tick_s = at_s
            self.world.push(at_s, self.process, Kind.TICK, self.tick, (at_s,))

    def _settle(self, action: Settle) -> None:
        self.world.note(self.name, "settles", action.transfer, action.ending.value, action.reason)
        self.world.counts[f"settled {action.ending.value}"] += 1
        outgoing = self.unsettled.pop(action.transfer, None)
        if outgoing is None:
            raise Violation("exactly once", f"{self.name} settles {action.transfer}, which is not open")
        if not outgoing.is_revoked:
            raise Violation("P7", f"{self.name} settles {action.transfer} before its hold is revoked")
        if action.ending is Ending.DONE:
            self._check_read(action.transfer, outgoing)
        self.setting.check_ending(self.name, action)
        self.world.release()
        self.engine.pipe.send(self.engine.rank_settled, self.rank, action.transfer, action.ending)

    # Checks

    def _check_read(self, transfer: str, outgoing: Outgoing) -> None:
        """P3: every part of every layer was published, and has landed at decode."""
        for layer in range(len(self.setting.options.layers)):
            parts = range(outgoing.published[layer])
            landed = [
                (transfer, self.member, layer, part) in self.setting.landed[self.peer] for part in parts
            ]
            if layer not in outgoing.complete or not all(landed):
                raise Violation("P3", f"{self.name} settles {transfer} as done, layer {layer} is {landed}")

    def _watch_refused(self, transfer: str) -> None:
        """P7: decode hears from the refused that they are, unless the network loses it."""
        setting = self.setting
        if self.world.now_s < setting.options.calm_s or setting.options.has_cuts:
            return
        processes = [self.process, setting.network.process_of(self.peer)]
        setting.watch.within(
            _TOLD_S,
            processes,
            lambda: transfer not in setting.expected[self.peer],
            f"{transfer} on {self.peer}, for which {self.name} was refused,",
        )

    def check_idle(self) -> None:
        """Raise Violation if anything is held or open."""
        if self.holds.live or self.unsettled:
            raise Violation("P7", f"{self.name} holds {self.holds.live}, unsettled {sorted(self.unsettled)}")
        self.machine.check_integrity()
