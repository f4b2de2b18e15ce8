"""What a sparse launch gets wrong: refused by name while the engine starts, and nothing is left behind."""

from __future__ import annotations

from typing import Any

import pytest
from checks import NEW_TOKENS, ModelOf, TransformersTokens
from engines import BLOCK_SIZE, kvstrata_config, open_engine, sparse
from models import FLOAT32_BYTES, Model
from test_e2e_refusals import named, refusal

GIB = 1 << 30
CHUNKED = {"max_num_batched_tokens": 48}


@pytest.fixture(scope="module", autouse=True)
def _a_good_engine_starts_afterwards(model_of: ModelOf, transformers_tokens: TransformersTokens) -> Any:
    """After all refusals of this module, in the same process."""
    yield
    model = model_of("dsa")
    with open_engine(model, **sparse(buffer=32), **CHUNKED) as engine:
        assert engine.ask(model.prompts, NEW_TOKENS).tokens == transformers_tokens("dsa")


def knobs(**values: Any) -> dict[str, Any]:
    """Arguments whose `sparse_kv_offload_config` is exactly this."""
    return {"additional_config": {"sparse_kv_offload_config": values}}


# The models select 32 rows; blocks have 16 tokens.
CONFIGURATIONS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "buffer-below-top-k": (
        sparse(buffer=16),
        ["sparse_kv_offload_config.topk_buffer_size=16", "32 rows", "at least 32"],
    ),
    "buffer-no-multiple-of-the-block": (
        sparse(buffer=40),
        ["sparse_kv_offload_config.topk_buffer_size=40", "block size of 16", "32 or 48"],
    ),
    "buffer-as-text": (sparse(buffer="64"), ["topk_buffer_size='64'", "str", "integer"]),  # type: ignore[arg-type]
    "buffer-without-offload": (
        knobs(topk_buffer_size=64),
        ["topk_buffer_size=64", "sparse_kv_offload_config.enabled=false"],
    ),
    "host-memory-without-offload": (
        knobs(enabled=False, dram_size_per_dp_GB=1.0),
        ["dram_size_per_dp_GB=1.0", "sparse_kv_offload_config.enabled=false"],
    ),
    "device-cache-without-offload": (
        knobs(keep_device_kv_cache=True),
        ["keep_device_kv_cache=True", "sparse_kv_offload_config.enabled=false"],
    ),
    "window-without-offload": (
        kvstrata_config(prompt_window_tokens=64),
        ["kvstrata.prompt_window_tokens=64", "sparse_kv_offload_config.enabled=false"],
    ),
    "fault-without-offload": (
        kvstrata_config(fault="stale_rows"),
        ["stale_rows", "sparse_kv_offload_config.enabled=false"],
    ),
    "unknown-key": (
        knobs(enabled=True, topk_buffer=64),
        ["'topk_buffer'", "did you mean 'topk_buffer_size'"],
    ),
    "another-connector-alone": (
        {**sparse(), **named("ExampleConnector")},
        ["kv_connector='ExampleConnector'", "KVStrataConnector", "MultiConnector"],
    ),
    "remote-connector": (
        {**sparse(), **named("SfaRemoteD2HConnector")},
        ["SfaRemoteD2HConnector", "kv_port"],
    ),
}


@pytest.mark.parametrize(("arguments", "words"), CONFIGURATIONS.values(), ids=CONFIGURATIONS.keys())
def test_a_bad_configuration_is_named(arguments: dict[str, Any], words: list[str], model_of: ModelOf) -> None:
    text = refusal(model_of("dsa"), **arguments)
    assert [word for word in words if word not in text] == [], text


@pytest.mark.parametrize(
    ("name", "words"),
    [("dense", ["sparse_kv_offload_config.enabled", "no sparse attention"]), ("llama", ["no MLA layers"])],
)
def test_a_model_without_sparse_attention_is_named(name: str, words: list[str], model_of: ModelOf) -> None:
    model = model_of(name)
    text = refusal(model, **sparse())
    assert [word for word in [*words, str(model.path)] if word not in text] == [], text


def page_bytes(model: Model) -> int:
    """Host bytes of one block."""
    return model.cache.layers * model.cache.main_page_bytes(BLOCK_SIZE)


def test_a_device_budget_below_one_block_is_named(model_of: ModelOf) -> None:
    """Both numbers and the knobs: hot rows alone take more than there is."""
    model = model_of("dsa")
    hot_bytes = model.cache.layers * 8 * 64 * model.cache.main_row_elements * FLOAT32_BYTES
    text = refusal(model, **sparse(), kv_cache_memory_bytes=hot_bytes)
    for word in (str(hot_bytes), f"{hot_bytes} are available", "max_num_seqs", "topk_buffer_size"):
        assert word in text, text


def test_host_memory_below_one_block_is_named(model_of: ModelOf) -> None:
    model = model_of("dsa")
    size_bytes = page_bytes(model)  # without room for guards
    text = refusal(model, **sparse(dram_gb=size_bytes / GIB))
    for word in ("dram_size_per_dp_GB", f"{size_bytes} are available", "one block needs"):
        assert word in text, text


def test_more_blocks_than_fit_are_named(model_of: ModelOf) -> None:
    model = model_of("dsa")
    text = refusal(
        model,
        **sparse(buffer=32, dram_gb=40.5 * page_bytes(model) / GIB),
        num_gpu_blocks_override=41,
    )
    for word in ("num_gpu_blocks_override", "41", "40"):
        assert word in text, text


def test_a_pool_below_the_longest_request_is_vllms_to_refuse(model_of: ModelOf) -> None:
    """Of 24 blocks vLLM keeps one empty: 368 tokens, and max_model_len is 512."""
    model = model_of("dsa")
    assert model.max_model_len == 512
    text = refusal(model, **sparse(buffer=32, dram_gb=24.5 * page_bytes(model) / GIB))
    assert "max_model_len" in text, text
    assert "estimated maximum model length is 368" in text, text


def test_a_request_longer_than_allowed_is_refused_and_others_go_on(
    model_of: ModelOf, transformers_tokens: TransformersTokens
) -> None:
    from vllm.exceptions import VLLMValidationError

    model = model_of("dsa")
    arguments = sparse(buffer=32, dram_gb=24.5 * page_bytes(model) / GIB)
    with open_engine(model, **arguments, **CHUNKED, max_model_len=288) as engine:
        with pytest.raises(VLLMValidationError, match="maximum context length is 288"):
            engine.ask([[1] * 300], 1)
        assert engine.ask(model.prompts, NEW_TOKENS).tokens == transformers_tokens("dsa")
        engine.check_integrity()
