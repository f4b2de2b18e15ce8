"""Known defects, each of which the simulator has to find: what proves that its checks are not blind.

A mutant is the real part with one thing wrong. Some reach into the private state of the machines, as a slip
there would; their own checks of integrity are left out, so that only what a defect leads to betrays it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvstrata.errors import ConfigurationError
from kvstrata.remote.holds import Hold
from kvstrata.remote.protocol.actions import Ending
from kvstrata.sim.decode import Decode, DecodeJob
from kvstrata.sim.http import Call
from kvstrata.sim.machine_mutants import (
    AnswersCountTwice,
    FinishesUnderReads,
    KeepsRefusalsToItself,
    LastPartCompletes,
    MembersCountTwice,
    NeverLapses,
)
from kvstrata.sim.pages import Exported, Holds
from kvstrata.sim.parts import Parts
from kvstrata.sim.prefill import Prefill, PrefillJob
from kvstrata.sim.rank_mutants import (
    PublishesBeforeWriting,
    PublishesHalfBlocks,
    RestartsUnderItsOldEpoch,
    SilentWithoutBlocks,
    TakesTheFirstShare,
)
from kvstrata.sim.reads import Read, Readers
from kvstrata.sim.run import REAL


class _GateDropped(Prefill):
    def may_free(self, job: PrefillJob) -> bool:
        return job.is_over and not job.is_in_step

    def rank_settled(self, rank: int, transfer: str, ending: Ending) -> None:
        if transfer in self.jobs:
            super().rank_settled(rank, transfer, ending)


class _FreesUnderWrites(Prefill):
    def may_free(self, job: PrefillJob) -> bool:
        return job.is_over and not job.unsettled


class _HoldKept(Holds):
    def revoke(self, hold: Hold) -> bool:
        self._free.append(hold.slot)
        return True


class _GenerationIgnored(Readers):
    def accepts(self, memory: Exported, hold: Hold) -> bool:
        return memory.holds.words[hold.slot] != 0


class _HoldUnchecked(Readers):
    def accepts(self, memory: Exported, hold: Hold) -> bool:
        return True


class _Unfenced(Readers):
    def _end(self, read: Read, error: str | None, is_final: bool) -> None:
        super()._end(read, error, is_final)
        if error is not None and read.memory is not None and read.copies:
            # The bytes of a connection that was given up are still under way.
            self._process.after(0.2, self._copy, read, read.memory, read.copies[-1])


class _ReportsHalfway(Readers):
    def _end(self, read: Read, error: str | None, is_final: bool) -> None:
        if error == "cancelled" and read.copied:
            error = None  # some bytes have landed, have they not
        super()._end(read, error, is_final)


class _AbortFreesAtOnce(Decode):
    def is_settled(self, job: DecodeJob) -> bool:
        return job.is_cancelled or not job.unfinished

    def cancel(self, call: Call) -> None:
        super().cancel(call)
        for job in list(self.jobs.values()):
            self.proceed(job)

    def rank_finished(self, rank: int, transfer: str, ending: Ending) -> None:
        if transfer in self.jobs:
            super().rank_finished(rank, transfer, ending)


class _OneRankIsEnough(Decode):
    def is_settled(self, job: DecodeJob) -> bool:
        return len(job.unfinished) < len(self.ranks)

    def rank_finished(self, rank: int, transfer: str, ending: Ending) -> None:
        if transfer in self.jobs:
            super().rank_finished(rank, transfer, ending)


class _FailureIgnored(Decode):
    def rank_finished(self, rank: int, transfer: str, ending: Ending) -> None:
        super().rank_finished(rank, transfer, Ending.DONE)


@dataclass(frozen=True)
class Mutant:
    """A defect in words, and the parts that have it."""

    defect: str
    parts: Parts


MUTANTS: dict[str, Mutant] = {
    "gate-dropped": Mutant(
        "prefill frees blocks when they are computed, whoever reads them", replace(REAL, prefill=_GateDropped)
    ),
    "frees-under-writes": Mutant(
        "prefill frees an aborted request's blocks in the step that writes them",
        replace(REAL, prefill=_FreesUnderWrites),
    ),
    "hold-kept": Mutant("a hold that is revoked stays in the table", replace(REAL, holds=_HoldKept)),
    "generation-ignored": Mutant(
        "a reader takes any hold in the slot for its own", replace(REAL, readers=_GenerationIgnored)
    ),
    "hold-unchecked": Mutant("a reader does not look at the hold", replace(REAL, readers=_HoldUnchecked)),
    "unfenced": Mutant("bytes land after a read has reported its failure", replace(REAL, readers=_Unfenced)),
    "answers-count-twice": Mutant(
        "the producer counts a repeated ReadDone for another part", replace(REAL, producer=AnswersCountTwice)
    ),
    "members-count-twice": Mutant(
        "the consumer counts a member's repeated part for another member",
        replace(REAL, consumer=MembersCountTwice),
    ),
    "last-part-completes": Mutant(
        "the consumer takes a layer for complete when its last part has landed",
        replace(REAL, consumer=LastPartCompletes),
    ),
    "finishes-under-reads": Mutant(
        "the consumer finishes an aborted transfer while reads are in flight",
        replace(REAL, consumer=FinishesUnderReads),
    ),
    "abort-frees-at-once": Mutant(
        "decode frees an aborted request's blocks before its ranks have finished",
        replace(REAL, decode=_AbortFreesAtOnce),
    ),
    "one-rank-is-enough": Mutant(
        "decode begins when the first of its ranks has finished", replace(REAL, decode=_OneRankIsEnough)
    ),
    "failure-ignored": Mutant(
        "decode takes every finished transfer for a good one", replace(REAL, decode=_FailureIgnored)
    ),
    "never-lapses": Mutant("the producer has no lease", replace(REAL, producer=NeverLapses)),
    "keeps-refusals-to-itself": Mutant(
        "a refused producer does not tell decode which transfers it will never open",
        replace(REAL, producer=KeepsRefusalsToItself),
    ),
    "publishes-before-writing": Mutant(
        "prefill publishes a layer before its rows are there",
        replace(REAL, prefill_rank=PublishesBeforeWriting),
    ),
    "publishes-half-blocks": Mutant(
        "prefill publishes a block that the next chunk still fills",
        replace(REAL, prefill_rank=PublishesHalfBlocks),
    ),
    "silent-without-blocks": Mutant(
        "a member that has nothing to send of a layer does not say so",
        replace(REAL, prefill_rank=SilentWithoutBlocks),
    ),
    "restarts-under-its-old-epoch": Mutant(
        "a restarted prefill rank has the epoch of its former life",
        replace(REAL, prefill_rank=RestartsUnderItsOldEpoch),
    ),
    "takes-the-first-share": Mutant(
        "every decode rank reads the first rank's share of a common main pool",
        replace(REAL, decode_rank=TakesTheFirstShare),
    ),
}


def parts_of(name: str) -> Parts:
    """The parts of a mutant, or the real ones for an empty name. Raises ConfigurationError for another."""
    if not name:
        return REAL
    if name not in MUTANTS:
        raise ConfigurationError(f"mutant {name!r} is unknown; there are {', '.join(MUTANTS)}")
    return MUTANTS[name].parts
