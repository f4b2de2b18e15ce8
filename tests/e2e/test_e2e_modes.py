"""The other ways to run the same model: compiled, with drafts, LI-C8, bfloat16."""

from __future__ import annotations

from pathlib import Path
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
    count_changed,
    largest_difference,
)
from engines import BLOCK_SIZE, INT8_INDEXER, ROOMY_BYTES, SKIP_LOADS, Engine, layerwise, open_engine
from models import Ledger, ledger

CHUNKED = {"max_num_batched_tokens": 48}
MTP = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 2}}
DRAFTED = "vllm:spec_decode_num_draft_tokens"
ACCEPTED = "vllm:spec_decode_num_accepted_tokens"
INT8_ROW_BYTES = 128 + 4  # values and their float32 scale


@pytest.mark.features("layerwise", "chunked", "compiled")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "backend"), [("dsa", "inductor"), ("dense", "eager"), ("glm", "eager")], ids=str
)
def test_compiled_offload_is_exact(
    name: str,
    backend: str,
    monkeypatch: pytest.MonkeyPatch,
    model_of: ModelOf,
    plain: PlainAnswers,
    transformers_tokens: TransformersTokens,
) -> None:
    """Traced by dynamo; compiled by inductor for one model, for that takes a minute."""
    from vllm.config import CompilationMode

    # vLLM's own switch for its tests: trace, and run the traced graph as it is.
    monkeypatch.setenv("VLLM_CPU_CI_ENV", str(int(backend == "eager")))
    model = model_of(name)
    with open_engine(model, **layerwise(shared=2), **CHUNKED, enforce_eager=False) as engine:
        compilation = engine.llm.llm_engine.vllm_config.compilation_config
        assert compilation.mode == CompilationMode.DYNAMO_TRACE_ONCE
        assert compilation.backend == backend
        got = engine.ask(model.prompts, NEW_TOKENS)
        statistics = engine.statistics()
    assert_exact(got, plain(name), transformers_tokens(name))
    assert statistics["loaded_bytes"] > 0
    assert statistics["saved_bytes"] > 0


@pytest.fixture(scope="module")
def book() -> Ledger:
    return ledger(seed=1)


def drafts(engine: Engine) -> tuple[int, int]:
    """Draft tokens proposed and accepted so far."""
    return int(engine.counter(DRAFTED)), int(engine.counter(ACCEPTED))


@pytest.mark.features("layerwise", "store", "mtp", "chunked")
def test_drafts_under_offload_are_exact_and_as_good(
    tmp_path: Path, model_of: ModelOf, book: Ledger, truth: Truth
) -> None:
    """The draft layer shares a buffer too. A wrong row of its own only costs accepted drafts: count them."""
    model = model_of("tiny-dsv32-mtp")
    new_tokens = len(book.answers[0])
    expected = truth(model.name, book.prompts, new_tokens)
    arguments = {**MTP, "max_num_batched_tokens": 96}
    with open_engine(model, **arguments) as engine:
        before = drafts(engine)
        got = engine.ask(book.prompts, new_tokens)
        proposed, accepted = (after - start for after, start in zip(drafts(engine), before, strict=True))
    assert got.tokens == expected.tokens
    assert 0 < accepted < proposed

    with open_engine(
        model, **layerwise(shared=2, backend="local", store_path=str(tmp_path)), **arguments
    ) as engine:
        before = drafts(engine)
        first = engine.ask(book.prompts, new_tokens)
        middle = drafts(engine)
        second = engine.ask(book.prompts, new_tokens)
        after = drafts(engine)
        statistics = engine.statistics()
    assert first.tokens == second.tokens == expected.tokens
    page_bytes = model.cache.main_page_bytes(BLOCK_SIZE) + model.cache.index_page_bytes(BLOCK_SIZE)
    assert statistics["logical_page_bytes"] == 7 * page_bytes, "six layers and the draft layer"
    assert statistics["physical_page_bytes"] == 3 * page_bytes, "[0] [1 3 5] [2 4 6]"
    assert (middle[0] - before[0], middle[1] - before[1]) == (proposed, accepted)
    # Hits of the store hold the draft layer's rows as well.
    assert statistics["fetched_blocks"] > 0
    assert after[1] - middle[1] >= 0.9 * accepted


def test_drafts_without_loads_are_wrong(model_of: ModelOf, book: Ledger, truth: Truth) -> None:
    model = model_of("tiny-dsv32-mtp")
    new_tokens = len(book.answers[0])
    expected = truth(model.name, book.prompts, new_tokens)
    with open_engine(model, **layerwise(shared=2), **SKIP_LOADS, **MTP, max_num_batched_tokens=96) as engine:
        got = engine.ask(book.prompts, new_tokens)
    assert count_changed(got, expected) >= 12


@pytest.mark.features("layerwise", "store", "li-c8", "chunked")
@pytest.mark.parametrize("name", ["dsa", "glm"])
def test_int8_indexer_under_offload_reads_the_same_bits(
    name: str, tmp_path: Path, model_of: ModelOf, plain: PlainAnswers
) -> None:
    """LI-C8 may choose other rows than a float32 indexer; offload must change nothing about that."""
    model = model_of(name)
    unoffloaded = plain(name, **INT8_INDEXER, **CHUNKED)
    with open_engine(
        model,
        **layerwise(shared=2, backend="local", store_path=str(tmp_path)),
        **INT8_INDEXER,
        **CHUNKED,
    ) as engine:
        got = engine.ask(model.prompts, NEW_TOKENS)
        again = engine.ask(model.prompts, NEW_TOKENS)
        statistics = engine.statistics()
    assert_same_bits(got, unoffloaded)
    assert again.tokens == unoffloaded.tokens
    assert again.cached_tokens == [0, 0, 48, 128, 240]
    main_bytes = model.cache.layers * model.cache.main_page_bytes(BLOCK_SIZE)
    index_bytes = len(model.cache.index_layers) * BLOCK_SIZE * INT8_ROW_BYTES
    assert statistics["logical_page_bytes"] == main_bytes + index_bytes
    assert statistics["physical_page_bytes"] < statistics["logical_page_bytes"]
    # Without offload it is LI-C8 too: other log-probabilities than the float32 indexer's, and more blocks.
    assert largest_difference(unoffloaded, plain(name, **CHUNKED)) > 0


def test_int8_indexer_without_offload_has_its_own_page_size(model_of: ModelOf) -> None:
    model = model_of("dsa")
    with open_engine(model, **INT8_INDEXER) as engine:
        num_blocks = engine.num_blocks()
    block_bytes = 4 * (model.cache.main_page_bytes(BLOCK_SIZE) + BLOCK_SIZE * INT8_ROW_BYTES)
    assert num_blocks == ROOMY_BYTES // block_bytes


def test_int8_indexer_without_loads_is_wrong(model_of: ModelOf, plain: PlainAnswers) -> None:
    model = model_of("dsa")
    faulty: dict[str, Any] = {
        "additional_config": {"kvstrata": {"indexer_cache_dtype": "int8", "fault": "skip_loads"}}
    }
    with open_engine(model, **layerwise(shared=2), **faulty, **CHUNKED) as engine:
        got = engine.ask(model.prompts, NEW_TOKENS)
    assert count_changed(got, plain("dsa", **INT8_INDEXER, **CHUNKED)) >= 3


@pytest.mark.features("layerwise", "bf16", "chunked")
@pytest.mark.parametrize("name", ["dense", "dsa", "glm"])
def test_bfloat16_under_offload_reads_the_same_bits(
    name: str, model_of: ModelOf, plain: PlainAnswers
) -> None:
    """Against transformers nothing could be said: bf16 answers part after a few near ties."""
    model = model_of(name)
    with open_engine(model, **layerwise(shared=2), **CHUNKED, dtype="bfloat16") as engine:
        got = engine.ask(model.prompts, NEW_TOKENS)
        statistics = engine.statistics()
    assert_same_bits(got, plain(name, **CHUNKED, dtype="bfloat16"))
    assert 2 * statistics["logical_page_bytes"] == model.cache.plain_block_bytes(BLOCK_SIZE)
    assert statistics["loaded_bytes"] > 0
