"""Decode's endpoint: listens for prefill's ranks and pulls what they publish into this engine's own memory.

Source: seed, Joint Prefill and Decode Design, Request flow 1, 5 and 7; Unequal Tensor Parallelism. The
machine (`consumer`) decides, the loop carries out, the read pool moves the bytes.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np

from kvstrata.errors import ConfigurationError, TransferFailed
from kvstrata.memory.pages import PageView
from kvstrata.remote.channels import ListeningChannel
from kvstrata.remote.consumer.machine import Consumer
from kvstrata.remote.consumer.read_planner import ReadPlanner, ReadTarget
from kvstrata.remote.consumer.read_pool import ReadJob, ReadPool
from kvstrata.remote.consumer.sources import Sources
from kvstrata.remote.endpoint_statistics import ConsumerEndpointStatistics
from kvstrata.remote.ledger import Ledger
from kvstrata.remote.loop import EndpointLoop
from kvstrata.remote.options import EndpointOptions
from kvstrata.remote.protocol.actions import CancelReads, Finish, LosePeer, Send, StartRead
from kvstrata.remote.protocol.codec import Codec
from kvstrata.remote.protocol.messages import AnyMessage, ComponentLayout
from kvstrata.remote.ranges import CacheKey
from kvstrata.remote.timeline import Timeline
from kvstrata.remote.transports.base import Transport
from kvstrata.remote.transports.loops import prepare


class ConsumerEndpoint:
    """One rank's. Every method may be called from the engine's thread; `wait_finished` and `close` wait.

    A thread that dies makes every method raise TransferFailed.
    """

    def __init__(
        self,
        *,
        options: EndpointOptions,
        port: int,
        tp_rank: int,
        tp_size: int,
        main_rank: int,
        main_ranks: int,
        components: Sequence[ComponentLayout],
        destinations: Mapping[CacheKey, PageView],
        transports: Sequence[Transport],
        epoch: str | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Listen on `options.host` and `port` (0 for any free one).

        `destinations` are the pages of every component; their memory stays mapped until `close` has returned.
        `main_ranks` ranks share one main pool, this one is `main_rank` of them; 1 and 0 where it has its own.
        Raises ConfigurationError without a transport or if the port is taken.
        """
        if not transports:
            raise ConfigurationError("remote read needs at least one transport, none is usable here")
        self._options = options
        self._clock = clock
        self._layers = sorted({layout.layer for layout in components})
        self._planner = ReadPlanner(
            components=tuple(components),
            destinations=dict(destinations),
            transports=tuple(transports),
            tp_rank=tp_rank,
            tp_size=tp_size,
            main_rank=main_rank,
            main_ranks=main_ranks,
            memfabric_protocol=options.memfabric_protocol,
            model=options.model,
            secret=options.secret,
            connect_deadline_s=options.read_deadline_s,
        )
        self._sources = Sources(self._planner)
        self._cancelled: set[str] = set()
        self._is_closed = False
        # Compiling holds up every thread for seconds: here, and not under the first transfer's lease.
        prepare()
        self._channel = ListeningChannel(host=options.host, port=port)
        self._machine = Consumer(
            epoch=epoch or secrets.token_hex(8),
            check_hello=self._sources.check_hello,
            clock=clock,
            lease_s=options.lease_s,
            resend_s=options.resend_s,
            wait_s=options.wait_s,
            read_attempts=options.read_attempts,
        )
        self._codec = Codec(options.secret)
        self._pool = ReadPool(
            readers=options.readers,
            read_deadline_s=options.read_deadline_s,
            cancel_grace_s=min(1.0, options.lease_s / 4),
            report=self._report,
            clock=clock,
        )
        self._loop = EndpointLoop(
            name="decode",
            driver=self,
            channel=self._channel,
            codec=self._codec,
            clock=clock,
            late_s=options.lease_s / 8,
        )
        self._ledger = Ledger[ReadTarget, Finish](self._loop, clock)
        self._loop.start()

    @property
    def address(self) -> tuple[str, int]:
        """Host and port that prefill's ranks connect to."""
        return self._channel.address

    def expect(self, transfer: str, *, first_block: int, end_block: int, blocks: Sequence[int]) -> None:
        """Be ready to receive blocks `first_block..end_block` of a request into this engine's `blocks`.

        They may not be used for anything else until the transfer is among `take_finished`. Raises
        TransferFailed for an id that is in use or was lately, AssertionError if the counts differ.
        """
        assert len(blocks) == end_block - first_block, (len(blocks), first_block, end_block)
        target = ReadTarget(
            first_block=first_block,
            end_block=end_block,
            blocks=np.asarray(blocks, dtype=np.int64),
            timeline=Timeline(begin_s=self._clock()),
        )
        with self._loop.entered():
            self._machine.expect(transfer, first_block=first_block, end_block=end_block, layers=self._layers)
            self._ledger.begin(transfer, target)

    def abort(self, transfer: str, reason: str) -> None:
        """End a transfer; it finishes once nothing writes to its blocks any more. Nothing if it ended."""
        with self._loop.entered():
            if transfer in self._ledger.open:
                self._machine.abort(transfer, reason)

    def take_finished(self) -> list[Finish]:
        """Return the transfers that ended since the last call; nothing writes to their blocks any more."""
        self._loop.check_alive()
        return self._ledger.take()

    def wait_finished(self, timeout_s: float) -> bool:
        """Wait until `take_finished` has something to return, `timeout_s` at most; whether it has."""
        self._loop.check_alive()
        found = self._ledger.wait(timeout_s)
        self._loop.check_alive()
        return found

    def statistics(self) -> ConsumerEndpointStatistics:
        """Return the counts since construction; also after the end."""
        reads = self._pool.statistics()
        with self._loop.looking():
            return ConsumerEndpointStatistics(
                transfers_open=len(self._ledger.open),
                expected=self._ledger.opened,
                finished=dict(self._ledger.endings),
                quarantined_blocks=sum(len(self._ledger.open[name].blocks) for name in self._cancelled),
                reads=reads,
                read_bytes=reads.read_bytes,
                read_s=reads.read_s,
                layers_read=reads.done,
                machine=self._machine.statistics(),
                codec=self._codec.statistics(),
                undelivered=dict(self._channel.counts),
                waits_s={"read": reads.read_s, "connect": reads.connect_s, "reader": reads.queued_s},
                timeline=self._ledger.timeline,
                late_rounds=self._loop.counts["late_rounds"],
            )

    def check_integrity(self) -> None:
        """Assert what holds between any two calls; raises TransferFailed if a thread is gone."""
        self._loop.check_alive()
        self._pool.check_integrity()
        with self._loop.looking():
            self._machine.check_integrity()
            self._ledger.check_integrity()
            assert self._cancelled <= self._ledger.open.keys(), (self._cancelled, self._ledger.open.keys())

    def close(self, *, deadline_s: float) -> None:
        """Abort what is open, wait for it up to `deadline_s` or a lease, then stop everything.

        Raises DeadlineExceeded if a read would not end: the destinations' memory must then stay mapped.
        Harmless to repeat.
        """
        if self._is_closed:
            return
        self._is_closed = True
        end_s = self._clock() + min(deadline_s, 1.25 * self._options.lease_s)
        self._ledger.drain(lambda transfer: self.abort(transfer, "decode is closing"), end_s=end_s)
        try:
            self._pool.close(deadline_s=max(1.0, deadline_s))  # a read under way is fenced, not left
        finally:
            self._loop.stop(deadline_s=max(1.0, end_s - self._clock()))

    # The loop's side.

    def receive(self, peer: str, message: AnyMessage) -> None:
        """For the loop."""
        self._machine.receive(peer, message)
        self._sources.keep(peer)

    def tick(self) -> None:
        """For the loop."""
        if not self._pool.is_alive:
            raise TransferFailed("a reading thread is gone")
        self._machine.tick()
        self._pool.tick()

    def next_tick_s(self) -> float | None:
        """For the loop."""
        times = [at_s for at_s in (self._machine.next_tick_s(), self._pool.next_tick_s()) if at_s is not None]
        return min(times, default=None)

    def perform(self) -> None:
        """For the loop."""
        with self._loop.looking():
            actions = self._machine.take_actions()
        for action in actions:
            match action:
                case Send():
                    self._loop.send(action.peer, action.message)
                case StartRead():
                    self._start_read(action)
                case CancelReads():
                    with self._loop.looking():
                        self._cancelled.add(action.transfer)
                    self._pool.cancel(action.transfer)
                case Finish():
                    with self._loop.looking():
                        self._cancelled.discard(action.transfer)
                    self._ledger.end(action)
                case LosePeer():
                    self._sources.lose(action.peer)
                    self._pool.lose(action.peer)

    def died(self) -> None:
        """For the loop: nothing new is read; what is being read is cut off."""
        self._pool.stop()
        self._ledger.wake()

    def _start_read(self, read: StartRead) -> None:
        target, source = self._ledger.open[read.transfer], self._sources.get(read.peer)
        if source is None:
            self._report(read.number, "the producer is gone", is_final=True)
            return
        target.timeline.note_part(self._clock())
        job = ReadJob(
            number=read.number,
            peer=read.peer,
            transfer=read.transfer,
            hold=read.hold,
            plan=partial(self._planner.plan, read, target, source),
        )
        self._pool.submit(job, connect=partial(self._planner.connect, source))

    def _report(self, number: int, error: str | None, *, is_final: bool) -> None:
        """From the pool, in any thread."""
        try:
            with self._loop.entered():
                self._machine.read_finished(number, error, is_final=is_final)
        except TransferFailed:
            pass  # the loop is gone, and every caller is told so
        except BaseException as cause:
            self._loop.die(cause)
