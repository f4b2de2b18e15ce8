"""Fourth part: KVPP on two ranks against plain vLLM on two ranks, and its negative control."""

from __future__ import annotations

from dataclasses import dataclass

from kvstrata.demo.baseline import Baseline
from kvstrata.demo.serving import BROADCASTS_SKIPPED, KVPP, TWO_RANKS, Served, Servings, mib
from kvstrata.demo.two_ranks import RANKS

SCRATCH_BUFFERS = 2
CAPACITY_SHARE = 0.95  # of the formula: the rest is half a block


@dataclass(frozen=True, kw_only=True)
class KvppResult:
    """What two ranks made of the prompt. `problems` says what makes it a failure.

    All three have one budget per rank; the answer to compare with is that of the baseline, one rank with
    enough memory.
    """

    baseline: Baseline
    plain: Served
    kvstrata: Served
    control: Served
    capacity_ratio_formula: float

    @property
    def capacity_ratio(self) -> float:
        """Tokens that fit with KVPP over tokens that fit without, by vLLM's own block counts."""
        return self.kvstrata.max_tokens / self.plain.max_tokens

    @property
    def exact(self) -> bool:
        """Whether KVPP's tokens equal those of plain vLLM with enough memory."""
        reference = self.baseline.roomy.token_ids
        return bool(reference) and self.kvstrata.token_ids == reference

    @property
    def negative_control_diverges(self) -> bool:
        """Whether the run in which nothing is passed on gives other tokens; else `exact` means nothing."""
        return self.control.token_ids != self.baseline.roomy.token_ids

    @property
    def bytes_per_rank(self) -> tuple[int, ...]:
        """Device bytes of KV cache that each rank of the KVPP engine allocated."""
        return tuple(int(rank["device_bytes"]) for rank in self.kvstrata.ranks)

    @property
    def broadcast_bytes(self) -> int:
        """Bytes that owners passed on for the answer, each layer of a forward counted once."""
        return int(self.kvstrata.counters.get("broadcast_bytes", 0))

    @property
    def problems(self) -> list[str]:
        """Return why this run does not show what it should; empty if it does."""
        found = []
        if self.plain.refusal is None:
            found.append(
                "plain vLLM on two ranks took the prompt: the budget per rank is too large to show anything"
            )
        if not self.exact:
            found.append("KVPP's answer differs from plain vLLM's: a bug, please report it")
        if not self.negative_control_diverges:
            found.append("KVPP without broadcasts gave the same answer: the comparison proves nothing")
        if self.capacity_ratio < CAPACITY_SHARE * self.capacity_ratio_formula:
            found.append(
                f"capacity grew {self.capacity_ratio:.2f} times with KVPP, the formula says "
                f"{self.capacity_ratio_formula:.2f}"
            )
        if not self.broadcast_bytes:
            found.append("no layer was passed from rank to rank: the prompt fitted into one chunk")
        if len(self.bytes_per_rank) != RANKS or max(self.bytes_per_rank, default=0) > self._rank_bytes:
            found.append(
                f"the ranks hold {list(self.bytes_per_rank)} bytes of KV, each may hold {self._rank_bytes}"
            )
        return found

    @property
    def _rank_bytes(self) -> int:
        return self.kvstrata.device_kv_budget_bytes


@dataclass(frozen=True, kw_only=True)
class KvppSkipped:
    """The part was left out, which is no failure."""

    reason: str

    @property
    def problems(self) -> list[str]:
        """Return nothing."""
        return []


KvppPart = KvppResult | KvppSkipped


def formula(*, num_layers: int) -> float:
    """Return N / (ceil(N / R) + 2) for equal layers on two ranks (seed: KVPP, Layout and budget)."""
    return num_layers / (-(-num_layers // RANKS) + SCRATCH_BUFFERS)


def run_kvpp(
    servings: Servings,
    baseline: Baseline,
    *,
    rank_bytes: int,
    capacity_ratio_formula: float,
    skip_reason: str | None,
) -> KvppPart:
    """Serve the prompt on two ranks: plain, with KVPP, and broken. Raises what the engines raise."""
    if skip_reason is not None:
        servings.terminal.console.print(f"KVPP on two ranks is skipped: {skip_reason}")
        return KvppSkipped(reason=skip_reason)
    return KvppResult(
        baseline=baseline,
        plain=servings.serve(f"plain vLLM on two ranks with {mib(rank_bytes)} each", rank_bytes, TWO_RANKS),
        kvstrata=servings.serve(f"kvstrata on two ranks with {mib(rank_bytes)} each, KVPP", rank_bytes, KVPP),
        control=servings.serve(
            "negative control: KVPP with nothing passed from rank to rank", rank_bytes, BROADCASTS_SKIPPED
        ),
        capacity_ratio_formula=capacity_ratio_formula,
    )
