"""LI-C8: indexer rows as D int8 values and one float32 scale, D + 4 bytes of a uint8 cache."""

from __future__ import annotations

import torch

from kvstrata.kernels.rows import write_rows

SCALE_BYTES = 4


def quantise_rows(k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Symmetric int8 per row: [T, D] float -> int8 [T, D] and float32 scale [T], k ~ value * scale.

    The largest magnitude maps to +-127; a row of zeros has scale 0.
    """
    k = k.float()
    scale = k.abs().amax(dim=-1) / 127.0
    values = torch.where(scale[:, None] > 0, k / scale[:, None], 0.0)
    return values.round_().clamp_(-127, 127).to(torch.int8), scale


def write_quantised_rows(cache: torch.Tensor, k: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """Quantise k [>=T, D] and store it in cache [B, N, D + 4] uint8 at slot_mapping [T]; -1 is skipped."""
    values, scale = quantise_rows(k[: slot_mapping.shape[0]])
    packed = torch.cat((values.view(torch.uint8), scale[:, None].view(torch.uint8)), dim=1)
    write_rows(cache, packed, slot_mapping)
