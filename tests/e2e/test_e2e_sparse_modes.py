"""Sparse decode offload in the other ways to run a model: drafts, LI-C8, compiled, bfloat16, other blocks."""

from __future__ import annotations

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
)
from engines import BLOCK_SIZE, Engine, kvstrata_config, open_engine, sparse
from models import Ledger, ledger

CHUNKED = {"max_num_batched_tokens": 48}
MTP = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 2}}
DRAFTED = "vllm:spec_decode_num_draft_tokens"
ACCEPTED = "vllm:spec_decode_num_accepted_tokens"
LI_C8 = {"indexer_cache_dtype": "int8"}
NEAR = 0.25  # of log-probabilities; a row of another prompt costs several
INT8_ROW_BYTES = 128 + 4  # values and their float32 scale


@pytest.fixture(scope="module")
def book() -> Ledger:
    return ledger(seed=1)


def drafts(engine: Engine) -> tuple[int, int]:
    """Draft tokens proposed and accepted so far."""
    return int(engine.counter(DRAFTED)), int(engine.counter(ACCEPTED))


@pytest.mark.features("sparse", "mtp", "chunked")
@pytest.mark.parametrize("buffer", [64, 192])
def test_drafts_are_exact_and_as_good(buffer: int, model_of: ModelOf, book: Ledger, truth: Truth) -> None:
    """Each request decodes three tokens a step, at 1x top-k a group of tokens at a time.

    Rows of rejected drafts are written again. The draft layer has hot rows too; a wrong one of its own only
    costs accepted drafts, so count them.
    """
    model = model_of("tiny-dsv32-mtp")
    new_tokens = len(book.answers[0])
    arguments = {**MTP, "max_num_batched_tokens": 96, "max_num_seqs": 6}
    with open_engine(model, **arguments) as engine:
        before = drafts(engine)
        engine.ask(book.prompts, new_tokens)
        proposed, accepted = (after - start for after, start in zip(drafts(engine), before, strict=True))
    assert 0 < accepted < proposed

    with open_engine(model, **sparse(buffer=buffer, prompt_window_tokens=64), **arguments) as engine:
        before = drafts(engine)
        got = engine.ask(book.prompts, new_tokens)
        after = drafts(engine)
        engine.check_integrity()
        statistics = engine.statistics()
    assert got.tokens == truth(model.name, book.prompts, new_tokens).tokens
    assert (after[0] - before[0], after[1] - before[1]) == (proposed, accepted)
    assert statistics["share_groups"] == [[layer] for layer in range(7)], "six layers and the draft layer"
    assert statistics["hit_rows"] + statistics["missed_rows"] == statistics["selected_rows"]
    assert statistics["invalidated_rows"] > 0, "rows of rejected drafts stayed hot"


def test_drafts_with_stale_rows_are_wrong(model_of: ModelOf, book: Ledger, truth: Truth) -> None:
    model = model_of("tiny-dsv32-mtp")
    new_tokens = len(book.answers[0])
    arguments = sparse(buffer=64, fault="stale_rows")
    with open_engine(model, **arguments, **MTP, max_num_batched_tokens=96) as engine:
        got = engine.ask(book.prompts, new_tokens)
    assert count_changed(got, truth(model.name, book.prompts, new_tokens)) >= 12


@pytest.mark.parametrize(
    ("name", "dtype", "own"),
    [
        pytest.param("dsa", "float32", LI_C8, marks=pytest.mark.features("sparse", "li-c8")),
        pytest.param("glm", "bfloat16", LI_C8, marks=pytest.mark.features("sparse", "li-c8", "bf16")),
        pytest.param("dsa", "bfloat16", {}, marks=pytest.mark.features("sparse", "bf16")),
    ],
    ids=["dsa-float32-int8", "glm-bfloat16-int8", "dsa-bfloat16"],
)
def test_rounded_values_are_the_same_bits(
    name: str, dtype: str, own: dict[str, str], model_of: ModelOf, plain: PlainAnswers
) -> None:
    """bf16 rows and LI-C8 indexers turn a last bit into another answer, so nothing but bits can be compared.

    The first call's prompts pass in one chunk, as without offload. The second hits their prefixes, which come
    through the window and are joined in another order: there the first answers may only be near.
    """
    model = model_of(name)
    unoffloaded = plain(name, **kvstrata_config(**own), dtype=dtype)
    with open_engine(model, **sparse(buffer=32, **own), dtype=dtype, enable_prefix_caching=True) as engine:
        got = engine.ask(model.prompts, NEW_TOKENS)
        again = engine.ask(model.prompts, NEW_TOKENS)
        engine.check_integrity()
        statistics = engine.statistics()
    assert_same_bits(got, unoffloaded)
    assert again.cached_tokens == [0, 0, 48, 128, 240]
    first_tokens = zip(again.logprobs, got.logprobs, strict=True)
    assert max(abs(near[0] - exact[0]) for near, exact in first_tokens) <= NEAR
    assert statistics["prompt_loaded_bytes"] > 0
    assert statistics["missed_rows"] > 0
    row_bytes = INT8_ROW_BYTES if own else 128 * (2 if dtype == "bfloat16" else 4)
    assert statistics["indexer_page_bytes"] == len(model.cache.index_layers) * BLOCK_SIZE * row_bytes


@pytest.mark.features("sparse", "chunked", "compiled")
@pytest.mark.slow
@pytest.mark.parametrize("name", ["dsa", "glm"])
def test_traced_offload_is_exact(
    name: str,
    monkeypatch: pytest.MonkeyPatch,
    model_of: ModelOf,
    plain: PlainAnswers,
    transformers_tokens: TransformersTokens,
) -> None:
    """Traced by dynamo and run as it is: moves and attention stay outside the graph."""
    from vllm.config import CompilationMode

    monkeypatch.setenv("VLLM_CPU_CI_ENV", "1")  # vLLM's own switch for its tests
    model = model_of(name)
    with open_engine(
        model, **sparse(buffer=32, prompt_window_tokens=32), **CHUNKED, enforce_eager=False
    ) as engine:
        compilation = engine.llm.llm_engine.vllm_config.compilation_config
        assert compilation.mode == CompilationMode.DYNAMO_TRACE_ONCE
        got = engine.ask(model.prompts, NEW_TOKENS)
        engine.check_integrity()
        statistics = engine.statistics()
    assert_exact(got, plain(name), transformers_tokens(name))
    assert statistics["missed_rows"] > 0
    assert statistics["prompt_loaded_bytes"] > 0


@pytest.mark.features("sparse", "chunked")
@pytest.mark.parametrize("block_size", [32, 64])
def test_any_block_size_is_exact(
    block_size: int, model_of: ModelOf, plain: PlainAnswers, transformers_tokens: TransformersTokens
) -> None:
    model = model_of("dsa")
    arguments = sparse(buffer=64, prompt_window_tokens=64)
    with open_engine(model, block_size=block_size, **arguments, **CHUNKED) as engine:
        got = engine.ask(model.prompts, NEW_TOKENS)
    assert_exact(got, plain("dsa"), transformers_tokens("dsa"))
