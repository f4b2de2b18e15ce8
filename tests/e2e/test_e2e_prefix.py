"""vLLM's own prefix cache under offload: a hit's rows stand in the host pool, and are loaded from there."""

from __future__ import annotations

import pytest
from checks import (
    NEW_TOKENS,
    ModelOf,
    PlainAnswers,
    TransformersTokens,
    Truth,
    assert_exact,
    count_changed,
)
from engines import BLOCK_SIZE, SKIP_LOADS, layerwise, open_engine
from models import random_prompts

CHUNKED = {"max_num_batched_tokens": 48}
CACHED = {"enable_prefix_caching": True}


@pytest.mark.features("layerwise", "prefix", "chunked")
@pytest.mark.parametrize("name", ["dense", "dsa", "glm"])
def test_hits_of_an_earlier_call_are_exact(
    name: str, model_of: ModelOf, plain: PlainAnswers, transformers_tokens: TransformersTokens
) -> None:
    """Prompts of 1, 11, 64, 129 and 250 tokens: of 64, vLLM computes the last block again."""
    model = model_of(name)
    with open_engine(model, **layerwise(shared=2), **CHUNKED, **CACHED) as engine:
        first = engine.ask(model.prompts, NEW_TOKENS)
        second = engine.ask(model.prompts, NEW_TOKENS)
    for got in (first, second):
        assert_exact(got, plain(name), transformers_tokens(name))
    assert first.cached_tokens == [0, 0, 0, 0, 0]
    assert second.cached_tokens == [0, 0, 48, 128, 240]


def test_a_hit_moves_what_it_reads_and_no_more(model_of: ModelOf) -> None:
    """129 tokens, of which the second call computes one; layers 1, 2 and 3 share one buffer."""
    model = model_of("dsa")
    prompt = model.prompts[3]
    with open_engine(model, **layerwise(shared=1), **CACHED) as engine:
        engine.ask([prompt], 1)
        before = engine.statistics()
        engine.ask([prompt], 4)
        after = engine.statistics()
    page_bytes = model.cache.main_page_bytes(BLOCK_SIZE) + model.cache.index_page_bytes(BLOCK_SIZE)
    prefixes = [128, 129, 130, 131]
    loaded_blocks = sum(-(-prefix // BLOCK_SIZE) for prefix in prefixes)
    assert after["loaded_bytes"] - before["loaded_bytes"] == 3 * loaded_blocks * page_bytes
    assert after["saved_bytes"] - before["saved_bytes"] == 3 * len(prefixes) * page_bytes


def test_a_hit_without_loads_is_wrong(model_of: ModelOf, plain: PlainAnswers) -> None:
    """Negative control of the hits: the second call's only loads are those of its prefix.

    Its prompts go through one at a time and answer one token, so that no decode step has to load.
    """
    model = model_of("dsa")
    long = [prompt for prompt in model.prompts if len(prompt) >= 64]
    truth = [tokens[:1] for tokens in plain("dsa").tokens[-len(long) :]]
    with open_engine(model, **layerwise(shared=1), **SKIP_LOADS, **CACHED, max_num_seqs=1) as engine:
        first = engine.ask(long, 1)
        second = engine.ask(long, 1)
    assert first.tokens == truth, "a prompt in one chunk loads nothing and must be right"
    assert second.cached_tokens == [48, 128, 240]
    assert count_changed(second, first) >= 2


@pytest.mark.features("layerwise", "prefix", "chunked")
@pytest.mark.parametrize("name", ["dsa", "glm"])
def test_prefixes_that_end_in_mid_block_are_exact(name: str, model_of: ModelOf, truth: Truth) -> None:
    """Prompts part at 75 tokens, in the middle of block 4: 64 tokens are hits, 11 are computed again."""
    base, *tails = random_prompts(41, (75, 30, 61, 100))
    prompts = [base + tail for tail in tails]
    with open_engine(model_of(name), **layerwise(shared=2), **CHUNKED, **CACHED) as engine:
        # The first alone; the other two in one step with each other.
        first = engine.ask(prompts[:1], NEW_TOKENS)
        rest = engine.ask(prompts[1:], NEW_TOKENS)
    expected = truth(name, prompts)
    assert first.tokens + rest.tokens == expected.tokens
    assert first.cached_tokens + rest.cached_tokens == [0, 64, 64]


@pytest.mark.features("layerwise", "prefix", "chunked")
def test_a_conversation_hits_the_blocks_of_its_own_answers(model_of: ModelOf, truth: Truth) -> None:
    """Rows that decode steps wrote are a prefix like any other."""
    model = model_of("dsa")
    prompt = list(model.prompts[2])
    prompts, answers, hits = [], [], []
    with open_engine(model, **layerwise(shared=2), **CHUNKED, **CACHED) as engine:
        for turn in range(3):
            got = engine.ask([prompt], 40)
            prompts.append(prompt)
            answers += got.tokens
            hits += got.cached_tokens
            prompt = prompt + got.tokens[0] + random_prompts(60 + turn, (9,))[0]
    assert answers == truth("dsa", prompts, 40).tokens
    # 64 + 40 tokens, the last of them never a row: 103 rows, 6 full blocks; then 113 + 39 rows, 9 blocks.
    assert hits == [0, 96, 144]


@pytest.mark.features("layerwise", "prefix", "chunked")
@pytest.mark.parametrize("name", ["dense", "dsa"])
def test_blocks_are_reused_after_eviction(name: str, model_of: ModelOf, truth: Truth) -> None:
    """A pool of 20 blocks for prompts that need 17, 9, 13 and 17: each call takes the blocks of others."""
    model = model_of(name)
    prompts = random_prompts(42, (250, 120, 190, 251))
    expected = truth(name, prompts)
    block_bytes = 3 * (model.cache.main_page_bytes(BLOCK_SIZE) + model.cache.index_page_bytes(BLOCK_SIZE))
    with open_engine(
        model,
        **layerwise(shared=2),
        **CHUNKED,
        **CACHED,
        max_model_len=288,
        kv_cache_memory_bytes=20 * block_bytes,
    ) as engine:
        assert engine.num_blocks() == 20
        cached = []
        for at in (0, 1, 2, 3, 0, 1, 1, 0):
            got = engine.ask([prompts[at]], NEW_TOKENS)
            assert got.tokens == [expected.tokens[at]], f"prompt {at} after {len(cached)} others"
            cached += got.cached_tokens
        print(cached)
    # Evicted but for a hit of prompt 1 on its own call just before.
    assert cached[:4] == [0, 0, 0, 0]
    assert cached[6] == 112
    assert cached[4] < 240
    assert 0 < sum(cached) < 240 + 112 + 240
