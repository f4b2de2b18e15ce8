"""For tests of KVPP: a stage of layers whose pages betray every byte that is not their own."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvstrata.core.bundle import ComponentSpec, build_bundles
from kvstrata.core.layers import Component, LayerId
from kvstrata.core.owners import OwnerPlan, plan_owners
from kvstrata.memory.pages import PageView


@dataclass(frozen=True, kw_only=True)
class OwnerShape:
    """A stage: bytes of main and indexer pages by target layer, and one draft layer behind them."""

    main_bytes: tuple[int, ...] = (64, 48, 64, 80, 64)
    indexer_bytes: tuple[int, ...] = (16, 0, 24, 0, 8)
    draft_bytes: int = 40
    num_blocks: int = 10

    def page_bytes(self, layer: int, component: Component) -> int:
        """Of a target layer, or the draft layer behind them; 0 for a cache that the layer lacks."""
        if layer == len(self.main_bytes):
            return self.draft_bytes if component is Component.MAIN else 0
        return (self.main_bytes if component is Component.MAIN else self.indexer_bytes)[layer]

    def pattern(self, layer: int, component: Component, block: int, version: int) -> npt.NDArray[np.uint8]:
        """What a page holds after its `version`-th writing; no two pages ever hold the same."""
        seed = (((layer * 2 + (component is Component.INDEXER)) * 64 + block) << 20) + version
        page_bytes = self.page_bytes(layer, component)
        return np.random.default_rng(seed).integers(0, 256, page_bytes, dtype=np.uint8)

    def plan(self, group_size: int) -> OwnerPlan:
        drafts = len(self.main_bytes)
        specs = [
            ComponentSpec(
                name=f"{layer}.{component.value}",
                layer=LayerId(layer, component, layer == drafts),
                page_bytes=page_bytes,
                block_tokens=16,
                layout=str(page_bytes),
            )
            for layer in range(drafts + 1)
            for component in Component
            if (page_bytes := self.page_bytes(layer, component))
        ]
        return plan_owners(build_bundles(specs), group_size=group_size)


UNIFORM = OwnerShape(main_bytes=(64,) * 5, indexer_bytes=(16,) * 5)
"""Layers that can share a layerwise buffer."""


def page_of(view: PageView, block: int) -> npt.NDArray[np.uint8]:
    """A page's bytes themselves, while their memory lives."""
    address = int(view.page_address(np.array([block], dtype=np.int64))[0])
    return np.ctypeslib.as_array((ctypes.c_uint8 * view.page_bytes).from_address(address))
