"""Warming up calls every kernel of the protocol."""

from kvstrata.kernels.base import AttentionKernels, kernels_for
from kvstrata.kernels.warmup import warm_up


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
