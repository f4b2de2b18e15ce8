"""First part: layerwise prefill offload in the small budget, and its negative control."""

from __future__ import annotations

from dataclasses import dataclass

from kvstrata.demo.baseline import Baseline, Comparison
from kvstrata.demo.serving import LAYERWISE, LOADS_SKIPPED, Servings, mib


@dataclass(frozen=True, kw_only=True)
class LayerwiseResult(Comparison):
    """What layerwise offload made of the prompt. `problems` says what makes it a failure."""

    @property
    def exact(self) -> bool:
        """Whether kvstrata's tokens equal those of plain vLLM with enough memory."""
        return (
            bool(self.baseline.roomy.token_ids) and self.kvstrata.token_ids == self.baseline.roomy.token_ids
        )

    @property
    def negative_control_diverges(self) -> bool:
        """Whether the same run without loads gives other tokens, so that `exact` means something."""
        return self.control.token_ids != self.baseline.roomy.token_ids

    @property
    def prefill_time_ratio(self) -> float | None:
        """kvstrata's median prefill time over plain vLLM's with enough memory."""
        ours, plain = self.kvstrata.median_prefill_s, self.baseline.roomy.median_prefill_s
        return ours / plain if ours is not None and plain else None

    @property
    def problems(self) -> list[str]:
        """Return why this run does not show what it should; empty if it does."""
        found = self.baseline.problems
        if not self.exact:
            found.append("kvstrata's answer differs from plain vLLM's: this is a bug, please report it")
        if not self.negative_control_diverges:
            found.append("the negative control gave the same answer: the comparison proves nothing")
        if not self.kvstrata.loaded_bytes:
            found.append("kvstrata loaded nothing: the prompt fitted into one chunk")
        return found


def formula(*, num_layers: int, num_independent: int, num_shared_buffers: int) -> float:
    """Return N / (I + min(B, R)) for equal layers (seed: Layerwise Prefill Offload, Buffer planning)."""
    reused = num_layers - num_independent
    return num_layers / (num_independent + min(num_shared_buffers, reused))


def run_layerwise(
    servings: Servings,
    baseline: Baseline,
    *,
    small_bytes: int,
    capacity_ratio_formula: float,
    timed_prefills: int,
) -> LayerwiseResult:
    """Serve the prompt, then again with the loads skipped. Raises what the engines raise."""
    return LayerwiseResult(
        baseline=baseline,
        kvstrata=servings.serve(
            f"kvstrata with {mib(small_bytes)}, layerwise prefill offload",
            small_bytes,
            LAYERWISE,
            timed_prefills=timed_prefills,
        ),
        control=servings.serve(
            "negative control: kvstrata with its loads skipped", small_bytes, LOADS_SKIPPED
        ),
        capacity_ratio_formula=capacity_ratio_formula,
    )
