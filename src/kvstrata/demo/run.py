"""The demonstration's steps, each on one engine, and the figures they leave.

1. Plain vLLM in a small device budget: how much fits, and what it says to the prompt.
2. Plain vLLM with enough memory: the answer to compare with.
3. kvstrata in the small budget: it must give that answer.
4. kvstrata with its loads switched off: it must not, or the comparison could not fail.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

from kvstrata.demo.prompt import DemoPrompt
from kvstrata.errors import KVStrataError
from kvstrata.terminal import Terminal

ANSWER_TOKENS = 16


class Engine(Protocol):
    """The part of an engine that the demonstration uses; `kvstrata.vllm.engines.Engine` is one."""

    @property
    def max_tokens(self) -> int:
        """Tokens that fit the KV cache."""

    def answer(self, prompt: tuple[int, ...], *, max_new_tokens: int) -> Any:
        """Decode greedily; the result has `token_ids`, `text` and `seconds`."""

    def refusal(self, prompt: tuple[int, ...]) -> str | None:
        """Return the engine's words if it does not take the prompt."""

    def prefill_s(self, prompt: tuple[int, ...]) -> float:
        """Time one prefill."""

    def worker_statistics(self) -> list[dict[str, Any]]:
        """Return kvstrata's statistics, one dict a rank."""


# Opens an engine for (device budget in bytes, mode); mode is one of the three below.
OpenEngine = Callable[[int, str], AbstractContextManager[Engine]]
PLAIN, LAYERWISE, LOADS_SKIPPED = "plain", "layerwise", "loads skipped"


@dataclass(frozen=True, kw_only=True)
class Served:
    """What one engine made of the prompt."""

    device_kv_budget_bytes: int
    max_tokens: int
    refusal: str | None = None
    answer: str | None = None
    token_ids: tuple[int, ...] = ()
    prefill_s: tuple[float, ...] = ()  # one a run
    loaded_bytes: int = 0
    saved_bytes: int = 0
    worker: dict[str, Any] = field(default_factory=dict)

    @property
    def median_prefill_s(self) -> float | None:
        """Median over the runs, None if the engine did not take the prompt."""
        return statistics.median(self.prefill_s) if self.prefill_s else None


@dataclass(frozen=True, kw_only=True)
class DemoResult:
    """Everything that was measured. `problems` says what makes it a failure."""

    prompt: DemoPrompt
    plain: Served
    roomy: Served
    kvstrata: Served
    control: Served
    capacity_ratio_formula: float

    @property
    def capacity_ratio(self) -> float:
        """Tokens that fit with kvstrata over tokens that fit without, at one device budget."""
        return self.kvstrata.max_tokens / self.plain.max_tokens

    @property
    def exact(self) -> bool:
        """Whether kvstrata's tokens equal those of plain vLLM with enough memory."""
        return bool(self.roomy.token_ids) and self.kvstrata.token_ids == self.roomy.token_ids

    @property
    def negative_control_diverges(self) -> bool:
        """Whether the same run without loads gives other tokens, so that `exact` means something."""
        return self.control.token_ids != self.roomy.token_ids

    @property
    def prefill_time_ratio(self) -> float | None:
        """kvstrata's median prefill time over plain vLLM's with enough memory."""
        ours, plain = self.kvstrata.median_prefill_s, self.roomy.median_prefill_s
        return ours / plain if ours is not None and plain else None

    @property
    def problems(self) -> list[str]:
        """Return why this run does not show what it should; empty if it does."""
        found = []
        if self.plain.refusal is None:
            found.append(
                "plain vLLM took the prompt in the small budget: the budget is too large to show anything"
            )
        if not self.exact:
            found.append("kvstrata's answer differs from plain vLLM's: this is a bug, please report it")
        if self.prompt.expected_answer not in (self.roomy.answer or ""):
            found.append(
                f"plain vLLM with enough memory did not answer {self.prompt.expected_answer!r}: the model "
                "cannot do this prompt, so it shows nothing"
            )
        if not self.negative_control_diverges:
            found.append("the negative control gave the same answer: the comparison proves nothing")
        if not self.kvstrata.loaded_bytes:
            found.append("kvstrata loaded nothing: the prompt fitted into one chunk")
        return found


def formula(*, num_layers: int, num_independent: int, num_shared_buffers: int) -> float:
    """Return N / (I + min(B, R)) for equal layers (seed: Layerwise Prefill Offload, Buffer planning)."""
    reused = num_layers - num_independent
    return num_layers / (num_independent + min(num_shared_buffers, reused))


def run_demo(
    open_engine: OpenEngine,
    prompt: DemoPrompt,
    *,
    device_kv_budget_bytes: int,
    roomy_kv_budget_bytes: int,
    capacity_ratio_formula: float,
    timed_runs: int,
    terminal: Terminal,
) -> DemoResult:
    """Run the four steps. Raises what the engines raise, and KVStrataError if the reference refuses."""

    def serve(title: str, budget_bytes: int, mode: str, runs: int) -> Served:
        with terminal.step(title), open_engine(budget_bytes, mode) as engine:
            return _serve(engine, prompt, budget_bytes, runs, has_worker=mode != PLAIN)

    small, roomy = device_kv_budget_bytes, roomy_kv_budget_bytes
    plain = serve(f"plain vLLM with {mib(small)} of device KV memory", small, PLAIN, 0)
    reference = serve(f"plain vLLM with {mib(roomy)}, for comparison", roomy, PLAIN, timed_runs)
    if reference.refusal is not None:
        raise KVStrataError(f"the reference engine with {mib(roomy)} refused the prompt: {reference.refusal}")
    ours = serve(f"kvstrata with {mib(small)}", small, LAYERWISE, timed_runs)
    control = serve("negative control: kvstrata with its loads skipped", small, LOADS_SKIPPED, 0)
    return DemoResult(
        prompt=prompt,
        plain=plain,
        roomy=reference,
        kvstrata=ours,
        control=control,
        capacity_ratio_formula=capacity_ratio_formula,
    )


def _serve(engine: Engine, prompt: DemoPrompt, budget_bytes: int, runs: int, *, has_worker: bool) -> Served:
    refusal = engine.refusal(prompt.token_ids)  # also the warm-up: the first prefill is never timed
    if refusal is not None:
        return Served(device_kv_budget_bytes=budget_bytes, max_tokens=engine.max_tokens, refusal=refusal)
    before = _bytes_moved(engine) if has_worker else (0, 0)
    answer = engine.answer(prompt.token_ids, max_new_tokens=ANSWER_TOKENS)
    after = _bytes_moved(engine) if has_worker else (0, 0)
    return Served(
        device_kv_budget_bytes=budget_bytes,
        max_tokens=engine.max_tokens,
        answer=answer.text,
        token_ids=tuple(answer.token_ids),
        prefill_s=tuple(engine.prefill_s(prompt.token_ids) for _ in range(runs)),
        loaded_bytes=after[0] - before[0],
        saved_bytes=after[1] - before[1],
        worker=engine.worker_statistics()[0] if has_worker else {},
    )


def _bytes_moved(engine: Engine) -> tuple[int, int]:
    ranks = engine.worker_statistics()
    return sum(int(r["loaded_bytes"]) for r in ranks), sum(int(r["saved_bytes"]) for r in ranks)


def mib(size_bytes: int) -> str:
    """Return a size for people, in MiB."""
    return f"{size_bytes / (1 << 20):.1f} MiB"
