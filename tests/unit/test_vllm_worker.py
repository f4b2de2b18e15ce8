"""What the worker refuses before vLLM's own code runs."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from vllm.v1.worker.cpu_worker import CPUWorker

from kvstrata.errors import TransferFailed, UnsupportedError
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


class Ended(BaseException):
    """Stands for the end of the process."""


@pytest.mark.parametrize("call", ["execute_model", "sample_tokens"])
@pytest.mark.parametrize(
    ("rank", "tensor", "stages", "ends"),
    [(0, 1, 1, False), (0, 2, 1, False), (1, 2, 1, True), (0, 2, 2, True), (2, 2, 2, False), (3, 2, 2, True)],
)
def test_a_rank_that_vllm_does_not_listen_to_ends_rather_than_let_the_others_wait(
    call: str, rank: int, tensor: int, stages: int, ends: bool, monkeypatch: pytest.MonkeyPatch
):
    made = worker(None)
    made.rank = rank
    made.parallel_config = SimpleNamespace(
        distributed_executor_backend="mp" if tensor * stages > 1 else "uni",
        world_size=tensor * stages,
        tensor_parallel_size=tensor,
        prefill_context_parallel_size=1,
    )

    def fail(self: CPUWorker) -> None:
        raise TransferFailed("rows did not arrive")

    def end(status: int) -> None:
        assert status == 1
        raise Ended

    monkeypatch.setattr(CPUWorker, call, fail)
    monkeypatch.setattr("kvstrata.vllm.worker.os._exit", end)
    with pytest.raises(Ended if ends else TransferFailed):
        getattr(made, call)()


def test_an_error_that_is_not_ours_goes_the_way_vllm_knows(monkeypatch: pytest.MonkeyPatch):
    def fail(self: CPUWorker) -> None:
        raise ValueError("a model's own")

    monkeypatch.setattr(CPUWorker, "execute_model", fail)
    with pytest.raises(ValueError, match="own"):
        worker(None).execute_model()
