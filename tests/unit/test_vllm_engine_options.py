"""Options of engines in this process are options that kvstrata's own configuration takes."""

import pytest

from kvstrata.config import parse_additional_config, parse_connector_config
from kvstrata.vllm.engine_options import LayerwiseOptions, SparseOptions
from kvstrata.vllm.engines import open_engine


def test_sparse_options_arrive_in_their_sections():
    options = SparseOptions(
        topk_buffer_size=128,
        dram_size_per_dp_GB=0.5,
        keep_device_kv_cache=True,
        hot_row_policy="lru",
        prompt_window_tokens=64,
        topk_trace_path="rows.trace",
        indexer_cache_dtype="int8",
        fault="stale_rows",
    )
    parsed = parse_additional_config(options.engine_arguments()["additional_config"])
    assert parsed.sparse_offload.enabled
    assert parsed.sparse_offload.topk_buffer_size == 128
    assert parsed.sparse_offload.dram_size_per_dp_GB == 0.5
    assert parsed.sparse_offload.keep_device_kv_cache
    assert (parsed.hot_row_policy, parsed.prompt_window_tokens) == ("lru", 64)
    assert (parsed.topk_trace_path, parsed.indexer_cache_dtype) == ("rows.trace", "int8")
    assert parsed.fault == "stale_rows"


def test_sparse_options_say_nothing_of_knobs_left_alone():
    arguments = SparseOptions().engine_arguments()
    assert arguments == {"additional_config": {"sparse_kv_offload_config": {"enabled": True}}}


@pytest.mark.parametrize("fault", [None, "skip_loads"])
def test_layerwise_options_arrive(fault: str | None):
    arguments = LayerwiseOptions(num_shared_buffers=3, prefetch_layers=2, fault=fault).engine_arguments()
    extra = arguments["kv_transfer_config"]["kv_connector_extra_config"]
    layerwise = parse_connector_config(extra).layerwise
    assert layerwise.use_layerwise
    assert (layerwise.layerwise_num_shared_buffers, layerwise.prefetch_layers) == (3, 2)
    assert parse_additional_config(arguments.get("additional_config")).fault == (fault or "none")


def test_an_engine_has_one_kind_of_offload():
    both = open_engine(
        "no model", device_kv_budget_bytes=1, layerwise=LayerwiseOptions(), sparse=SparseOptions()
    )
    with pytest.raises(ValueError, match="not both"), both:
        pass
