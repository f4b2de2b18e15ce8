"""Sparse decode offload: indexer caches and hot rows on the device, and the answers of plain vLLM."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from checks import (
    NEW_TOKENS,
    ModelOf,
    PlainAnswers,
    TransformersTokens,
    Truth,
    assert_exact,
    assert_same_bits,
    assert_true,
    count_changed,
)
from engines import BLOCK_SIZE, ROOMY_BYTES, Engine, open_engine, sparse
from models import FLOAT32_BYTES, Ledger, Model, ledger, random_prompts

CHUNKED = {"max_num_batched_tokens": 48}
# More answered tokens than hot rows a sequence, from a prompt that fits them and from one that does not.
LONG_ANSWER = 80
LONG_LENGTHS = (24, 70)
LONG_SEEDS = {"dsa": 503, "glm": 502}


@dataclass(frozen=True, kw_only=True)
class Case:
    """An engine and what its hot rows come to. The random models select 32 rows, the trained one 64."""

    model: str
    buffer: int
    sequences: int
    window: int  # tokens
    policy: str = "auto"
    async_scheduling: bool = False

    def __str__(self) -> str:
        return f"{self.model}-{self.buffer}x{self.sequences}"

    def arguments(self) -> dict[str, Any]:
        return {
            **sparse(buffer=self.buffer, prompt_window_tokens=self.window, hot_row_policy=self.policy),
            **CHUNKED,
            "max_num_seqs": self.sequences,
            "async_scheduling": self.async_scheduling,
        }


CASES = [
    Case(model="dsa", buffer=32, sequences=1, window=16),
    Case(model="dsa", buffer=32, sequences=8, window=32, policy="lru", async_scheduling=True),
    Case(model="dsa", buffer=128, sequences=2, window=16),
    # IndexShare: layers 2 and 4 replay what layers 1 and 3 resolved.
    Case(model="glm", buffer=32, sequences=8, window=16),
    Case(model="glm", buffer=64, sequences=1, window=32, policy="lru"),
    Case(model="tiny-dsv32", buffer=64, sequences=8, window=32, async_scheduling=True),
    Case(model="tiny-dsv32", buffer=256, sequences=1, window=16),
]


def check_rows(statistics: dict[str, Any]) -> None:
    """What must hold of any run that decoded."""
    assert statistics["hit_rows"] + statistics["missed_rows"] == statistics["selected_rows"]
    assert statistics["missed_rows"] > 0
    assert statistics["placed_rows"] > 0
    assert statistics["loaded_bytes"] == statistics["saved_bytes"] == 0, "no layer moves as a whole"


@pytest.mark.features("sparse", "chunked")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_sparse_decode_is_exact_in_any_buffer(
    case: Case,
    model_of: ModelOf,
    plain: PlainAnswers,
    transformers_tokens: TransformersTokens,
    truth: Truth,
) -> None:
    """Prompts in chunks beside requests that decode; then answers longer than the buffer."""
    model = model_of(case.model)
    seed = LONG_SEEDS.get(case.model)
    with open_engine(model, **case.arguments()) as engine:
        assert engine.llm.llm_engine.vllm_config.scheduler_config.async_scheduling == case.async_scheduling
        num_blocks = engine.num_blocks()
        got = engine.ask(model.prompts, NEW_TOKENS)
        engine.check_integrity()
        prompts = random_prompts(seed, LONG_LENGTHS) if seed is not None else []
        grown = engine.ask(prompts, LONG_ANSWER) if prompts else None
        engine.check_integrity()
        statistics = engine.statistics()
    assert_exact(got, plain(case.model), transformers_tokens(case.model))
    if grown is not None:
        assert_true(grown, truth(case.model, prompts, LONG_ANSWER))
    check_rows(statistics)
    assert statistics["evicted_rows"] > 0, "everything fitted: the case shows nothing"
    assert statistics["prompt_loaded_bytes"] > 0
    assert statistics["num_blocks"] == num_blocks
    check_capacity(statistics, model, case.buffer * case.sequences)


def check_capacity(statistics: dict[str, Any], model: Model, hot_rows: int) -> None:
    """Counted here from the model's shape: what lies on the device, and how many more blocks that gives."""
    cache = model.cache
    row_bytes = cache.main_row_elements * FLOAT32_BYTES
    hot_bytes = cache.layers * hot_rows * row_bytes
    index_bytes = len(cache.index_layers) * cache.index_page_bytes(BLOCK_SIZE)
    plain_bytes = cache.plain_block_bytes(BLOCK_SIZE)
    ratio = (ROOMY_BYTES - hot_bytes) / index_bytes / (ROOMY_BYTES / plain_bytes)
    assert statistics["hot_row_capacity"] == hot_rows
    assert statistics["hot_row_bytes"] == hot_bytes
    assert statistics["logical_page_bytes"] == plain_bytes
    assert statistics["indexer_page_bytes"] == index_bytes
    assert statistics["capacity_ratio_formula"] == pytest.approx(ratio, rel=1e-12)
    assert statistics["device_bytes"] <= ROOMY_BYTES
    blocks, plain_blocks = statistics["num_blocks"], ROOMY_BYTES // plain_bytes
    assert 0.95 * ratio * plain_blocks <= blocks <= ROOMY_BYTES // index_bytes
    assert statistics["host_pool_bytes"] >= blocks * cache.layers * cache.main_page_bytes(BLOCK_SIZE)


@pytest.mark.features("sparse")
@pytest.mark.parametrize("name", ["dsa", "glm"])
def test_defaults_read_the_same_bits_in_the_planned_blocks(
    name: str, model_of: ModelOf, plain: PlainAnswers
) -> None:
    """Without any knob: twice the model's top-k a sequence, 4 % of the device for the prompt window.

    Prompts in one chunk attend to rows where they were computed, and decode to copies of rows: the same bits.
    """
    model = model_of(name)
    with open_engine(model, **sparse()) as engine:
        got = engine.ask(model.prompts, NEW_TOKENS)
        statistics = engine.statistics()
    assert_same_bits(got, plain(name))
    assert 0 < statistics["prompt_window_bytes"] <= 0.04 * ROOMY_BYTES
    check_capacity(statistics, model, 2 * 32 * 8)


def first_tokens(engine: Engine, model: Model) -> list[list[int]]:
    return engine.ask(model.prompts, 1).tokens


@pytest.mark.parametrize("name", ["dsa", "glm"])
def test_negative_control_stale_hot_rows_are_wrong(name: str, model_of: ModelOf, plain: PlainAnswers) -> None:
    """Missed rows are not copied: decode goes wrong. Prompts do not pass the hot rows and stay right."""
    model = model_of(name)
    with open_engine(model, **sparse(buffer=32, fault="stale_rows"), **CHUNKED) as engine:
        first = first_tokens(engine, model)
        got = engine.ask(model.prompts, NEW_TOKENS)
    expected = plain(name)
    assert first == [tokens[:1] for tokens in expected.tokens]
    assert count_changed(got, expected) >= 4


@pytest.mark.parametrize("name", ["dsa", "glm"])
def test_negative_control_prompts_without_loads_are_wrong(
    name: str, model_of: ModelOf, plain: PlainAnswers
) -> None:
    """Nothing reaches the prompt window: prompts of more than one chunk go wrong in their first token."""
    model = model_of(name)
    arguments = sparse(buffer=32, prompt_window_tokens=32, fault="skip_loads")
    with open_engine(model, **arguments, **CHUNKED) as engine:
        first = first_tokens(engine, model)
    wrong = [a != b[:1] for a, b in zip(first, plain(name).tokens, strict=True)]
    # 1 and 11 tokens are computed in one chunk; of those of 64, 129 and 250 two at least must break.
    assert wrong[:2] == [False, False]
    assert sum(wrong) >= 2


@pytest.fixture(scope="module")
def book() -> Ledger:
    return ledger(seed=1)


@pytest.mark.features("sparse", "prefix", "chunked")
def test_trained_model_reads_its_ledger_through_hot_rows(
    model_of: ModelOf, book: Ledger, truth: Truth
) -> None:
    """All 24 questions share their context, so hot rows of one request serve the others."""
    model = model_of("tiny-dsv32")
    new_tokens = len(book.answers[0])
    arguments = sparse(buffer=64, prompt_window_tokens=32)
    with open_engine(model, **arguments, enable_prefix_caching=True, max_num_batched_tokens=96) as engine:
        got = engine.ask(book.prompts, new_tokens)
        engine.check_integrity()
        statistics = engine.statistics()
    assert_true(got, truth(model.name, book.prompts, new_tokens))
    assert sum(got.cached_tokens) > 0
    check_rows(statistics)


@pytest.mark.parametrize("fault", ["stale_rows", "skip_loads"])
def test_trained_model_loses_its_ledger_with_a_fault(
    fault: str, model_of: ModelOf, book: Ledger, truth: Truth
) -> None:
    model = model_of("tiny-dsv32")
    new_tokens = len(book.answers[0])
    with open_engine(model, **sparse(buffer=64, fault=fault), max_num_batched_tokens=96) as engine:
        got = engine.ask(book.prompts, new_tokens)
    assert count_changed(got, truth(model.name, book.prompts, new_tokens)) >= 12
