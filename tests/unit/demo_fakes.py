"""Pretended engines and a pretended deployment for the demonstration, and a run of it on them."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from rich.console import Console

from kvstrata.demo.pd import PdAnswer, PdCounters, PdPrompts
from kvstrata.demo.prompt import build_prompt, handbook
from kvstrata.demo.report import as_table
from kvstrata.demo.run import DemoResult, Formulas, run_demo
from kvstrata.demo.serving import (
    BROADCASTS_SKIPPED,
    KVPP,
    LAYERWISE,
    LOADS_SKIPPED,
    PLAIN,
    SPARSE,
    STALE_ROWS,
    TWO_RANKS,
    WITHOUT_KVSTRATA,
    Servings,
)
from kvstrata.terminal import Terminal

MIB = 1 << 20
RIGHT, WRONG = (7, 8, 9), (7, 8, 1)
TOKENS_PER_MIB = {
    PLAIN: 100,
    LAYERWISE: 200,
    LOADS_SKIPPED: 200,
    SPARSE: 480,
    STALE_ROWS: 480,
    TWO_RANKS: 100,
    KVPP: 120,
    BROADCASTS_SKIPPED: 120,
}


def letters(text: str) -> list[int]:
    return [ord(letter) for letter in text]


PROMPT = build_prompt(letters, text=handbook(), prompt_tokens=1000, pass_key="12345", depth=0.5)
MORE = tuple(
    build_prompt(letters, text=handbook(), prompt_tokens=length, pass_key=key, depth=0.5)
    for length, key in ((400, "11111"), (500, "22222"))
)
OTHER = build_prompt(letters, text=handbook(), prompt_tokens=400, pass_key="33333", depth=0.5)
PD_PROMPTS = PdPrompts(more=MORE, control=MORE[0], control_other=OTHER)


def tokens_of(prompt: tuple[int, ...]) -> tuple[int, ...]:
    """What every engine answers to the further prompts of prefill and decode."""
    return len(prompt), sum(prompt) % 997


def text_of(prompt: tuple[int, ...]) -> str:
    (known,) = (one for one in (PROMPT, *MORE, OTHER) if one.token_ids == prompt)
    return known.expected_answer


class FakeDeployment:
    """Reads 100 bytes in 3 parts for every prompt, of what prefill computed: so it answers that."""

    def __init__(
        self, *, recomputes: bool = False, leaks: int = 0, unsettled: int = 0, wrong: int | None = None
    ) -> None:
        self._recomputes, self._leaks, self._wrong = recomputes, leaks, wrong
        self._unsettled = unsettled
        self.asked: list[tuple[int, ...]] = []
        self.pulls = 7  # from before: only what is added counts
        self.own_answer: tuple[int, ...] = RIGHT  # to the demonstration's own prompt

    def answer(self, prompts: Sequence[tuple[int, ...]], *, max_new_tokens: int) -> list[PdAnswer]:
        assert max_new_tokens == 16
        return [self._answer(prompt, prompt) for prompt in prompts]

    def answer_from_other(
        self, prompt: tuple[int, ...], other: tuple[int, ...], *, max_new_tokens: int
    ) -> PdAnswer:
        assert max_new_tokens == 16
        return self._answer(prompt, other)

    def counters(self) -> PdCounters:
        return PdCounters(
            pulls_done=self.pulls,
            sends_done=self.pulls - self._unsettled,
            parts_pulled=3 * self.pulls,
            bytes_pulled=100 * self.pulls,
            pulls_open=0,
            leases_open=self._leaks,
        )

    settled_counters = counters

    def _answer(self, prompt: tuple[int, ...], prefilled: tuple[int, ...]) -> PdAnswer:
        self.asked.append(prompt)
        if self._recomputes:
            prefilled = prompt
        else:
            self.pulls += 1
        tokens = self.own_answer if prefilled == PROMPT.token_ids else tokens_of(prefilled)
        if len(self.asked) - 1 == self._wrong:
            tokens = WRONG
        return PdAnswer(token_ids=tokens, text=text_of(prefilled))


class FakeEngine:
    """Layerwise copies its prefix on every prefill, sparse selects rows with every token decoded.

    With KVPP each of two ranks passes 500 bytes on in every prefill and keeps all but 4 bytes of its budget.
    """

    def __init__(self, budget_bytes: int, mode: str, answers: dict[str, tuple[int, ...]], hits: int) -> None:
        self.mode = mode
        self._budget_bytes = budget_bytes
        self.max_tokens = budget_bytes // MIB * TOKENS_PER_MIB[mode]
        self._tokens = answers[mode]
        self._hits = hits
        self._prefills = 0
        self._loaded_bytes = 0
        self._decoded_tokens = 0

    def answer(self, prompt: tuple[int, ...], *, max_new_tokens: int) -> Any:
        self._prefills += 1
        self._loaded_bytes += 0 if self.mode == LOADS_SKIPPED else 1000
        self._decoded_tokens += len(self._tokens[:max_new_tokens])
        if self.mode == PLAIN and prompt != PROMPT.token_ids:
            return SimpleNamespace(token_ids=tokens_of(prompt), text=text_of(prompt), seconds=2.0)
        text = PROMPT.expected_answer if self._tokens == RIGHT else f"text of {self._tokens}"
        return SimpleNamespace(token_ids=self._tokens, text=text, seconds=2.0)

    def decode(self, prompts: list[tuple[int, ...]], *, new_tokens: int) -> Any:
        (_,) = prompts
        self._decoded_tokens += new_tokens
        return SimpleNamespace(token_ids=((self._tokens * new_tokens)[:new_tokens],), s_per_token=0.25)

    def refusal(self, prompt: tuple[int, ...]) -> str | None:
        if len(prompt) > self.max_tokens:
            return "too long"
        self.answer(prompt, max_new_tokens=1)
        return None

    def prefill_s(self, prompt: tuple[int, ...]) -> float:
        self.answer(prompt, max_new_tokens=1)
        return float(self._prefills) * (1.0 if self.mode == PLAIN else 1.5)

    def worker_statistics(self) -> list[dict[str, Any]]:
        assert self.mode not in WITHOUT_KVSTRATA, "plain vLLM has no statistics of kvstrata's"
        if self.mode in (SPARSE, STALE_ROWS):
            selected = 10 * self._decoded_tokens
            hits = self._hits * self._decoded_tokens
            return [{"selected_rows": selected, "hit_rows": hits, "missed_rows": selected - hits}]
        if self.mode in (KVPP, BROADCASTS_SKIPPED):
            passed = 500 * self._prefills
            return [{"broadcast_bytes": passed, "device_bytes": self._budget_bytes - at} for at in (4, 8)]
        return [{"loaded_bytes": self._loaded_bytes, "saved_bytes": 10 * self._prefills, "plan": "slots"}]


def run(
    answers: dict[str, tuple[int, ...]] | None = None,
    *,
    small_bytes: int = 6 * MIB,
    roomy_bytes: int = 20 * MIB,
    hits: int = 9,
    kvpp_bytes: int = 9 * MIB,
    kvpp_skip_reason: str | None = None,
    sparse_formula: float = 5.0,
    kvpp_formula: float = 1.2,
    deployment: FakeDeployment | None = None,
) -> tuple[DemoResult, list[tuple[int, str]]]:
    opened: list[tuple[int, str]] = []
    alive: list[str] = []
    told = {PLAIN: RIGHT, LAYERWISE: RIGHT, LOADS_SKIPPED: WRONG, SPARSE: RIGHT, STALE_ROWS: WRONG}
    told |= {TWO_RANKS: RIGHT, KVPP: RIGHT, BROADCASTS_SKIPPED: WRONG}
    told |= answers or {}
    deployment = deployment or FakeDeployment()
    deployment.own_answer = told[PLAIN]

    @contextmanager
    def open_engine(budget_bytes: int, mode: str) -> Iterator[FakeEngine]:
        assert not alive, "one engine at a time"
        opened.append((budget_bytes, mode))
        alive.append(mode)
        yield FakeEngine(budget_bytes, mode, told, hits)
        alive.pop()

    @contextmanager
    def open_deployment() -> Iterator[FakeDeployment]:
        assert not alive, "no engine beside the deployment"
        alive.append("deployment")
        yield deployment
        alive.pop()

    result = run_demo(
        Servings(open_engine=open_engine, prompt=PROMPT, terminal=Terminal(Console(quiet=True))),
        open_deployment=open_deployment,
        pd_prompts=PD_PROMPTS,
        small_bytes=small_bytes,
        roomy_bytes=roomy_bytes,
        kvpp_bytes=kvpp_bytes,
        kvpp_skip_reason=kvpp_skip_reason,
        formulas=Formulas(layerwise=2.0, sparse=sparse_formula, kvpp=kvpp_formula),
        timed_prefills=3,
        decode_tokens=8,
    )
    assert not alive
    return result, opened


def shown_table(result: DemoResult) -> str:
    console = Console(width=160, record=True, quiet=False, file=None, force_terminal=False)
    with console.capture() as captured:
        console.print(as_table(result))
    return captured.get()
