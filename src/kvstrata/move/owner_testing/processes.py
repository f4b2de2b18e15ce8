"""For tests of KVPP: the ranks of a group in processes of their own, to be driven, delayed and killed."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any, Literal

import numpy as np
import torch.distributed as dist

from kvstrata.core.owners import owner_groups
from kvstrata.errors import GateViolation
from kvstrata.move.broadcast import CollectiveCarrier
from kvstrata.move.carrier import Carrier
from kvstrata.move.faulty import IdleCarrier
from kvstrata.move.owner_testing.rank import OwnerRank, shm_carrier

CarrierName = Literal["shm", "collective"]
START_S = 180.0  # imports, on a machine that does many other things
ANSWER_S = 120.0
TP, PCP = 2, 2


class OwnerProcesses:
    """The ranks of one KVPP group; each answers one call at a time."""

    def __init__(self, size: int, *, carrier: CarrierName, meeting_place: str, **settings: Any) -> None:
        """Start them and wait until they have met. `meeting_place` is a path that does not exist yet."""
        # Forked from a clean process that has imported everything: a start takes no seconds.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["kvstrata.move.owner_testing.preload"])
        self.size = size
        self._pipes: list[Connection] = []
        self._processes = []
        for member in range(size):
            pipe, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(theirs, member, size, carrier, meeting_place, settings), daemon=True
            )
            process.start()
            theirs.close()
            self._pipes.append(pipe)
            self._processes.append(process)
        self._introduce()

    def send(self, member: int, method: str, *args: Any, **more: Any) -> None:
        """Begin a call; `answer` ends it."""
        self._pipes[member].send((method, args, more))

    def answer(self, member: int) -> Any:
        """What a call gave. Raises AssertionError with what it raised, or if nothing comes."""
        kind, value = self._receive(member, ANSWER_S)
        assert kind == "value", value
        return value

    def ask(self, member: int, method: str, *args: Any, **more: Any) -> Any:
        self.send(member, method, *args, **more)
        return self.answer(member)

    def ask_all(
        self, method: str, *args: Any, members: Sequence[int] | None = None, **more: Any
    ) -> list[Any]:
        members = range(self.size) if members is None else members
        for member in members:
            self.send(member, method, *args, **more)
        return [self.answer(member) for member in members]

    def hears_nothing_from(self, members: Sequence[int], seconds: float = 0.3) -> bool:
        """Whether none of `members` has answered after a while."""
        return not any(self._pipes[member].poll(seconds) for member in members)

    def kill(self, member: int) -> None:
        """SIGKILL; harmless to repeat."""
        self._processes[member].kill()
        self.await_death(member)

    def await_death(self, member: int) -> None:
        self._processes[member].join(ANSWER_S)
        assert not self._processes[member].is_alive()

    def close(self) -> None:
        for member in range(self.size):
            self.kill(member)

    def _introduce(self) -> None:
        """Pass on what the ranks tell each other until all are ready."""
        while True:
            said = [self._receive(member, START_S) for member in range(self.size)]
            if all(kind == "ready" for kind, _ in said):
                return
            assert all(kind == "exchange" for kind, _ in said), said
            for pipe in self._pipes:
                pipe.send([value for _, value in said])

    def _receive(self, member: int, deadline_s: float) -> tuple[str, Any]:
        assert self._pipes[member].poll(deadline_s), f"rank {member}: no answer in {deadline_s} s"
        try:
            kind, value = self._pipes[member].recv()
        except (EOFError, ConnectionResetError):
            raise AssertionError(f"rank {member} ended") from None
        return kind, value


class ServedRank(OwnerRank):
    """A rank with what only a process can do, and what needs the carrier itself."""

    def begin_again_while_loading(self) -> str:
        """What the carrier says to a second forward while the first waits for other ranks."""
        self.carrier.begin_step()
        self.carrier.load(0, np.array([0], dtype=np.int64), after=())
        try:
            self.carrier.begin_step()
        except GateViolation as violation:
            return f"{type(violation).__name__}: {violation}"
        return "nothing"

    def die_in_next_copy(self) -> None:
        """End without a word, in the middle of a layer."""
        self.faults.append(lambda: os.kill(os.getpid(), signal.SIGKILL))


def _serve(
    pipe: Connection,
    member: int,
    size: int,
    carrier: CarrierName,
    meeting_place: str,
    settings: dict[str, Any],
) -> None:
    def exchange(value: object) -> Sequence[Any]:
        pipe.send(("exchange", value))
        met: Sequence[Any] = pipe.recv()
        return met

    try:
        is_idle = settings.pop("idle", False)
        busy = _maker(carrier, member, size, meeting_place, settings)

        def make(rank: OwnerRank) -> Carrier:
            return IdleCarrier(busy(rank)) if is_idle else busy(rank)

        rank = ServedRank(member=member, group_size=size, exchange=exchange, make=make, **settings)
        pipe.send(("ready", None))
    except Exception as error:
        pipe.send(("error", f"{type(error).__name__}: {error}"))
        return
    while True:
        try:
            method, args, more = pipe.recv()
        except EOFError:
            return  # the test is over
        try:
            pipe.send(("value", getattr(rank, method)(*args, **more)))
        except Exception as error:
            pipe.send(("error", f"{method}: {type(error).__name__}: {error}"))


def _maker(
    carrier: CarrierName, member: int, size: int, meeting_place: str, settings: dict[str, Any]
) -> Callable[[OwnerRank], Carrier]:
    if carrier == "shm":
        return shm_carrier
    staging_bytes = settings.pop("staging_bytes", 1 << 20)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    deadline = timedelta(seconds=settings.get("deadline_s", ANSWER_S))
    dist.init_process_group(
        "gloo", init_method=f"file://{meeting_place}", rank=member, world_size=size, timeout=deadline
    )
    tp, pcp = (TP, PCP) if size == TP * PCP else (size, 1)
    (ranks,) = owner_groups(size, tp=tp, pcp=pcp)
    group = dist.new_group(list(ranks), backend="gloo", timeout=deadline)

    def make(rank: OwnerRank) -> Carrier:
        return CollectiveCarrier(
            plan=rank.plan,
            member=rank.member,
            windows=rank.windows,
            homes=rank.homes,
            group=group,
            engine=rank.engine,
            deadline_s=rank.deadline_s,
            payload=rank.payload,
            staging_bytes=staging_bytes,
            copy=rank._copy,
        )

    return make
