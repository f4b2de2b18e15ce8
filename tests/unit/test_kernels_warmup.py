"""Warming up calls every kernel of the protocol."""

import pytest

from kvstrata.core.eviction import POLICIES
from kvstrata.kernels.base import AttentionKernels, kernels_for
from kvstrata.kernels.gather_loops import gather_share
from kvstrata.kernels.residency import ResidencyTable
from kvstrata.kernels.residency_loops import resolve
from kvstrata.kernels.selection import _host_rows
from kvstrata.kernels.warmup import warm_up, warm_up_hot_rows


class _Counting:
    def __init__(self, inner: AttentionKernels) -> None:
        self._inner = inner
        self.called: set[str] = set()

    def __getattr__(self, name: str) -> object:
        self.called.add(name)
        return getattr(self._inner, name)


def test_every_kernel_that_compiles_is_called_once() -> None:
    kernels = _Counting(kernels_for("cpu"))
    warm_up(kernels)  # type: ignore[arg-type]
    assert kernels.called == {"write_rows", "index_topk", "sparse_mla", "dense_mla"}


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_hot_rows_are_found_without_compiling_once_warm(policy: str) -> None:
    warm_up_hot_rows()
    before = [len(loop.signatures) for loop in (resolve, _host_rows, gather_share)]
    assert min(before) >= 1
    ResidencyTable(host_rows=4, capacity=2, policy=policy)
    warm_up_hot_rows()
    assert [len(loop.signatures) for loop in (resolve, _host_rows, gather_share)] == before
