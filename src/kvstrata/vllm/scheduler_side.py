"""The scheduler's half: which prefix the store holds, which blocks to fetch, which finished blocks to offer.

Two frontiers a request (device constraint 11): what is scheduled, which drafts and asynchronous steps may
take back, and what is confirmed. Only confirmed rows are offered to the store.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from vllm.logger import init_logger

from kvstrata.errors import KVStrataError
from kvstrata.store.base import ReadLease, Status, Store, StoreKey

from .transfers import Fetch, Put, StepTransfers

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

logger = init_logger("vllm.kvstrata.scheduler")

_Answer = TypeVar("_Answer")


@dataclass(frozen=True, kw_only=True)
class SchedulerStatistics:
    """Totals since start: blocks asked of the store, and of these the blocks it held on every rank."""

    asked_blocks: int = 0
    hit_blocks: int = 0
    store_faults: int = 0  # calls that the store answered with an exception


@dataclass(kw_only=True)
class _Match:
    """A prefix found in the store for a request that is not scheduled yet; one lease a rank and block."""

    first_block: int
    leases: list[dict[str, ReadLease]]


@dataclass(frozen=True, kw_only=True)
class _Reading:
    """A step that reads from the store and whose workers have not answered yet."""

    number: int
    leases: list[ReadLease]
    block_ids: frozenset[int]


@dataclass(kw_only=True)
class _Tracked:
    """What the connector remembers of a request while vLLM knows it."""

    request: Request
    block_ids: list[int] = field(default_factory=list)
    offered_blocks: int = 0  # leading blocks that the store was offered or already had
    lost_at: int | None = None  # its first block that the store lost; None: its rows are sound


class StoreScheduler:
    """Answers vLLM's scheduler from the store. Lives in its process, called by its thread only."""

    def __init__(
        self,
        *,
        store: Store,
        namespace: str,
        ranks: Sequence[str],
        block_tokens: int,
        lease_s: float,
        offers: bool = True,
    ) -> None:
        """``offers``: whether finished blocks are offered to the store; a pure consumer only reads it."""
        self._store = store
        self._offers = offers
        self._namespace = namespace
        self._ranks = tuple(ranks)
        self._block_tokens = block_tokens
        self._lease_s = lease_s
        self._matches: dict[str, _Match] = {}
        self._tracked: dict[str, _Tracked] = {}
        self._fetches: list[Fetch] = []
        self._steps = 0
        self._reading: deque[_Reading] = deque()  # oldest first
        self._asked_blocks = 0
        self._hit_blocks = 0
        self._faults = 0
        self._told_faults: set[tuple[str, type[KVStrataError]]] = set()

    def matched_tokens(self, request: Request, num_computed_tokens: int) -> int:
        """Return how many tokens beyond ``num_computed_tokens`` the store can supply, in whole blocks.

        Leases what it reports. One token is always left to compute: a full hit has nothing to schedule.
        """
        self._forget_match(request.request_id)
        if not self._stores(request):
            return 0
        first = num_computed_tokens // self._block_tokens
        if num_computed_tokens % self._block_tokens:
            return 0
        last = min((request.num_tokens - 1) // self._block_tokens, len(request.block_hashes))
        hashes = [bytes(block_hash) for block_hash in request.block_hashes[first:last]]
        if not hashes:
            return 0
        leases = self._lease_prefix(hashes)
        self._asked_blocks += len(hashes)
        self._hit_blocks += len(leases)
        if leases:
            self._matches[request.request_id] = _Match(first_block=first, leases=leases)
        return len(leases) * self._block_tokens

    def allocated(self, request: Request, block_ids: Sequence[int], num_external_tokens: int) -> None:
        """Note the blocks vLLM gave a request, and fetch the matched ones in its next step."""
        tracked = self._tracked.setdefault(request.request_id, _Tracked(request=request))
        tracked.request = request
        match = self._matches.pop(request.request_id, None)
        if match is None:
            return
        wanted = num_external_tokens // self._block_tokens
        for at, leases in enumerate(match.leases[:wanted]):
            self._fetches.append(
                Fetch(
                    request_id=request.request_id,
                    block_id=block_ids[match.first_block + at],
                    leases=leases,
                )
            )
        tracked.offered_blocks = max(tracked.offered_blocks, match.first_block + wanted)
        self._release([lease for leases in match.leases[wanted:] for lease in leases.values()])

    def step(self, output: SchedulerOutput) -> StepTransfers:
        """Return this step's fetches and the blocks that will be complete and confirmed when it ends."""
        self._steps += 1
        transfers = StepTransfers(number=self._steps, fetches=self._fetches)
        self._fetches = []
        if transfers.fetches:
            leases = [lease for fetch in transfers.fetches for lease in fetch.leases.values()]
            block_ids = frozenset(fetch.block_id for fetch in transfers.fetches)
            self._reading.append(_Reading(number=self._steps, leases=leases, block_ids=block_ids))
        for new in output.scheduled_new_reqs:
            self._schedule(new.req_id, new.block_ids[0], None, new.num_computed_tokens, output, transfers)
        cached = output.scheduled_cached_reqs
        for at, request_id in enumerate(cached.req_ids):
            block_ids = cached.new_block_ids[at]
            added = list(block_ids[0]) if block_ids is not None else []
            keep = None if request_id in cached.resumed_req_ids else self._blocks_of(request_id)
            self._schedule(request_id, added, keep, cached.num_computed_tokens[at], output, transfers)
        return transfers

    def step_done(self, number: int, lost_block_ids: Collection[int] = ()) -> set[int]:
        """The workers have run step ``number``: end the leases of all steps up to it.

        Returns the blocks that may have been computed from ``lost_block_ids``, these included. A request that
        holds one offers nothing until it computes that block itself: of several that share it, vLLM lets one
        compute it again, and the others may go first.
        """
        while self._reading and self._reading[0].number <= number:
            self._release(self._reading.popleft().leases)
        lost = set(lost_block_ids)
        spoilt: set[int] = set()
        for tracked in self._tracked.values() if lost else ():
            first = next((at for at, block_id in enumerate(tracked.block_ids) if block_id in lost), None)
            if first is not None:
                tracked.lost_at = first
                spoilt.update(tracked.block_ids[first:])
        return lost | spoilt

    def finished(self, request_id: str) -> None:
        """Forget a request; its leases end."""
        self._forget_match(request_id)
        self._tracked.pop(request_id, None)

    def clear(self) -> bool:
        """Drop every object of the store that nobody reads (vLLM's reset of the connector's cache).

        Returns whether the store did.
        """
        return self._ask("clear", self._store.clear, otherwise=-1) >= 0

    def statistics(self) -> SchedulerStatistics:
        """Return totals since start."""
        return SchedulerStatistics(
            asked_blocks=self._asked_blocks, hit_blocks=self._hit_blocks, store_faults=self._faults
        )

    def close(self) -> None:
        """Release every lease still held."""
        for request_id in list(self._matches):
            self._forget_match(request_id)
        self.step_done(self._steps)
        self._release([lease for fetch in self._fetches for lease in fetch.leases.values()])
        self._fetches = []
        self._ask("close", self._store.close, otherwise=None)

    def _schedule(
        self,
        request_id: str,
        added: Sequence[int],
        kept: Sequence[int] | None,
        computed: int,
        output: SchedulerOutput,
        transfers: StepTransfers,
    ) -> None:
        tracked = self._tracked.get(request_id)
        if tracked is None:
            return
        tracked.block_ids = [*(kept or ()), *added]
        if kept is None:  # what it starts from was offered when it was computed
            tracked.offered_blocks = max(tracked.offered_blocks, computed // self._block_tokens)
        else:  # vLLM went back to blocks the store had lost: what is computed again is offered again
            tracked.offered_blocks = min(tracked.offered_blocks, computed // self._block_tokens)
        if tracked.lost_at is not None and (kept is None or computed <= tracked.lost_at * self._block_tokens):
            tracked.lost_at = None
        is_sound = tracked.lost_at is None and not self._reads_unsure(tracked)
        if not (self._offers and is_sound and self._stores(tracked.request)):
            return
        confirmed = confirmed_tokens(tracked.request, computed, output.num_scheduled_tokens[request_id])
        ready = min(confirmed // self._block_tokens, len(tracked.request.block_hashes))
        for at in range(tracked.offered_blocks, ready):
            transfers.puts.append(
                Put(
                    request_id=request_id,
                    block_id=tracked.block_ids[at],
                    block_hash=bytes(tracked.request.block_hashes[at]),
                )
            )
        tracked.offered_blocks = max(tracked.offered_blocks, ready)

    def _lease_prefix(self, hashes: Sequence[bytes]) -> list[dict[str, ReadLease]]:
        keys = [
            StoreKey(namespace=self._namespace, rank=rank, block_hash=block_hash)
            for block_hash in hashes
            for rank in self._ranks
        ]
        none: list[ReadLease | Status] = []
        present = self._ask("contains", lambda: self._store.contains(keys), otherwise=list[Status]())
        keys = keys[: len(present)]
        found = next((at for at, status in enumerate(present) if status is not Status.OK), len(present))
        ranks = len(self._ranks)
        prefix = found - found % ranks
        # What is missing is asked for too, so that the store counts it as missed.
        missing = [
            key
            for key, status in zip(keys[prefix:], present[prefix:], strict=True)
            if status is Status.MISSING
        ]
        answers = self._ask(
            "acquire",
            lambda: self._store.acquire([*keys[:prefix], *missing], ttl_s=self._lease_s),
            otherwise=none,
        )
        leases: list[dict[str, ReadLease]] = []
        surplus = [lease for lease in answers[prefix:] if isinstance(lease, ReadLease)]
        for at in range(min(prefix, len(answers)) // ranks):
            answer = answers[at * ranks : (at + 1) * ranks]
            held = [lease for lease in answer if isinstance(lease, ReadLease)]
            if len(held) == ranks and len(leases) == at:
                leases.append(dict(zip(self._ranks, held, strict=True)))
            else:
                surplus += held
        self._release(surplus)
        return leases

    def _reads_unsure(self, tracked: _Tracked) -> bool:
        """Whether a block of the request comes from a read that may have failed without the rank knowing.

        A rank sees its own failures in the step itself and offers nothing then; those of other ranks and of
        steps in flight are known with the answer only. Later steps offer what waits.
        """
        return any(
            not reading.block_ids.isdisjoint(tracked.block_ids)
            for reading in self._reading
            if reading.number < self._steps or len(self._ranks) > 1
        )

    def _stores(self, request: Request) -> bool:
        """Whether the request's block hashes and the namespace tell all that its rows depend on.

        vLLM's hash names a LoRA adapter by name and path only: one retrained in place would get the old rows.
        """
        return request.prompt_embeds is None and not request.pooling_params and request.lora_request is None

    def _blocks_of(self, request_id: str) -> Sequence[int]:
        tracked = self._tracked.get(request_id)
        return tracked.block_ids if tracked is not None else ()

    def _forget_match(self, request_id: str) -> None:
        match = self._matches.pop(request_id, None)
        if match is not None:
            self._release([lease for leases in match.leases for lease in leases.values()])

    def _release(self, leases: Sequence[ReadLease]) -> None:
        if leases:
            self._ask("release", lambda: self._store.release(leases), otherwise=None)  # or they expire

    def _ask(self, what: str, call: Callable[[], _Answer], *, otherwise: _Answer) -> _Answer:
        """Ask the store; whatever it raises is a miss (M5), logged once a kind."""
        try:
            return call()
        except KVStrataError as error:
            self._faults += 1
            kind = (what, type(error))
            if kind not in self._told_faults:
                self._told_faults.add(kind)
                logger.warning("the store failed to %s and counts as empty meanwhile: %s", what, error)
            return otherwise


def confirmed_tokens(request: Request, computed: int, scheduled: int) -> int:
    """Return how many leading tokens have final rows once the step with ``scheduled`` tokens has run.

    Prompt tokens are final as soon as computed. A generated token's row is final when the token is known and
    a later one has been sampled from it: rows of rejected drafts are rewritten before that.
    """
    prompt = request.num_prompt_tokens
    after = computed + scheduled
    if after <= prompt:
        return after
    return max(prompt, min(computed, request.num_tokens - 1))
