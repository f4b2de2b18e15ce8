"""The local store beside sparse decode offload: hits land in the host pool and the indexer caches."""

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
    assert_true,
)
from engine_process import losing_objects_of
from engines import BLOCK_SIZE, layerwise, open_engine, sparse
from models import random_prompts

from kvstrata.store.local import LocalStore

CHUNKED = {"max_num_batched_tokens": 48}
FULL_HIT = [0, 0, 48, 128, 240]
HIT_BLOCKS = sum(FULL_HIT) // BLOCK_SIZE
ONLY_RANK = "tp0of1"


def store(path: Path, **options: Any) -> dict[str, Any]:
    return {
        **sparse(buffer=32, prompt_window_tokens=32, backend="local", store_path=str(path), **options),
        **CHUNKED,
    }


@pytest.mark.features("sparse", "store", "prefix", "chunked")
@pytest.mark.parametrize("name", ["dsa", "glm"])
def test_hits_and_losses_are_exact(
    name: str,
    tmp_path: Path,
    model_of: ModelOf,
    plain: PlainAnswers,
    transformers_tokens: TransformersTokens,
) -> None:
    """Put by one engine, hit by the next; then objects vanish between lookup and read; then all hit again."""
    model = model_of(name)
    # An object holds all layers in order, whoever wrote it: here an engine with shared layer buffers.
    writer = {**layerwise(shared=2, backend="local", store_path=str(tmp_path)), **CHUNKED}
    with open_engine(model, **(writer if name == "glm" else store(tmp_path))) as engine:
        outcomes = [engine.ask(model.prompts, NEW_TOKENS)]
    with open_engine(model, enable_prefix_caching=True, **store(tmp_path)) as engine:
        outcomes.append(engine.ask(model.prompts, NEW_TOKENS))
        statistics = engine.statistics()
        engine.forget_prefixes()
        with losing_objects_of(ONLY_RANK):
            outcomes.append(engine.ask(model.prompts, NEW_TOKENS))
        lost = engine.statistics()["failed_blocks"]
        engine.forget_prefixes()
        outcomes.append(engine.ask(model.prompts, NEW_TOKENS))
        engine.check_integrity()
    for got in outcomes:
        assert_exact(got, plain(name), transformers_tokens(name))
    assert [outcome.cached_tokens for outcome in outcomes[:2]] == [[0, 0, 0, 0, 0], FULL_HIT]
    assert statistics["fetched_blocks"] == HIT_BLOCKS
    assert statistics["fetched_bytes"] == HIT_BLOCKS * model.cache.plain_block_bytes(BLOCK_SIZE)
    assert statistics["failed_blocks"] == 0
    assert lost > 0
    assert outcomes[3].cached_tokens == FULL_HIT, "what was computed again did not go back into the store"
    stored = LocalStore.attach(tmp_path)
    stored.check_integrity()
    assert stored.statistics().leases == 0
    stored.close()


@pytest.mark.features("sparse", "store", "prefix")
def test_a_lost_prefix_that_requests_share_never_spoils_the_store(
    tmp_path: Path, model_of: ModelOf, truth: Truth
) -> None:
    """Both requests of the step read blocks whose rows did not come, hot rows among them."""
    base, *tails = random_prompts(44, (70, 40, 50))
    prompts = [base + tail for tail in tails]
    expected = truth("dsa", prompts)
    arguments = {**store(tmp_path), "max_num_batched_tokens": 256, "enable_prefix_caching": True}
    with open_engine(model_of("dsa"), **arguments) as engine:
        engine.ask([base], 4)  # a later step is where the puts of one are known to have ended
        engine.forget_prefixes()
        with losing_objects_of(ONLY_RANK):
            got = engine.ask(prompts, NEW_TOKENS)
        assert engine.statistics()["failed_blocks"] > 0
        engine.check_integrity()
        engine.forget_prefixes()
        again = engine.ask(prompts, NEW_TOKENS)
    assert got.tokens == expected.tokens
    assert min(again.cached_tokens) >= 64
    assert_true(again, expected)


def test_negative_control_hits_without_loads_are_wrong(
    tmp_path: Path, model_of: ModelOf, plain: PlainAnswers
) -> None:
    """What the store brought stands in the host pool, and reaches attention by the loads alone."""
    model = model_of("dsa")
    with open_engine(model, **store(tmp_path)) as engine:
        engine.ask(model.prompts, 1)
    with open_engine(model, **store(tmp_path, fault="skip_loads")) as engine:
        got = engine.ask(model.prompts, 1)
    assert got.cached_tokens == FULL_HIT
    expected = [tokens[:1] for tokens in plain("dsa").tokens]
    assert sum(a != b for a, b in zip(got.tokens, expected, strict=True)) >= 2
