"""Untested on CUDA and NPU: the copy engine of accelerators, on torch.Stream and torch.Event.

It shows where an accelerator fits and is to be measured and tested on one before use; CI has none.
Copies are issued on a stream per lane and never block the host. Host functions run on a thread per lane; a
copy submitted after a host function of the same lane blocks its caller until that function has returned (a
stream cannot wait for a thread), so give store writes a lane of their own.
"""

from __future__ import annotations

import bisect
import time
from collections.abc import Callable, Sequence

import torch

from kvstrata.errors import DeadlineExceeded, TransferFailed, UnsupportedError
from kvstrata.move.engine import CopyToken, EngineStatistics
from kvstrata.move.ledger import LaneLedger, Ticket
from kvstrata.move.plan import CopyPlan
from kvstrata.move.threads import ThreadEngine

POLL_S = 50e-6


class StreamToken:
    """An event on a device stream."""

    def __init__(self, name: str, event: torch.Event) -> None:
        self.name = name
        self._event = event

    def done(self) -> bool:
        try:
            return bool(self._event.query())
        except RuntimeError as error:
            raise TransferFailed(f"{self.name!r} failed on the device: {error}") from error

    def wait(self, *, deadline_s: float, what: str) -> None:
        """Make the current stream wait; returns at once, so the deadline has nothing to bound here."""
        self.wait_on(torch.accelerator.current_stream())

    def wait_on(self, stream: torch.Stream) -> None:
        stream.wait_event(self._event)

    def synchronize(self, *, deadline_s: float, what: str) -> None:
        """Block the host until the bytes are there. Raises as `CopyToken.wait` does on a CPU."""
        give_up_s = time.monotonic() + deadline_s
        while not self.done():
            if time.monotonic() >= give_up_s:
                raise DeadlineExceeded(f"{what}, waiting for {self.name!r}", deadline_s)
            time.sleep(POLL_S)


class _OnHost:
    """A StreamToken as a host thread has to wait for it."""

    def __init__(self, token: StreamToken) -> None:
        self.name = token.name
        self.done = token.done
        self.wait = token.synchronize


class StreamLane:
    """One device stream, and a host thread for its calls. Made by `StreamEngine.lane`."""

    def __init__(self, *, name: str, engine: StreamEngine) -> None:
        self.name = name
        self.ledger = LaneLedger(name)
        self._engine = engine
        self._stream = torch.Stream(device=engine.device)
        self._last_call: CopyToken | None = None

    def submit(self, plan: CopyPlan, *, after: Sequence[CopyToken] = (), name: str) -> CopyToken:
        self._engine.refuse_if_closed(name)
        self.ledger.add_submitted()
        ticket = Ticket(name=name, lane=self.name, wait_until_settled=_never)
        try:
            for token in (*after, *([self._last_call] if self._last_call else [])):
                if isinstance(token, StreamToken):
                    token.wait_on(self._stream)
                else:
                    token.wait(deadline_s=self._engine.dependency_deadline_s, what=str(ticket))
            with self._stream:
                for dst, src, size in zip(
                    plan.dst.tolist(), plan.src.tolist(), plan.size.tolist(), strict=True
                ):
                    self._engine.bytes_at(dst, size).copy_(
                        self._engine.bytes_at(src, size), non_blocking=True
                    )
            token_of_copy = self.mark(name)
        except (TransferFailed, DeadlineExceeded, RuntimeError) as cause:
            ticket.settle(self.ledger.add_failure(str(ticket), cause))
            return ticket
        self.ledger.add_success(copied_bytes=plan.total_bytes)
        return token_of_copy

    def call(self, fn: Callable[[], None], *, after: Sequence[CopyToken] = (), name: str) -> CopyToken:
        self._engine.refuse_if_closed(name)
        tokens = [self.mark(f"copies before {name}"), *after]
        on_host = [_OnHost(token) if isinstance(token, StreamToken) else token for token in tokens]
        self._last_call = self._engine.host.lane(self.name).call(fn, after=on_host, name=name)
        return self._last_call

    def drain(self, *, deadline_s: float) -> None:
        what = f"draining lane {self.name!r}"
        self.mark(what).synchronize(deadline_s=deadline_s, what=what)
        self._engine.host.lane(self.name).drain(deadline_s=deadline_s)
        self.ledger.raise_untold()

    def mark(self, name: str) -> StreamToken:
        """A token for all copies issued on this lane so far."""
        return StreamToken(name, self._stream.record_event(torch.Event(device=self._engine.device)))


class StreamEngine:
    """Copy engine of accelerators. See `engine.CopyEngine`.

    Only memory that was made known by `register` can be copied: torch copies tensors, not addresses.
    """

    def __init__(
        self, *, device_type: str, device_index: int | None = None, dependency_deadline_s: float = 60.0
    ) -> None:
        present = torch.accelerator.current_accelerator(check_available=True)
        if present is None or present.type != device_type:
            found = "none" if present is None else present.type
            raise UnsupportedError(
                f"no copy engine for device type {device_type!r}: torch finds the accelerator {found!r}; "
                "use 'cpu', or a torch build for the device"
            )
        index = torch.accelerator.current_device_index() if device_index is None else device_index
        self.device = torch.device(device_type, index)
        self.dependency_deadline_s = dependency_deadline_s
        self.host = ThreadEngine(dependency_deadline_s=dependency_deadline_s)
        self._lanes: dict[str, StreamLane] = {}
        self._bases: list[int] = []
        self._storages: list[torch.Tensor] = []
        self._closed = False

    def register(self, tensor: torch.Tensor) -> None:
        """Allow copies to and from the storage of `tensor`, and keep it alive until `close`."""
        storage = tensor.untyped_storage()
        flat = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
        at = bisect.bisect_left(self._bases, storage.data_ptr())
        if self._bases[at : at + 1] != [storage.data_ptr()]:
            self._bases.insert(at, storage.data_ptr())
            self._storages.insert(at, flat)

    def bytes_at(self, address: int, size_bytes: int) -> torch.Tensor:
        """The registered bytes `[address, address + size_bytes)`. Raises TransferFailed if they are not."""
        at = bisect.bisect_right(self._bases, address) - 1
        if at >= 0:
            offset = address - self._bases[at]
            if offset + size_bytes <= self._storages[at].numel():
                return self._storages[at][offset : offset + size_bytes]
        raise TransferFailed(f"{size_bytes} bytes at {address:#x} are not registered with the copy engine")

    def lane(self, name: str) -> StreamLane:
        self.refuse_if_closed(f"lane {name}")
        if name not in self._lanes:
            self._lanes[name] = StreamLane(name=name, engine=self)
        return self._lanes[name]

    def refuse_if_closed(self, what: str) -> None:
        if self._closed:
            raise TransferFailed(f"{what!r} refused: the copy engine was closed")

    def compute_done(self) -> CopyToken:
        stream = torch.accelerator.current_stream(self.device)
        return StreamToken("compute", stream.record_event(torch.Event(device=self.device)))

    def statistics(self) -> EngineStatistics:
        """Copies count when issued; busy and stalled time are known for host functions only."""
        host = {f"{name} (host)": counts for name, counts in self.host.statistics().lanes.items()}
        return EngineStatistics(
            lanes={**host, **{name: lane.ledger.statistics() for name, lane in self._lanes.items()}}
        )

    def check_integrity(self) -> None:
        assert self._bases == sorted(set(self._bases)), "registered storages out of order"
        self.host.check_integrity()

    def close(self, deadline_s: float) -> None:
        self._closed = True
        self.host.close(deadline_s)
        for name, lane in self._lanes.items():
            what = f"closing lane {name!r}"
            lane.mark(what).synchronize(deadline_s=deadline_s, what=what)
        self._bases.clear()
        self._storages.clear()


def _never(ticket: Ticket, deadline_s: float) -> None:
    raise AssertionError(f"{ticket} is settled at once")
