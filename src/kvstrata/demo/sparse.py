"""Second part: sparse decode offload in the same budget, and its negative control."""

from __future__ import annotations

from dataclasses import dataclass

from kvstrata.demo.baseline import Baseline, Comparison
from kvstrata.demo.serving import SPARSE, STALE_ROWS, Decoded, Served, Servings, mib

CAPACITY_SHARE = 0.95  # of the formula: the rest is the prompt window, the row table and half a block


@dataclass(frozen=True, kw_only=True)
class SparseResult(Comparison):
    """What sparse decode offload made of the prompt. `problems` says what makes it a failure."""

    @property
    def exact(self) -> bool:
        """Whether kvstrata's tokens, far beyond the answer, equal those of plain vLLM with enough memory."""
        reference = _tokens(self.baseline.roomy)
        return bool(reference) and _tokens(self.kvstrata) == reference

    @property
    def negative_control_diverges(self) -> bool:
        """Whether the run that serves stale rows gives other tokens, so that `exact` means something."""
        return _tokens(self.control) != _tokens(self.baseline.roomy)

    @property
    def hit_rate(self) -> float:
        """Selected rows that needed no copy from the host, over all selected rows of the long decoding."""
        counters = _decoded(self.kvstrata).counters
        selected = counters.get("selected_rows", 0)
        return counters.get("hit_rows", 0) / selected if selected else 0.0

    @property
    def problems(self) -> list[str]:
        """Return why this run does not show what it should; empty if it does."""
        found = self.baseline.problems
        if not self.exact:
            found.append(
                "kvstrata's tokens with sparse offload differ from plain vLLM's: a bug, please report it"
            )
        if not self.negative_control_diverges:
            found.append("serving stale rows gave the same tokens: the sparse comparison proves nothing")
        if self.capacity_ratio < CAPACITY_SHARE * self.capacity_ratio_formula:
            found.append(
                f"capacity grew {self.capacity_ratio:.2f} times with sparse offload, the formula says "
                f"{self.capacity_ratio_formula:.2f}"
            )
        if not self.hit_rate:
            found.append("no selected row was found hot: the hot rows do nothing")
        if not _decoded(self.kvstrata).counters.get("missed_rows", 0):
            found.append("no row was copied from the host: the hot rows held the whole prompt")
        return found


def run_sparse(
    servings: Servings,
    baseline: Baseline,
    *,
    small_bytes: int,
    capacity_ratio_formula: float,
    decode_tokens: int,
) -> SparseResult:
    """Serve the prompt, then again with stale rows. Raises what the engines raise.

    `decode_tokens` must be what the baseline decoded.
    """
    return SparseResult(
        baseline=baseline,
        kvstrata=servings.serve(
            f"kvstrata with {mib(small_bytes)}, sparse decode offload",
            small_bytes,
            SPARSE,
            decode_tokens=decode_tokens,
        ),
        control=servings.serve(
            "negative control: kvstrata serving stale rows",
            small_bytes,
            STALE_ROWS,
            decode_tokens=decode_tokens,
        ),
        capacity_ratio_formula=capacity_ratio_formula,
    )


def _tokens(served: Served) -> tuple[int, ...]:
    return served.token_ids + _decoded(served).token_ids


def _decoded(served: Served) -> Decoded:
    """Return the long decoding; an engine that refused the prompt has an empty one."""
    return served.decoded or Decoded(token_ids=(), s_per_token=0.0, counters={})
