"""The two collectives that data-parallel replicas of a model with experts need and vLLM's CPU platform lacks.

Stock limit (vLLM 0.32): replicas bring their tokens together before the experts and take the sums apart after
them; on CPU both calls raise NotImplementedError.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator


class KVStrataCpuCommunicator(CpuCommunicator):
    """vLLM's CPU communicator, with gather and reduce-scatter of unequal shares along the first dimension."""

    def all_gatherv(
        self,
        input_: torch.Tensor | list[torch.Tensor],  # [own rows, ...]
        dim: int = 0,
        sizes: list[int] | None = None,  # rows of each rank; None: as many as here
    ) -> torch.Tensor | list[torch.Tensor]:
        """Return the rows of all ranks, in their order, of each tensor given."""
        assert dim == 0
        if not isinstance(input_, torch.Tensor):
            return [self._gather_rows(tensor, sizes) for tensor in input_]
        return self._gather_rows(input_, sizes)

    def reduce_scatterv(
        self,
        input_: torch.Tensor,  # [rows of all ranks, ...]
        dim: int = -1,
        sizes: list[int] | None = None,  # rows of each rank; None: equal shares
    ) -> torch.Tensor:
        """Return this rank's rows of the sum over the ranks."""
        assert dim == 0
        rows = input_.shape[0]
        if sizes is None:
            assert rows % self.world_size == 0
            sizes = [rows // self.world_size] * self.world_size
        assert sum(sizes) == rows
        total = input_.clone(memory_format=torch.contiguous_format)
        torch.distributed.all_reduce(total, group=self.device_group)
        return total.split(sizes)[self.rank_in_group]

    def _gather_rows(self, own: torch.Tensor, sizes: Sequence[int] | None) -> torch.Tensor:
        sizes = [own.shape[0]] * self.world_size if sizes is None else sizes
        assert sizes[self.rank_in_group] == own.shape[0]
        # Gloo gathers equal shares only: all send as many rows as the longest.
        padded = own.new_zeros((max(sizes), *own.shape[1:]))
        padded[: own.shape[0]] = own
        gathered = [torch.empty_like(padded) for _ in sizes]
        torch.distributed.all_gather(gathered, padded, group=self.device_group)
        return torch.cat([share[:rows] for share, rows in zip(gathered, sizes, strict=True)])
