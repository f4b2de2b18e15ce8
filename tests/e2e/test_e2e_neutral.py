"""kvstrata where it was not asked for, and beside other connectors of vLLM."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from checks import NEW_TOKENS, ModelOf, PlainAnswers, TransformersTokens, assert_exact
from engine_process import ask_in_new_process
from engines import engine_arguments, open_engine

CHUNKED = {"max_num_batched_tokens": 48}


def test_another_model_is_served_by_vllm_alone(
    tmp_path: Path, model_of: ModelOf, transformers_tokens: TransformersTokens
) -> None:
    """A dense model with the plugin, and with the plugin shut out: the same tokens by the same code."""
    model = model_of("llama")
    with_plugin, without = (
        ask_in_new_process(
            engine_arguments(model, block_size=32, **CHUNKED),
            [model.prompts],
            NEW_TOKENS,
            directory=tmp_path / str(at),
            environment=environment,
            imports_anew="VLLM_PLUGINS" in environment,
        )
        for at, environment in enumerate(({}, {"VLLM_PLUGINS": "none-of-them"}))
    )
    assert with_plugin.tokens == without.tokens == [transformers_tokens("llama")]
    assert with_plugin.platform == "KVStrataCpuPlatform"
    assert without.platform == "CpuPlatform"
    assert with_plugin.worker == without.worker == "vllm.v1.worker.cpu_worker.CPUWorker"
    assert with_plugin.attention == without.attention
    assert with_plugin.attention
    assert all(module.startswith("vllm.") for module in with_plugin.attention)
    assert with_plugin.num_blocks == without.num_blocks


def multi(*children: dict[str, Any]) -> dict[str, Any]:
    return {
        "kv_transfer_config": {
            "kv_connector": "MultiConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"connectors": list(children)},
        }
    }


def child(name: str, **extra: Any) -> dict[str, Any]:
    return {"kv_connector": name, "kv_role": "kv_both", "kv_connector_extra_config": extra}


@pytest.mark.features("layerwise", "store", "chunked")
@pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside-another"])
def test_the_seeds_connector_works_inside_multi_connector(
    beside: bool,
    tmp_path: Path,
    model_of: ModelOf,
    plain: PlainAnswers,
    transformers_tokens: TransformersTokens,
) -> None:
    """A child of vLLM's own may stand behind it and watch; it finds no hits that kvstrata did not find."""
    model = model_of("dsa")
    store = child(
        "AscendStoreConnector",
        use_layerwise=True,
        layerwise_num_shared_buffers=2,
        backend="local",
        store_path=str(tmp_path / "store"),
        store_size_GB=0.2,
    )
    other = child("ExampleConnector", shared_storage_path=str(tmp_path / "example"))
    with open_engine(model, **multi(store, *([other] if beside else [])), **CHUNKED) as engine:
        first = engine.ask(model.prompts, NEW_TOKENS)
        second = engine.ask(model.prompts, NEW_TOKENS)
        statistics = engine.statistics()
    for got in (first, second):
        assert_exact(got, plain("dsa"), transformers_tokens("dsa"))
    assert second.cached_tokens == [0, 0, 48, 128, 240]
    assert statistics["loaded_bytes"] > 0
    assert statistics["fetched_blocks"] > 0
    if beside:
        assert list((tmp_path / "example").rglob("*.safetensors")), "the other connector saved nothing"
