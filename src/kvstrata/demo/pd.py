"""Third part: a prefill engine computes the prompts, a decode engine reads their KV and answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from typing import Protocol

from kvstrata.demo.baseline import Baseline
from kvstrata.demo.prompt import DemoPrompt
from kvstrata.demo.serving import ANSWER_TOKENS, Asked, Servings, mib


@dataclass(frozen=True, kw_only=True)
class PdAnswer:
    """One greedy answer."""

    token_ids: tuple[int, ...]
    text: str


@dataclass(frozen=True, kw_only=True)
class PdCounters:
    """What the engines' /metrics say of remote read since they started, the last two at this moment."""

    pulls_done: int  # prompts whose KV arrived whole, as decode counts them
    sends_done: int  # the same, as prefill does: only now its blocks are free
    parts_pulled: int  # layers, counted once a chunk of the prompt
    bytes_pulled: int
    pulls_open: int
    leases_open: int  # transfers for which prefill holds blocks

    def since(self, before: PdCounters) -> PdCounters:
        """Return what was counted after `before`; what is open is that of this moment."""
        return replace(
            self,
            pulls_done=self.pulls_done - before.pulls_done,
            sends_done=self.sends_done - before.sends_done,
            parts_pulled=self.parts_pulled - before.parts_pulled,
            bytes_pulled=self.bytes_pulled - before.bytes_pulled,
        )


class Deployment(Protocol):
    """A prefill engine, a decode engine and the proxy; `kvstrata.demo.pd_servers.PdServers` is one."""

    def answer(self, prompts: Sequence[tuple[int, ...]], *, max_new_tokens: int) -> list[PdAnswer]:
        """Send all prompts to the proxy at once; answers in prompt order."""

    def answer_from_other(
        self, prompt: tuple[int, ...], other: tuple[int, ...], *, max_new_tokens: int
    ) -> PdAnswer:
        """Send `prompt` to decode, and `other`, which is as long, to prefill."""

    def counters(self) -> PdCounters:
        """Return the counters now."""

    def settled_counters(self) -> PdCounters:
        """Return the counters once nothing is open any more, or once leases should have ended."""


OpenDeployment = Callable[[], AbstractContextManager[Deployment]]


@dataclass(frozen=True, kw_only=True)
class PdPrompts:
    """`more` are served beside the demonstration's own prompt.

    `control` is one of them; `control_other` is as long as it and hides another pass key.
    """

    more: tuple[DemoPrompt, ...]
    control: DemoPrompt
    control_other: DemoPrompt

    def __post_init__(self) -> None:
        assert self.control in self.more
        assert len(self.control.token_ids) == len(self.control_other.token_ids)


@dataclass(frozen=True, kw_only=True)
class PdResult:
    """What the two engines made of the prompts. `problems` says what makes it a failure."""

    device_kv_budget_bytes: int  # of each engine
    asked: tuple[Asked, ...]  # with plain vLLM's answers
    answers: tuple[PdAnswer, ...]
    counters: PdCounters  # of these requests
    at_end: PdCounters
    control_reference: Asked
    control: PdAnswer

    @property
    def is_exact(self) -> tuple[bool, ...]:
        """By request, whether its tokens equal plain vLLM's."""
        return tuple(
            bool(asked.token_ids) and answer.token_ids == asked.token_ids
            for asked, answer in zip(self.asked, self.answers, strict=True)
        )

    @property
    def exact(self) -> bool:
        """Whether all of them do."""
        return all(self.is_exact)

    @property
    def negative_control_diverges(self) -> bool:
        """Whether decode answers otherwise when it is given the KV of another prompt."""
        return self.control.token_ids != self.control_reference.token_ids

    @property
    def problems(self) -> list[str]:
        """Return why this run does not show what it should; empty if it does."""
        found = []
        for asked in self.asked[1:]:  # of the first one the baseline says it
            if asked.prompt.expected_answer not in asked.text:
                found.append(
                    f"plain vLLM did not answer {asked.prompt.expected_answer!r}: the model cannot do this "
                    "prompt, so it shows nothing"
                )
        if not self.exact:
            found.append(
                f"{self.is_exact.count(False)} of {len(self.asked)} answers through prefill and decode "
                "differ from plain vLLM's: a bug, please report it"
            )
        if not self.negative_control_diverges:
            found.append(
                "decode gave the same tokens with the KV of another prompt: it did not use what it read"
            )
        if self.counters.pulls_done != len(self.asked):
            found.append(
                f"KV of {self.counters.pulls_done} prompts was read, of {len(self.asked)} that were asked: "
                "decode computed the others itself"
            )
        if not self.counters.bytes_pulled or not self.counters.parts_pulled:
            found.append("decode read nothing from prefill")
        if self.at_end.leases_open or self.at_end.pulls_open:
            found.append(
                f"{self.at_end.leases_open} leases and {self.at_end.pulls_open} reads were open at the end"
            )
        if self.at_end.sends_done != self.at_end.pulls_done:
            found.append(
                f"decode read {self.at_end.pulls_done} prompts to their end, prefill knows of "
                f"{self.at_end.sends_done}"
            )
        return found


def run_pd(
    servings: Servings,
    baseline: Baseline,
    *,
    open_deployment: OpenDeployment,
    prompts: PdPrompts,
    small_bytes: int,
) -> PdResult:
    """Serve the prompts that the baseline answered. Raises what the engines raise."""
    asked = baseline.asked
    terminal = servings.terminal
    with ExitStack() as running:
        with terminal.step(f"prefill and decode engine with {mib(small_bytes)} each, and a proxy, start"):
            deployment = running.enter_context(open_deployment())
        before = deployment.counters()
        with terminal.step(f"{len(asked)} prompts at once: prefill computes, decode reads and answers"):
            answers = deployment.answer([one.prompt.token_ids for one in asked], max_new_tokens=ANSWER_TOKENS)
            after = deployment.settled_counters()
        with terminal.step("negative control: decode reads the KV of a prompt with another pass key"):
            control = deployment.answer_from_other(
                prompts.control.token_ids, prompts.control_other.token_ids, max_new_tokens=ANSWER_TOKENS
            )
            at_end = deployment.settled_counters()
    return PdResult(
        device_kv_budget_bytes=small_bytes,
        asked=asked,
        answers=tuple(answers),
        counters=after.since(before),
        at_end=at_end,
        control_reference=next(one for one in asked if one.prompt == prompts.control),
        control=control,
    )
