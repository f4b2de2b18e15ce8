"""The order of a step's end on a rank that shares its pool with others."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvstrata.vllm.sparse_path import SparsePath
from kvstrata.vllm.transfers import Put, StepTransfers


class Recorder:
    """Stands for the pipeline and for the store's side; notes what is called."""

    def __init__(self, calls: list[str], *, got_through: bool = True) -> None:
        self._calls = calls
        self._got_through = got_through

    def ran_all_target_layers(self) -> bool:
        return self._got_through

    def failed_blocks(self) -> frozenset[int]:
        return frozenset()

    def __getattr__(self, name: str) -> Any:
        return lambda *_: self._calls.append(name)


def path(calls: list[str], *, fence: bool, got_through: bool = True) -> SparsePath:
    """A data path whose parts only note their calls."""
    it: Any = object.__new__(SparsePath)
    it._home = SimpleNamespace(fence=Recorder(calls) if fence else None)
    it._pipeline = it._pipeline_of_rows = Recorder(calls, got_through=got_through)
    it._io = Recorder(calls)
    it._transfers = StepTransfers(puts=[Put(request_id="r", block_id=1, block_hash=b"h")])
    return it


def test_M3_the_store_is_done_with_a_shared_pool_before_other_ranks_go_on():  # noqa: N802
    calls: list[str] = []
    path(calls, fence=True).end_step()
    assert calls.index("put") < calls.index("settle_puts") < len(calls) - 1
    assert calls[-1] == "end_step", "the pipeline ends the fence's step last"


def test_a_forward_that_broke_off_offers_nothing_and_ends_all_the_same():
    calls: list[str] = []
    path(calls, fence=True, got_through=False).end_step()
    assert "put" not in calls
    assert calls[-1] == "end_step"


def test_other_ranks_are_told_if_the_store_is_not_done_with_the_pool(monkeypatch: pytest.MonkeyPatch):
    calls: list[str] = []
    it = path(calls, fence=True)

    def fail() -> None:
        raise RuntimeError("the store is gone")

    monkeypatch.setattr(it._io, "settle_puts", fail, raising=False)
    with pytest.raises(RuntimeError, match="gone"):
        it.end_step()
    assert calls[-2:] == ["fail", "end_step"], "they may not write it"


def test_a_rank_alone_lets_the_store_write_on_beside_the_next_step():
    calls: list[str] = []
    path(calls, fence=False).end_step()
    assert calls.index("end_step") < calls.index("put")
    assert "settle_puts" not in calls
