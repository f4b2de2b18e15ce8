"""What a launch may ask for, and what is refused, each by knob, value and way out."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import CompilationMode, ParallelConfig

from kvstrata.errors import ConfigurationError, ConfigurationTypeError, KVStrataError, UnsupportedError
from kvstrata.vllm import platform as platform_module
from kvstrata.vllm.platform import KVStrataCpuPlatform, serves_mla
from kvstrata.vllm.settings import (
    Settings,
    add_connector,
    check_experts,
    kvstrata_connectors,
    uses_kvstrata_connector,
)


def launch(connector: str | None = "KVStrataConnector", extra: Any = None, additional: Any = None) -> Any:
    transfer = SimpleNamespace(
        kv_connector=connector,
        kv_connector_extra_config={} if extra is None else extra,
        kv_load_failure_policy="fail",
    )
    return SimpleNamespace(
        kv_transfer_config=transfer,
        additional_config=additional,
        parallel_config=SimpleNamespace(
            decode_context_parallel_size=1,
            prefill_context_parallel_size=1,
            pipeline_parallel_size=1,
            enable_expert_parallel=False,
            use_sequence_parallel_moe=False,
            data_parallel_size=1,
        ),
        cache_config=SimpleNamespace(
            cache_dtype="auto", kv_sharing_fast_prefill=False, block_size=16, prefix_match_unit=None
        ),
        scheduler_config=SimpleNamespace(async_scheduling=True),
        speculative_config=None,
        model_config=SimpleNamespace(model="some/model", quantization=None),
        use_v2_model_runner=False,
    )


def child(name: str, **extra: Any) -> dict[str, Any]:
    return {"kv_connector": name, "kv_role": "kv_both", "kv_connector_extra_config": extra}


def under_multi(*children: Any) -> Any:
    return launch("MultiConnector", {"connectors": list(children)})


def test_no_transfer_configuration_asks_for_nothing():
    config = launch()
    config.kv_transfer_config = None
    settings = Settings.of(config)
    assert settings.connector is None
    settings.check_combination(config)
    assert not uses_kvstrata_connector(config)
    assert not uses_kvstrata_connector(launch(None))


def test_another_connector_is_left_alone():
    config = launch("NixlConnector", {"whatever": 1})
    assert kvstrata_connectors(config) == []
    Settings.of(config).check_combination(config)
    assert config.kv_transfer_config.kv_load_failure_policy == "fail"
    assert config.scheduler_config.async_scheduling is True


@pytest.mark.parametrize("name", ["KVStrataConnector", "AscendStoreConnector"])
def test_the_seeds_names_take_the_seeds_keys_alone_or_under_multi_connector(name: str):
    extra = {"use_layerwise": True, "layerwise_num_shared_buffers": 2, "backend": "local"}
    for config in (launch(name, extra), under_multi(child("NixlConnector"), child(name, **extra))):
        connector = Settings.of(config).connector
        assert connector is not None
        assert connector.layerwise.layerwise_num_shared_buffers == 2


@pytest.mark.parametrize("children", [[], [child("NixlConnector")], ["not an object"], [{}]])
def test_multi_connector_without_one_of_ours_is_left_alone(children: list[Any]):
    assert Settings.of(under_multi(*children)).connector is None


def test_fault_23_two_of_ours_under_multi_connector_are_refused_by_name():
    config = under_multi(child("KVStrataConnector"), child("AscendStoreConnector"))
    with pytest.raises(ConfigurationError, match=r"KVStrataConnector.*AscendStoreConnector.*exactly one"):
        Settings.of(config)


@pytest.mark.parametrize(
    ("extra", "error", "words"),
    [
        ({"use_layerwise": "false"}, ConfigurationTypeError, ["use_layerwise", "'false'"]),
        ({"use_layerwise": 1}, ConfigurationTypeError, ["use_layerwise", "1"]),
        (
            {"use_layerwise": True, "layerwise_num_shared_buffers": "2"},
            ConfigurationTypeError,
            ["layerwise_num_shared_buffers", "'2'"],
        ),
        (
            {"use_layerwise": True, "layerwise_num_shared_buffers": 0},
            ConfigurationError,
            ["layerwise_num_shared_buffers", "0"],
        ),
        (
            {"layerwise_num_shared_buffers": 2},
            ConfigurationError,
            ["layerwise_num_shared_buffers=2", "use_layerwise"],
        ),
        ({"use_layerwize": True}, ConfigurationError, ["use_layerwize", "use_layerwise"]),
        ({"store_address": "h:1"}, ConfigurationError, ["store_address", "local", "mooncake"]),
        ({"backend": "redis"}, ConfigurationError, ["backend", "redis"]),
        ({"deadline_s": 0}, ConfigurationError, ["deadline_s", "0"]),
    ],
)
def test_bad_knobs_are_named_with_value_and_fix(
    extra: dict[str, Any], error: type[KVStrataError], words: list[str]
):
    for config in (launch(extra=extra), under_multi(child("KVStrataConnector", **extra))):
        with pytest.raises(error) as raised:
            Settings.of(config)
        assert [word for word in words if word not in str(raised.value)] == []


@pytest.mark.parametrize(
    ("additional", "error", "words"),
    [
        (
            {"kvstrata": {"kvpp_broadcast": "all"}},
            ConfigurationError,
            ["kvpp_broadcast='all'", "enable_kvpp"],
        ),
        ({"enable_kvpp": "false"}, ConfigurationTypeError, ["enable_kvpp", "'false'"]),
        (
            {"sparse_kv_offload_config": {"enabled": "true"}},
            ConfigurationTypeError,
            ["sparse_kv_offload_config.enabled", "'true'"],
        ),
        (
            {"sparse_kv_offload_config": {"topk_buffer_size": 64}},
            ConfigurationError,
            ["sparse_kv_offload_config.topk_buffer_size=64", "enabled to true"],
        ),
        ({"kvstrata": {"indexer_cache_dtype": "fp8"}}, ConfigurationError, ["indexer_cache_dtype", "fp8"]),
        ({"kvstrata": {"fault": "yes"}}, ConfigurationError, ["fault", "yes"]),
    ],
)
def test_bad_additional_knobs_are_named(
    additional: dict[str, Any], error: type[KVStrataError], words: list[str]
):
    with pytest.raises(error) as raised:
        Settings.of(launch(additional=additional))
    assert [word for word in words if word not in str(raised.value)] == []


def test_additional_configuration_of_others_is_ignored():
    assert Settings.of(launch(additional=object())).additional.indexer_cache_dtype == "auto"
    assert (
        Settings.of(launch(additional={"ascend_scheduler_config": {"enabled": True}})).connector is not None
    )


def set_at(path: str, value: Any) -> Callable[[Any], None]:
    *owners, name = path.split(".")

    def change(config: Any) -> None:
        for owner in owners:
            config = getattr(config, owner)
        setattr(config, name, value)

    return change


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("parallel_config.decode_context_parallel_size", 2, "decode_context_parallel_size=2: .*set it to 1"),
        (
            "parallel_config.prefill_context_parallel_size",
            4,
            "prefill_context_parallel_size=4: .*set it to 1",
        ),
        ("cache_config.cache_dtype", "fp8", "kv_cache_dtype=fp8: .*set it to auto"),
        ("cache_config.kv_sharing_fast_prefill", True, "kv_sharing_fast_prefill=True: .*turn it off"),
        ("use_v2_model_runner", True, "VLLM_USE_V2_MODEL_RUNNER=1: .*unset it"),
    ],
)
def test_what_cannot_be_combined_is_refused_by_knob_value_and_fix(path: str, value: Any, words: str):
    config = launch()
    Settings.of(config).check_combination(config)
    set_at(path, value)(config)
    with pytest.raises(UnsupportedError, match=words):
        Settings.of(config).check_combination(config)


@pytest.mark.parametrize(
    ("parallel", "quantization", "fits"),
    [(True, None, True), (False, "fp8", True), (True, "compressed-tensors", False)],
)
def test_quantised_experts_spread_over_ranks_are_refused_by_name(
    parallel: bool, quantization: str | None, fits: bool
):
    """vLLM's kernels would read past the end of a rank's own experts."""
    config = launch()
    config.parallel_config.enable_expert_parallel = parallel
    config.model_config.quantization = quantization
    if fits:
        Settings.of(config).check_combination(config)
        return
    with pytest.raises(UnsupportedError, match=r"enable_expert_parallel=True: .*set it to false"):
        Settings.of(config).check_combination(config)


def spread(
    tensor: int = 1,
    data: int = 1,
    experts: bool = False,
    *,
    mode: CompilationMode = CompilationMode.NONE,
    is_moe: bool = True,
) -> Any:
    """A launch of a model over ranks and replicas."""
    sizes = {"tensor_parallel_size": tensor, "data_parallel_size": data}
    return SimpleNamespace(
        parallel_config=ParallelConfig(**sizes, enable_expert_parallel=experts),
        compilation_config=SimpleNamespace(mode=mode),
        model_config=SimpleNamespace(is_moe=is_moe),
    )


def test_experts_over_replicas_of_several_ranks_are_refused_by_name():
    """vLLM takes one row of one token for a part of the step's rows, and for the whole of them."""

    for allowed in ((1, 2, True), (2, 1, True), (2, 2, False)):
        check_experts(spread(*allowed))
    words = r"enable_expert_parallel=True with tensor_parallel_size=2 and data_parallel_size=2.*to false"
    with pytest.raises(UnsupportedError, match=words):
        check_experts(spread(2, 2, True))


def test_compiled_replicas_with_experts_are_refused_by_name(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("VLLM_USE_BREAKABLE_CUDAGRAPH", "0")  # vLLM sets it to 1 for the whole process
    compiled = CompilationMode.DYNAMO_TRACE_ONCE
    for allowed in (spread(data=2), spread(mode=compiled), spread(data=2, mode=compiled, is_moe=False)):
        check_experts(allowed)
    with pytest.raises(
        UnsupportedError, match=r"data_parallel_size=2 .*enforce_eager=False: .*set enforce_eager to true"
    ):
        check_experts(spread(data=2, mode=compiled))


@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_M5_a_lost_block_is_recomputed_not_failed(policy: str):  # noqa: N802
    config = launch()
    config.kv_transfer_config.kv_load_failure_policy = policy
    Settings.of(config).check_combination(config)
    assert config.kv_transfer_config.kv_load_failure_policy == "recompute"


@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_fault_11_with_pipeline_stages_a_lost_block_fails_its_request(policy: str):
    config = launch()
    config.parallel_config.pipeline_parallel_size = 2
    config.kv_transfer_config.kv_load_failure_policy = policy
    Settings.of(config).check_combination(config)
    assert config.kv_transfer_config.kv_load_failure_policy == "fail"


@pytest.mark.parametrize(("backend", "stays"), [("local", False), ("none", True)])
def test_fault_11_asynchronous_scheduling_goes_where_a_lost_block_could_not_be_recomputed(
    backend: str, stays: bool
):
    config = launch(extra={"backend": backend})
    Settings.of(config).check_combination(config)
    assert config.scheduler_config.async_scheduling is stays


def test_asynchronous_scheduling_goes_where_there_are_pipeline_stages():
    config = launch(extra={"backend": "none"})
    config.parallel_config.pipeline_parallel_size = 2
    Settings.of(config).check_combination(config)
    assert config.scheduler_config.async_scheduling is False


@pytest.mark.parametrize(("has_cache", "refused"), [(True, True), (False, False)], ids=["mtp", "ngram"])
def test_drafts_with_a_cache_are_refused_with_pipeline_stages(has_cache: bool, refused: bool):
    config = launch()
    config.speculative_config = SimpleNamespace(method="mtp", uses_draft_kv_cache=lambda: has_cache)
    Settings.of(config).check_combination(config)
    config.parallel_config.pipeline_parallel_size = 2
    if not refused:
        Settings.of(config).check_combination(config)
        return
    with pytest.raises(
        UnsupportedError, match=r"speculative_config.method=mtp: .*pipeline_parallel_size to 1"
    ):
        Settings.of(config).check_combination(config)


def test_a_model_without_mla_is_refused_with_the_connector_and_left_alone_without(
    monkeypatch: pytest.MonkeyPatch,
):
    updated: list[Any] = []
    monkeypatch.setattr(
        platform_module.CpuPlatform,
        "check_and_update_config",
        classmethod(lambda cls, config: updated.append(config)),
    )
    config = launch()
    config.model_config.use_mla = False
    assert not serves_mla(config)
    with pytest.raises(UnsupportedError, match=r"'some/model'.*no MLA layers.*remove kv_connector"):
        KVStrataCpuPlatform.check_and_update_config(config)
    config.kv_transfer_config = None
    KVStrataCpuPlatform.check_and_update_config(config)
    assert len(updated) == 2, "vLLM's own rules were applied both times"


@pytest.mark.parametrize(
    ("unit", "backend", "fits"), [(None, "local", 1), (16, "local", 1), (8, "none", 1), (8, "local", 0)]
)
def test_hashes_finer_than_a_block_do_not_name_store_objects(unit: int | None, backend: str, fits: int):
    """vLLM's n-th hash would not be the n-th block's: prompts that differ within a block would share it."""
    config = launch(extra={"backend": backend})
    config.cache_config.prefix_match_unit = unit
    if fits:
        Settings.of(config).check_combination(config)
        return
    with pytest.raises(UnsupportedError, match=r"prefix_match_unit=8 with block_size=16.*block size"):
        Settings.of(config).check_combination(config)


SPARSE = {"sparse_kv_offload_config": {"enabled": True}}


@pytest.mark.parametrize(("additional", "sparse"), [(None, False), (SPARSE, True)])
def test_sparse_offload_is_on_where_it_is_asked_for(additional: Any, sparse: bool):
    assert Settings.of(launch(additional=additional)).is_sparse is sparse


def added(config: Any) -> Any:
    add_connector(config, Settings.of(config))
    return config.kv_transfer_config


KVPP = {"enable_kvpp": True}


@pytest.mark.parametrize("feature", [SPARSE, KVPP], ids=["sparse", "kvpp"])
@pytest.mark.parametrize("transfer", [None, SimpleNamespace(kv_connector=None)])
def test_a_feature_without_a_connector_gets_one_without_a_store(transfer: Any, feature: Any):
    config = launch(additional=feature)
    config.kv_transfer_config = transfer
    made = added(config)
    assert (made.kv_connector, made.kv_role) == ("KVStrataConnector", "kv_both")
    connector = Settings.of(config).connector
    assert connector is not None
    assert connector.store.backend == "none"
    assert added(config) is made, "once"


@pytest.mark.parametrize(
    "config",
    [
        launch(extra={"backend": "local"}, additional=SPARSE),
        launch("AscendStoreConnector", additional=SPARSE),
        launch(extra={"backend": "local"}, additional=KVPP),
        under_multi(child("NixlConnector"), child("KVStrataConnector")),
    ],
)
def test_a_feature_leaves_a_connector_of_ours_as_it_is(config: Any):
    before = config.kv_transfer_config
    assert added(config) is before


@pytest.mark.parametrize("feature", [SPARSE, KVPP], ids=["sparse", "kvpp"])
@pytest.mark.parametrize(
    "make", [lambda: launch("NixlConnector"), lambda: under_multi(child("NixlConnector"))]
)
def test_a_feature_beside_other_connectors_only_is_refused_by_name(make: Any, feature: Any):
    config = make()
    config.additional_config = feature
    name = config.kv_transfer_config.kv_connector
    with pytest.raises(
        UnsupportedError, match=rf"kv_connector={name!r}.*name KVStrataConnector instead"
    ) as why:
        added(config)
    assert next(iter(feature)) in str(why.value)


def test_sparse_offload_with_a_connector_beside_ours_is_refused_by_name():
    """It would save and fill the caches that vLLM bound to the layers, which hold no main KV."""
    config = under_multi(child("KVStrataConnector", backend="none"), child("NixlConnector"))
    Settings.of(config).check_combination(config)
    config.additional_config = SPARSE
    with pytest.raises(UnsupportedError, match=r"kv_connector='NixlConnector'.*MultiConnector's list"):
        Settings.of(config).check_combination(config)
    config = under_multi(child("KVStrataConnector", backend="none"))
    config.additional_config = SPARSE
    Settings.of(config).check_combination(config)


def sparse_mla(**text: Any) -> Any:
    """What the platform reads of a launch with sparse offload; `text` is the model's text configuration."""
    config = launch(additional=SPARSE)
    config.kv_transfer_config = None
    config.model_config = SimpleNamespace(
        model="some/model",
        use_mla=True,
        hf_config=SimpleNamespace(model_type="deepseek_v32"),
        hf_text_config=SimpleNamespace(**text),
    )
    config.scheduler_config = SimpleNamespace(
        enable_chunked_prefill=True, max_num_batched_tokens=64, async_scheduling=True
    )
    config.cache_config.enable_prefix_caching = True
    config.cache_config.user_specified_block_size = True
    config.cache_config.block_size = 16
    config.compilation_config = SimpleNamespace(custom_ops=["none"], mode=None)
    config.parallel_config.worker_cls = "auto"
    return config


def test_the_platform_adds_the_connector_for_sparse_models_and_refuses_dense_ones(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(
        platform_module.CpuPlatform, "check_and_update_config", classmethod(lambda cls, config: None)
    )
    config = sparse_mla(index_topk=64)
    KVStrataCpuPlatform.check_and_update_config(config)
    assert config.kv_transfer_config.kv_connector == "KVStrataConnector"
    assert config.scheduler_config.async_scheduling is True, "there is no store that loses blocks"
    with pytest.raises(UnsupportedError, match=r"some/model.*no sparse attention.*use_layerwise"):
        KVStrataCpuPlatform.check_and_update_config(sparse_mla())


def test_sparse_offload_of_a_model_without_mla_is_refused_without_a_connector_too(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(
        platform_module.CpuPlatform, "check_and_update_config", classmethod(lambda cls, config: None)
    )
    config = launch(additional=SPARSE)
    config.kv_transfer_config = None
    config.model_config.use_mla = False
    with pytest.raises(UnsupportedError, match="no MLA layers"):
        KVStrataCpuPlatform.check_and_update_config(config)


def test_the_kept_device_cache_cannot_judge_rows_that_a_store_brought():
    sparse = {"enabled": True, "keep_device_kv_cache": True}
    config = launch(extra={"backend": "local"}, additional={"sparse_kv_offload_config": sparse})
    with pytest.raises(UnsupportedError, match=r"keep_device_kv_cache=true beside a store.*backend"):
        Settings.of(config).check_combination(config)
    config = launch(extra={"backend": "none"}, additional={"sparse_kv_offload_config": sparse})
    Settings.of(config).check_combination(config)
