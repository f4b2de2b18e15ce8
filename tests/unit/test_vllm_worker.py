"""What the worker refuses before vLLM's own code runs."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from vllm.v1.worker.cpu_worker import CPUWorker

from kvstrata.errors import UnsupportedError
from kvstrata.vllm.worker import KVStrataCPUWorker


def worker(backend: str | None) -> KVStrataCPUWorker:
    made = KVStrataCPUWorker.__new__(KVStrataCPUWorker)
    transfer = SimpleNamespace(
        kv_connector="KVStrataConnector", kv_connector_extra_config={"backend": backend or "none"}
    )
    made.vllm_config = SimpleNamespace(
        kv_transfer_config=None if backend is None else transfer, additional_config=None
    )
    return made


@pytest.mark.parametrize("call", ["reload_weights", "start_weight_update"])
def test_new_weights_are_refused_where_a_store_keeps_rows_of_the_old_ones(call: str):
    with pytest.raises(UnsupportedError, match=rf"{call}: .*backend to \"none\""):
        getattr(worker("local"), call)()


@pytest.mark.parametrize("call", ["reload_weights", "start_weight_update"])
@pytest.mark.parametrize("backend", [None, "none"])
def test_new_weights_are_vllms_business_without_a_store(
    call: str, backend: str | None, monkeypatch: pytest.MonkeyPatch
):
    called = []
    monkeypatch.setattr(CPUWorker, call, lambda self: called.append(call))
    getattr(worker(backend), call)()
    assert called == [call]
