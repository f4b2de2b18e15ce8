"""Every knob: what it takes, what it refuses, and that an error names the knob, its value and the fix."""

import dataclasses
import json

import pytest

from kvstrata.config import (
    GB,
    AdditionalConfig,
    ConnectorConfig,
    LayerwiseConfig,
    SparseOffloadConfig,
    StoreConfig,
    parse_additional_config,
    parse_connector_config,
)
from kvstrata.config_kvpp import KvppConfig
from kvstrata.config_transfer import TransferConfig
from kvstrata.errors import ConfigurationError, ConfigurationTypeError, KVStrataError, UnsupportedError

WHOLE_TYPES = [True, "2", 2.0, [2], {}]
NUMBER_TYPES = [True, "2", [2], {}]
NUMBER_VALUES = [0, -1, 0.0, 1e-300, 1e30, 1e308, float("nan"), float("inf"), 10**400]
FLAG_TYPES = ["false", "true", 0, 1, None, []]
WORD_TYPES = [True, 3, None, ["local"]]

# knob -> (accepted as given, of a wrong type, out of range)
CONNECTOR = {
    "use_layerwise": ([True, False], FLAG_TYPES, []),
    "layerwise_num_shared_buffers": ([1, 6, 1000, None], WHOLE_TYPES, [0, -1]),
    "layerwise_independent_layers": (["all"], [27, "1,4", None, True, [True], ["1"], [1.0], [[1]], {}], []),
    "layerwise_prefetch_layers": ([0, 8, None], WHOLE_TYPES, [-1]),
    "host_memory_GB": ([0.5, 64, None], NUMBER_TYPES, NUMBER_VALUES),
    "backend": (["none", "local", "mooncake", "memcache"], WORD_TYPES, ["", "Local", "redis"]),
    "store_path": (["/dev/shm/x", None], [True, 3, ["x"]], ["", "a\0b", "a\udcffb"]),
    "store_size_GB": ([0.25, 3], [*NUMBER_TYPES, None], NUMBER_VALUES),
    "store_spill_path": (["/var/tmp/x", None], [True, 3, ["x"]], ["", "a\0b", "a\udcffb"]),
    "store_spill_size_GB": ([8], [*NUMBER_TYPES, None], NUMBER_VALUES),
    "store_lease_s": ([0.5, 30], [*NUMBER_TYPES, None], NUMBER_VALUES),
    "transfer_backend": (["auto", "shm", "tcp", "nixl", "mooncake", "memfabric"], WORD_TYPES, ["", "rdma"]),
    "memfabric_transfer_protocol": (["sdma", "device_rdma", "device_urma"], WORD_TYPES, ["", "host_rdma"]),
    "kv_port": ([1, 20001, 65535, None], WHOLE_TYPES, [0, -1, 65536]),
    "remote_role": (["auto", "producer", "consumer", "both"], WORD_TYPES, ["", "kv_both"]),
    "remote_host": (["127.0.0.1", "decode-3"], WORD_TYPES, ["", "a\0b"]),
    "remote_secret": (["sixteen or more!", None], [True, 3, ["x"]], ["", "short", "a\0b" * 8]),
    "remote_lease_s": ([0.5, 30], [*NUMBER_TYPES, None], NUMBER_VALUES),
    "remote_wait_s": ([0.5, 30], [*NUMBER_TYPES, None], NUMBER_VALUES),
    "remote_read_attempts": ([1, 100], [*WHOLE_TYPES, None], [0, 101]),
    "deadline_s": ([0.5, 120], [*NUMBER_TYPES, None], NUMBER_VALUES),
}
ADDRESSES = (["127.0.0.1:50051", "store-3:5000", None], [True, 3, ["x"]], ["", "a\0b"])
POOL = {
    "store_address": ADDRESSES,
    "store_client_address": ADDRESSES,
    "store_config_address": ADDRESSES,
    "store_protocol": (["tcp", None], [True, 3, ["x"]], ["", "TCP", "ub"]),
    "store_timeout_s": ([0.5, 30], [*NUMBER_TYPES, None], NUMBER_VALUES),
}
SPARSE = {
    "enabled": ([True, False], FLAG_TYPES, []),
    "topk_buffer_size": ([1, 4096, None], WHOLE_TYPES, [0, -1]),
    "dram_size_per_dp_GB": ([0.5, 64, None], NUMBER_TYPES, NUMBER_VALUES),
    "keep_device_kv_cache": ([True, False], FLAG_TYPES, []),
}
OWN = {
    "indexer_cache_dtype": (["auto", "int8"], WORD_TYPES, ["", "fp8"]),
    "main_cache_dtype": (["auto", "int8"], WORD_TYPES, ["", "fp8", "INT8"]),
    "hot_row_policy": (["auto", "lru", "frequency"], WORD_TYPES, ["", "LRU", "fifo"]),
    "prompt_window_tokens": ([1, 4096, None], WHOLE_TYPES, [0, -1]),
    "topk_trace_path": (["/var/tmp/trace", None], [True, 3, ["x"]], ["", "a\0b", "a\udcffb"]),
    "fault": (["none", "skip_loads", "stale_rows"], WORD_TYPES, ["", "skip_saves"]),
}
TOP = {"enable_kvpp": ([True, False], FLAG_TYPES, [])}
KVPP = {
    "kvpp_broadcast": (["referenced", "all"], WORD_TYPES, ["", "active"]),
    "kvpp_transport": (["auto", "collective", "shm"], WORD_TYPES, ["", "gloo"]),
}


def connector(**given):
    """Parse with layerwise and remote read on, as most of their knobs need."""
    return parse_connector_config({"use_layerwise": True, "kv_port": 1000} | given)


def pool(**given):
    """Parse with the store that reads the knob."""
    if "store_client_address" in given:
        given["store_protocol"] = "shm"
    return connector(backend="memcache" if "store_config_address" in given else "mooncake", **given)


def sparse(section, **given):
    """Parse with sparse offload on, as most of its knobs need."""
    config = {"sparse_kv_offload_config": {"enabled": True}}
    config.setdefault(section, {}).update(given)
    return parse_additional_config(config)


def flat(config):
    """Return every knob of a configuration by name, groups inside it included."""
    found = {}
    for item in dataclasses.fields(config):
        value = getattr(config, item.name)
        found |= flat(value) if dataclasses.is_dataclass(value) else {item.name: value}
    return found


# section -> (its knobs, how a value is given, what an error calls it)
SECTIONS = {
    "connector": (CONNECTOR, lambda name, value: connector(**{name: value}), "{}"),
    "pool": (POOL, lambda name, value: pool(**{name: value}), "{}"),
    "sparse": (
        SPARSE,
        lambda name, value: sparse("sparse_kv_offload_config", **{name: value}),
        "sparse_kv_offload_config.{}",
    ),
    "own": (OWN, lambda name, value: sparse("kvstrata", **{name: value}), "kvstrata.{}"),
    "kvpp": (
        KVPP,
        lambda name, value: parse_additional_config({"enable_kvpp": True, "kvstrata": {name: value}}),
        "kvstrata.{}",
    ),
    "top": (TOP, lambda name, value: parse_additional_config({name: value}), "{}"),
}


def cases(column):
    return [
        pytest.param(section, name, value, id=f"{section}-{name}-{value!r:.12}".replace("\0", "NUL"))
        for section, (knobs, _, _) in SECTIONS.items()
        for name, columns in knobs.items()
        for value in columns[column]
    ]


def test_every_knob_is_in_these_tables():
    connector_groups = (LayerwiseConfig, StoreConfig, TransferConfig, ConnectorConfig)
    assert {k.name for group in connector_groups for k in group.knobs()} == set(CONNECTOR) | set(POOL)
    assert {k.name for k in SparseOffloadConfig.knobs()} == set(SPARSE)
    assert {k.name for k in KvppConfig.knobs()} == set(KVPP) | set(TOP)
    assert {k.name for k in AdditionalConfig.knobs()} == set(OWN)


@pytest.mark.parametrize(("section", "name", "value"), cases(0))
def test_a_legal_value_is_kept(section, name, value):
    assert flat(SECTIONS[section][1](name, value))[name] == value


@pytest.mark.parametrize(("section", "name", "value"), cases(1))
def test_a_wrong_type_is_refused_by_name(section, name, value):
    _, parse, called = SECTIONS[section]
    with pytest.raises(ConfigurationTypeError) as caught:
        parse(name, value)
    message = str(caught.value)
    assert message.startswith(f"{called.format(name)}={value!r} is of type {type(value).__name__}; set ")
    assert isinstance(caught.value, TypeError)


@pytest.mark.parametrize(("section", "name", "value"), cases(2))
def test_a_wrong_value_is_refused_by_name(section, name, value):
    _, parse, called = SECTIONS[section]
    with pytest.raises(ConfigurationError) as caught:
        parse(name, value)
    assert str(caught.value).startswith(f"{called.format(name)}={value!r} is out of range; set ")
    assert isinstance(caught.value, ValueError)


def test_defaults():
    assert parse_connector_config({}) == ConnectorConfig()
    assert flat(ConnectorConfig()) == {
        "use_layerwise": False,
        "layerwise_num_shared_buffers": None,
        "layerwise_independent_layers": (0,),
        "layerwise_prefetch_layers": None,
        "host_memory_GB": None,
        "backend": "local",
        "store_path": None,
        "store_size_GB": 1.0,
        "store_spill_path": None,
        "store_spill_size_GB": 8.0,
        "store_lease_s": 30.0,
        "store_address": None,
        "store_client_address": None,
        "store_config_address": None,
        "store_protocol": None,
        "store_timeout_s": 5.0,
        "transfer_backend": "auto",
        "memfabric_transfer_protocol": "sdma",
        "kv_port": None,
        "remote_role": "auto",
        "remote_host": "127.0.0.1",
        "remote_secret": None,
        "remote_lease_s": 10.0,
        "remote_wait_s": 60.0,
        "remote_read_attempts": 3,
        "deadline_s": 60.0,
    }
    assert parse_additional_config(None) == parse_additional_config({}) == AdditionalConfig()
    assert flat(AdditionalConfig()) == {
        "enabled": False,
        "topk_buffer_size": None,
        "dram_size_per_dp_GB": None,
        "keep_device_kv_cache": False,
        "enable_kvpp": False,
        "kvpp_broadcast": "referenced",
        "kvpp_transport": "auto",
        "indexer_cache_dtype": "auto",
        "main_cache_dtype": "auto",
        "hot_row_policy": "auto",
        "prompt_window_tokens": None,
        "topk_trace_path": None,
        "fault": "none",
    }


def test_a_remote_knob_without_remote_read_is_refused():
    with pytest.raises(ConfigurationError, match=r"remote_lease_s=5\.0 has no effect without kv_port"):
        parse_connector_config({"remote_lease_s": 5})


def test_a_launch_line_as_json():
    text = """{"backend": "local", "use_layerwise": true, "layerwise_num_shared_buffers": 3,
               "layerwise_independent_layers": [0, -1], "store_size_GB": 2}"""
    config = parse_connector_config(json.loads(text))
    assert config.layerwise.layerwise_independent_layers == (0, -1)
    assert config.layerwise.prefetch_layers == 3
    assert config.layerwise.reuses_buffers
    assert config.store.store_size_bytes == 2 * GB
    assert type(config.store.store_size_GB) is float


@pytest.mark.parametrize("given", [[], [0], [3, 5, 10], [-1], (1, 2)])
def test_independent_layers_become_a_tuple(given):
    assert connector(layerwise_independent_layers=given).layerwise.layerwise_independent_layers == tuple(
        given
    )


@pytest.mark.parametrize(
    ("shared", "prefetch", "expected"), [(3, None, 3), (20, None, 8), (None, None, 8), (3, 0, 0), (3, 12, 12)]
)
def test_prefetch_default(shared, prefetch, expected):
    config = connector(layerwise_num_shared_buffers=shared, layerwise_prefetch_layers=prefetch)
    assert config.layerwise.prefetch_layers == expected


def test_use_layerwise_without_shared_buffers_reuses_nothing():
    assert not connector().layerwise.reuses_buffers
    config = connector(layerwise_num_shared_buffers=2, layerwise_independent_layers="all")
    assert not config.layerwise.reuses_buffers


@pytest.mark.parametrize("name", ["layerwise_num_shared_buffers", "layerwise_prefetch_layers"])
@pytest.mark.parametrize("off", [{}, {"use_layerwise": False}])
def test_layerwise_knobs_without_layerwise_name_the_fix(name, off):
    with pytest.raises(ConfigurationError, match=f"{name}=2 .*set use_layerwise to true, or remove {name}"):
        parse_connector_config({name: 2} | off)


def test_spill_size_without_spill_path_names_the_fix():
    with pytest.raises(ConfigurationError, match=r"store_spill_size_GB=4 .*set store_spill_path"):
        connector(store_spill_size_GB=4)
    config = connector(store_spill_size_GB=4, store_spill_path="/var/tmp/x")
    assert config.store.store_spill_size_bytes == 4 * GB
    assert connector().store.store_spill_size_bytes == 0


@pytest.mark.parametrize(
    ("section", "name", "value"),
    [
        ("sparse_kv_offload_config", "topk_buffer_size", 128),
        ("sparse_kv_offload_config", "dram_size_per_dp_GB", 2.0),
        ("sparse_kv_offload_config", "keep_device_kv_cache", True),
        ("kvstrata", "hot_row_policy", "lru"),
        ("kvstrata", "prompt_window_tokens", 64),
        ("kvstrata", "topk_trace_path", "/var/tmp/x"),
        ("kvstrata", "fault", "stale_rows"),
    ],
)
@pytest.mark.parametrize("off", [{}, {"enabled": False}])
def test_sparse_knobs_without_sparse_offload_name_the_fix(section, name, value, off):
    given = {"sparse_kv_offload_config": dict(off)}
    given.setdefault(section, {})[name] = value
    with pytest.raises(ConfigurationError) as caught:
        parse_additional_config(given)
    message = str(caught.value)
    assert message.startswith(f"{section}.{name}={value!r} has no effect with")
    assert "set sparse_kv_offload_config.enabled to true, or " in message


def test_defaults_written_out_are_no_contradiction():
    off = {
        "enabled": False,
        "topk_buffer_size": None,
        "dram_size_per_dp_GB": None,
        "keep_device_kv_cache": False,
    }
    own = {"hot_row_policy": "auto", "prompt_window_tokens": None, "topk_trace_path": None, "fault": "none"}
    given = {"sparse_kv_offload_config": off, "kvstrata": own}
    assert parse_additional_config(given) == AdditionalConfig()


def test_skipping_loads_needs_no_sparse_offload():
    assert parse_additional_config({"kvstrata": {"fault": "skip_loads"}}).fault == "skip_loads"


@pytest.mark.parametrize("backend", ["mooncake", "memcache"])
def test_a_pool_needs_no_address_and_has_its_own_protocols(backend):
    """As a launch command of the seeds has it; the servers' own default ports are meant then."""
    assert connector(backend=backend).store.store_address is None
    other = "host_shm" if backend == "mooncake" else "shm"
    with pytest.raises(ConfigurationError, match=rf"store_protocol='{other}' is none of backend='{backend}'"):
        connector(backend=backend, store_protocol=other)


@pytest.mark.parametrize(
    ("backend", "given"),
    [
        ("mooncake", {"store_path": "/dev/shm/x"}),
        ("memcache", {"store_spill_path": "/tmp/x"}),
        ("memcache", {"store_client_address": "h:1"}),
        ("mooncake", {"store_client_address": "h:1"}),
        ("mooncake", {"store_config_address": "h:1"}),
        ("local", {"store_address": "h:1"}),
        ("none", {"store_timeout_s": 1.0}),
        ("local", {"store_protocol": "tcp"}),
    ],
)
def test_a_knob_of_another_store_is_refused(backend, given):
    (name,) = given
    with pytest.raises(
        ConfigurationError,
        match=rf"{name}=.* has no effect with (backend='{backend}'|store_protocol=None); set",
    ):
        connector(backend=backend, **given)


def test_kvpp_and_sparse_offload_are_refused_together():
    with pytest.raises(
        UnsupportedError, match=r"enable_kvpp=true with sparse_kv_offload_config.enabled=true"
    ):
        parse_additional_config({"enable_kvpp": True, "sparse_kv_offload_config": {"enabled": True}})


@pytest.mark.parametrize("given", [{"kvpp_broadcast": "all"}, {"kvpp_transport": "shm"}])
def test_a_knob_of_kvpp_without_kvpp_is_refused(given):
    with pytest.raises(
        ConfigurationError, match="has no effect with enable_kvpp=false; set enable_kvpp to true"
    ):
        parse_additional_config({"kvstrata": given})


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("layerwise_num_shared_bufers", "did you mean 'layerwise_num_shared_buffers'"),
        ("use_layer_wise", "did you mean 'use_layerwise'"),
        ("Backend", "did you mean 'backend'"),
        ("host_memory_gb", "did you mean 'host_memory_GB'"),
        ("zzz", "known are backend, deadline_s, "),
        (7, "known are"),
    ],
)
def test_an_unknown_connector_key_suggests_the_closest(key, hint):
    with pytest.raises(ConfigurationError) as caught:
        parse_connector_config({key: 1})
    assert f"kv_connector_extra_config holds the unknown key {key!r}; {hint}" in str(caught.value)


def test_unknown_keys_inside_our_sections_are_refused():
    with pytest.raises(
        ConfigurationError, match="kvstrata holds the unknown key 'indexer_dtype'; did you mean"
    ):
        parse_additional_config({"kvstrata": {"indexer_dtype": "int8"}})
    with pytest.raises(
        ConfigurationError, match=r"sparse_kv_offload_config holds.*'topk_buffer'; did you mean"
    ):
        parse_additional_config({"sparse_kv_offload_config": {"topk_buffer": 4}})
    # A knob of ours in the wrong object would otherwise be lost.
    with pytest.raises(ConfigurationError, match="kvstrata holds the unknown key 'enable_kvpp'"):
        parse_additional_config({"kvstrata": {"enable_kvpp": False}})


def test_other_top_level_keys_belong_to_others():
    assert parse_additional_config({"torchair_graph_config": {"enabled": 1}, "x": None}) == AdditionalConfig()


@pytest.mark.parametrize("value", [None, "x", [], 3, True])
def test_sections_must_be_objects(value):
    for name in ("sparse_kv_offload_config", "kvstrata"):
        with pytest.raises(ConfigurationTypeError, match=f"{name}=.*set a JSON object"):
            parse_additional_config({name: value})
    with pytest.raises(ConfigurationTypeError, match="kv_connector_extra_config="):
        parse_connector_config(value)
    if value is not None:
        with pytest.raises(ConfigurationTypeError, match="additional_config="):
            parse_additional_config(value)


def test_a_group_checks_itself_however_it_is_made():
    with pytest.raises(KVStrataError, match="use_layerwise"):
        LayerwiseConfig(use_layerwise="false")
    with pytest.raises(KVStrataError, match="store_lease_s"):
        dataclasses.replace(StoreConfig(), store_lease_s=0)
    with pytest.raises(dataclasses.FrozenInstanceError):
        StoreConfig().store_lease_s = 3


def test_sizes_in_bytes():
    assert connector(host_memory_GB=1.5).layerwise.host_memory_bytes == 3 << 29
    assert connector().layerwise.host_memory_bytes is None
    on = sparse("sparse_kv_offload_config", dram_size_per_dp_GB=1.5)
    assert on.sparse_offload.dram_bytes_per_dp == 3 << 29
    assert AdditionalConfig().sparse_offload.dram_bytes_per_dp is None
