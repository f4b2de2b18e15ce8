"""SFA-C8 main rows in engines, against transformers whose cached latents are rounded by a few lines of torch.

A last bit of float32 can move a rounded value by a whole step, so log-probabilities are near, not equal: at
least three times as near as those of latents that are not rounded. Prompts are such that noise in the last
bits moves no step of the reference near a tie; the seeded random models need short ones for that.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import references
from checks import ModelOf, assert_same_bits, count_changed
from engines import BLOCK_SIZE, ROOMY_BYTES, Outcome, kvstrata_config, layerwise, open_engine, sparse
from models import Model, ledger, random_prompts
from references import Reference

INT8 = {"main_cache_dtype": "int8"}
CHUNKED = {"max_num_batched_tokens": 32}
NEW_TOKENS = 8
DECISIVE = 0.04  # smallest gap between the best two logits of the reference, over all steps
SEEDED_PROMPTS = {"dense-small-head": (35, (5, 20, 50)), "dsa": (8, (5, 13, 23))}
TRAINED, DRAFTING = "tiny-dsv32", "tiny-dsv32-mtp"
MTP = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 2}}
# Values, scales, rope part in float32: 512 latent values have four scales, 64 have one.
ROW_BYTES = {"dense-small-head": 64 + 4 + 16 * 4, "dsa": 512 + 16 + 64 * 4, TRAINED: 512 + 16 + 64 * 4}

ReferencesOf = Callable[[str], tuple[Reference, Reference]]


def round_latents(model: Any) -> None:
    """Let a transformers model cache, and attend to, latents that went through int8 and back."""

    def rounded(module: Any, given: Any, latent: Any) -> Any:
        rank = latent.shape[-1]
        groups = latent.unflatten(-1, (-1, 128 if rank % 128 == 0 else rank))
        scale = groups.abs().amax(dim=-1, keepdim=True) / 127
        return ((groups / scale).round() * scale).flatten(-2)

    layers = [module for name, module in model.named_modules() if name.endswith(".kv_a_layernorm")]
    assert len(layers) == model.config.num_hidden_layers
    for layer in layers:
        layer.register_forward_hook(rounded)


@pytest.fixture(scope="module")
def model_with_prompts(model_of: ModelOf) -> ModelOf:
    """Return a model with the prompts of this module: of the trained one, six questions on one context."""

    def get(name: str) -> Model:
        if name in (TRAINED, DRAFTING):
            prompts = ledger(seed=1).prompts[:6]
        else:
            prompts = tuple(map(tuple, random_prompts(*SEEDED_PROMPTS[name])))
        return dataclasses.replace(model_of(name), prompts=prompts)

    return get


@pytest.fixture(scope="module")
def references_of(model_with_prompts: ModelOf) -> ReferencesOf:
    """Return what transformers answers with rounded latents, and without; computed once a model."""
    found: dict[str, tuple[Reference, Reference]] = {}

    def get(name: str) -> tuple[Reference, Reference]:
        if name not in found:
            model = model_with_prompts(name)
            rounded, plain = (
                references.greedy(model.path, model.prompts, NEW_TOKENS, change=change)
                for change in (round_latents, None)
            )
            assert rounded.smallest_gap > DECISIVE
            found[name] = rounded, plain
        return found[name]

    return get


def distance(got: Outcome, reference: Reference) -> float:
    """Mean difference of log-probabilities of the best tokens, over all steps."""
    pairs = [
        (a, b)
        for got_row, row in zip(got.logprobs, reference.logprobs, strict=True)
        for a, b in zip(got_row, row, strict=True)
    ]
    return sum(abs(a - b) for a, b in pairs) / len(pairs)


def assert_rounded(got: Outcome, expected: tuple[Reference, Reference]) -> None:
    """The answers are those of rounded latents, and could not be those of others."""
    rounded, plain = expected
    assert got.tokens == rounded.tokens
    assert 3 * distance(got, rounded) < distance(got, plain)


@pytest.mark.features("sfa-c8", "chunked")
@pytest.mark.parametrize("name", ["dense-small-head", "dsa", TRAINED])
def test_int8_main_rows_answer_as_transformers_with_rounded_latents_and_not_without(
    name: str, model_with_prompts: ModelOf, references_of: ReferencesOf
) -> None:
    model = model_with_prompts(name)
    with open_engine(model, **kvstrata_config(**INT8), **CHUNKED) as engine:
        got = engine.ask(model.prompts, NEW_TOKENS)
        num_blocks = engine.num_blocks()
    assert_rounded(got, references_of(name))
    shape = model.cache
    index_bytes = len(shape.index_layers) * shape.index_page_bytes(BLOCK_SIZE)
    assert num_blocks == ROOMY_BYTES // (shape.layers * BLOCK_SIZE * ROW_BYTES[name] + index_bytes)


def test_rows_of_the_models_dtype_are_not_taken_for_rounded_ones(
    model_with_prompts: ModelOf, references_of: ReferencesOf
) -> None:
    model = model_with_prompts("dsa")
    with open_engine(model, **CHUNKED) as engine:
        got = engine.ask(model.prompts, NEW_TOKENS)
    rounded, plain = references_of("dsa")
    assert got.tokens == plain.tokens != rounded.tokens
    with pytest.raises(AssertionError):
        assert_rounded(got, (rounded, plain))


@pytest.mark.features("layerwise", "store", "sfa-c8", "chunked")
@pytest.mark.parametrize("name", ["dense-small-head", "dsa"])
def test_int8_main_rows_under_layerwise_offload_and_from_the_store_answer_the_same(
    name: str, tmp_path: Path, model_with_prompts: ModelOf, references_of: ReferencesOf
) -> None:
    model = model_with_prompts(name)
    offload = layerwise(shared=2, backend="local", store_path=str(tmp_path))
    with open_engine(model, **offload, **kvstrata_config(**INT8), **CHUNKED) as engine:
        got = engine.ask(model.prompts, NEW_TOKENS)
        again = engine.ask(model.prompts, NEW_TOKENS)
        engine.check_integrity()
        statistics = engine.statistics()
    assert_rounded(got, references_of(name))
    assert_rounded(again, references_of(name))
    assert again.cached_tokens == [(len(prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE for prompt in model.prompts]
    assert statistics["loaded_bytes"] > 0
    index_bytes = len(model.cache.index_layers) * model.cache.index_page_bytes(BLOCK_SIZE)
    main_bytes = model.cache.layers * BLOCK_SIZE * ROW_BYTES[name]
    assert statistics["logical_page_bytes"] == main_bytes + index_bytes


def test_int8_main_rows_under_layerwise_offload_without_loads_are_wrong(
    model_with_prompts: ModelOf, references_of: ReferencesOf
) -> None:
    model = model_with_prompts("dense-small-head")
    broken = kvstrata_config(**INT8, fault="skip_loads")
    with open_engine(model, **layerwise(shared=2), **broken, **CHUNKED) as engine:
        got = engine.ask(model.prompts, NEW_TOKENS)
    assert count_changed(got, references_of("dense-small-head")[0]) >= 2


@pytest.mark.features("sparse", "sfa-c8", "chunked")
def test_int8_main_rows_under_sparse_offload_answer_the_same(
    model_with_prompts: ModelOf, references_of: ReferencesOf
) -> None:
    """The trained model: its selections leave most of a context out."""
    model = model_with_prompts(TRAINED)
    with open_engine(model, **sparse(buffer=64, prompt_window_tokens=64, **INT8), **CHUNKED) as engine:
        got = engine.ask(model.prompts, NEW_TOKENS)
        engine.check_integrity()
        statistics = engine.statistics()
    assert_rounded(got, references_of(TRAINED))
    assert statistics["prompt_loaded_bytes"] > 0
    assert statistics["missed_rows"] > 0
    assert statistics["miss_bytes"] == statistics["missed_rows"] * ROW_BYTES[TRAINED]


def test_int8_main_rows_under_sparse_offload_that_are_stale_are_wrong(
    model_with_prompts: ModelOf, references_of: ReferencesOf
) -> None:
    model = model_with_prompts(TRAINED)
    with open_engine(model, **sparse(buffer=64, fault="stale_rows", **INT8), **CHUNKED) as engine:
        got = engine.ask(model.prompts, NEW_TOKENS)
    assert count_changed(got, references_of(TRAINED)[0]) >= 3


@pytest.mark.features("sparse", "sfa-c8", "bf16")
def test_int8_main_rows_of_a_bfloat16_model_are_the_same_bits_under_sparse_offload(
    model_with_prompts: ModelOf,
) -> None:
    """Rope parts are bfloat16 there, and prompts are attended to in float32. All pass in one chunk each."""
    model = model_with_prompts(TRAINED)
    arguments = {"dtype": "bfloat16", "max_num_batched_tokens": sum(map(len, model.prompts))}
    with open_engine(model, **kvstrata_config(**INT8), **arguments) as engine:
        unoffloaded = engine.ask(model.prompts, NEW_TOKENS)
    with open_engine(model, **sparse(buffer=64, **INT8), **arguments) as engine:
        got = engine.ask(model.prompts, NEW_TOKENS)
        statistics = engine.statistics()
    assert_same_bits(got, unoffloaded)
    assert statistics["missed_rows"] > 0


@pytest.mark.features("sparse", "sfa-c8", "mtp")
def test_int8_main_rows_of_a_draft_layer_too_answer_the_same(
    model_with_prompts: ModelOf, references_of: ReferencesOf
) -> None:
    """A draft layer's wrong rows only cost accepted drafts, so some must be accepted."""
    model = model_with_prompts(DRAFTING)
    with open_engine(model, **sparse(buffer=64, **INT8), **MTP, max_num_batched_tokens=96) as engine:
        got = engine.ask(model.prompts, NEW_TOKENS)
        engine.check_integrity()
        statistics = engine.statistics()
        accepted = engine.counter("vllm:spec_decode_num_accepted_tokens")
    assert_rounded(got, references_of(DRAFTING))
    assert accepted >= len(model.prompts)
    assert statistics["share_groups"] == [[layer] for layer in range(7)], "six layers and the draft layer"
