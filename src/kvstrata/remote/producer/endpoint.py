"""Prefill's endpoint: offers this rank's pages to decode, layer by layer, and says when they are free again.

Source: seed, Joint Prefill and Decode Design, Request flow 3-6. The machine (`producer`) decides, the loop
carries out; `transports` serve the bytes.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections import Counter
from collections.abc import Callable, Sequence

from kvstrata.errors import TransferFailed
from kvstrata.memory.region import HostRegion
from kvstrata.move.engine import CopyToken
from kvstrata.remote.channels import ConnectingChannel
from kvstrata.remote.endpoint_statistics import ProducerEndpointStatistics
from kvstrata.remote.ledger import Ledger
from kvstrata.remote.loop import EndpointLoop
from kvstrata.remote.options import EndpointOptions
from kvstrata.remote.producer.exports import Exports, Offer
from kvstrata.remote.producer.machine import Producer
from kvstrata.remote.producer.publisher import Part, Publisher
from kvstrata.remote.protocol.actions import Ending, Revoke, Send, Settle
from kvstrata.remote.protocol.codec import Codec
from kvstrata.remote.protocol.messages import AnyMessage, ComponentLayout, Place, Refused, Welcome
from kvstrata.remote.timeline import Timeline
from kvstrata.remote.transports.base import Transport

logger = logging.getLogger("vllm.kvstrata.remote")


class ProducerEndpoint:
    """One rank's. Every method may be called from the engine's thread; only `close` waits.

    A thread that dies makes every method raise TransferFailed, with every hold revoked before.
    """

    def __init__(
        self,
        *,
        options: EndpointOptions,
        rank: int,
        tp_size: int,
        components: Sequence[ComponentLayout],
        places: Sequence[Place],
        regions: Sequence[HostRegion],
        transports: Sequence[Transport],
        epoch: str | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Export `regions`, in which component i has its pages at `places[i]`, over every transport.

        The regions stay mapped until `close` has returned. Raises ConfigurationError without a transport, and
        whatever an export raises.
        """
        self._clock = clock
        self._layers = sorted({layout.layer for layout in components})
        self._counts: Counter[str] = Counter()
        self._lease_s = options.lease_s
        self._is_closed = False
        self._exports = Exports(transports, regions, options)
        self._holds = self._exports.holds
        hello = self._exports.hello(
            epoch=epoch or secrets.token_hex(8),
            rank=rank,
            tp_size=tp_size,
            components=components,
            places=places,
        )
        self._machine = Producer(
            hello=hello,
            clock=clock,
            lease_s=options.lease_s,
            resend_s=options.resend_s,
            open_wait_s=options.open_wait_s,
        )
        self._channel = ConnectingChannel(keep_s=options.resend_s, clock=clock)
        self._codec = Codec(options.secret)
        self._loop = EndpointLoop(
            name="prefill",
            driver=self,
            channel=self._channel,
            codec=self._codec,
            clock=clock,
            late_s=options.lease_s / 8,
        )
        self._ledger = Ledger[Offer, Settle](self._loop, clock)
        self._publisher = Publisher(
            publish=self._publish,
            is_wanted=self._machine.is_open,
            deadline_s=options.read_deadline_s,
            clock=clock,
        )
        self._loop.start()

    def open(
        self,
        transfer: str,
        *,
        host: str,
        port: int,
        member: int,
        members: int,
        first_block: int,
        end_block: int,
    ) -> None:
        """Begin to offer blocks `first_block..end_block` of a request to the decode rank at `host:port`.

        From now on the blocks may not be reused until the transfer is among `take_settled`. Raises
        TransferFailed if too many transfers are open, or for an id that is in use or was lately.
        """
        self._loop.check_alive()
        hold, peer = self._holds.grant(), f"{host}:{port}"
        try:
            with self._loop.entered():
                self._machine.open(
                    transfer,
                    peer=peer,
                    hold=hold,
                    member=member,
                    members=members,
                    first_block=first_block,
                    end_block=end_block,
                    layers=self._layers,
                )
                self._ledger.begin(transfer, Offer(peer, hold, Timeline(begin_s=self._clock())))
        except BaseException:
            self._holds.revoke(hold)
            raise

    def publish(
        self,
        transfer: str,
        *,
        layer: int,
        first_block: int,
        end_block: int,
        blocks: Sequence[int],
        is_last: bool,
        after: CopyToken | None,
    ) -> None:
        """Let decode read `blocks`, which hold blocks `first_block..end_block`, once `after` is done.

        Returns at once. Parts of a layer come in order and without a gap; a part may be empty. If `after`
        fails, or is not done within `read_deadline_s`, the transfer is aborted. Nothing happens if it ended.
        """
        self._loop.check_alive()
        self._publisher.submit(
            Part(
                transfer=transfer,
                layer=layer,
                first_block=first_block,
                end_block=end_block,
                blocks=tuple(blocks),
                is_last=is_last,
                after=after,
            )
        )

    def abort(self, transfer: str, reason: str) -> None:
        """End a transfer; it settles once decode has said that it reads no more. Nothing if it ended."""
        with self._loop.entered():
            if self._machine.is_open(transfer):
                self._machine.abort(transfer, reason)

    def revoke(self, transfer: str) -> None:
        """End the transfer's hold before this returns: its blocks are being given away (preemption).

        What is being read of it fails, and what will be published is refused there. Nothing if it ended.
        """
        with self._loop.looking():
            offer = self._ledger.open.get(transfer)
        if offer is not None:
            self._holds.revoke(offer.hold)

    def take_settled(self) -> list[Settle]:
        """Return the transfers that ended since the last call; their blocks may be reused."""
        self._loop.check_alive()
        return self._ledger.take()

    def statistics(self) -> ProducerEndpointStatistics:
        """Return the counts since construction; also after the end."""
        with self._loop.looking():
            return ProducerEndpointStatistics(
                transfers_open=len(self._ledger.open),
                opened=self._ledger.opened,
                settled=dict(self._ledger.endings),
                published_parts=self._counts["published"],
                unpublished_parts=self._counts["unpublished"],
                holds=self._holds.statistics(),
                machine=self._machine.statistics(),
                codec=self._codec.statistics(),
                undelivered=dict(self._channel.counts),
                transports=self._exports.statistics(),
                waits_s={"save": self._publisher.waited_s},
                timeline=self._ledger.timeline,
                late_rounds=self._loop.counts["late_rounds"],
            )

    def check_integrity(self) -> None:
        """Assert what holds between any two calls; raises TransferFailed if a thread is gone."""
        self._loop.check_alive()
        with self._loop.looking():
            self._machine.check_integrity()
            self._ledger.check_integrity()
        self._exports.check_integrity()

    def close(self, *, deadline_s: float) -> None:
        """Abort what is open, wait for it up to `deadline_s` or a lease, then revoke and stop everything.

        After it nobody reads this rank's memory and believes it. Harmless to repeat.
        """
        if self._is_closed:
            return
        self._is_closed = True
        end_s = self._clock() + min(deadline_s, 1.25 * self._lease_s)
        self._ledger.drain(lambda transfer: self.abort(transfer, "prefill is closing"), end_s=end_s)
        try:
            self._publisher.close(deadline_s=max(1.0, end_s - self._clock()))
            self._loop.stop(deadline_s=max(1.0, end_s - self._clock()))
        finally:
            with self._loop.looking():
                self.died()
            self._holds.check_integrity()
            self._holds.close()

    # The loop's side.

    def receive(self, peer: str, message: AnyMessage) -> None:
        """For the loop."""
        if isinstance(message, Welcome):
            logger.info("decode at %s (epoch %s) reads over %s", peer, message.epoch, message.transport)
        elif isinstance(message, Refused) and not message.is_stale:
            logger.info("decode at %s refused: %s", peer, message.reason)
        self._machine.receive(peer, message)

    def tick(self) -> None:
        """For the loop."""
        if not self._publisher.is_alive:
            raise TransferFailed("the publishing thread is gone")
        self._machine.tick()

    def next_tick_s(self) -> float | None:
        """For the loop."""
        return self._machine.next_tick_s()

    def perform(self) -> None:
        """For the loop."""
        with self._loop.looking():
            actions = self._machine.take_actions()
        for action in actions:
            match action:
                case Send():
                    self._loop.send(action.peer, action.message)
                case Revoke():
                    self._holds.revoke(action.hold)
                case Settle():
                    offer = self._ledger.open[action.transfer]
                    assert not self._holds.is_valid(offer.hold), f"{action.transfer} settled with a live hold"
                    if action.ending is Ending.LAPSED:
                        self._channel.doubt(offer.peer, self._lease_s / 2)
                    self._ledger.end(action)

    def died(self) -> None:
        """For the loop: revoke every hold, so that memory may be reused whoever still reads."""
        for offer in self._ledger.open.values():
            self._holds.revoke(offer.hold)
        self._exports.close()
        self._ledger.wake()

    def _publish(self, part: Part, failure: str | None) -> None:
        """In the publisher's thread, in the order of `publish`."""
        try:
            with self._loop.entered():
                if not self._machine.is_open(part.transfer) or failure is not None:
                    self._counts["unpublished"] += 1
                    if self._machine.is_open(part.transfer):
                        self._machine.abort(part.transfer, f"layer {part.layer} was not saved: {failure}")
                    return
                self._counts["published"] += 1
                self._ledger.open[part.transfer].timeline.note_part(self._clock())
                self._machine.publish(
                    part.transfer,
                    layer=part.layer,
                    first_block=part.first_block,
                    end_block=part.end_block,
                    blocks=part.blocks,
                    is_last=part.is_last,
                )
        except TransferFailed:
            pass  # the loop is gone, and every caller is told so
        except BaseException as cause:
            self._loop.die(cause)
