"""The simulated prefill engine: a scheduler over a small pool of blocks, and its ranks."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

from kvstrata.remote.protocol.actions import Ending
from kvstrata.sim.http import Call, Server
from kvstrata.sim.options import Request
from kvstrata.sim.pages import BlockPool
from kvstrata.sim.prefill_rank import PrefillRank
from kvstrata.sim.setting import PAGE_BYTES, Setting
from kvstrata.sim.world import Action, Pipe, Violation


@dataclass(slots=True, eq=False)
class PrefillJob:
    """One request that prefill has; `number` marks the pages it writes."""

    call: Call
    request: Request
    transfer: str
    number: int
    first_block: int
    blocks: tuple[int, ...] = ()
    computed_tokens: int = 0
    unsettled: set[int] = field(default_factory=set)
    is_begun: bool = False  # a chunk was computed
    is_in_step: bool = False
    is_over: bool = False  # computes no more: done, or given up


@dataclass(frozen=True, slots=True)
class Chunk:
    """What a step computes of a job."""

    job: PrefillJob
    first_token: int
    end_token: int
    is_begun: bool  # not the job's first chunk
    is_last: bool


class Prefill(Server):
    """Blocks return to the pool when every rank has settled the transfer and no step writes them."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting, "p")
        parts, options = setting.parts, setting.options
        self.pipe = Pipe(self.process, options.network_s)
        self.ranks = [parts.prefill_rank(setting, self, rank) for rank in range(options.p_tp)]
        self.processes = [self.process, *(rank.process for rank in self.ranks)]
        self.pipes = [Pipe(rank.process, options.network_s) for rank in self.ranks]
        self._empty()

    def _empty(self) -> None:
        self.pool = BlockPool("prefill", self.setting.options.prefill_blocks)
        self.jobs: dict[str, PrefillJob] = {}
        self._waiting: list[PrefillJob] = []
        self._running: list[PrefillJob] = []
        self._computing: set[int] = set()  # ranks that have not finished the step
        self._chunks: tuple[Chunk, ...] = ()

    def crash(self) -> None:
        """Lose every process of the engine."""
        self.break_calls()
        self.process.crash()
        for rank in self.ranks:
            rank.crash()
        self._empty()

    def restart(self, page_bytes: int = PAGE_BYTES) -> None:
        """Start anew, perhaps with other pages."""
        for process in self.processes:
            process.restart()
        for rank in self.ranks:
            rank.start(page_bytes)

    # Calls of the proxy

    def prefill(self, call: Call, request: Request, transfer: str, number: int, first_block: int) -> None:
        """Compute a prompt and let decode read it from `first_block` on."""
        job = PrefillJob(call, request, transfer, number, first_block)
        self.jobs[transfer] = job
        self._waiting.append(job)
        self._step()

    def cancel(self, call: Call) -> None:
        """The caller has gone."""
        self.forget(call)
        for job in list(self.jobs.values()):
            if job.call is call:
                self.setting.world.counts["prefill cancelled"] += 1
                self.give_up(job, "the client left")
                self.setting.watch.within(
                    self.setting.options.longest_lease_s + 1.0,
                    self.processes,
                    partial(self._is_gone, job.transfer),
                    f"{job.transfer} at prefill after its client left",
                    grace_s=self.setting.options.longest_lease_s,
                )

    # Scheduling

    def _step(self) -> None:
        if self._computing:
            return
        self._preempt()
        self._admit()
        budget = self.setting.options.chunk_tokens
        chunks = []
        for job in self._running:
            size = min(budget, job.request.tokens - job.computed_tokens)
            if size > 0:
                budget -= size
                end = job.computed_tokens + size
                is_last = end == job.request.tokens
                chunks.append(Chunk(job, job.computed_tokens, end, job.is_begun, is_last))
                job.computed_tokens, job.is_begun, job.is_in_step = end, True, True
        if chunks:
            self._chunks = tuple(chunks)
            self._computing = set(range(len(self.ranks)))
            for rank, pipe in zip(self.ranks, self.pipes, strict=True):
                pipe.send(rank.command, rank.compute, self._chunks)

    def _admit(self) -> None:
        options = self.setting.options
        while self._waiting and len(self._running) < options.max_running:
            job = self._waiting[0]
            count = -(-job.request.tokens // options.block_tokens)
            if self.pool.free < count:
                return
            self._waiting.pop(0)
            self._running.append(job)
            job.blocks = self.pool.take(count, job.transfer)
            job.computed_tokens = job.request.prefill_hit_blocks * options.block_tokens
            job.unsettled = set(range(len(self.ranks)))
            for rank in self.ranks:
                rank.memory.check_unread(job.blocks, f"{job.transfer} gets")
            for rank, pipe in zip(self.ranks, self.pipes, strict=True):
                pipe.send(rank.command, rank.open, job)

    def _preempt(self) -> None:
        world = self.setting.world
        if self._running and world.random.random() < self.setting.options.preemption:
            world.counts["preemptions"] += 1
            job = self._running[-1]
            self.give_up(job, "preempted")
            self.answer(job.call, False)

    def rank_computed(self, rank: int) -> None:
        """A rank has finished the step."""
        self._computing.discard(rank)
        if self._computing:
            return
        chunks, self._chunks = self._chunks, ()
        for chunk in chunks:
            job = chunk.job
            job.is_in_step = False
            if chunk.is_last and not job.is_over:
                job.is_over = True
                self._running.remove(job)
                self.answer(job.call, True)
        for chunk in chunks:
            self.release(chunk.job)
        self._step()

    def give_up(self, job: PrefillJob, reason: str) -> None:
        """Compute a job no further, whatever it has got to."""
        if job in self._waiting:
            self._waiting.remove(job)
        elif not job.is_over:
            self._running.remove(job)
        job.is_over = True
        self.abort(job, job.unsettled, reason)
        self.release(job)

    def abort(self, job: PrefillJob, ranks: set[int], reason: str) -> None:
        """Have some ranks end the job's transfer."""
        for number in sorted(ranks):
            rank = self.ranks[number]
            via: Action = rank.command
            if self.setting.options.interrupts:
                self.pipes[number].send(self._interrupt, rank, job, reason)
            else:
                self.pipes[number].send(via, rank.abort, job, reason)

    def _interrupt(self, rank: PrefillRank, job: PrefillJob, reason: str) -> None:
        # Another thread of the worker: but it cannot abort what has not been opened yet.
        if job.transfer in rank.unsettled:
            rank.abort(job, reason)
        else:
            rank.command(rank.abort, job, reason)

    def rank_settled(self, rank: int, transfer: str, ending: Ending) -> None:
        """A rank lets go of a transfer's blocks."""
        job = self.jobs.get(transfer)
        if job is None or rank not in job.unsettled:
            raise Violation("exactly once", f"rank {rank} settles {transfer} again")
        job.unsettled.remove(rank)
        if ending is not Ending.DONE and not job.is_over and self.setting.options.stops_early:
            self.give_up(job, "another rank's transfer ended")
            self.answer(job.call, False)
        else:
            self.release(job)

    def may_free(self, job: PrefillJob) -> bool:
        """Whether nobody reads or writes the job's blocks any more."""
        return job.is_over and not job.is_in_step and not job.unsettled

    def release(self, job: PrefillJob) -> None:
        """Free a job's blocks as soon as that is allowed; waiting jobs get them at once."""
        if job.transfer not in self.jobs or not self.may_free(job):
            return
        for rank in self.ranks:
            rank.memory.check_unread(job.blocks, f"{job.transfer} frees")
        del self.jobs[job.transfer]
        self.pool.give_back(job.blocks, job.transfer)
        self.setting.world.release()
        self.process.after(0.0, self._step)

    def _is_gone(self, transfer: str) -> bool:
        return transfer not in self.jobs

    def check_accounts(self) -> None:
        """A1: every block is free, or of one job."""
        held = sum(len(job.blocks) for job in self.jobs.values())
        if held != self.pool.used:
            raise Violation("A1", f"prefill's jobs hold {held} blocks, its pool has given {self.pool.used}")

    def check_idle(self) -> None:
        """Raise Violation if anything is held, open or waited for."""
        if self.jobs or self.pool.used:
            raise Violation("P7", f"prefill has jobs {sorted(self.jobs)} and {self.pool.used} used blocks")
        for rank in self.ranks:
            if rank.process.is_up:
                rank.check_idle()
