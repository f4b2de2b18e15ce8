"""What the scheduler does to requests: preemption, abort, asynchronous steps, many requests in few blocks."""

from __future__ import annotations

import random
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
    assert_true,
    count_changed,
)
from engines import BLOCK_SIZE, SKIP_LOADS, layerwise, open_engine
from models import Model, random_prompts

CHUNKED = {"max_num_batched_tokens": 48}
CACHED = {"enable_prefix_caching": True}
PREEMPTIONS = "vllm:num_preemptions"
LONG_ANSWER = 40
SHORT_ANSWER = 6  # of many prompts: fewer steps, fewer near ties
CROWD_SEED = 348


def few_blocks(model: Model, num_blocks: int) -> dict[str, Any]:
    """Arguments of an engine with 2 shared buffers beside layer 0, in exactly `num_blocks` blocks."""
    cache = model.cache
    assert len(cache.index_layers) in (0, cache.layers), "buffers of layers without indexer differ"
    block_bytes = 3 * cache.main_page_bytes(BLOCK_SIZE)
    if cache.index_layers:
        block_bytes += 3 * cache.index_page_bytes(BLOCK_SIZE)
    return {"max_model_len": 288, "kv_cache_memory_bytes": num_blocks * block_bytes}


def crowd(seed: int) -> list[list[int]]:
    """24 prompts of 1 to 200 tokens; half of them start like another one."""
    rng = random.Random(seed)
    prompts = random_prompts(seed, tuple(rng.randrange(1, 200) for _ in range(12)))
    tails = random_prompts(seed + 1, tuple(rng.randrange(1, 40) for _ in range(12)))
    prompts += [
        prompt[: rng.randrange(1, len(prompt) + 1)] + tail
        for prompt, tail in zip(prompts, tails, strict=True)
    ]
    rng.shuffle(prompts)
    return prompts


@pytest.mark.parametrize(
    ("name", "seed", "backend", "arguments"),
    [
        pytest.param("dense", 345, "none", {}, marks=pytest.mark.features("layerwise", "chunked")),
        pytest.param(
            "dsa", 245, "none", CACHED, marks=pytest.mark.features("layerwise", "prefix", "chunked")
        ),
        pytest.param("dsa", 245, "local", {}, marks=pytest.mark.features("layerwise", "store", "chunked")),
        pytest.param(
            "dsa",
            245,
            "none",
            {"async_scheduling": True},
            marks=pytest.mark.features("layerwise", "async", "chunked"),
        ),
    ],
    ids=["dense", "dsa-prefix-cache", "dsa-store", "dsa-async"],
)
def test_preempted_requests_resume_exactly(
    name: str,
    seed: int,
    backend: str,
    arguments: dict[str, Any],
    tmp_path: Path,
    model_of: ModelOf,
    truth: Truth,
) -> None:
    """Four requests that grow to 9 blocks each in a pool of 24: some are preempted and computed again."""
    model = model_of(name)
    prompts = random_prompts(seed, (97, 96, 95, 99))
    expected = truth(name, prompts, LONG_ANSWER)
    path = str(tmp_path) if backend == "local" else None
    with open_engine(
        model,
        **layerwise(shared=2, backend=backend, store_path=path),
        **CHUNKED,
        **few_blocks(model, 24),
        **arguments,
    ) as engine:
        assert engine.num_blocks() == 24
        before = engine.counter(PREEMPTIONS)
        got = engine.ask(prompts, LONG_ANSWER)
        preemptions = engine.counter(PREEMPTIONS) - before
        statistics = engine.statistics()
        assert engine.llm.llm_engine.vllm_config.scheduler_config.async_scheduling == (
            "async_scheduling" in arguments
        )
    assert preemptions > 0
    assert_true(got, expected)
    if backend == "local":
        assert statistics["fetched_blocks"] > 0, "a resumed request finds its own blocks in the store"


@pytest.mark.features("layerwise", "store", "prefix", "chunked")
@pytest.mark.parametrize("after_steps", [1, 3, 7])
def test_blocks_of_aborted_requests_are_reused(
    after_steps: int, tmp_path: Path, model_of: ModelOf, truth: Truth
) -> None:
    """Aborted in the first prompt's prefill, in the second's, in decode; copies may still be in flight."""
    model = model_of("dsa")
    abandoned = random_prompts(46, (90, 95))
    prompts = random_prompts(47, (99, 130))
    expected = truth("dsa", prompts)
    with open_engine(
        model,
        **layerwise(shared=2, backend="local", store_path=str(tmp_path)),
        **CHUNKED,
        **CACHED,
        **few_blocks(model, 20),
    ) as engine:
        engine.abandon(abandoned, after_steps=after_steps)
        first = engine.ask(prompts, NEW_TOKENS)
        engine.abandon(abandoned, after_steps=after_steps)
        engine.forget_prefixes()
        second = engine.ask(prompts, NEW_TOKENS)
    assert_true(first, expected)
    assert_true(second, expected)
    assert second.cached_tokens == [96, 128]


@pytest.mark.features("layerwise", "chunked", "async")
@pytest.mark.parametrize("name", ["dense", "dsa", "glm"])
def test_async_scheduling_is_exact(
    name: str, model_of: ModelOf, plain: PlainAnswers, transformers_tokens: TransformersTokens
) -> None:
    model = model_of(name)
    with open_engine(model, **layerwise(shared=2), **CHUNKED, async_scheduling=True) as engine:
        assert engine.llm.llm_engine.vllm_config.scheduler_config.async_scheduling
        got = engine.ask(model.prompts, NEW_TOKENS)
    assert_exact(got, plain(name), transformers_tokens(name))
    assert_same_bits(got, plain(name, **CHUNKED))


@pytest.mark.parametrize(
    "backend",
    [
        pytest.param("none", marks=pytest.mark.features("layerwise", "prefix", "chunked")),
        pytest.param("local", marks=pytest.mark.features("layerwise", "store", "prefix", "chunked")),
    ],
)
def test_a_crowd_in_few_blocks_is_exact(
    backend: str, tmp_path: Path, model_of: ModelOf, truth: Truth
) -> None:
    """24 prompts, half with prefixes of others, twice through 30 blocks and a store of 20."""
    model = model_of("dsa")
    prompts = crowd(CROWD_SEED)
    expected = truth("dsa", prompts, SHORT_ANSWER)
    more: dict[str, Any] = {"backend": "none"}
    if backend == "local":
        size_bytes = 20 * model.cache.plain_block_bytes(BLOCK_SIZE)
        more = {"backend": "local", "store_path": str(tmp_path), "store_size_GB": size_bytes / 2**30}
    with open_engine(
        model, **layerwise(shared=2, **more), **CHUNKED, **CACHED, **few_blocks(model, 30)
    ) as engine:
        first = engine.ask(prompts, SHORT_ANSWER)
        second = engine.ask(prompts[::-1], SHORT_ANSWER)
        statistics = engine.statistics()
    assert_true(first, expected)
    assert second.tokens == expected.tokens[::-1]
    assert sum(first.cached_tokens) > 0
    if backend == "local":
        assert statistics["fetched_blocks"] > 0
        assert statistics["failed_blocks"] == 0


def test_a_crowd_without_loads_is_wrong(tmp_path: Path, model_of: ModelOf, truth: Truth) -> None:
    model = model_of("dsa")
    prompts = crowd(CROWD_SEED)
    expected = truth("dsa", prompts, SHORT_ANSWER)
    with open_engine(
        model,
        **layerwise(shared=2, backend="local", store_path=str(tmp_path)),
        **SKIP_LOADS,
        **CHUNKED,
        **CACHED,
        **few_blocks(model, 30),
    ) as engine:
        got = engine.ask(prompts, SHORT_ANSWER)
    assert count_changed(got, expected) >= len(prompts) // 2
