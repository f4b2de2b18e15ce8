"""Fault 4: keys that leave out a rank dimension, the model or the layout serve one's rows to another."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import PretrainedConfig
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import init_none_hash

from kvstrata.vllm.namespace import all_rank_keys, rank_identity, store_namespace


def launch(model: Path, **changes: Any) -> Any:
    """A launch as far as the namespace looks at it."""
    given = {
        "hf": {"hidden_size": 64, "kv_lora_rank": 32, "num_hidden_layers": 4},
        "dtype": "float32",
        "block_size": 16,
        "cache_dtype": "auto",
        "algo": "sha256",
        "load_format": "auto",
        "quantization": None,
        "revision": None,
        "additional": {},
        "draft": None,
        "sizes": (1, 1, 1, 1, 1),
        "commit": None,
        **changes,
    }
    hf_config = PretrainedConfig(**given["hf"])
    hf_config._commit_hash = given["commit"]
    model_config = SimpleNamespace(
        model=str(model),
        revision=given["revision"],
        hf_config=hf_config,
        dtype=given["dtype"],
        quantization=given["quantization"],
    )
    tp, pp, pcp, dcp, dp = given["sizes"]
    return SimpleNamespace(
        model_config=model_config,
        cache_config=SimpleNamespace(
            block_size=given["block_size"],
            cache_dtype=given["cache_dtype"],
            prefix_caching_hash_algo=given["algo"],
        ),
        load_config=SimpleNamespace(load_format=given["load_format"]),
        speculative_config=given["draft"],
        additional_config=given["additional"],
        kv_transfer_config=None,
        parallel_config=SimpleNamespace(
            tensor_parallel_size=tp,
            pipeline_parallel_size=pp,
            prefill_context_parallel_size=pcp,
            decode_context_parallel_size=dcp,
            data_parallel_size=dp,
            data_parallel_rank=0,
            data_parallel_index=0,
        ),
    )


def make_model(folder: Path, weights: bytes = b"weights") -> Path:
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(weights)
    (folder / "tokenizer.json").write_text("{}")
    return folder


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_model(tmp_path / "model")


def draft(model: Path, method: str = "mtp", **config: Any) -> Any:
    own = launch(model, **config).model_config
    return SimpleNamespace(method=method, model=str(model), draft_model_config=own)


def test_equal_launches_agree(model: Path):
    assert store_namespace(launch(model)) == store_namespace(launch(model))


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "bfloat16"},
        {"block_size": 32},
        {"cache_dtype": "bfloat16"},
        {"algo": "sha256_cbor"},
        {"load_format": "dummy"},
        {"quantization": "fp8"},
        {"revision": "main"},
        {"commit": "0123abc"},
        {"additional": {"kvstrata": {"indexer_cache_dtype": "int8"}}},
        {"additional": {"kvstrata": {"main_cache_dtype": "int8"}}},
        {"additional": {"enable_kvpp": True}},
        {"hf": {"hidden_size": 64, "kv_lora_rank": 32, "num_hidden_layers": 5}},
        {"hf": {"hidden_size": 64, "kv_lora_rank": 32, "num_hidden_layers": 4, "rope_theta": 5}},
    ],
    ids=lambda change: next(iter(change)),
)
def test_fault_4_whatever_changes_the_rows_changes_the_namespace(model: Path, change: dict[str, Any]):
    assert store_namespace(launch(model, **change)) != store_namespace(launch(model))


@pytest.mark.parametrize(
    "change",
    [
        lambda folder: (folder / "model.safetensors").write_bytes(b"other weights"),
        lambda folder: os.utime(folder / "model.safetensors", ns=(1, 1)),
        lambda folder: (folder / "model-2.safetensors").write_bytes(b"more"),
        lambda folder: (folder / "model.safetensors").unlink(),
    ],
    ids=["size", "time", "another file", "a file less"],
)
def test_fault_4_retrained_weights_are_another_model(model: Path, change: Callable[[Path], None]):
    before = store_namespace(launch(model))
    change(model)
    assert store_namespace(launch(model)) != before


def test_files_that_hold_no_weights_do_not_matter(model: Path):
    before = store_namespace(launch(model))
    (model / "README.md").write_text("hello")
    assert store_namespace(launch(model)) == before


def test_fault_5_the_draft_model_counts(model: Path, tmp_path: Path):
    other = make_model(tmp_path / "draft")
    drafts = [None, draft(model), draft(model, "eagle"), draft(other), draft(other, hf={"hidden_size": 8})]
    found = [store_namespace(launch(model, draft=item)) for item in drafts]
    (other / "model.safetensors").write_bytes(b"retrained")
    found.append(store_namespace(launch(model, draft=draft(other))))
    assert len(set(found)) == len(found)
    assert store_namespace(
        launch(model, draft=SimpleNamespace(method="ngram", model=None, draft_model_config=None))
    )


PROGRAM = """
import sys
sys.path.insert(0, {folder!r})
from pathlib import Path
from test_vllm_namespace import launch
from kvstrata.vllm.namespace import store_namespace
print(store_namespace(launch(Path({model!r}))))
"""


def test_another_process_with_the_same_launch_agrees(model: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)  # strings hash at random in every process
    program = PROGRAM.format(folder=str(Path(__file__).parent), model=str(model))
    environment = {**os.environ, "VLLM_LOGGING_LEVEL": "ERROR"}
    run = subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    assert run.stdout.splitlines()[-1] == store_namespace(launch(model))


@pytest.mark.parametrize("seed", [None, "7"])
def test_the_engine_core_and_its_workers_agree(
    model: Path, monkeypatch: pytest.MonkeyPatch, seed: str | None
):
    """Only the engine core's process tells vLLM to seed its hashes, and not before it makes its workers."""
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    unseeded = store_namespace(launch(model))
    if seed is not None:
        monkeypatch.setenv("PYTHONHASHSEED", seed)
    worker = store_namespace(launch(model))
    init_none_hash(sha256)
    try:
        assert store_namespace(launch(model)) == worker, "it would put under keys that nobody asks for"
    finally:
        monkeypatch.undo()
        init_none_hash(sha256)
    assert (worker == unseeded) == (seed is None)


def test_fault_4_every_rank_dimension_is_in_the_key(model: Path):
    sizes = [
        (1, 1, 1, 1, 1),
        (2, 1, 1, 1, 1),
        (1, 2, 1, 1, 1),
        (1, 1, 2, 1, 1),
        (1, 1, 1, 2, 1),
        (1, 1, 1, 1, 2),
    ]
    first = [rank_identity(launch(model, sizes=size), tp_rank=0, pp_rank=0).key() for size in sizes]
    assert len(set(first)) == len(sizes)


def test_a_hit_needs_every_rank_of_this_engine(model: Path):
    config = launch(model, sizes=(2, 3, 1, 1, 1))
    keys = all_rank_keys(config)
    assert len(set(keys)) == 6
    assert set(keys) == {
        rank_identity(config, tp_rank=tp, pp_rank=pp).key() for tp in range(2) for pp in range(3)
    }


def test_fault_4_a_dense_replica_is_rank_0_of_1_whatever_its_index(tmp_path: Path):
    """vLLM sets size and rank back for dense models, and keeps the index."""
    config = launch(tmp_path)
    config.parallel_config.data_parallel_index = 1
    assert rank_identity(config, tp_rank=0, pp_rank=0).key().endswith("dp0of1")
    assert all_rank_keys(config) == (rank_identity(config, tp_rank=0, pp_rank=0).key(),)


def test_fault_4_replicas_with_ranks_of_their_own_do_not_share_keys(tmp_path: Path):
    first, second = launch(tmp_path), launch(tmp_path)
    for rank, config in enumerate((first, second)):
        config.parallel_config.data_parallel_size = 2
        config.parallel_config.data_parallel_rank = rank
    assert set(all_rank_keys(first)).isdisjoint(all_rank_keys(second))
