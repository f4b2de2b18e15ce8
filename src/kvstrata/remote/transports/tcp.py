"""Reads over plain sockets, from anywhere. The connection carries no encryption: for networks one trusts."""

from __future__ import annotations

import socket
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta

from kvstrata.errors import DeadlineExceeded, TransferFailed
from kvstrata.memory.region import HostRegion
from kvstrata.remote.holds import Hold, HoldTable
from kvstrata.remote.transports.base import Destination, ReadPlan, TransportStatistics
from kvstrata.remote.transports.channel import Channel
from kvstrata.remote.transports.checks import Counts, Destinations, check_plan, cut
from kvstrata.remote.transports.loops import prepare
from kvstrata.remote.transports.tcp_server import TcpServer
from kvstrata.remote.transports.tcp_wire import (
    MAX_REQUEST_BYTES,
    MAX_REQUEST_RANGES,
    WINDOW,
    Kind,
    greet_exporter,
    pack_request,
    receive_reply,
)
from kvstrata.remote.transports.tickets import MAX_REGIONS, read_unverified, sign, verify

NAME = "tcp"
WAIT = "remote read over tcp"


class _Ticket(msgspec.Struct, frozen=True, kw_only=True):
    host: Annotated[str, Meta(max_length=256)]
    port: Annotated[int, Meta(ge=1, le=65535)]
    export_id: Annotated[bytes, Meta(min_length=16, max_length=16)]
    region_bytes: Annotated[tuple[Annotated[int, Meta(ge=0, lt=1 << 62)], ...], Meta(max_length=MAX_REGIONS)]


class TcpTransport:
    """See `base.Transport`."""

    name = NAME

    def usable(self) -> str | None:
        return None

    def export(
        self, regions: Sequence[HostRegion], holds: HoldTable, *, host: str, secret: bytes
    ) -> TcpExporter:
        """Listen on a free port of `host`, an address that readers can reach. Raises ConfigurationError."""
        if len(regions) > MAX_REGIONS:
            raise ValueError(f"{len(regions)} regions to export; at most {MAX_REGIONS}")
        return TcpExporter(TcpServer(regions, holds, host=host, secret=secret), host=host, secret=secret)

    def reaches(self, ticket: bytes) -> str | None:
        """Whether the ticket can be read; only `connect` finds out about the network."""
        try:
            read_unverified(ticket, _Ticket, transport=NAME)
        except TransferFailed as error:
            return str(error)
        return None

    def connect(
        self, ticket: bytes, destinations: Sequence[Destination], *, secret: bytes, deadline_s: float
    ) -> TcpReader:
        """Connect and prove the secret to each other. Raises TransferFailed or DeadlineExceeded."""
        found = verify(ticket, _Ticket, transport=NAME, secret=secret)
        prepare()
        reader = TcpReader(found, Destinations(destinations), secret=secret)
        reader.connect(deadline_s=deadline_s)
        return reader


class TcpExporter:
    """See `base.Exporter`."""

    def __init__(self, server: TcpServer, *, host: str, secret: bytes) -> None:
        self._server = server
        found = _Ticket(
            host=host,
            port=server.port,
            export_id=server.export_id,
            region_bytes=tuple(server.region_bytes.tolist()),
        )
        self.ticket = sign(found, transport=NAME, secret=secret)

    def statistics(self) -> TransportStatistics:
        """`reads` counts reads that were finished, `failed_reads` requests that were refused."""
        return self._server.statistics()

    def check_integrity(self) -> None:
        self._server.check_integrity()

    def close(self) -> None:
        self._server.close()


class TcpReader:
    """See `base.Reader`. Any error costs the connection; the next read makes a new one."""

    def __init__(self, ticket: _Ticket, destinations: Destinations, *, secret: bytes) -> None:
        self._ticket = ticket
        self._region_bytes = np.array(ticket.region_bytes, dtype=np.int64)
        self._destinations = destinations
        self._secret = secret
        self._counts = Counts()
        self._lock = threading.Lock()
        self._channel: Channel | None = None
        self._busy = False
        self._closed = False

    def connect(self, *, deadline_s: float) -> None:
        """Connect now rather than with the first read."""
        give_up_s = time.monotonic() + deadline_s
        self._begin()
        try:
            self._connected(give_up_s)
        except BaseException:
            self._disconnect()
            raise
        finally:
            self._end()

    def read(self, plan: ReadPlan, hold: Hold, *, deadline_s: float) -> None:
        give_up_s = time.monotonic() + deadline_s
        self._begin()
        try:
            check_plan(plan, self._region_bytes, self._destinations, self._counts)
            try:
                self._pull(self._connected(give_up_s), plan, hold, give_up_s)
            except BaseException:
                self._disconnect()
                raise
        except BaseException as error:
            self._counts.add(failed_reads=1)
            if self._closed and isinstance(error, TransferFailed | DeadlineExceeded):
                raise TransferFailed(f"{WAIT}: the reader was closed meanwhile") from error
            if isinstance(error, DeadlineExceeded):
                raise DeadlineExceeded(f"{WAIT}, {error.wait}", deadline_s) from error
            raise
        finally:
            self._end()
        self._counts.add(reads=1, read_bytes=plan.total_bytes)

    def statistics(self) -> TransportStatistics:
        return self._counts.statistics()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            is_busy, channel = self._busy, self._channel
            if not is_busy:
                self._channel = None
        if channel is not None:
            channel.shutdown()
            if not is_busy:  # else the thread that reads closes it
                channel.close()

    def _pull(self, channel: Channel, plan: ReadPlan, hold: Hold, give_up_s: float) -> None:
        waiting: deque[tuple[np.ndarray, np.ndarray]] = deque()
        for region, offset, dst, size in cut(
            plan, max_bytes=MAX_REQUEST_BYTES, max_ranges=MAX_REQUEST_RANGES
        ):
            ranges = np.stack((region, offset, size))
            frame = pack_request(Kind.READ, hold, timeout_s=give_up_s - time.monotonic(), ranges=ranges)
            channel.send(frame, give_up_s=give_up_s, wait="sending a request")
            waiting.append((dst, size))
            if len(waiting) == WINDOW:
                self._land(channel, *waiting.popleft(), give_up_s)
        while waiting:
            self._land(channel, *waiting.popleft(), give_up_s)
        frame = pack_request(Kind.CHECK, hold, timeout_s=give_up_s - time.monotonic())
        channel.send(frame, give_up_s=give_up_s, wait="asking whether the hold lasted")
        receive_reply(channel, give_up_s=give_up_s, wait=f"{WAIT}, at its end")

    def _land(self, channel: Channel, dst: np.ndarray, size: np.ndarray, give_up_s: float) -> None:
        receive_reply(channel, give_up_s=give_up_s, wait=WAIT)
        channel.receive_ranges(dst, size, give_up_s=give_up_s, wait="bytes of the producer")

    def _connected(self, give_up_s: float) -> Channel:
        if time.monotonic() >= give_up_s:
            raise DeadlineExceeded("before it began")
        channel = self._channel
        if channel is not None and channel.wait_readable(0):
            # Nothing was asked, so nothing but the stream's end can be there.
            self._disconnect()
            channel = None
        if channel is None:
            channel = self._dial(give_up_s)
            greet_exporter(
                channel, export_id=self._ticket.export_id, secret=self._secret, give_up_s=give_up_s
            )
        return channel

    def _dial(self, give_up_s: float) -> Channel:
        where = f"{self._ticket.host} port {self._ticket.port}"
        timeout_s = max(1e-3, give_up_s - time.monotonic())  # 0 would mean: do not wait for the answer
        try:
            sock = socket.create_connection((self._ticket.host, self._ticket.port), timeout=timeout_s)
        except TimeoutError:
            raise DeadlineExceeded(f"connecting to {where}") from None
        except OSError as error:
            raise TransferFailed(f"{WAIT}: the producer at {where} cannot be reached: {error}") from error
        channel = Channel(sock)
        with self._lock:
            if not self._closed:
                self._channel = channel
                return channel
        channel.close()
        raise TransferFailed(f"{WAIT}: the reader was closed meanwhile")

    def _disconnect(self) -> None:
        with self._lock:
            channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()

    def _begin(self) -> None:
        with self._lock:
            if self._closed:
                raise TransferFailed(f"{WAIT}: the reader was closed")
            assert not self._busy, "one thread at a time may read"
            self._busy = True

    def _end(self) -> None:
        with self._lock:
            self._busy = False
            is_closed = self._closed
        if is_closed:
            self._disconnect()
