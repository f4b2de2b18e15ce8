"""What the end-to-end tests assert, in one place."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from engines import Outcome
from models import Model

NEW_TOKENS = 16

# The same rows in another chunking go through other matrix shapes: float32 sums differ in the last bits.
LOGPROB_TOLERANCE = 5e-5

ModelOf = Callable[[str], Model]
TransformersTokens = Callable[[str], list[list[int]]]
PlainAnswers = Callable[..., Outcome]
Prompts = Sequence[Sequence[int]]
Truth = Callable[..., Outcome]


def assert_exact(got: Outcome, plain: Outcome, reference: Sequence[Sequence[int]]) -> None:
    """Tokens equal transformers' and plain vLLM's, and so do the log-probabilities of the chosen tokens.

    Log-probabilities see a wrong row that the arg max forgives.
    """
    assert got.tokens == reference
    assert got.tokens == plain.tokens
    assert largest_difference(got, plain) <= LOGPROB_TOLERANCE


def assert_true(got: Outcome, truth: Outcome) -> None:
    """As `assert_exact`, against answers on which plain vLLM and transformers agreed (fixture `truth`)."""
    assert got.tokens == truth.tokens
    assert largest_difference(got, truth) <= LOGPROB_TOLERANCE


def assert_same_bits(got: Outcome, plain: Outcome) -> None:
    """Invariant M4 seen from outside: with the same batches, attention read the same bits."""
    assert got.tokens == plain.tokens
    assert got.logprobs == plain.logprobs


def largest_difference(got: Outcome, plain: Outcome) -> float:
    """Largest difference of chosen log-probabilities; both outcomes must hold them."""
    pairs = [
        (a, b)
        for got_row, plain_row in zip(got.logprobs, plain.logprobs, strict=True)
        for a, b in zip(got_row, plain_row, strict=True)
    ]
    assert pairs, "neither outcome holds log-probabilities"
    return max(abs(a - b) for a, b in pairs)


def count_changed(got: Outcome, expected: Outcome) -> int:
    """Number of prompts answered differently."""
    return sum(a != b for a, b in zip(got.tokens, expected.tokens, strict=True))
