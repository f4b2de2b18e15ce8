"""The scheduler under sparse decode offload: shared prefixes, preemption, abort, more requests than fit."""

from __future__ import annotations

from typing import Any

import pytest
from checks import NEW_TOKENS, ModelOf, PlainAnswers, TransformersTokens, Truth, assert_exact, assert_true
from engines import BLOCK_SIZE, open_engine, sparse
from models import Model, random_prompts
from test_e2e_scheduling import CROWD_SEED, crowd

GIB = 1 << 30
CHUNKED = {"max_num_batched_tokens": 48}
CACHED = {"enable_prefix_caching": True}
PREEMPTIONS = "vllm:num_preemptions"
LONG_ANSWER = 40
PREEMPTED_SEED = 245
SHORT_ANSWER = 6  # of many prompts: fewer steps, fewer near ties


def few_blocks(model: Model, num_blocks: int) -> dict[str, Any]:
    """Arguments of an engine whose host pool, and not its device, allows exactly `num_blocks` blocks."""
    pages_bytes = model.cache.layers * model.cache.main_page_bytes(BLOCK_SIZE)
    # Half a block for guards and alignment.
    host = {"dram_gb": (num_blocks + 0.5) * pages_bytes / GIB}
    return {"max_model_len": 288, **sparse(buffer=32, prompt_window_tokens=32, **host)}


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param({}, marks=pytest.mark.features("sparse", "chunked")),
        pytest.param(CACHED, marks=pytest.mark.features("sparse", "prefix", "chunked")),
        pytest.param(
            {"async_scheduling": True, "max_num_seqs": 4},
            marks=pytest.mark.features("sparse", "async", "chunked"),
        ),
    ],
    ids=["override", "prefix-cache", "async"],
)
def test_preempted_requests_resume_exactly(
    arguments: dict[str, Any], model_of: ModelOf, truth: Truth
) -> None:
    """Four requests that grow to 9 blocks each in 24 blocks, as host memory or the user decides."""
    model = model_of("dsa")
    prompts = random_prompts(PREEMPTED_SEED, (97, 96, 95, 99))
    expected = truth("dsa", prompts, LONG_ANSWER)
    by_user = {"max_model_len": 288, **sparse(buffer=32), "num_gpu_blocks_override": 24}
    blocks = few_blocks(model, 24) if arguments else by_user
    with open_engine(model, **CHUNKED, **blocks, **arguments) as engine:
        assert engine.num_blocks() == 24
        before = engine.counter(PREEMPTIONS)
        got = engine.ask(prompts, LONG_ANSWER)
        preemptions = engine.counter(PREEMPTIONS) - before
        engine.check_integrity()
        statistics = engine.statistics()
    assert preemptions > 0
    assert_true(got, expected)
    page_bytes = model.cache.layers * model.cache.main_page_bytes(BLOCK_SIZE)
    assert 24 * page_bytes <= statistics["host_pool_bytes"] <= 24.5 * page_bytes
    assert statistics["invalidated_rows"] > 0, "a block changed hands and its rows stayed hot"


@pytest.mark.features("sparse", "prefix", "chunked")
def test_blocks_of_aborted_requests_are_reused(model_of: ModelOf, truth: Truth) -> None:
    """Aborted in the first prompt's prefill, in the second's, in decode: rows may be hot, pieces loaded."""
    model = model_of("dsa")
    abandoned = random_prompts(46, (90, 95))
    prompts = random_prompts(47, (99, 130))
    expected = truth("dsa", prompts)
    with open_engine(model, **CHUNKED, **CACHED, **few_blocks(model, 20)) as engine:
        for after_steps in (1, 3, 7):
            engine.abandon(abandoned, after_steps=after_steps)
            engine.check_integrity()
            assert_true(engine.ask(prompts, NEW_TOKENS), expected)
            engine.abandon(abandoned, after_steps=after_steps)
            engine.forget_prefixes()
            again = engine.ask(prompts, NEW_TOKENS)
            assert_true(again, expected)
            assert again.cached_tokens == [0, 0]
            engine.check_integrity()


@pytest.mark.features("sparse", "prefix", "chunked")
def test_a_crowd_waits_and_is_exact(model_of: ModelOf, truth: Truth) -> None:
    """24 prompts, half with prefixes of others, twice through 30 blocks, 8 at a time at most."""
    model = model_of("dsa")
    prompts = crowd(CROWD_SEED)
    expected = truth("dsa", prompts, SHORT_ANSWER)
    with open_engine(model, **CHUNKED, **CACHED, **few_blocks(model, 30)) as engine:
        assert sum(-(-len(prompt) // BLOCK_SIZE) for prompt in prompts) > engine.num_blocks() == 30
        first = engine.ask(prompts, SHORT_ANSWER)
        engine.check_integrity()
        second = engine.ask(prompts[::-1], SHORT_ANSWER)
        engine.check_integrity()
    assert_true(first, expected)
    assert second.tokens == expected.tokens[::-1]
    assert sum(first.cached_tokens) > 0


@pytest.mark.features("sparse", "prefix", "chunked")
@pytest.mark.parametrize("name", ["dsa", "glm"])
def test_shared_prefixes_are_exact(
    name: str,
    model_of: ModelOf,
    plain: PlainAnswers,
    transformers_tokens: TransformersTokens,
    truth: Truth,
) -> None:
    """Hits of an earlier call; requests that part in mid-block; one prefix twice in one step."""
    model = model_of(name)
    base, *tails = random_prompts(41, (75, 30, 61, 100))
    branches = [base + tail for tail in tails]
    with open_engine(
        model, **sparse(buffer=32, prompt_window_tokens=16), **CACHED, max_num_batched_tokens=256
    ) as engine:
        first = engine.ask(model.prompts, NEW_TOKENS)
        second = engine.ask(model.prompts, NEW_TOKENS)
        # The first alone; the others in one step with each other, hot rows of their prefix in common.
        parted = [engine.ask(branches[:1], NEW_TOKENS), engine.ask(branches[1:], NEW_TOKENS)]
        engine.forget_prefixes()
        at_once = engine.ask(branches, NEW_TOKENS)
        engine.check_integrity()
    for got in (first, second):
        assert_exact(got, plain(name), transformers_tokens(name))
    assert second.cached_tokens == [0, 0, 48, 128, 240]
    expected = truth(name, branches)
    assert parted[0].tokens + parted[1].tokens == expected.tokens
    assert parted[0].cached_tokens + parted[1].cached_tokens == [0, 64, 64]
    # vLLM lets a request hit blocks that the same step computes.
    assert at_once.cached_tokens == [0, 64, 64]
    assert_true(at_once, expected)


@pytest.mark.features("sparse", "prefix", "chunked")
def test_a_conversation_hits_rows_that_decode_wrote(model_of: ModelOf, truth: Truth) -> None:
    model = model_of("dsa")
    prompt = list(model.prompts[2])
    prompts, answers, hits = [], [], []
    with open_engine(model, **sparse(buffer=32, prompt_window_tokens=32), **CHUNKED, **CACHED) as engine:
        for turn in range(3):
            got = engine.ask([prompt], 40)
            prompts.append(prompt)
            answers += got.tokens
            hits += got.cached_tokens
            prompt = prompt + got.tokens[0] + random_prompts(60 + turn, (9,))[0]
    assert answers == truth("dsa", prompts, 40).tokens
    # 64 + 40 tokens, the last of them never a row: 103 rows, 6 full blocks; then 113 + 39 rows, 9 blocks.
    assert hits == [0, 96, 144]
