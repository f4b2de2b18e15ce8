"""The seeds' two connectors become one, whatever their order."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import KVTransferConfig

from kvstrata.errors import ConfigurationError
from kvstrata.vllm.halves import merge_halves, merged_half, remote_role

REMOTE = {
    "kv_connector": "SfaRemoteD2HConnector",
    "kv_role": "kv_producer",
    "kv_connector_extra_config": {"kv_port": 20001, "memfabric_transfer_protocol": "sdma"},
}
STORE = {
    "kv_connector": "AscendStoreConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"use_layerwise": True, "layerwise_num_shared_buffers": 2},
}
OTHER = {"kv_connector": "ExampleConnector", "kv_role": "kv_both", "kv_connector_extra_config": {}}


def launch(*children: dict[str, Any]) -> Any:
    transfer = KVTransferConfig(
        kv_connector="MultiConnector",
        kv_role="kv_producer",
        kv_connector_extra_config={"connectors": list(children)},
    )
    return SimpleNamespace(kv_transfer_config=transfer)


@pytest.mark.parametrize("children", [(REMOTE, STORE), (STORE, REMOTE)], ids=["remote first", "store first"])
def test_two_halves_are_one_connector_whatever_their_order(children):
    config = launch(*children)
    merge_halves(config)
    transfer = config.kv_transfer_config
    assert transfer.kv_connector == "KVStrataConnector"
    assert transfer.kv_role == "kv_both", "the store offers what it computes"
    assert transfer.kv_connector_extra_config == {
        "kv_port": 20001,
        "memfabric_transfer_protocol": "sdma",
        "use_layerwise": True,
        "layerwise_num_shared_buffers": 2,
        "remote_role": "producer",
    }


def test_merging_twice_changes_nothing():
    config = launch(REMOTE, STORE)
    merge_halves(config)
    once = config.kv_transfer_config
    merge_halves(config)
    assert config.kv_transfer_config is once


def test_a_third_connector_stays_beside_the_merged_one():
    config = launch(OTHER, STORE, REMOTE)
    merge_halves(config)
    transfer = config.kv_transfer_config
    assert transfer.kv_connector == "MultiConnector"
    children = transfer.kv_connector_extra_config["connectors"]
    assert [child["kv_connector"] for child in children] == ["KVStrataConnector", "ExampleConnector"]


@pytest.mark.parametrize("children", [(REMOTE,), (STORE,), (REMOTE, OTHER), (REMOTE, REMOTE, STORE)])
def test_anything_else_is_left_alone(children):
    config = launch(*children)
    before = config.kv_transfer_config
    merge_halves(config)
    assert config.kv_transfer_config is before


def test_halves_that_disagree_are_refused_with_both_values():
    store = STORE | {"kv_connector_extra_config": {"kv_port": 7}}
    with pytest.raises(ConfigurationError, match=r"kv_port=20001 of Sfa.* and kv_port=7 of Ascend"):
        merged_half(REMOTE, store)


@pytest.mark.parametrize(
    ("kv_role", "configured", "roles"),
    [
        ("kv_producer", "auto", {"producer"}),
        ("kv_consumer", "auto", {"consumer"}),
        ("kv_both", "auto", {"producer", "consumer"}),
        ("kv_both", "consumer", {"consumer"}),
        ("kv_consumer", "both", {"producer", "consumer"}),
    ],
)
def test_the_role_follows_kv_role_unless_it_is_set(kv_role, configured, roles):
    assert remote_role(kv_role, configured) == roles
