"""The simulated decode engine: takes requests, has their prompts filled from prefill, uses what it got."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from functools import partial

from kvstrata.remote.protocol.actions import Ending
from kvstrata.sim.decode_rank import DecodeRank
from kvstrata.sim.http import Call, Server
from kvstrata.sim.options import Request
from kvstrata.sim.pages import BlockPool, Content, Pages
from kvstrata.sim.setting import Setting
from kvstrata.sim.world import Pipe, Violation


class Stage(Enum):
    """How far decode has got with a request."""

    WAITING = "waiting"  # for blocks
    REMOTE = "remote"  # prefill's ranks fill its blocks
    LOCAL = "local"  # computes the prompt itself
    DECODING = "decoding"


@dataclass(slots=True, eq=False)
class DecodeJob:
    """One request that decode has; `number` marks the pages that prefill writes for it."""

    call: Call
    request: Request
    transfer: str
    number: int
    is_remote: bool
    on_advert: Callable[[str, int], None]
    on_token: Callable[[Call], None]
    first_block: int = 0
    blocks: tuple[int, ...] = ()
    unfinished: set[int] = field(default_factory=set)
    is_good: bool = True  # every rank that has finished has DONE
    is_cancelled: bool = False
    stage: Stage = Stage.WAITING
    writer: int = 0  # who has computed the blocks from `first_block` on


class Decode(Server):
    """Blocks return to the pool once every rank's Finish has come and the request is over."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting, "d")
        options = setting.options
        self.pipe = Pipe(self.process, options.network_s)
        self._empty()
        self.ranks = [setting.parts.decode_rank(setting, self, rank) for rank in range(options.d_tp)]
        self.processes = [self.process, *(rank.process for rank in self.ranks)]
        self.pipes = [Pipe(rank.process, options.network_s) for rank in self.ranks]

    def _empty(self) -> None:
        options = self.setting.options
        self.pool = BlockPool("decode", options.decode_blocks)
        self.shared_pages = Pages(len(options.planes), options.decode_blocks)
        self.jobs: dict[str, DecodeJob] = {}
        self._waiting: list[DecodeJob] = []

    def crash(self) -> None:
        """Lose every process of the engine."""
        self.break_calls()
        self.process.crash()
        for rank in self.ranks:
            rank.crash()
        self._empty()

    def restart(self) -> None:
        """Start anew."""
        for process in self.processes:
            process.restart()
        for rank in self.ranks:
            rank.start()

    def main_pages(self, rank: DecodeRank) -> Pages:
        """Where a rank's main KV lies."""
        return self.shared_pages if self.setting.options.shares_main else rank.pages

    # Calls of the proxy

    def generate(
        self,
        call: Call,
        request: Request,
        transfer: str,
        number: int,
        is_remote: bool,
        on_advert: Callable[[str, int], None],
        on_token: Callable[[Call], None],
    ) -> None:
        """Answer a request; its prompt comes from prefill if `is_remote`."""
        job = DecodeJob(call, request, transfer, number, is_remote, on_advert, on_token)
        self.jobs[transfer] = job
        self._waiting.append(job)
        self._admit()

    def cancel(self, call: Call) -> None:
        """The caller has gone."""
        self.forget(call)
        for job in list(self.jobs.values()):
            if job.call is call:
                self.setting.world.counts[f"cancelled while {job.stage.value}"] += 1
                job.is_cancelled = True
                if job.stage is Stage.REMOTE:
                    self._abort(job, "the client left")
                    deadline_s = self.setting.options.read_deadline_s
                    self.setting.watch.within(
                        deadline_s + 1.0,
                        self.processes,
                        partial(self._is_gone, job.transfer),
                        f"{job.transfer} at decode after its client left",
                        grace_s=deadline_s,
                    )
                else:
                    self._free(job)

    # Scheduling

    def _admit(self) -> None:
        options, world = self.setting.options, self.setting.world
        while self._waiting:
            job = self._waiting[0]
            count = -(-job.request.tokens // options.block_tokens)
            if self.pool.free < count:
                return
            self._waiting.pop(0)
            job.blocks = self.pool.take(count, job.transfer)
            job.first_block = job.request.decode_hit_blocks
            self._compute(job, 0, job.first_block)
            if not job.is_remote or job.first_block == count:
                self._compute_later(job)
                continue
            job.stage = Stage.REMOTE
            job.writer = job.number
            job.unfinished = set(range(len(self.ranks)))
            for rank, pipe in zip(self.ranks, self.pipes, strict=True):
                pipe.send(rank.expect, job)
            for _ in range(1 + (world.random.random() < 0.2)):  # posts are retried
                delay_s = options.network_s * (0.1 + world.random.random())
                world.at(delay_s, job.on_advert, job.transfer, job.first_block)

    def _abort(self, job: DecodeJob, reason: str) -> None:
        for number in sorted(job.unfinished):
            self.pipes[number].send(self.ranks[number].abort, job.transfer, reason)

    def rank_finished(self, rank: int, transfer: str, ending: Ending) -> None:
        """A transfer is over on a rank."""
        job = self.jobs.get(transfer)
        if job is None or rank not in job.unfinished:
            raise Violation("exactly once", f"rank {rank} finishes {transfer} again")
        job.unfinished.remove(rank)
        if ending is not Ending.DONE and job.is_good:
            job.is_good = False
            if self.setting.options.stops_early:
                self._abort(job, "it failed on another rank")
        self.proceed(job)

    def is_settled(self, job: DecodeJob) -> bool:
        """Whether no rank has anything to do with the job's blocks any more."""
        return not job.unfinished

    def proceed(self, job: DecodeJob) -> None:
        """Go on with a job of which ranks have finished the transfer."""
        if job.stage is not Stage.REMOTE or not self.is_settled(job):
            return
        if job.is_cancelled:
            self._free(job)
        elif job.is_good:
            self._use(job)
        else:
            self.setting.world.counts["recomputed"] += 1
            self._compute_later(job)

    def _compute_later(self, job: DecodeJob) -> None:
        job.stage = Stage.LOCAL
        delay_s = self.setting.options.layer_s * (1 + self.setting.world.random.random())
        self.process.after(delay_s, self._computed, job)

    def _computed(self, job: DecodeJob) -> None:
        if not job.is_cancelled:
            job.writer = -job.number
            self._compute(job, job.first_block, len(job.blocks))
            self._use(job)

    def _compute(self, job: DecodeJob, first: int, end: int) -> None:
        for pages, plane in self._stores():
            for position in range(first, end):
                pages.put(plane, job.blocks[position], self._content(job, -job.number, plane, position))

    def _use(self, job: DecodeJob) -> None:
        self.check_content(job)
        job.stage = Stage.DECODING
        # What decoding adds to the last block is the only copy of it.
        self._append(job)
        self.process.after(0.05 * self.setting.world.random.random(), self._token, job)

    def _append(self, job: DecodeJob) -> None:
        for pages, plane in self._stores():
            pages.put(plane, job.blocks[-1], (-job.number, plane, -1, 0))

    def _token(self, job: DecodeJob) -> None:
        if not job.is_cancelled:
            self.setting.world.at(self.setting.options.network_s, job.on_token, job.call)
            self.process.after(self.setting.world.random.random(), self._answered, job)

    def _answered(self, job: DecodeJob) -> None:
        if job.is_cancelled:
            return
        self.check_content(job, appended=True)
        self.answer(job.call, True)
        self._free(job)

    def _free(self, job: DecodeJob) -> None:
        if job in self._waiting:
            self._waiting.remove(job)
        for rank in self.ranks:
            reads = rank.readers.of_transfer(job.transfer)
            if reads:
                raise Violation("M3", f"decode frees blocks of {job.transfer} under {reads[0]}")
        del self.jobs[job.transfer]
        self.pool.give_back(job.blocks, job.transfer)
        self.setting.world.release()
        self._admit()

    # Checks

    def _stores(self) -> list[tuple[Pages, int]]:
        """Every plane of every rank, a shared one once."""
        planes = range(len(self.setting.options.planes))
        found = []
        for rank in self.ranks:
            for plane in planes:
                if self.setting.is_main(plane):
                    if rank.rank == 0 or not self.setting.options.shares_main:
                        found.append((self.main_pages(rank), plane))
                else:
                    found.append((rank.pages, plane))
        return found

    def _content(self, job: DecodeJob, writer: int, plane: int, position: int) -> Content:
        return (writer, plane, position, self.setting.filled(job.request.tokens, position))

    def check_content(self, job: DecodeJob, *, appended: bool = False) -> None:
        """M4, P4: every page of every layer and component is the request's own."""
        last = len(job.blocks) - 1
        for pages, plane in self._stores():
            for position, block in enumerate(job.blocks):
                writer = job.writer if position >= job.first_block else -job.number
                expected = self._content(job, writer, plane, position)
                if appended and position == last:
                    expected = (-job.number, plane, -1, 0)
                if pages.get(plane, block) != expected:
                    raise Violation(
                        "M4", f"{job.transfer} uses {pages.get(plane, block)}, which should be {expected}"
                    )

    def _is_gone(self, transfer: str) -> bool:
        return transfer not in self.jobs

    def check_accounts(self) -> None:
        """A1: every block is free, or of one job."""
        held = sum(len(job.blocks) for job in self.jobs.values())
        if held != self.pool.used:
            raise Violation("A1", f"decode's jobs hold {held} blocks, its pool has given {self.pool.used}")

    def check_idle(self) -> None:
        """Raise Violation if anything is held, expected or waited for."""
        if self.jobs or self.pool.used:
            raise Violation("P7", f"decode has jobs {sorted(self.jobs)} and {self.pool.used} used blocks")
        for rank in self.ranks:
            if rank.process.is_up:
                rank.check_idle()
