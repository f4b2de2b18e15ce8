"""For tests of remote read: engines' sides over memory whose every page says whose it is.

`ProducerSide` and `ConsumerSide` are endpoints with their memory. Their methods take and return plain
values, so that `testing_process` can run either of them in a process of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from kvstrata.core.layers import Component
from kvstrata.remote.consumer.endpoint import ConsumerEndpoint
from kvstrata.remote.options import EndpointOptions
from kvstrata.remote.producer.endpoint import ProducerEndpoint
from kvstrata.remote.testing.memory import PagedMemory, Shape
from kvstrata.remote.transports.base import Transport

REUSED = 0xEE  # a producer's page after its transfer settled
UNUSED = 0x5A  # a consumer's page that no transfer may touch
PAUSE_S = 0.002


class ProducerSide:
    """A prefill rank. A settled transfer's blocks are overwritten at once, as a next request would."""

    def __init__(
        self,
        *,
        options: EndpointOptions,
        shape: Shape,
        transports: Sequence[Transport],
        rank: int = 0,
        tp_size: int = 1,
        epoch: str | None = None,
    ) -> None:
        self.memory = PagedMemory(shape, "test-prefill", REUSED)
        self.endpoint = ProducerEndpoint(
            options=options,
            rank=rank,
            tp_size=tp_size,
            components=shape.components(),
            places=self.memory.places(),
            regions=[self.memory.region],
            transports=transports,
            epoch=epoch,
        )
        self._blocks: dict[str, tuple[int, list[int]]] = {}
        self._settled: dict[str, list[str]] = {}

    def open(
        self,
        *,
        transfer: str,
        address: Sequence[Any],
        blocks: Sequence[int],
        first_block: int = 0,
        member: int = 0,
        members: int = 1,
    ) -> None:
        """Offer `blocks`, which will hold the request's blocks from `first_block` on."""
        self._blocks[transfer] = (first_block, list(blocks))
        self.endpoint.open(
            transfer,
            host=address[0],
            port=address[1],
            member=member,
            members=members,
            first_block=first_block,
            end_block=first_block + len(blocks),
        )

    def publish(
        self, *, transfer: str, layers: Sequence[int] | None = None, first: int = 0, end: int | None = None
    ) -> None:
        """Write and publish blocks `first..end` of the transfer (counted from its first), of each layer."""
        first_block, blocks = self._blocks[transfer]
        end = len(blocks) if end is None else end
        chosen = list(range(self.memory.shape.layers)) if layers is None else list(layers)
        for layer in chosen:
            if transfer not in self._settled:  # its blocks are somebody else's otherwise
                self.memory.write(transfer, first_block + first, blocks[first:end], [layer])
            self.endpoint.publish(
                transfer,
                layer=layer,
                first_block=first_block + first,
                end_block=first_block + end,
                blocks=blocks[first:end],
                is_last=end == len(blocks),
                after=None,
            )

    def abort(self, *, transfer: str, reason: str = "test") -> None:
        """As the engine does when the client is gone."""
        self.endpoint.abort(transfer, reason)

    def settled(self) -> dict[str, list[str]]:
        """Ending and reason of every transfer that settled so far."""
        for settle in self.endpoint.take_settled():
            self.memory.fill(self._blocks[settle.transfer][1], REUSED)
            assert settle.transfer not in self._settled, f"{settle.transfer} settled twice"
            self._settled[settle.transfer] = [settle.ending.value, settle.reason]
        return dict(self._settled)

    def wait_settled(self, *, transfers: Sequence[str], deadline_s: float = 30.0) -> dict[str, list[str]]:
        """Poll until all of them have settled."""
        poll_until(lambda: set(transfers) <= self.settled().keys(), deadline_s, f"settling {transfers}")
        return self.settled()

    def summary(self) -> dict[str, Any]:
        """The statistics, as JSON."""
        self.endpoint.check_integrity()
        return _plain(asdict(self.endpoint.statistics()))

    def close(self, *, deadline_s: float = 10.0) -> None:
        """End the endpoint and give the memory up."""
        self.endpoint.close(deadline_s=deadline_s)
        self.memory.region.close()


class ConsumerSide:
    """A decode rank. Blocks whose transfer failed are overwritten at once and watched for late writes."""

    def __init__(
        self,
        *,
        options: EndpointOptions,
        shape: Shape,
        transports: Sequence[Transport],
        port: int = 0,
        tp_rank: int = 0,
        tp_size: int = 1,
        main_rank: int = 0,
        main_ranks: int = 1,
        main_of: ConsumerSide | None = None,
        epoch: str | None = None,
    ) -> None:
        """`main_of`: another rank in this process, whose main pool this one shares."""
        self.memory = PagedMemory(shape, "test-decode", UNUSED)
        destinations = self.memory.views()
        if main_of is not None:
            shared = main_of.memory.views()
            destinations |= {key: view for key, view in shared.items() if key[1] is Component.MAIN}
        self.endpoint = ConsumerEndpoint(
            options=options,
            port=port,
            tp_rank=tp_rank,
            tp_size=tp_size,
            main_rank=main_rank,
            main_ranks=main_ranks,
            components=shape.components(),
            destinations=destinations,
            transports=transports,
            epoch=epoch,
        )
        self._blocks: dict[str, tuple[int, list[int]]] = {}
        self._finished: dict[str, list[str]] = {}

    def address(self) -> list[Any]:
        """Where producers connect to."""
        return list(self.endpoint.address)

    def expect(self, *, transfer: str, blocks: Sequence[int], first_block: int = 0) -> None:
        """Receive the request's blocks from `first_block` on into `blocks`."""
        self._blocks[transfer] = (first_block, list(blocks))
        self.endpoint.expect(
            transfer, first_block=first_block, end_block=first_block + len(blocks), blocks=blocks
        )

    def abort(self, *, transfer: str, reason: str = "test") -> None:
        """As the engine does when the client is gone."""
        self.endpoint.abort(transfer, reason)

    def finished(self) -> dict[str, list[str]]:
        """Ending and reason of every transfer that finished so far."""
        for finish in self.endpoint.take_finished():
            assert finish.transfer not in self._finished, f"{finish.transfer} finished twice"
            self._finished[finish.transfer] = [finish.ending.value, finish.reason]
            if finish.ending.value != "done":
                self.memory.fill(self._blocks[finish.transfer][1], UNUSED)
        return dict(self._finished)

    def wait_finished(self, *, transfers: Sequence[str], deadline_s: float = 30.0) -> dict[str, list[str]]:
        """Wait until all of them have finished."""
        end_s = time.monotonic() + deadline_s
        while not set(transfers) <= self.finished().keys():
            left_s = end_s - time.monotonic()
            assert left_s > 0, f"not finished within {deadline_s} s: {transfers}, of {self._finished}"
            self.endpoint.wait_finished(left_s)
        return self.finished()

    def wrong_pages(self, *, transfer: str) -> list[str]:
        """Pages that hold something else than the request's rows; of a failed one: that were written to."""
        first_block, blocks = self._blocks[transfer]
        if self._finished[transfer][0] != "done":
            return [] if self.memory.holds_only(blocks, UNUSED) else ["written to after its end"]
        return self.memory.wrong_pages(transfer, first_block, blocks)

    def summary(self) -> dict[str, Any]:
        """The statistics, as JSON."""
        self.endpoint.check_integrity()
        return _plain(asdict(self.endpoint.statistics()))

    def close(self, *, deadline_s: float = 10.0) -> None:
        """End the endpoint and give the memory up."""
        self.endpoint.close(deadline_s=deadline_s)
        self.memory.region.close()


def poll_until(is_true: Callable[[], bool], deadline_s: float, what: str) -> None:
    """Ask again and again; an AssertionError naming `what` after `deadline_s`."""
    end_s = time.monotonic() + deadline_s
    while not is_true():
        assert time.monotonic() < end_s, f"not within {deadline_s} s: {what}"
        time.sleep(PAUSE_S)


def quick_options(secret: bytes = b"secret of the tests", **changes: Any) -> EndpointOptions:
    """Options with a lease of a second."""
    options = EndpointOptions(
        host="127.0.0.1", secret=secret, lease_s=1.0, resend_s=0.1, open_wait_s=5.0, wait_s=5.0,
        read_deadline_s=5.0,
    )  # fmt: skip
    return replace(options, **changes)


def _plain(value: Mapping[Any, Any]) -> dict[str, Any]:
    return {
        str(getattr(key, "value", key)): _plain(item) if isinstance(item, Mapping) else item
        for key, item in value.items()
    }
