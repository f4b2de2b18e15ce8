"""SFA-C8: main rows with their latent part in int8. Everything but attention moves them as opaque bytes.

Where the parts of a row lie, in bytes from its start:

| from | what |
|---|---|
| 0 | kv_lora_rank int8 values, then padding to a multiple of 4 |
| `scales_at` | float32 scales: one for every 128 values, or one for all where 128 does not divide them |
| `rope_at` | the rope part in the model's dtype, unquantised, then padding to a multiple of 4 |

So a DeepSeek row of 512 + 64 bfloat16 values takes 512 + 16 + 128 = 656 bytes instead of 1152. Attention over
packed rows is attention over value * scale in float32.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np
import torch

from kvstrata.kernels.compiled import SFA_C8, packed_layout
from kvstrata.kernels.quantise import quantise_rows
from kvstrata.kernels.rows import KINDS, FlatRows, flat_rows

ALIGN_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class PackedRows:
    """The row layout of one model: how many values of which kind."""

    kv_lora_rank: int
    rope: int
    rope_dtype: torch.dtype

    @property
    def width(self) -> int:
        """Values of a row, which is what queries have."""
        return self.kv_lora_rank + self.rope

    @property
    def row_bytes(self) -> int:
        """Bytes of a packed row, padding included."""
        rope_at = packed_layout(self.kv_lora_rank)[2]
        return _aligned(rope_at + self.rope * self.rope_dtype.itemsize)

    @property
    def name(self) -> str:
        """What tells this layout from others of the same row bytes."""
        return f"sfa-c8, rope {self.rope_dtype}"

    def pack(self, latent: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
        """Quantise latent [T, kv_lora_rank] by groups and join it with rope [T, rope]: uint8 [T, row_bytes].

        The largest magnitude of a group maps to +-127; a group of zeros has scale 0.
        """
        group, scales_at, rope_at = packed_layout(self.kv_lora_rank)
        tokens = latent.shape[0]
        values, scales = quantise_rows(latent.reshape(-1, group))
        rows = latent.new_zeros(tokens, self.row_bytes, dtype=torch.uint8)
        rows[:, : self.kv_lora_rank] = values.view(torch.uint8).view(tokens, self.kv_lora_rank)
        rows[:, scales_at:rope_at] = scales.view(torch.uint8).view(tokens, rope_at - scales_at)
        rope_bytes = rope.to(self.rope_dtype).contiguous().view(torch.uint8)
        rows[:, rope_at : rope_at + rope_bytes.shape[1]] = rope_bytes
        return rows

    def flat(self, cache: torch.Tensor) -> FlatRows:
        """View cache [B, N, row_bytes] uint8 as the compiled loops address it, without copying it."""
        assert cache.dtype == torch.uint8
        assert cache.shape[2] == self.row_bytes
        flat = flat_rows(cache)
        for what in (flat.block_stride, flat.row_stride, flat.u8.ctypes.data):
            assert what % ALIGN_BYTES == 0, "scales and rope parts are read where they lie"
        return dataclasses.replace(
            flat,
            kind=SFA_C8 + KINDS[self.rope_dtype],
            f32=flat.u8.view(np.float32),
            u16=flat.u8.view(np.uint16),
        )


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // ALIGN_BYTES) * ALIGN_BYTES
