"""KVPP on two ranks: each layer's KV persists on one of them, and the answers are those of plain vLLM."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from checks import NEW_TOKENS, ModelOf, PlainAnswers, TransformersTokens, Truth
from engine_process import ProcessAnswer, ask_in_new_process
from engines import BLOCK_SIZE, MIB, engine_arguments, kvpp, layerwise, sparse
from models import Model, ledger, random_prompts
from pd import Fleet, advertised_blocks, assert_at_rest, free_port, remote

pytestmark = pytest.mark.whole_machine

CHUNKED = {"max_num_batched_tokens": 48}
TWO_RANKS = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}
FULL_HIT = [0, 0, 48, 128, 240]
PULLED = 3  # of the model's prompts: the others have a block at most
FEW_BYTES = 8 * MIB  # a few prompts: blocks are reused from batch to batch
MTP = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 2}}


def bundle_bytes(model: Model, layer: int) -> int:
    indexer = model.cache.index_page_bytes(BLOCK_SIZE) if layer in model.cache.index_layers else 0
    return model.cache.main_page_bytes(BLOCK_SIZE) + indexer


def check_ranks(model: Model, answer: ProcessAnswer, budget_bytes: int) -> None:
    """Both ranks hold what the formula gives (A1, A3), and the plan is what fits the fuller one."""
    layers = range(model.cache.layers)
    split = -(-len(layers) // 2)
    ranks = sorted(answer.statistics, key=lambda rank: str(rank["rank"]))
    largest = max(bundle_bytes(model, layer) for layer in layers)
    blocks = []
    for rank, own in zip(ranks, (layers[:split], layers[split:]), strict=True):
        physical = sum(bundle_bytes(model, layer) for layer in own) + 2 * largest
        assert rank["owned_layers"] == list(own)
        assert rank["physical_page_bytes"] == physical
        assert rank["num_blocks"] == answer.num_blocks
        assert rank["device_bytes"] == physical * answer.num_blocks <= budget_bytes
        blocks.append(budget_bytes // physical)
    assert answer.num_blocks == min(blocks)


def check_broadcasts(model: Model, answer: ProcessAnswer, *, forwards: int) -> None:
    """Each layer travelled once in every forward that had history, from its owner."""
    ranks = sorted(answer.statistics, key=lambda rank: str(rank["rank"]))
    for rank in ranks:
        assert rank["broadcasts"] == forwards * len(rank["owned_layers"])
        assert rank["broadcast_bytes"] > 0
        assert rank["loaded_bytes"] == sum(r["broadcast_bytes"] for r in ranks) - rank["broadcast_bytes"]


@pytest.mark.parametrize(
    ("own", "more"),
    [
        pytest.param(
            {"kvpp_transport": "shm"},
            {},
            id="shm",
            marks=pytest.mark.features("kvpp", "tp", "chunked", "prefix"),
        ),
        pytest.param(
            {"kvpp_transport": "collective"},
            {"async_scheduling": True},
            id="collective-async",
            marks=pytest.mark.features("kvpp", "tp", "chunked", "prefix", "async"),
        ),
        pytest.param(
            {"kvpp_broadcast": "all"},
            {"enforce_eager": False},
            id="all-compiled",
            marks=pytest.mark.features("kvpp", "tp", "chunked", "prefix", "compiled"),
        ),
        pytest.param(
            {"kvpp_transport": "collective", "kvpp_broadcast": "all"},
            {},
            id="collective-all",
            marks=pytest.mark.features("kvpp", "tp", "chunked", "prefix"),
        ),
    ],
)
def test_kvpp_is_exact_and_holds_what_the_formula_says(
    own: dict[str, Any],
    more: dict[str, Any],
    tmp_path: Path,
    model_of: ModelOf,
    plain: PlainAnswers,
    transformers_tokens: TransformersTokens,
) -> None:
    """Chunked prompts and decode, prefix hits, blocks that go to other requests, and the first ones again.

    Six layers, so that three of the other rank's share two scratch buffers; IndexShare, so that bundles
    differ in size.
    """
    name = "glm"
    model = model_of(name)
    others = random_prompts(71, (200, 220, 240))
    arguments = kvpp(**own) | CHUNKED | more
    answer = ask_in_new_process(
        engine_arguments(model, **arguments, enable_prefix_caching=True, kv_cache_memory_bytes=FEW_BYTES),
        [model.prompts, model.prompts, others, model.prompts],
        NEW_TOKENS,
        directory=tmp_path,
        environment=TWO_RANKS | {"VLLM_USE_BREAKABLE_CUDAGRAPH": "0", "VLLM_CPU_CI_ENV": "1"},
    )
    expected = transformers_tokens(name)
    assert answer.tokens[0] == answer.tokens[1] == answer.tokens[3] == expected == plain(name).tokens
    assert answer.cached_tokens[:2] == [[0, 0, 0, 0, 0], FULL_HIT]
    assert sum(answer.cached_tokens[3]) < sum(FULL_HIT), "no block was reused"
    check_ranks(model, answer, FEW_BYTES)
    if own.get("kvpp_broadcast") != "all":
        forwards = answer.statistics[0]["broadcasts"] // len(answer.statistics[0]["owned_layers"])
        check_broadcasts(model, answer, forwards=forwards)


def test_kvpp_without_broadcasts_is_wrong(tmp_path: Path, model_of: ModelOf, plain: PlainAnswers) -> None:
    """The negative control: what a rank reads of the other's layers is what passed its scratch last."""
    model = model_of("glm")
    answer = ask_in_new_process(
        engine_arguments(model, **kvpp(fault="skip_loads"), **CHUNKED),
        [model.prompts],
        NEW_TOKENS,
        directory=tmp_path,
        environment=TWO_RANKS,
    )
    changed = sum(a != b for a, b in zip(answer.tokens[0], plain("glm").tokens, strict=True))
    assert changed >= sum(len(prompt) > BLOCK_SIZE for prompt in model.prompts)


@pytest.mark.features("kvpp", "tp", "mtp", "li-c8", "sfa-c8", "chunked", "prefix")
@pytest.mark.features("kvpp", "tp", "layerwise", "mtp", "li-c8", "sfa-c8", "chunked", "prefix")
def test_kvpp_with_drafts_and_both_caches_quantised(tmp_path: Path, model_of: ModelOf) -> None:
    """MTP with two drafts, LI-C8 and SFA-C8: the tokens of one rank with the same caches and no drafts.

    Then with a single layer buffer, which a draft layer must not be put into: nobody would bring it back.
    """
    model = model_of("tiny-dsv32-mtp")
    book = ledger(seed=1)
    new_tokens = len(book.answers[0])
    own = {"indexer_cache_dtype": "int8", "main_cache_dtype": "int8"}
    chunked = {"max_num_batched_tokens": 96}
    alone = ask_in_new_process(
        engine_arguments(model, additional_config={"kvstrata": own}, **chunked),
        [book.prompts],
        new_tokens,
        directory=tmp_path / "alone",
    )
    for name, buffers in (("scratch", {}), ("one-buffer", layerwise(shared=1))):
        answer = ask_in_new_process(
            engine_arguments(model, **kvpp(**own), **buffers, **MTP, **chunked, enable_prefix_caching=True),
            [book.prompts, book.prompts],
            new_tokens,
            directory=tmp_path / name,
            environment=TWO_RANKS,
        )
        assert answer.tokens[0] == answer.tokens[1] == alone.tokens[0], name
        assert sum(answer.cached_tokens[1]) > 0
        assert min(rank["broadcast_bytes"] for rank in answer.statistics) > 0


@pytest.mark.parametrize(
    ("parallel", "threads"),
    [
        pytest.param({"tensor_parallel_size": 4}, "0|0|1|1", id="tp4"),
        pytest.param(
            {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
            "0|0|1|1",
            id="tp2-pp2",
            marks=pytest.mark.features("kvpp", "tp", "pp", "chunked"),
        ),
    ],
)
def test_kvpp_on_four_ranks(
    parallel: dict[str, int], threads: str, tmp_path: Path, model_of: ModelOf, truth: Truth
) -> None:
    """Short prompts: four ranks take turns on two cores."""
    model = model_of("glm")
    prompts = random_prompts(83, (70, 40))
    answer = ask_in_new_process(
        engine_arguments(model, **(kvpp() | parallel), **CHUNKED),
        [prompts],
        4,
        directory=tmp_path,
        environment={"VLLM_CPU_OMP_THREADS_BIND": threads},
    )
    assert answer.tokens[0] == truth("glm", prompts, 4).tokens
    owned = [rank["owned_layers"] for rank in answer.statistics]
    assert sorted(layer for layers in owned for layer in layers) == list(range(6))
    assert len({rank["num_blocks"] for rank in answer.statistics}) == 1


@pytest.mark.features("kvpp", "tp", "layerwise", "store", "chunked", "prefix")
def test_kvpp_with_layer_buffers_and_a_store_is_exact(
    tmp_path: Path, model_of: ModelOf, transformers_tokens: TransformersTokens, truth: Truth
) -> None:
    """Homes are the owners' host pools, and only they save and load. The store is filled, hit, and loses a
    rank's part of a prefix, which is then computed again."""
    model = model_of("glm")
    base, *tails = random_prompts(44, (70, 40, 50))
    branches = [base + tail for tail in tails]
    stored = layerwise(shared=2, backend="local", store_path=str(tmp_path / "store"))
    answer = ask_in_new_process(
        engine_arguments(model, **kvpp(), **stored, max_num_batched_tokens=256),
        [model.prompts, model.prompts, [base], branches, branches],
        NEW_TOKENS,
        directory=tmp_path / "job",
        lose={3: "tp1of2"},
        environment=TWO_RANKS,
    )
    assert answer.tokens[0] == answer.tokens[1] == transformers_tokens("glm")
    assert answer.cached_tokens[:3] == [[0, 0, 0, 0, 0], FULL_HIT, [0]]
    assert answer.tokens[3] == answer.tokens[4] == truth("glm", branches).tokens
    bundles = [bundle_bytes(model, layer) for layer in range(model.cache.layers)]
    for rank in answer.statistics:
        own = sum(bundles[layer] for layer in rank["owned_layers"])
        assert rank["fetched_bytes"] == rank["fetched_blocks"] * own > 0, "it reads its own layers only"
        assert rank["put_bytes"] == rank["put_blocks"] * own > 0
        assert rank["saved_bytes"] > 0
        assert (rank["failed_blocks"] > 0) == ("tp1of2" in rank["rank"])
    assert sum(rank["host_pool_bytes"] for rank in answer.statistics) < 1.5 * answer.num_blocks * sum(bundles)


@pytest.mark.features("prefill", "kvpp", "tp", "layerwise", "chunked")
@pytest.mark.features("prefill", "kvpp", "tp", "chunked")
@pytest.mark.features("decode", "sparse")
@pytest.mark.features("decode")
def test_decode_reads_each_layer_out_of_its_owners_memory(
    tmp_path: Path, model_of: ModelOf, transformers_tokens: TransformersTokens
) -> None:
    """From owners' device memory, then from owners' host pools."""
    model, expected = model_of("glm"), transformers_tokens("glm")
    block_bytes = sum(bundle_bytes(model, layer) for layer in range(model.cache.layers))
    buffers = {"use_layerwise": True, "layerwise_num_shared_buffers": 2}
    with Fleet(model, tmp_path) as fleet:
        receivers = fleet.start(
            ("sparse", {**remote("consumer", free_port()), **sparse(buffer=32)}, "0"),
            ("plain", remote("consumer", free_port()), "1"),
        )
        pulled_bytes = dict.fromkeys(receivers, 0)
        for name, more in (("on-device", {}), ("in-host-pool", buffers)):
            prefill = {**remote("producer", **more), **kvpp(), **CHUNKED}
            (sender,) = fleet.start((name, prefill, "0|1"))
            for asked, receiver in enumerate(receivers, 1):
                pair = fleet.pair(sender, receiver)
                assert pair.ask(model.prompts, NEW_TOKENS) == expected
                assert_at_rest(sender, receiver)
                assert sender.statistics()["sends_done"] == asked * 2 * PULLED
                statistics = receiver.statistics()
                pulled_bytes[receiver] += advertised_blocks(pair.adverts) * block_bytes
                assert statistics["pulled_bytes"] == pulled_bytes[receiver]
                assert statistics["bad_messages"] == 0
                pair.forget_prefixes()
            sender.close()
