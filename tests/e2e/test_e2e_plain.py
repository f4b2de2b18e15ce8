"""kvstrata's CPU attention backends without any offload, against transformers.

Everything else in this directory compares with these engines, so they must not be wrong themselves.
"""

from __future__ import annotations

import pytest
from checks import ModelOf, PlainAnswers, TransformersTokens, assert_exact, assert_same_bits
from engines import open_engine
from models import ledger, trained_cases
from references import greedy

SEEDED = ["dense", "dense-small-head", "dsa", "glm"]
CHUNKED = {"max_num_batched_tokens": 48}


@pytest.mark.parametrize("name", SEEDED)
def test_plain_engine_answers_as_transformers(
    name: str, plain: PlainAnswers, transformers_tokens: TransformersTokens
) -> None:
    assert plain(name).tokens == transformers_tokens(name)


@pytest.mark.parametrize("name", SEEDED)
def test_chunked_prefill_is_exact(
    name: str, plain: PlainAnswers, transformers_tokens: TransformersTokens
) -> None:
    assert_exact(plain(name, **CHUNKED), plain(name), transformers_tokens(name))


@pytest.mark.parametrize(
    ("name", "block_size"), [("dense", 64), ("dense-small-head", 24), ("dsa", 24), ("glm", 64)]
)
def test_block_size_does_not_matter(
    name: str, block_size: int, plain: PlainAnswers, transformers_tokens: TransformersTokens
) -> None:
    assert_exact(plain(name, block_size=block_size, **CHUNKED), plain(name), transformers_tokens(name))


@pytest.mark.parametrize("name", ["dense", "dsa", "glm"])
def test_traced_engine_is_exact(
    name: str,
    monkeypatch: pytest.MonkeyPatch,
    plain: PlainAnswers,
    transformers_tokens: TransformersTokens,
) -> None:
    """Traced by dynamo and run as it is; `test_e2e_modes.py` has a run through inductor."""
    monkeypatch.setenv("VLLM_CPU_CI_ENV", "1")
    assert_exact(plain(name, enforce_eager=False), plain(name), transformers_tokens(name))


@pytest.mark.parametrize("name", ["dense", "dsa"])
def test_async_scheduling_is_exact(
    name: str, plain: PlainAnswers, transformers_tokens: TransformersTokens
) -> None:
    assert_exact(plain(name, async_scheduling=True), plain(name), transformers_tokens(name))


def test_prefix_cache_hits_are_exact(
    model_of: ModelOf, plain: PlainAnswers, transformers_tokens: TransformersTokens
) -> None:
    model = model_of("dsa")
    with open_engine(model, enable_prefix_caching=True) as engine:
        first = engine.ask(model.prompts, 16)
        second = engine.ask(model.prompts, 16)
    assert_same_bits(first, plain("dsa"))
    assert_exact(second, plain("dsa"), transformers_tokens("dsa"))
    assert second.cached_tokens == [0, 0, 48, 128, 240]


def test_trained_model_answers_as_its_reference_file(model_of: ModelOf) -> None:
    model, cases = model_of("tiny-dsv32"), trained_cases()
    with open_engine(model, max_num_batched_tokens=2048) as engine:
        got = engine.ask(model.prompts, 12)
    for case, tokens in zip(cases, got.tokens, strict=True):
        expected = case["out"][: len(tokens)]
        assert tokens[: len(expected)] == expected, case["name"]


def test_trained_model_reads_its_ledger(model_of: ModelOf) -> None:
    model, book = model_of("tiny-dsv32"), ledger(seed=1)
    expected = greedy(model.path, book.prompts, len(book.answers[0])).tokens
    right = sum(list(answer) == tokens for answer, tokens in zip(book.answers, expected, strict=True))
    assert right >= 22, "the model does not read its own ledger: the prompts are not in its format"
    with open_engine(model) as engine:
        assert engine.ask(book.prompts, len(book.answers[0])).tokens == expected
