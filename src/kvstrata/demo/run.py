"""The demonstration's steps, each but the seventh and eighth on one engine, and the figures they leave.

1. Plain vLLM in a small device budget: how much fits, and what it says to the prompt.
2. Plain vLLM with enough memory: the answer to compare with.
3. kvstrata with layerwise prefill offload in the small budget: it must give that answer.
4. The same with its loads switched off: it must not, or the comparison could not fail.
5. kvstrata with sparse decode offload in the small budget: the same answer, and the same text far beyond it.
6. The same, serving rows that are not the ones asked for: it must go wrong.
7. A prefill engine, a decode engine and a proxy: plain vLLM's answers to several prompts at once.
8. The same with prefill computing another prompt than the one that decode is asked: it must go wrong.
9. Plain vLLM on two ranks, in a budget per rank that is too small for the prompt: how much fits.
10. KVPP on two ranks in that budget: plain vLLM's answer again.
11. The same with nothing passed from rank to rank: it must go wrong.

With one core the last three are left out: two ranks on it would take minutes.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvstrata.demo.baseline import Baseline, run_baseline
from kvstrata.demo.kvpp import KvppPart, run_kvpp
from kvstrata.demo.layerwise import LayerwiseResult, run_layerwise
from kvstrata.demo.pd import OpenDeployment, PdPrompts, PdResult, run_pd
from kvstrata.demo.serving import Servings
from kvstrata.demo.sparse import SparseResult, run_sparse


@dataclass(frozen=True, kw_only=True)
class Formulas:
    """How many times more tokens should fit, by part."""

    layerwise: float
    sparse: float
    kvpp: float


@dataclass(frozen=True, kw_only=True)
class DemoResult:
    """Everything that was measured."""

    baseline: Baseline
    layerwise: LayerwiseResult
    sparse: SparseResult
    pd: PdResult
    kvpp: KvppPart

    @property
    def problems(self) -> list[str]:
        """Return why the demonstration failed, each reason once; empty if it did not."""
        parts = self.layerwise.problems + self.sparse.problems + self.pd.problems + self.kvpp.problems
        return list(dict.fromkeys(parts))


def run_demo(
    servings: Servings,
    *,
    open_deployment: OpenDeployment,
    pd_prompts: PdPrompts,
    small_bytes: int,
    roomy_bytes: int,
    kvpp_bytes: int,
    kvpp_skip_reason: str | None,
    formulas: Formulas,
    timed_prefills: int,
    decode_tokens: int,
) -> DemoResult:
    """Run the steps. `kvpp_bytes` is the budget of a rank; a `kvpp_skip_reason` leaves that part out.

    Raises what the engines raise, and KVStrataError if the reference refuses."""
    baseline = run_baseline(
        servings,
        small_bytes=small_bytes,
        roomy_bytes=roomy_bytes,
        timed_prefills=timed_prefills,
        decode_tokens=decode_tokens,
        more_prompts=pd_prompts.more,
    )
    return DemoResult(
        baseline=baseline,
        layerwise=run_layerwise(
            servings,
            baseline,
            small_bytes=small_bytes,
            capacity_ratio_formula=formulas.layerwise,
            timed_prefills=timed_prefills,
        ),
        sparse=run_sparse(
            servings,
            baseline,
            small_bytes=small_bytes,
            capacity_ratio_formula=formulas.sparse,
            decode_tokens=decode_tokens,
        ),
        pd=run_pd(
            servings,
            baseline,
            open_deployment=open_deployment,
            prompts=pd_prompts,
            small_bytes=small_bytes,
        ),
        kvpp=run_kvpp(
            servings,
            baseline,
            rank_bytes=kvpp_bytes,
            capacity_ratio_formula=formulas.kvpp,
            skip_reason=kvpp_skip_reason,
        ),
    )
