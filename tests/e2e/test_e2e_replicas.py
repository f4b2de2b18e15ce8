"""Two data-parallel replicas: each with its own pools and store keys, both with the answers of one engine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from checks import NEW_TOKENS, ModelOf, PlainAnswers, TransformersTokens
from engines import SKIP_LOADS, engine_arguments, layerwise, open_engine, sparse
from models import Model, ledger
from pd import Fleet, Pair, advertised_blocks, assert_at_rest, free_port, remote
from rank_extension import HELD_EXPERTS
from replicas import COUNT, TWO_REPLICAS, ReplicatedEngine

pytestmark = pytest.mark.whole_machine

CHUNKED = {"max_num_batched_tokens": 48}
EXPERTS = {"enable_expert_parallel": True}
MTP = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 2}}
FULL_HIT = [0, 0, 48, 128, 240]
NO_HIT = [0, 0, 0, 0, 0]
PULLED = 3  # of the model's prompts: the others have a block at most


@contextmanager
def replicated(model: Model, directory: Path, **arguments: Any) -> Iterator[ReplicatedEngine]:
    """Run the block with an engine of two replicas, each on a core of its own."""
    given = engine_arguments(model, **TWO_REPLICAS, **arguments)
    engine = ReplicatedEngine("replicated", given, cpus="0|1", log=directory / "replicated.log")
    try:
        engine.wait_until_ready()
        yield engine
    finally:
        engine.close()


def own_names(engine: ReplicatedEngine) -> list[str]:
    return [replica.statistics()["rank"].rpartition(".")[2] for replica in engine.replicas]


@pytest.mark.features("layerwise", "store", "dp", "ep", "chunked")
def test_replicas_of_a_model_with_experts_keep_to_their_own_keys(
    tmp_path: Path, model_of: ModelOf, transformers_tokens: TransformersTokens
) -> None:
    """They compute each layer's experts together, each its half of them; one works while the other idles,
    then both do, on prompts of other lengths. What one has stored is no hit for the other."""
    model, expected = model_of("dsa"), transformers_tokens("dsa")
    store = layerwise(shared=2, backend="local", store_path=str(tmp_path / "store"))
    with replicated(model, tmp_path, **store, **EXPERTS, **CHUNKED) as engine:
        alone, nothing = engine.ask(model.prompts, [], new_tokens=NEW_TOKENS)
        assert alone.tokens == expected
        assert nothing.tokens == []
        assert alone.cached_tokens == NO_HIT
        for hits in (NO_HIT, FULL_HIT):
            first, second = engine.ask(model.prompts, model.prompts[::-1], new_tokens=NEW_TOKENS)
            assert first.tokens == expected
            assert second.tokens == expected[::-1]
            assert first.cached_tokens == FULL_HIT
            assert second.cached_tokens == hits[::-1]
        assert own_names(engine) == ["dp0of2", "dp1of2"]
        held = [replica.ranks(HELD_EXPERTS)[0]["ids"] for replica in engine.replicas]
        assert len(held[0]) == model.cache.layers - 1
        for name, ids in held[0].items():
            assert sorted(ids + held[1][name]) == list(range(8)), name
            assert len(ids) == 4, name
        for replica in engine.replicas:
            statistics = replica.statistics()
            assert statistics["put_blocks"] > 0
            assert statistics["fetched_blocks"] >= sum(FULL_HIT) // 16
            assert statistics["own_host_pool_bytes"] > 0
            replica.check_at_rest()


def test_replicas_without_loads_are_wrong(tmp_path: Path, model_of: ModelOf, plain: PlainAnswers) -> None:
    """The negative control: with their loads switched off, both answer wrongly."""
    model, expected = model_of("dsa"), plain("dsa").tokens
    with replicated(model, tmp_path, **layerwise(shared=2), **SKIP_LOADS, **CHUNKED) as engine:
        for outcome in engine.ask(model.prompts, model.prompts, new_tokens=NEW_TOKENS):
            changed = sum(a != b for a, b in zip(outcome.tokens, expected, strict=True))
            assert changed >= PULLED


@pytest.mark.features("sparse", "dp", "chunked")
def test_replicas_with_hot_rows_are_exact(
    tmp_path: Path, model_of: ModelOf, transformers_tokens: TransformersTokens
) -> None:
    """Experts are split by tensor here, over the replicas; an idle one takes part without a request."""
    model, expected = model_of("glm"), transformers_tokens("glm")
    with replicated(model, tmp_path, **sparse(buffer=32, prompt_window_tokens=32), **CHUNKED) as engine:
        _, alone = engine.ask([], model.prompts[-1:], new_tokens=NEW_TOKENS)
        assert alone.tokens == expected[-1:]
        first, second = engine.ask(model.prompts, model.prompts[::-1], new_tokens=NEW_TOKENS)
        assert first.tokens == expected
        assert second.tokens == expected[::-1]
        assert own_names(engine) == ["dp0of2", "dp1of2"]
        for replica in engine.replicas:
            statistics = replica.statistics()
            assert statistics["evicted_rows"] > 0
            assert statistics["hit_rows"] + statistics["missed_rows"] == statistics["selected_rows"] > 0
            assert statistics["own_host_pool_bytes"] > 0
            replica.check_at_rest()


@pytest.mark.features("layerwise", "dp", "ep", "mtp", "async", "chunked", "prefix")
def test_replicas_draft_together_and_are_exact(tmp_path: Path, model_of: ModelOf) -> None:
    """The draft layer has experts too: a replica that idles takes part in the other's drafts."""
    model = model_of("tiny-dsv32-mtp")
    book = ledger(seed=1)
    new_tokens = len(book.answers[0])
    chunked = {"max_num_batched_tokens": 96}
    with open_engine(model, **chunked) as plain_engine:
        expected = plain_engine.ask(book.prompts, new_tokens).tokens
    arguments = {**layerwise(shared=2), **EXPERTS, **MTP, **chunked, "async_scheduling": True}
    with replicated(model, tmp_path, **arguments, enable_prefix_caching=True) as engine:
        first, second = engine.ask(book.prompts[:9], book.prompts[9:], new_tokens=new_tokens)
        assert first.tokens + second.tokens == expected
        first, second = engine.ask([], book.prompts[:12], new_tokens=new_tokens)
        assert second.tokens == expected[:12]
        assert sum(second.cached_tokens) > 0
        for replica in engine.replicas:
            held = replica.ranks(HELD_EXPERTS)[0]
            assert set(held["counts"].values()) == {4}
            assert len(held["counts"]) == model.cache.layers - 1 + 1
            replica.check_at_rest()


@pytest.mark.features("layerwise", "store", "dp", "chunked")
def test_replicas_of_a_model_without_experts_share_what_they_store(
    tmp_path: Path, model_of: ModelOf, transformers_tokens: TransformersTokens
) -> None:
    """To vLLM each is an engine of its own, rank 0 of 1: the keys are the same, and so are the rows."""
    model = model_of("dsa-without-experts")
    expected = transformers_tokens(model.name)
    store = layerwise(shared=2, backend="local", store_path=str(tmp_path / "store"))
    with replicated(model, tmp_path, **store, **CHUNKED) as engine:
        first, _ = engine.ask(model.prompts, [], new_tokens=NEW_TOKENS)
        _, second = engine.ask([], model.prompts, new_tokens=NEW_TOKENS)
        assert first.tokens == second.tokens == expected
        assert first.cached_tokens == NO_HIT
        assert second.cached_tokens == FULL_HIT
        assert own_names(engine) == ["dp0of1", "dp0of1"]
        one, other = (replica.statistics() for replica in engine.replicas)
        assert one["put_blocks"] > 0
        assert one["fetched_blocks"] == 0
        assert other["fetched_blocks"] >= sum(FULL_HIT) // 16
        for replica in engine.replicas:
            replica.check_at_rest()


@pytest.mark.features("prefill", "layerwise", "chunked")
@pytest.mark.features("decode", "sparse", "dp")
@pytest.mark.parametrize("name", ["glm", "dsa-without-experts"])
def test_each_decode_replica_reads_from_prefill_at_a_port_of_its_own(
    name: str, tmp_path: Path, model_of: ModelOf, transformers_tokens: TransformersTokens
) -> None:
    """Both at once: control ports are kv_port and the next one, and what one reads is not the other's."""
    model, expected = model_of(name), transformers_tokens(name)
    port = free_port(COUNT)
    layers = {"use_layerwise": True, "layerwise_num_shared_buffers": 2}
    prefill = {**remote("producer", **layers), **CHUNKED}
    decode = {**remote("consumer", port), **sparse(buffer=32)}
    with Fleet(model, tmp_path) as fleet, replicated(model, tmp_path, **decode) as engine:
        (sender,) = fleet.start(("prefill", prefill, "0"))
        pairs: list[Pair] = [fleet.pair(sender, replica) for replica in engine.replicas]
        asked = [[pair.submit(prompt, NEW_TOKENS) for prompt in model.prompts] for pair in pairs]
        for pair, names in zip(pairs, asked, strict=True):
            assert [pair.tokens(name) for name in names] == expected
        block_bytes = model.cache.plain_block_bytes(16)
        for index, (pair, replica) in enumerate(zip(pairs, engine.replicas, strict=True)):
            assert {advert["dp_rank"] for advert in pair.adverts} == {index}
            assert {advert["kv_port"] for advert in pair.adverts} == {port}
            statistics = replica.statistics()
            assert statistics["pulls_done"] == PULLED
            assert statistics["pulled_bytes"] == advertised_blocks(pair.adverts) * block_bytes
            assert statistics["bad_messages"] == statistics["stale_messages"] == 0
            replica.check_at_rest()
        assert_at_rest(sender)
        assert sender.statistics()["sends_done"] == COUNT * PULLED


@pytest.mark.features("prefill", "layerwise", "dp", "ep", "chunked")
@pytest.mark.features("decode", "sparse")
def test_decode_reads_from_each_prefill_replica(
    tmp_path: Path, model_of: ModelOf, transformers_tokens: TransformersTokens
) -> None:
    """Both at once, each with half of the experts, to one decode engine."""
    model, expected = model_of("glm"), transformers_tokens("glm")
    layers = {"use_layerwise": True, "layerwise_num_shared_buffers": 2}
    prefill = {**remote("producer", **layers), **EXPERTS, **CHUNKED}
    decode = {**remote("consumer", free_port()), **sparse(buffer=32)}
    with Fleet(model, tmp_path) as fleet, replicated(model, tmp_path, **prefill) as engine:
        (receiver,) = fleet.start(("decode", decode, "1"))
        pairs: list[Pair] = [fleet.pair(replica, receiver) for replica in engine.replicas]
        asked = [[pair.submit(prompt, NEW_TOKENS) for prompt in model.prompts] for pair in pairs]
        for pair, names in zip(pairs, asked, strict=True):
            assert [pair.tokens(name) for name in names] == expected
        for replica in engine.replicas:
            replica.check_at_rest()
            assert replica.statistics()["sends_done"] == PULLED
        assert_at_rest(receiver)
        assert receiver.statistics()["pulls_done"] == COUNT * PULLED
