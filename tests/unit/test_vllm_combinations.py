"""Features that one engine cannot have together: refused by name, or said to have no effect."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvstrata.errors import ConfigurationError
from kvstrata.vllm import settings as settings_module
from kvstrata.vllm.remote_roles import check_remote
from kvstrata.vllm.settings import Settings

SPARSE = {"sparse_kv_offload_config": {"enabled": True}}


def launch(*, role: str = "kv_both", tp: int = 1, pp: int = 1, additional: Any = None, **extra: Any) -> Any:
    """What the checks read of a launch with kvstrata's connector and no store."""
    return SimpleNamespace(
        kv_transfer_config=SimpleNamespace(
            kv_connector="KVStrataConnector",
            kv_role=role,
            kv_connector_extra_config={"backend": "none", **extra},
            kv_load_failure_policy="recompute",
        ),
        additional_config=additional,
        parallel_config=SimpleNamespace(
            tensor_parallel_size=tp,
            pipeline_parallel_size=pp,
            data_parallel_index=0,
            decode_context_parallel_size=1,
            prefill_context_parallel_size=1,
            enable_expert_parallel=False,
        ),
        cache_config=SimpleNamespace(
            cache_dtype="auto", kv_sharing_fast_prefill=False, block_size=16, prefix_match_unit=None
        ),
        scheduler_config=SimpleNamespace(async_scheduling=True),
        speculative_config=None,
        use_v2_model_runner=False,
    )


def checked_remote(**arguments: Any) -> None:
    config = launch(kv_port=20001, remote_secret="secret-of-tests", **arguments)
    check_remote(config, Settings.of(config))


@pytest.mark.parametrize("role", ["kv_producer", "kv_consumer"])
def test_remote_read_with_pipeline_stages_is_refused_by_name(role: str):
    checked_remote(role=role)
    with pytest.raises(
        ConfigurationError,
        match=r"kv_port=20001 with pipeline_parallel_size=2.*set pipeline_parallel_size to 1",
    ):
        checked_remote(role=role, pp=2)


def test_sparse_offload_on_several_prefill_ranks_is_refused_by_name():
    for allowed in (
        {"role": "kv_producer", "tp": 1, "additional": SPARSE},
        {"role": "kv_producer", "tp": 2},
        {"role": "kv_consumer", "tp": 2, "additional": SPARSE},
    ):
        checked_remote(**allowed)
    with pytest.raises(
        ConfigurationError,
        match=r"enabled=true on a remote_role of producer with tensor_parallel_size=2.*false",
    ):
        checked_remote(role="kv_producer", tp=2, additional=SPARSE)


@pytest.mark.parametrize(("additional", "says"), [(SPARSE, 1), (None, 0)], ids=["beside-sparse", "alone"])
def test_layerwise_knobs_beside_sparse_offload_are_said_to_change_nothing(
    additional: Any, says: int, monkeypatch: pytest.MonkeyPatch
):
    said: list[str] = []
    monkeypatch.setattr(settings_module.logger, "info", lambda text, *values: said.append(text % values))
    config = launch(use_layerwise=True, layerwise_num_shared_buffers=2, additional=additional)
    Settings.of(config).check_combination(config)
    assert sum("use_layerwise and its knobs change nothing beside sparse" in line for line in said) == says
