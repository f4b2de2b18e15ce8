"""For tests of remote read: engines' memory, whose every page says whose it is."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvstrata.core.layers import Component
from kvstrata.memory.pages import PageView
from kvstrata.memory.region import HostRegion
from kvstrata.remote.protocol.messages import ComponentLayout, Place
from kvstrata.remote.ranges import CacheKey

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What the caches of an engine look like; odd sizes, so that a wrong stride shows."""

    layers: int = 3
    num_blocks: int = 64
    main_bytes: int = 1040
    indexer_bytes: int = 264  # 0: no indexer
    gap_bytes: int = 0  # between the pages of a cache
    block_tokens: int = 16
    layout: str = "bytes"

    def page_bytes(self) -> dict[CacheKey, int]:
        """Bytes of a page of each cache."""
        sizes = {Component.MAIN: self.main_bytes, Component.INDEXER: self.indexer_bytes}
        return {(n, c): sizes[c] for n in range(self.layers) for c in sizes if sizes[c]}

    def components(self) -> list[ComponentLayout]:
        """As a side announces them."""
        return [
            ComponentLayout(
                layer=layer,
                component=component.value,
                is_draft=False,
                page_bytes=page_bytes,
                block_tokens=self.block_tokens,
                layout=self.layout,
            )
            for (layer, component), page_bytes in self.page_bytes().items()
        ]


def page_of(owner: str, layer: int, component: Component, block: int, page_bytes: int) -> Bytes:
    """The bytes of block `block` of a request, which no other page of anybody has."""
    digest = hashlib.blake2b(f"{owner}/{layer}/{component.value}/{block}".encode(), digest_size=8).digest()
    words = np.arange(-(-page_bytes // 8), dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    page: Bytes = (words ^ np.frombuffer(digest, dtype=np.uint64)[0]).view(np.uint8)[:page_bytes]
    return page


class PagedMemory:
    """One region with the pages of every cache, the caches one behind the other."""

    def __init__(self, shape: Shape, name: str, fill: int) -> None:
        self.shape = shape
        self._offsets: dict[CacheKey, int] = {}
        size_bytes = 64
        for key, page_bytes in shape.page_bytes().items():
            self._offsets[key] = size_bytes
            size_bytes += shape.num_blocks * (page_bytes + shape.gap_bytes) + 64
        self.region = HostRegion.create(size_bytes, name, huge_pages=False)
        self._bytes: Bytes = self.region.tensor().numpy()
        self._bytes[:] = fill

    def places(self) -> list[Place]:
        """Where the caches lie in the region, in the order of `Shape.components`."""
        sizes = self.shape.page_bytes()
        return [
            Place(
                region=0,
                offset=offset,
                block_stride_bytes=sizes[key] + self.shape.gap_bytes,
                num_blocks=self.shape.num_blocks,
            )
            for key, offset in self._offsets.items()
        ]

    def views(self) -> dict[CacheKey, PageView]:
        """Where they lie in this process."""
        return {
            key: PageView(
                address=self.region.address + self._offsets[key],
                block_stride_bytes=page_bytes + self.shape.gap_bytes,
                page_bytes=page_bytes,
                num_blocks=self.shape.num_blocks,
            )
            for key, page_bytes in self.shape.page_bytes().items()
        }

    def page(self, key: CacheKey, block_id: int) -> Bytes:
        """One page, writable."""
        page_bytes = self.shape.page_bytes()[key]
        begin = self._offsets[key] + block_id * (page_bytes + self.shape.gap_bytes)
        return self._bytes[begin : begin + page_bytes]

    def write(self, owner: str, first_block: int, block_ids: Sequence[int], layers: Sequence[int]) -> None:
        """Put the pages of blocks `first_block...` of a request into `block_ids`."""
        for (layer, component), page_bytes in self.shape.page_bytes().items():
            if layer in layers:
                for at, block_id in enumerate(block_ids):
                    self.page((layer, component), block_id)[:] = page_of(
                        owner, layer, component, first_block + at, page_bytes
                    )

    def wrong_pages(self, owner: str, first_block: int, block_ids: Sequence[int]) -> list[str]:
        """Names of the pages that do not hold what `write` puts there."""
        return [
            f"layer {layer} {component.value} block {first_block + at}"
            for (layer, component), page_bytes in self.shape.page_bytes().items()
            for at, block_id in enumerate(block_ids)
            if not np.array_equal(
                self.page((layer, component), block_id),
                page_of(owner, layer, component, first_block + at, page_bytes),
            )
        ]

    def fill(self, block_ids: Sequence[int], value: int) -> None:
        """Overwrite whole pages, as a next owner does."""
        for key in self._offsets:
            for block_id in block_ids:
                self.page(key, block_id)[:] = value

    def holds_only(self, block_ids: Sequence[int], value: int) -> bool:
        """Whether nothing was written since `fill`."""
        return all((self.page(key, block) == value).all() for key in self._offsets for block in block_ids)
