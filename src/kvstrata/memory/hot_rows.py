"""Hot rows: the device buffers that hold the rows of main KV which attention picked.

Source: seed, Sparse Decode Offload, "per-layer K/V hot buffers". Which host row a slot holds is not known
here: that is the residency table's business.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

ALIGN_BYTES = 64
"""Every layer's buffer begins at a multiple of this: a cache line, and what wide vector loads like best."""


def hot_rows_bytes(row_bytes: Iterable[int], capacity_rows: int) -> int:
    """Device bytes that HotRows allocates for layers of these row sizes, each with `capacity_rows` rows."""
    return sum(_buffer_bytes(size_bytes, capacity_rows) for size_bytes in row_bytes)


class HotRows:
    """One buffer `[capacity_rows, width]` a layer, zeroed, at fixed addresses as long as this object lives.

    `widths` gives the elements of a row by layer; a row of opaque bytes has dtype uint8. `capacity_rows` is
    the same for all layers: layers that share a selection share slots. Not thread-safe by itself: a buffer is
    written by whoever moves the layer's rows, and read by its attention after that.
    """

    def __init__(
        self,
        widths: Mapping[int, int],
        *,
        capacity_rows: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        if capacity_rows < 1 or not widths or min(widths.values()) < 1:
            raise ValueError(f"hot rows need layers, rows and row widths: {capacity_rows} rows of {widths}")
        self.capacity_rows = capacity_rows
        sizes = {
            layer: _buffer_bytes(width * dtype.itemsize, capacity_rows) for layer, width in widths.items()
        }
        # Zeroed, not empty: a masked selection may still multiply what lies in slot 0 by nought.
        # One allocation: a device registers, and an allocator rounds up, once and not once a layer.
        self._memory = torch.zeros(sum(sizes.values()), dtype=torch.uint8, device=device)
        assert self._memory.data_ptr() % ALIGN_BYTES == 0, "torch aligns allocations to 64 bytes or more"
        self._buffers: dict[int, torch.Tensor] = {}
        offset = 0
        for layer, width in widths.items():
            rows = self._memory[offset : offset + capacity_rows * width * dtype.itemsize]
            self._buffers[layer] = rows.view(dtype).view(capacity_rows, width)
            offset += sizes[layer]

    @property
    def size_bytes(self) -> int:
        """Device bytes taken, alignment included; `hot_rows_bytes` of the same layers (A1)."""
        return self._memory.numel()

    @property
    def layers(self) -> tuple[int, ...]:
        return tuple(self._buffers)

    def buffer(self, layer: int) -> torch.Tensor:
        """The layer's `[capacity_rows, width]`, the same memory on every call. KeyError for another layer."""
        found = self._buffers.get(layer)
        if found is None:
            raise KeyError(f"layer {layer} has no hot rows here; layers are {sorted(self._buffers)}")
        return found


def _buffer_bytes(row_bytes: int, capacity_rows: int) -> int:
    return -(-row_bytes * capacity_rows // ALIGN_BYTES) * ALIGN_BYTES
