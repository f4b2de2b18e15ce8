"""What a launch gets wrong: refused while the engine starts, by name, and nothing is left behind."""

from __future__ import annotations

import json
import os
import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest
from checks import NEW_TOKENS, ModelOf, TransformersTokens
from engines import BLOCK_SIZE, clean_up, kvstrata_config, layerwise, open_engine, shared_memory
from models import Model

from kvstrata.store.local import LocalStore

GIB = 1 << 30
CHUNKED = {"max_num_batched_tokens": 48}


def extra(**knobs: Any) -> dict[str, Any]:
    """Arguments whose `kv_connector_extra_config` is exactly this."""
    return {
        "kv_transfer_config": {
            "kv_connector": "KVStrataConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": knobs,
        }
    }


def named(connector: str, extra_config: dict[str, Any] | None = None) -> dict[str, Any]:
    return {
        "kv_transfer_config": {
            "kv_connector": connector,
            "kv_role": "kv_both",
            "kv_connector_extra_config": extra_config or {},
        }
    }


def chain(error: BaseException) -> str:
    """The texts of an error and of all it came from; vLLM wraps some in its own."""
    texts = []
    link: BaseException | None = error
    while link is not None:
        texts.append(f"{type(link).__name__}: {link}")
        link = link.__cause__ or link.__context__
    return "\n".join(texts)


def refusal(model: Model, **arguments: Any) -> str:
    """Start an engine that must not start; return its words, once it is certain that nothing is left."""
    memory = shared_memory()
    threads = set(threading.enumerate())
    text = ""
    try:
        with open_engine(model, **arguments):
            pass
    except Exception as error:
        text = chain(error)
    finally:
        clean_up()
    assert text, f"the engine started with {arguments}"
    assert shared_memory() <= memory
    left = {thread.name for thread in set(threading.enumerate()) - threads if thread.is_alive()}
    assert not {name for name in left if "kvstrata" in name}, left
    return text


@pytest.fixture(scope="module", autouse=True)
def _a_good_engine_starts_afterwards(model_of: ModelOf, transformers_tokens: TransformersTokens) -> Any:
    """After all refusals of this module, in the same process."""
    yield
    model = model_of("dsa")
    with open_engine(model, **layerwise(shared=2), **CHUNKED) as engine:
        assert engine.ask(model.prompts, NEW_TOKENS).tokens == transformers_tokens("dsa")


CONFIGURATIONS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "flag-as-text": (extra(use_layerwise="false"), ["use_layerwise='false'", "str", "without quotes"]),
    "float-for-integer": (
        extra(use_layerwise=True, layerwise_num_shared_buffers=2.0),
        ["layerwise_num_shared_buffers=2.0", "float", "integer"],
    ),
    "below-range": (
        extra(use_layerwise=True, layerwise_num_shared_buffers=0),
        ["layerwise_num_shared_buffers=0", "at least 1"],
    ),
    "position-beyond-the-model": (
        extra(use_layerwise=True, layerwise_num_shared_buffers=2, layerwise_independent_layers=[9]),
        ["layerwise_independent_layers", "9"],
    ),
    "no-effect": (
        extra(layerwise_num_shared_buffers=2),
        ["layerwise_num_shared_buffers=2", "use_layerwise"],
    ),
    "unknown-key": (
        extra(use_layerwise=True, layerwise_shared_buffers=2),
        ["'layerwise_shared_buffers'", "did you mean 'layerwise_num_shared_buffers'"],
    ),
    "knob-of-another-backend": (extra(store_address="h:1"), ["store_address='h:1'", "'local'"]),
    "negative-size": (extra(store_size_GB=-1), ["store_size_GB=-1", "above 0"]),
    "unknown-own-key": (kvstrata_config(indexer_dtype="int8"), ["'indexer_dtype'", "indexer_cache_dtype"]),
    "kvpp": ({"additional_config": {"enable_kvpp": True}}, ["enable_kvpp=true"]),
    "remote-connector": (named("SfaRemoteD2HConnector"), ["SfaRemoteD2HConnector", "kv_port"]),
    "two-of-ours": (
        named(
            "MultiConnector",
            {
                "connectors": [
                    {
                        "kv_connector": name,
                        "kv_role": "kv_both",
                        "kv_connector_extra_config": {"backend": "none"},
                    }
                    for name in ("KVStrataConnector", "AscendStoreConnector")
                ]
            },
        ),
        ["KVStrataConnector", "AscendStoreConnector", "exactly one"],
    ),
}


@pytest.mark.parametrize(("arguments", "words"), CONFIGURATIONS.values(), ids=CONFIGURATIONS.keys())
def test_a_bad_configuration_is_named(arguments: dict[str, Any], words: list[str], model_of: ModelOf) -> None:
    text = refusal(model_of("dsa"), **arguments)
    assert [word for word in words if word not in text] == [], text


def test_a_budget_below_one_block_is_named(model_of: ModelOf) -> None:
    model = model_of("dsa")
    block_bytes = 3 * (model.cache.main_page_bytes(BLOCK_SIZE) + model.cache.index_page_bytes(BLOCK_SIZE))
    text = refusal(model, **layerwise(shared=2), kv_cache_memory_bytes=block_bytes - 1)
    assert str(block_bytes) in text
    assert str(block_bytes - 1) in text


def test_more_blocks_than_fit_are_named(model_of: ModelOf) -> None:
    model = model_of("dsa")
    block_bytes = 3 * (model.cache.main_page_bytes(BLOCK_SIZE) + model.cache.index_page_bytes(BLOCK_SIZE))
    text = refusal(
        model, **layerwise(shared=2), kv_cache_memory_bytes=40 * block_bytes, num_gpu_blocks_override=41
    )
    assert "num_gpu_blocks_override" in text
    assert "41" in text
    assert "40" in text


def test_too_little_host_memory_is_named(model_of: ModelOf) -> None:
    text = refusal(model_of("dsa"), **layerwise(shared=2, host_memory_GB=1e-6))
    assert "host_memory_GB" in text
    assert str(int(1e-6 * GIB)) in text


def test_host_memory_bounds_the_blocks(model_of: ModelOf, transformers_tokens: TransformersTokens) -> None:
    """Above the limit of one block it is no error: there are fewer blocks."""
    model = model_of("dsa")
    with open_engine(model, **layerwise(shared=2, host_memory_GB=8 / 1024), **CHUNKED) as engine:
        statistics = engine.statistics()
        assert engine.ask(model.prompts, NEW_TOKENS).tokens == transformers_tokens("dsa")
    # Slots [0] [1 3] [2]: only layers 1 and 3 lose their buffer to each other and have a home.
    page_bytes = 2 * (model.cache.main_page_bytes(BLOCK_SIZE) + model.cache.index_page_bytes(BLOCK_SIZE))
    assert statistics["host_pool_bytes"] <= 8 << 20, "more host memory than the user gave"
    assert statistics["host_pool_bytes"] + 2 * page_bytes > 8 << 20
    assert statistics["num_blocks"] in ((8 << 20) // page_bytes, (8 << 20) // page_bytes - 1)


def test_a_model_without_mla_is_named(model_of: ModelOf) -> None:
    llama = model_of("llama")
    text = refusal(llama, **layerwise(shared=2))
    assert str(llama.path) in text
    assert "MLA" in text


def spoil(kind: str, path: Path) -> None:
    """Damage the store in `path`."""
    record = path / "kvstrata-store.json"
    if kind == "corrupt":
        record.write_text("{not json")
    elif kind == "other-version":
        record.write_text(json.dumps(json.loads(record.read_text()) | {"version": 99}))
    else:
        assert kind == "truncated"
        os.truncate(path / "kvstrata-arena.bin", 4096)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("corrupt", ["corrupt", "kvstrata store clear"]),
        ("other-version", ["99", "kvstrata store clear"]),
        ("truncated", ["corrupt", "kvstrata store clear"]),
    ],
)
def test_a_store_that_cannot_be_read_is_named(
    kind: str, words: list[str], tmp_path: Path, model_of: ModelOf
) -> None:
    """Nothing of it is touched: its owner decides."""
    LocalStore.open(tmp_path, size_bytes=int(0.2 * GIB)).close()
    spoil(kind, tmp_path)
    before = {file: file.stat().st_mtime_ns for file in tmp_path.glob("kvstrata-*") if file.is_file()}
    text = refusal(model_of("dsa"), **layerwise(shared=2, backend="local", store_path=str(tmp_path)))
    assert [word for word in [*words, str(tmp_path)] if word not in text] == [], text
    assert before == {file: file.stat().st_mtime_ns for file in before}


@pytest.mark.parametrize(
    "place", ["/proc/kvstrata-store", "/dev/null/store"], ids=["read-only", "no-directory"]
)
def test_a_store_directory_that_cannot_be_written_is_named(place: str, model_of: ModelOf) -> None:
    text = refusal(model_of("dsa"), **layerwise(shared=2, backend="local", store_path=place))
    assert f"store_path={place}" in text


def test_a_store_larger_than_its_file_system_is_named(model_of: ModelOf) -> None:
    """The room it took is given back."""
    free = os.statvfs("/dev/shm")
    too_many_gb = free.f_bavail * free.f_frsize / GIB * 2 + 1
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="kvstrata-test-") as directory:
        path = Path(directory) / "store"
        options = {"backend": "local", "store_path": str(path), "store_size_GB": too_many_gb}
        text = refusal(model_of("dsa"), **layerwise(shared=2, **options))
        assert not [file for file in path.glob("*") if file.is_file() and file.stat().st_size > 0]
    assert f"store_path={path}" in text
    assert "store_size_GB" in text


def test_another_size_of_a_store_is_named(tmp_path: Path, model_of: ModelOf) -> None:
    LocalStore.open(tmp_path, size_bytes=GIB // 8).close()
    text = refusal(
        model_of("dsa"),
        **layerwise(shared=2, backend="local", store_path=str(tmp_path), store_size_GB=0.25),
    )
    assert "store_size_GB" in text
    assert "0.125" in text
    assert "0.25" in text


def test_a_block_larger_than_the_store_is_named(tmp_path: Path, model_of: ModelOf) -> None:
    """A store that could never take one object would only ever miss."""
    model = model_of("dsa")
    size_bytes = model.cache.plain_block_bytes(BLOCK_SIZE) // 2
    text = refusal(
        model,
        **layerwise(shared=2, backend="local", store_path=str(tmp_path), store_size_GB=size_bytes / GIB),
    )
    assert "store_size_GB" in text
