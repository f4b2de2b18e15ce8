"""Prefill and decode on two engines: decode answers what one engine would, from rows that another computed.

Every engine is in a process of its own, with the connectors, sockets and shared memory of production. The
proxy is played by `pd.Pair`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import references
from checks import NEW_TOKENS, ModelOf, TransformersTokens
from engines import BLOCK_SIZE, sparse
from models import Model, random_prompts
from pd import LEASE_S, Fleet, Pair, advertised_blocks, assert_at_rest, free_port, remote
from pd_reads import NOTHING, PASS

pytestmark = pytest.mark.whole_machine

CHUNKED = {"max_num_batched_tokens": 48}
CACHED = {"enable_prefix_caching": True}
LAYERWISE = {"use_layerwise": True, "layerwise_num_shared_buffers": 2}
# Prompts of 1, 11, 64, 129 and 250 tokens: at a block or less, decode computes the prompt itself.
PULLED = (64, 129, 250)
PULLED_BLOCKS = sum(-(-length // BLOCK_SIZE) for length in PULLED)
FULL_HIT = [0, 0, 48, 128, 240]  # one token at least is always computed
ONLY_RANK = "tp0of1"


def check_pulled(pair: Pair, model: Model) -> None:
    """All that was asked for arrived, byte for byte, and nothing is left of it on either side."""
    assert_at_rest(pair.prefill, pair.decode)
    pulled, sent = pair.decode.statistics(), pair.prefill.statistics()
    assert pulled["pulls_done"] == pulled["pulls_expected"] == len(pair.adverts)
    block_bytes = model.cache.plain_block_bytes(BLOCK_SIZE)
    assert pulled["pulled_bytes"] == advertised_blocks(pair.adverts) * block_bytes
    assert sent["sends_done"] == sent["sends_opened"] > 0
    for side in (pulled, sent):
        assert side["bad_messages"] == 0


def cached_at_prefill(pair: Pair, adverts: Sequence[dict[str, Any]]) -> list[int]:
    """Prompt tokens that prefill did not compute, by length of the prompt."""
    by_length = sorted(adverts, key=lambda advert: int(advert["num_tokens"]))
    return [pair.prefill.answer(advert["transfer_id"])["cached"] for advert in by_length]


@pytest.mark.features("prefill", "layerwise", "chunked")
@pytest.mark.features("prefill", "chunked")
@pytest.mark.features("decode", "sparse")
@pytest.mark.features("decode")
@pytest.mark.parametrize("name", ["dsa", "glm"])
def test_layerwise_and_plain_prefill_feed_sparse_and_plain_decode(
    name: str, tmp_path: Path, model_of: ModelOf, transformers_tokens: TransformersTokens
) -> None:
    """glm: layers 2 and 4 have no indexer cache. Two prefills and two decodes, four ways; in chunks."""
    model, expected = model_of(name), transformers_tokens(name)
    layerwise = {**remote("producer", **LAYERWISE), **CHUNKED}
    sparse_decode = {**remote("consumer", free_port()), **sparse(buffer=32)}
    with Fleet(model, tmp_path) as fleet:
        prefill, decode = fleet.start(("layerwise", layerwise, "0"), ("sparse", sparse_decode, "1"))
        pair = fleet.pair(prefill, decode)

        # Negative control: with reads that move nothing, what decode answers is not the model's answer.
        decode.call("set_reads", NOTHING)
        wrong = pair.ask(model.prompts, NEW_TOKENS)
        decode.call("set_reads", PASS)
        assert sum(a != b for a, b in zip(wrong, expected, strict=True)) == len(PULLED)
        assert_at_rest(prefill, decode)
        assert decode.statistics()["pulled_bytes"] > 0, "the control believed that it read"

        pair = fleet.pair(prefill, decode)
        before = decode.statistics()
        for _ in range(2):
            assert pair.ask(model.prompts, NEW_TOKENS) == expected
        assert_at_rest(prefill, decode)
        after, sent = decode.statistics(), prefill.statistics()
        assert [advert["first_block"] for advert in pair.adverts] == [0] * 2 * len(PULLED)
        pulled_bytes = 2 * PULLED_BLOCKS * model.cache.plain_block_bytes(BLOCK_SIZE)
        assert after["pulled_bytes"] - before["pulled_bytes"] == pulled_bytes
        assert after["pulls_done"] - before["pulls_done"] == 2 * len(PULLED)
        assert after["missed_rows"] > before["missed_rows"], "sparse decode read nothing from its host pool"
        assert sent["loaded_bytes"] > 0, "prefill in chunks loads the chunks before"
        assert sent["sends_done"] == sent["sends_opened"] == 3 * len(PULLED)
        assert sent["published_parts"] > sent["sends_done"] * model.cache.layers, "parts are chunks of layers"

        plain_prefill = {**remote("producer"), **CHUNKED}
        plain_decode = remote("consumer", free_port())
        others = fleet.start(("plain-prefill", plain_prefill, "0"), ("plain-decode", plain_decode, "1"))
        for pair in (
            fleet.pair(prefill, others[1]),
            fleet.pair(others[0], decode),
            fleet.pair(others[0], others[1]),
        ):
            before = pair.decode.statistics()
            assert pair.ask(model.prompts, NEW_TOKENS) == expected
            assert_at_rest(pair.prefill, pair.decode)
            after = pair.decode.statistics()
            assert after["pulled_bytes"] - before["pulled_bytes"] == pulled_bytes // 2
            assert after["pulls_done"] - before["pulls_done"] == len(PULLED)
            assert after["bad_messages"] == 0


@pytest.mark.features("prefill", "layerwise", "chunked")
@pytest.mark.features("decode")
def test_dense_model_over_tcp_is_exact(
    tmp_path: Path, model_of: ModelOf, transformers_tokens: TransformersTokens
) -> None:
    """No indexer anywhere; bytes go through sockets."""
    model, expected = model_of("dense"), transformers_tokens("dense")
    over_tcp = {"transfer_backend": "tcp"}
    prefill = {**remote("producer", **LAYERWISE, **over_tcp), **CHUNKED}
    decode = {**remote("consumer", free_port(), **over_tcp), **CHUNKED}
    with Fleet(model, tmp_path) as fleet:
        pair = fleet.pair(*fleet.start(("prefill", prefill, "0"), ("decode", decode, "1")))
        assert pair.ask(model.prompts, NEW_TOKENS) == expected
        check_pulled(pair, model)
        assert "is read over tcp" in pair.decode.log()


def seeds_launch(order: str, store: Path) -> dict[str, Any]:
    """Engine arguments of prefill as the seeds give them."""
    halves = [
        {
            "kv_connector": "SfaRemoteD2HConnector",
            "kv_role": "kv_producer",
            "kv_connector_extra_config": {"kv_port": 1, "remote_lease_s": LEASE_S},
        },
        {
            "kv_connector": "AscendStoreConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                **LAYERWISE,
                "backend": "local",
                "store_path": str(store),
                "store_size_GB": 0.2,
            },
        },
    ]
    return {
        "kv_transfer_config": {
            "kv_connector": "MultiConnector",
            "kv_role": "kv_producer",
            "kv_connector_extra_config": {"connectors": halves if order == "remote-first" else halves[::-1]},
        }
    }


@pytest.mark.features("prefill", "layerwise", "store", "prefix", "chunked")
@pytest.mark.features("decode", "sparse", "prefix", "chunked")
@pytest.mark.parametrize("order", ["remote-first", "store-first"])
def test_prefix_hits_on_either_side_and_the_store_are_exact(
    order: str, tmp_path: Path, model_of: ModelOf, transformers_tokens: TransformersTokens
) -> None:
    """Launched with the seeds' JSON, its two halves in either order.

    Decode's own hits are subtracted, prefill's are sent without being computed, the store's are sent once
    they are known not to be lost; what comes of a lost one is nobody's prompt.
    """
    name = "dsa" if order == "remote-first" else "glm"
    model, expected = model_of(name), transformers_tokens(name)
    base, *tails = random_prompts(44, (70, 40, 50))
    branches = [base + tail for tail in tails]
    expected_base, *expected_branches = references.greedy(model.path, [base, *branches], NEW_TOKENS).tokens
    prefill = {**seeds_launch(order, tmp_path / "store"), **CHUNKED, **CACHED}
    decode = {**remote("consumer", free_port()), **sparse(buffer=32), **CHUNKED, **CACHED}
    decode["kv_transfer_config"]["kv_connector"] = "SfaRemoteD2HConnector"
    with Fleet(model, tmp_path) as fleet:
        pair = fleet.pair(*fleet.start(("prefill", prefill, "0"), ("decode", decode, "1")))

        assert pair.ask(model.prompts, NEW_TOKENS) == expected
        assert len(pair.adverts) == len(PULLED)

        # Decode has all of it: nobody is asked.
        assert pair.ask(model.prompts, NEW_TOKENS) == expected
        assert len(pair.adverts) == len(PULLED)

        # Decode has part of it: the rest is sent, and prefill's own hit of `base` with it.
        assert pair.ask([base], NEW_TOKENS) == [expected_base]
        assert pair.ask(branches, NEW_TOKENS) == expected_branches
        new = pair.adverts[len(PULLED) + 1 :]
        assert [advert["first_block"] for advert in new] == [len(base) // BLOCK_SIZE] * len(branches)
        assert min(cached_at_prefill(pair, new)) >= len(base) // BLOCK_SIZE * BLOCK_SIZE
        check_pulled(pair, model)

        # Decode has forgotten it, prefill has not.
        assert_at_rest(pair.decode)
        assert pair.decode.call("forget_prefixes")
        seen = len(pair.adverts)
        assert pair.ask(model.prompts, NEW_TOKENS) == expected
        assert cached_at_prefill(pair, pair.adverts[seen:]) == FULL_HIT[-len(PULLED) :]
        check_pulled(pair, model)

        # Both have forgotten it, the store has not.
        pair.forget_prefixes()
        seen, fetched = len(pair.adverts), pair.prefill.statistics()["fetched_blocks"]
        assert pair.ask(model.prompts, NEW_TOKENS) == expected
        assert cached_at_prefill(pair, pair.adverts[seen:]) == FULL_HIT[-len(PULLED) :]
        assert pair.prefill.statistics()["fetched_blocks"] - fetched == sum(FULL_HIT) // BLOCK_SIZE
        check_pulled(pair, model)

        # The store loses what it promised: nothing of that step is sent, decode computes these prompts.
        pair.forget_prefixes()
        pulled, sent = pair.decode.statistics(), pair.prefill.statistics()
        pair.prefill.call("lose", ONLY_RANK)
        assert pair.ask(model.prompts, NEW_TOKENS) == expected
        pair.prefill.call("lose", None)
        assert_at_rest(pair.prefill, pair.decode)
        lost = pair.prefill.statistics()["sends_aborted"] - sent["sends_aborted"]
        assert lost > 0
        assert pair.prefill.statistics()["failed_blocks"] > 0
        after = pair.decode.statistics()
        assert after["pulls_failed"] - pulled["pulls_failed"] == lost
        assert after["pulls_done"] - pulled["pulls_done"] == len(PULLED) - lost

        # And what was computed meanwhile is sound wherever it is kept.
        pair.forget_prefixes()
        assert pair.ask(model.prompts, NEW_TOKENS) == expected
        assert_at_rest(pair.prefill, pair.decode)
