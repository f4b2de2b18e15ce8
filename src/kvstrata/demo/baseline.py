"""What all parts compare with: plain vLLM in the small budget, and with enough memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvstrata.demo.prompt import DemoPrompt
from kvstrata.demo.serving import PLAIN, Asked, Served, Servings, mib
from kvstrata.errors import KVStrataError


@dataclass(frozen=True, kw_only=True)
class Baseline:
    """Plain vLLM's two servings. `problems` says why a comparison with them would show nothing."""

    prompt: DemoPrompt
    plain: Served
    roomy: Served

    @property
    def asked(self) -> tuple[Asked, ...]:
        """Return every prompt that plain vLLM with enough memory answered; the demonstration's own first."""
        own = Asked(prompt=self.prompt, token_ids=self.roomy.token_ids, text=self.roomy.answer or "")
        return (own, *self.roomy.more)

    @property
    def problems(self) -> list[str]:
        """Return what is wrong with them; empty if nothing is."""
        found = []
        if self.plain.refusal is None:
            found.append(
                "plain vLLM took the prompt in the small budget: the budget is too large to show anything"
            )
        if self.prompt.expected_answer not in (self.roomy.answer or ""):
            found.append(
                f"plain vLLM with enough memory did not answer {self.prompt.expected_answer!r}: the model "
                "cannot do this prompt, so it shows nothing"
            )
        return found


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One part: what kvstrata made of the prompt, and the same with its data path broken on purpose."""

    baseline: Baseline
    kvstrata: Served
    control: Served
    capacity_ratio_formula: float

    @property
    def capacity_ratio(self) -> float:
        """Tokens that fit with kvstrata over tokens that fit without, at one device budget."""
        return self.kvstrata.max_tokens / self.baseline.plain.max_tokens


def run_baseline(
    servings: Servings,
    *,
    small_bytes: int,
    roomy_bytes: int,
    timed_prefills: int,
    decode_tokens: int,
    more_prompts: Sequence[DemoPrompt] = (),
) -> Baseline:
    """Run both engines. Raises what they raise, and KVStrataError if the one with enough memory refuses."""
    plain = servings.serve(f"plain vLLM with {mib(small_bytes)} of device KV memory", small_bytes, PLAIN)
    roomy = servings.serve(
        f"plain vLLM with {mib(roomy_bytes)}, for comparison",
        roomy_bytes,
        PLAIN,
        timed_prefills=timed_prefills,
        decode_tokens=decode_tokens,
        more_prompts=more_prompts,
    )
    if roomy.refusal is not None:
        raise KVStrataError(
            f"the reference engine with {mib(roomy_bytes)} refused the prompt: {roomy.refusal}"
        )
    return Baseline(prompt=servings.prompt, plain=plain, roomy=roomy)
