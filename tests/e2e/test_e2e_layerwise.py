"""Layerwise prefill offload: many layers in a few buffers, the same tokens, and as many blocks as planned."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from checks import (
    NEW_TOKENS,
    ModelOf,
    PlainAnswers,
    TransformersTokens,
    assert_exact,
    assert_same_bits,
    count_changed,
)
from engines import BLOCK_SIZE, ROOMY_BYTES, SKIP_LOADS, layerwise, open_engine
from models import Ledger, Model, ledger
from references import greedy

CHUNKED = {"max_num_batched_tokens": 48}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A buffer plan and what it must come to: buffers of main KV and of indexer KV, counted by hand."""

    model: str
    options: dict[str, Any]
    main_buffers: int
    index_buffers: int

    def __str__(self) -> str:
        return f"{self.model}-{'-'.join(str(value).replace(' ', '') for value in self.options.values())}"

    def block_bytes(self, model: Model, block_size: int) -> int:
        return self.main_buffers * model.cache.main_page_bytes(
            block_size
        ) + self.index_buffers * model.cache.index_page_bytes(block_size)


# Dense and DSA models have 4 layers, GLM 6 with indexers on 0, 1, 3 and 5, the trained one 6 with indexers.
CASES = [
    Case(model="dense", options={"shared": 1}, main_buffers=2, index_buffers=0),
    Case(model="dense", options={"shared": 2}, main_buffers=3, index_buffers=0),
    Case(model="dense", options={"shared": 3}, main_buffers=4, index_buffers=0),
    Case(model="dense", options={"shared": 2, "independent": "all"}, main_buffers=4, index_buffers=0),
    Case(model="dense", options={"shared": 1, "independent": [0, -1]}, main_buffers=3, index_buffers=0),
    Case(model="dense-small-head", options={"shared": 2}, main_buffers=3, index_buffers=0),
    Case(model="dsa", options={"shared": 1}, main_buffers=2, index_buffers=2),
    Case(model="dsa", options={"shared": 2, "prefetch": 0}, main_buffers=3, index_buffers=3),
    Case(model="dsa", options={"shared": 2, "prefetch": 3}, main_buffers=3, index_buffers=3),
    Case(model="dsa", options={"shared": 1, "independent": []}, main_buffers=1, index_buffers=1),
    # Slots [0] [1 2 3 4 5]; [0] [1 3 5] [2 4], the last without any indexer; [0] [1 4] [2 5] [3].
    Case(model="glm", options={"shared": 1}, main_buffers=2, index_buffers=2),
    Case(model="glm", options={"shared": 2}, main_buffers=3, index_buffers=2),
    Case(model="glm", options={"shared": 3}, main_buffers=4, index_buffers=4),
    Case(model="glm", options={"shared": 2, "independent": "all"}, main_buffers=6, index_buffers=4),
]


@pytest.mark.features("layerwise", "chunked")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_offload_is_exact_and_gives_the_planned_blocks(
    case: Case, model_of: ModelOf, plain: PlainAnswers, transformers_tokens: TransformersTokens
) -> None:
    model = model_of(case.model)
    with open_engine(model, **layerwise(**case.options), **CHUNKED) as engine:
        num_blocks = engine.num_blocks()
        got = engine.ask(model.prompts, NEW_TOKENS)
        statistics = engine.statistics()
    assert_exact(got, plain(case.model), transformers_tokens(case.model))
    assert_same_bits(got, plain(case.model, **CHUNKED))

    by_formula = ROOMY_BYTES // case.block_bytes(model, BLOCK_SIZE)
    assert 0.98 * by_formula <= num_blocks <= by_formula
    assert statistics["num_blocks"] == num_blocks
    assert statistics["device_bytes"] == num_blocks * case.block_bytes(model, BLOCK_SIZE) <= ROOMY_BYTES
    assert statistics["logical_page_bytes"] == model.cache.plain_block_bytes(BLOCK_SIZE)
    shares = case.block_bytes(model, BLOCK_SIZE) < model.cache.plain_block_bytes(BLOCK_SIZE)
    assert (statistics["loaded_bytes"] > 0) == shares
    assert (statistics["saved_bytes"] > 0) == shares


@pytest.mark.parametrize("name", ["dense", "dense-small-head", "dsa", "glm"])
def test_negative_control_sharing_without_loads_is_wrong(
    name: str, model_of: ModelOf, plain: PlainAnswers
) -> None:
    """Every other test here would pass on an engine that moved nothing, if this one did not fail there."""
    model = model_of(name)
    with open_engine(model, **layerwise(shared=2), **SKIP_LOADS, **CHUNKED) as engine:
        got = engine.ask(model.prompts, NEW_TOKENS)
    long_prompts = sum(len(prompt) > BLOCK_SIZE for prompt in model.prompts)
    assert count_changed(got, plain(name)) >= long_prompts


@pytest.mark.features("layerwise", "chunked")
@pytest.mark.parametrize(("name", "block_size"), [("dense", 64), ("dsa", 24), ("glm", 24)])
def test_any_block_size_is_exact(
    name: str,
    block_size: int,
    model_of: ModelOf,
    plain: PlainAnswers,
    transformers_tokens: TransformersTokens,
) -> None:
    model = model_of(name)
    with open_engine(model, block_size=block_size, **layerwise(shared=2), **CHUNKED) as engine:
        got = engine.ask(model.prompts, NEW_TOKENS)
    assert_exact(got, plain(name), transformers_tokens(name))


@pytest.mark.parametrize("name", ["dense", "dsa"])
def test_exactly_the_prefix_is_loaded_and_the_new_blocks_are_saved(name: str, model_of: ModelOf) -> None:
    """One prompt of 129 tokens in chunks of 64, then 7 decode steps; layers 1, 2 and 3 share one buffer."""
    model = model_of(name)
    prompt = model.prompts[3]
    assert len(prompt) == 129
    with open_engine(model, **layerwise(shared=1), max_num_batched_tokens=64) as engine:
        engine.ask([prompt], 8)
        statistics = engine.statistics()
    page_bytes = model.cache.main_page_bytes(BLOCK_SIZE) + model.cache.index_page_bytes(BLOCK_SIZE)
    prefixes = [0, 64, 128, *range(129, 136)]
    loaded_blocks = sum(-(-prefix // BLOCK_SIZE) for prefix in prefixes)
    # Chunks write blocks 0-3, 4-7 and 8; each decode step rewrites block 8, where its row goes.
    saved_blocks = 4 + 4 + 1 + 7
    assert statistics["loaded_bytes"] == 3 * loaded_blocks * page_bytes
    assert statistics["saved_bytes"] == 3 * saved_blocks * page_bytes


@pytest.fixture(scope="module")
def book() -> Ledger:
    return ledger(seed=1)


@pytest.fixture(scope="module")
def ledger_answers(book: Ledger, model_of: ModelOf) -> list[list[int]]:
    model = model_of("tiny-dsv32")
    return greedy(model.path, book.prompts, len(book.answers[0])).tokens


@pytest.mark.features("layerwise", "prefix", "chunked")
@pytest.mark.parametrize("shared", [1, 2, 3])
def test_trained_model_reads_its_ledger_through_shared_buffers(
    shared: int, model_of: ModelOf, book: Ledger, ledger_answers: list[list[int]]
) -> None:
    """All 24 questions share their context, so requests of one step also hit blocks that step computes."""
    with open_engine(
        model_of("tiny-dsv32"),
        **layerwise(shared=shared),
        enable_prefix_caching=True,
        max_num_batched_tokens=96,
    ) as engine:
        got = engine.ask(book.prompts, len(book.answers[0]))
        statistics = engine.statistics()
    assert got.tokens == ledger_answers
    assert sum(got.cached_tokens) > 0
    assert statistics["loaded_bytes"] > 0


def test_trained_model_loses_its_ledger_without_loads(
    model_of: ModelOf, book: Ledger, ledger_answers: list[list[int]]
) -> None:
    with open_engine(
        model_of("tiny-dsv32"), **layerwise(shared=2), **SKIP_LOADS, max_num_batched_tokens=96
    ) as engine:
        got = engine.ask(book.prompts, len(book.answers[0]))
    wrong = sum(a != b for a, b in zip(got.tokens, ledger_answers, strict=True))
    assert wrong >= 12


@pytest.mark.features("layerwise", "chunked")
def test_trained_model_answers_as_its_reference_file(model_of: ModelOf) -> None:
    from models import trained_cases

    model, cases = model_of("tiny-dsv32"), trained_cases()
    with open_engine(model, **layerwise(shared=2), max_num_batched_tokens=256) as engine:
        got = engine.ask(model.prompts, 12)
    for case, tokens in zip(cases, got.tokens, strict=True):
        expected = case["out"][: len(tokens)]
        assert tokens[: len(expected)] == expected, case["name"]
