"""Prefill and decode in the other ways to run a model: drafts, LI-C8, asynchronous steps, several ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from checks import NEW_TOKENS, ModelOf, PlainAnswers, TransformersTokens, Truth
from engines import BLOCK_SIZE, INT8_INDEXER, sparse
from models import Ledger, ledger
from pd import Fleet, Pair, advertised_blocks, assert_at_rest, free_port, remote

pytestmark = pytest.mark.whole_machine

CHUNKED = {"max_num_batched_tokens": 48}
LAYERWISE = {"use_layerwise": True, "layerwise_num_shared_buffers": 2}
MTP = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 2}}
ACCEPTED = "vllm:spec_decode_num_accepted_tokens"
PREEMPTIONS = "vllm:num_preemptions"
INT8_ROW_BYTES = 128 + 4  # values and their float32 scale
CONCURRENT = 32
TWO = {"tensor_parallel_size": 2}
PULLED = 3  # of a model's prompts: the others have a block at most


@pytest.fixture(scope="module")
def book() -> Ledger:
    return ledger(seed=1)


def accepted(pair: Pair) -> float:
    """Draft tokens that decode accepted so far."""
    return float(pair.decode.call("counter", ACCEPTED))


def check_bytes(pair: Pair, block_bytes: int) -> None:
    """Everything that was asked for arrived, and nothing is left."""
    assert_at_rest(pair.prefill, pair.decode)
    statistics = pair.decode.statistics()
    assert statistics["pulled_bytes"] == advertised_blocks(pair.adverts) * block_bytes
    assert statistics["bad_messages"] == 0


@pytest.mark.features("prefill", "layerwise", "mtp", "chunked")
@pytest.mark.features("decode", "sparse", "mtp")
def test_thirty_two_requests_at_once_with_drafts_are_exact(
    tmp_path: Path, model_of: ModelOf, book: Ledger, truth: Truth
) -> None:
    """The draft layer's rows travel too. A wrong one only costs accepted drafts: decode alone has as many."""
    model = model_of("tiny-dsv32-mtp")
    new_tokens = len(book.answers[0])
    expected = [*truth(model.name, book.prompts, new_tokens).tokens]
    prefill = {**remote("producer", **LAYERWISE), **MTP, "max_num_batched_tokens": 96}
    decode = {**remote("consumer", free_port()), **sparse(buffer=64), **MTP, "max_num_seqs": CONCURRENT}
    with Fleet(model, tmp_path) as fleet:
        pair = fleet.pair(*fleet.start(("prefill", prefill, "0"), ("decode", decode, "1")))
        again = CONCURRENT - len(book.prompts)
        prompts = [*book.prompts, *book.prompts[:again]]
        expected += expected[:again]
        start = accepted(pair)
        names = [pair.submit_local(prompt, new_tokens) for prompt in prompts]
        assert [pair.tokens(name) for name in names] == expected
        middle = accepted(pair)
        assert pair.ask(prompts, new_tokens) == expected
        end = accepted(pair)
        page_bytes = model.cache.main_page_bytes(BLOCK_SIZE) + model.cache.index_page_bytes(BLOCK_SIZE)
        check_bytes(pair, 7 * page_bytes)
        statistics = pair.decode.statistics()
    assert statistics["pulls_done"] == len(pair.adverts) == CONCURRENT
    assert middle - start >= CONCURRENT, "drafts are good for nothing here: the comparison says nothing"
    assert end - middle >= 0.9 * (middle - start)


@pytest.mark.features("prefill", "layerwise", "li-c8", "chunked")
@pytest.mark.features("decode", "sparse", "li-c8", "async")
def test_int8_indexers_on_both_sides_are_exact(
    tmp_path: Path, model_of: ModelOf, plain: PlainAnswers
) -> None:
    """LI-C8: values and scales travel in one page. Decode steps asynchronously."""
    model = model_of("dsa")
    prefill = {**remote("producer", **LAYERWISE), **INT8_INDEXER, **CHUNKED}
    offload = sparse(buffer=32, **INT8_INDEXER["additional_config"]["kvstrata"])
    decode = {**remote("consumer", free_port()), **offload, "async_scheduling": True}
    with Fleet(model, tmp_path) as fleet:
        pair = fleet.pair(*fleet.start(("prefill", prefill, "0"), ("decode", decode, "1")))
        for _ in range(2):
            assert pair.ask(model.prompts, NEW_TOKENS) == plain("dsa", **INT8_INDEXER, **CHUNKED).tokens
        main_bytes = model.cache.layers * model.cache.main_page_bytes(BLOCK_SIZE)
        check_bytes(pair, main_bytes + len(model.cache.index_layers) * BLOCK_SIZE * INT8_ROW_BYTES)
        assert pair.decode.statistics()["pulls_done"] == 2 * PULLED


@pytest.mark.features("prefill", "layerwise", "chunked")
@pytest.mark.features("decode", "sparse", "async")
def test_asynchronous_decode_is_exact(
    tmp_path: Path, model_of: ModelOf, transformers_tokens: TransformersTokens
) -> None:
    """A step is planned while the one before runs, with transfers under way and some of them aborted."""
    model, expected = model_of("glm"), transformers_tokens("glm")
    prefill = {**remote("producer", **LAYERWISE), **CHUNKED, "enable_prefix_caching": True}
    decode = {
        **remote("consumer", free_port()),
        **sparse(buffer=32),
        **CHUNKED,
        "async_scheduling": True,
        "enable_prefix_caching": True,
    }
    with Fleet(model, tmp_path) as fleet:
        pair = fleet.pair(*fleet.start(("prefill", prefill, "0"), ("decode", decode, "1")))
        for _ in range(3):
            names = [pair.submit(prompt, NEW_TOKENS) for prompt in model.prompts]
            doomed = [pair.submit(prompt[::-1], NEW_TOKENS) for prompt in model.prompts[-2:]]
            for name in doomed:
                pair.decode.abort(name)
            assert [pair.tokens(name) for name in names] == expected
            assert_at_rest(pair.prefill, pair.decode)
            pair.forget_prefixes()
        assert pair.decode.statistics()["pulls_done"] >= 3 * PULLED


@pytest.mark.features("prefill", "chunked")
@pytest.mark.features("decode")
def test_preempted_requests_on_either_side_are_exact(
    tmp_path: Path, model_of: ModelOf, transformers_tokens: TransformersTokens
) -> None:
    """Memory for little more than one prompt at prefill, and for two without their answers at decode.

    What prefill preempts it no longer sends; what decode preempts it computes again by itself.
    """
    model, expected = model_of("dsa"), transformers_tokens("dsa")
    block_bytes = model.cache.plain_block_bytes(BLOCK_SIZE)
    prefill = {
        **remote("producer"),
        "max_model_len": 288,
        "kv_cache_memory_bytes": 21 * block_bytes,
        "max_num_batched_tokens": 256,
        "long_prefill_token_threshold": 48,
    }
    decode = {**remote("consumer", free_port()), "kv_cache_memory_bytes": 34 * block_bytes}
    with Fleet(model, tmp_path) as fleet:
        pair = fleet.pair(*fleet.start(("prefill", prefill, "0"), ("decode", decode, "1")))
        for _ in range(2):
            assert pair.ask([model.prompts[-1]] * 4, NEW_TOKENS) == [expected[-1]] * 4
        assert_at_rest(pair.prefill, pair.decode)
        sent, pulled = pair.prefill.statistics(), pair.decode.statistics()
        assert pair.prefill.call("counter", PREEMPTIONS) > 0
        assert pair.decode.call("counter", PREEMPTIONS) > 0
        assert sent["sends_aborted"] == pulled["pulls_failed"] > 0
        assert sent["sends_done"] == pulled["pulls_done"] > 0
        assert len(pair.adverts) == 8, "a prompt is asked for once"


@pytest.mark.features("prefill", "layerwise", "tp", "chunked")
@pytest.mark.features("decode", "sparse")
@pytest.mark.features("decode", "sparse", "tp")
@pytest.mark.parametrize("name", ["dsa"])
def test_two_prefill_ranks_feed_one_and_two_decode_ranks(
    name: str, tmp_path: Path, model_of: ModelOf, transformers_tokens: TransformersTokens
) -> None:
    """To one rank: main KV from the first rank, indexers half from each. To two: the shared pool is filled
    half by each of them, and each has all of its own indexers."""
    model, expected = model_of(name), transformers_tokens(name)
    main_bytes = model.cache.layers * model.cache.main_page_bytes(BLOCK_SIZE)
    index_bytes = len(model.cache.index_layers) * model.cache.index_page_bytes(BLOCK_SIZE)
    prefill = {**remote("producer", **LAYERWISE), **CHUNKED, **TWO}
    one: dict[str, Any] = {**remote("consumer", free_port()), **sparse(buffer=32)}
    two = {**remote("consumer", free_port(2)), **sparse(buffer=32), **CHUNKED, **TWO}
    with Fleet(model, tmp_path) as fleet:
        sender, receiver = fleet.start(("prefill", prefill, "0|1"), ("decode", one, "1"))
        pair = fleet.pair(sender, receiver)
        assert pair.ask(model.prompts, NEW_TOKENS) == expected
        check_bytes(pair, main_bytes + index_bytes)
        assert pair.decode.statistics()["pulls_done"] == PULLED
        assert sender.statistics()["sends_done"] == 2 * PULLED
        receiver.close()

        (receiver,) = fleet.start(("decode-2", two, "0|1"))
        pair = fleet.pair(sender, receiver)
        assert pair.ask(model.prompts, NEW_TOKENS) == expected
        check_bytes(pair, main_bytes + 2 * index_bytes)
        assert pair.decode.statistics()["pulls_done"] == 2 * PULLED
        assert sender.statistics()["sends_done"] == 4 * PULLED
