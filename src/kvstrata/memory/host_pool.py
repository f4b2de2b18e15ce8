"""The host home: one region that holds every running request's KV, addressed by vLLM's own block ids.

Source: seed, Layerwise Prefill Offload; invariant M5 (a running request's KV never lives only in a store).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kvstrata.core.bundle import Bundle, ComponentSpec
from kvstrata.core.layers import Component
from kvstrata.memory.allocator import HostAllocator
from kvstrata.memory.pages import PageView
from kvstrata.memory.region import HostRegion, RegionHandle, open_region

ALIGN_BYTES = 4096
MIN_GUARD_BYTES = 64

ALL_COMPONENTS: Collection[Component] = (Component.MAIN, Component.INDEXER)
MAIN_ONLY: Collection[Component] = (Component.MAIN,)
"""For sparse decode offload, whose indexer caches stay on the device."""


@dataclass(frozen=True, kw_only=True)
class _Part:
    """All pages of one component of one layer, without gaps."""

    layer: int
    component: Component
    offset: int
    page_bytes: int
    block_tokens: int

    def __str__(self) -> str:
        return f"layer {self.layer} {self.component.value}"


@dataclass(frozen=True, kw_only=True)
class _Guard:
    """Bytes that nobody writes, between two parts."""

    offset: int
    size_bytes: int
    after: str


@dataclass(frozen=True, kw_only=True)
class HostPoolStatistics:
    num_blocks: int
    layers: int
    page_bytes: int
    """Bytes of one block in all layers and components held here."""
    size_bytes: int
    resident_bytes: int
    """Memory taken so far; grows up to `size_bytes` as blocks are first written."""
    pinned: bool


def host_page_bytes(
    bundles: Iterable[Bundle],
    layers: Collection[int],
    *,
    components: Collection[Component] = ALL_COMPONENTS,
) -> int:
    """Host bytes of one block: the pages of the `components` of `layers`."""
    return sum(spec.page_bytes for _, _, spec in _components(bundles, layers, components))


def host_pool_bytes(
    bundles: Iterable[Bundle],
    num_blocks: int,
    layers: Collection[int],
    *,
    components: Collection[Component] = ALL_COMPONENTS,
) -> int:
    """Bytes a HostPool of these arguments allocates: its pages, alignment and guards."""
    return _lay_out(bundles, num_blocks, layers, components)[2]


def host_pool_overhead_bytes(
    bundles: Iterable[Bundle],
    layers: Collection[int],
    *,
    components: Collection[Component] = ALL_COMPONENTS,
) -> int:
    """Most that guards and alignment add to the pages, whatever the number of blocks."""
    return ALIGN_BYTES + len(_components(bundles, layers, components)) * (MIN_GUARD_BYTES + ALIGN_BYTES)


class HostPool:
    """Pages of `num_blocks` blocks for the `components` of `layers`, zeroed at first.

    For each layer and component, block `i` is at page `i` of a compact view, so neighbouring blocks can be
    copied as one range. The pool decides nothing: which block is in use is vLLM's business.
    Constructing it allocates and registers; raises BudgetError if the memory is not there.
    """

    _closed: bool
    _bytes: npt.NDArray[np.uint8]

    def __init__(
        self,
        bundles: Iterable[Bundle],
        num_blocks: int,
        allocator: HostAllocator,
        *,
        layers: Collection[int],
        components: Collection[Component] = ALL_COMPONENTS,
        name: str = "host-pool",
    ) -> None:
        parts, guards, size_bytes = _lay_out(bundles, num_blocks, layers, components)
        region = allocator.alloc(size_bytes, name)

        def release() -> None:
            allocator.free(region)

        self._bind(parts, guards, num_blocks, region, release)
        self._pinned = allocator.register(region)
        for guard in guards:
            self._guard_bytes(guard)[:] = _pattern(guard)

    @classmethod
    def open(
        cls,
        bundles: Iterable[Bundle],
        num_blocks: int,
        handle: RegionHandle,
        *,
        layers: Collection[int],
        components: Collection[Component] = ALL_COMPONENTS,
    ) -> HostPool:
        """The pool that another process made of the same arguments, as rank 0 does for the ranks beside it.

        Raises StoreUnavailable if it is gone, ValueError if its size is not that of these arguments, and
        AssertionError if its guards are not where these arguments put them. It stays unpinned here.
        """
        parts, guards, size_bytes = _lay_out(bundles, num_blocks, layers, components)
        if handle.size_bytes != size_bytes:
            raise ValueError(
                f"host pool {handle.label!r} has {handle.size_bytes} bytes, but {num_blocks} blocks of "
                f"layers {sorted(layers)} take {size_bytes}: the two processes planned differently"
            )
        region = open_region(handle)
        pool = cls.__new__(cls)
        pool._bind(parts, guards, num_blocks, region, region.close)
        pool._pinned = False
        try:
            pool.check_integrity()
        except AssertionError:
            pool.close()
            raise
        return pool

    @property
    def size_bytes(self) -> int:
        return self._region.size_bytes

    @property
    def handle(self) -> RegionHandle:
        """Passed to `HostPool.open` in another process."""
        return self._region.handle

    @property
    def region(self) -> HostRegion:
        """The shared memory that all pages lie in."""
        return self._region

    def view(self, layer: int, component: Component) -> PageView:
        """Pages of one component. Raises KeyError for what has no home here, ValueError after `close`."""
        if self._closed:
            raise ValueError("the host pool was closed")
        found = self._views.get((layer, component))
        if found is None:
            raise KeyError(f"layer {layer} {component.value} has no home in this host pool")
        return found

    def tensor(self, layer: int, component: Component, *, width: int, dtype: torch.dtype) -> torch.Tensor:
        """Rows as `[num_blocks, block_tokens, width]` without a copy: what is written goes to the pool.

        What a page has beyond its rows is padding. The tensor keeps the memory mapped, even after `close`.
        Raises as `view` does, and ValueError where such rows do not fit a page.
        """
        view, block_tokens = self.view(layer, component), self._parts[layer, component].block_tokens
        page_items, rest = divmod(view.page_bytes, dtype.itemsize)
        if rest or not 0 < block_tokens * width <= page_items:
            raise ValueError(
                f"{block_tokens} rows of {width} elements of {dtype} do not fit a page of layer {layer} "
                f"{component.value}, which has {view.page_bytes} bytes"
            )
        offset = view.address - self._region.address
        pages = self._region.tensor()[offset : offset + view.span_bytes].view(dtype)
        rows = pages.view(view.num_blocks, page_items)[:, : block_tokens * width]
        return rows.unflatten(1, (block_tokens, width))

    def statistics(self) -> HostPoolStatistics:
        return HostPoolStatistics(
            num_blocks=self._num_blocks,
            layers=len({layer for layer, _ in self._views}),
            page_bytes=sum(view.page_bytes for view in self._views.values()),
            size_bytes=self._region.size_bytes,
            resident_bytes=0 if self._closed else self._region.resident_bytes,
            pinned=self._pinned,
        )

    def check_integrity(self) -> None:
        """Raise AssertionError naming the place if anything wrote outside the pages."""
        if self._closed:
            return
        for guard in self._guards:
            wrong = np.flatnonzero(self._guard_bytes(guard) != _pattern(guard))
            if len(wrong):
                raise AssertionError(
                    f"host pool: {len(wrong)} bytes after {guard.after} were overwritten, "
                    f"the first at offset {guard.offset + int(wrong[0])}"
                )

    def close(self) -> None:
        """Give the memory up. Only when no copy to or from it is pending. Closing twice is harmless."""
        if not self._closed:
            self._closed = True
            self._bytes = np.empty(0, dtype=np.uint8)
            self._release()

    def _bind(
        self,
        parts: list[_Part],
        guards: list[_Guard],
        num_blocks: int,
        region: HostRegion,
        release: Callable[[], None],
    ) -> None:
        self._num_blocks = num_blocks
        self._region = region
        self._guards = guards
        self._release = release
        self._closed = False
        self._bytes = region.tensor().numpy()
        self._parts = {(part.layer, part.component): part for part in parts}
        self._views = {
            (part.layer, part.component): PageView(
                address=region.address + part.offset,
                block_stride_bytes=part.page_bytes,
                page_bytes=part.page_bytes,
                num_blocks=num_blocks,
            )
            for part in parts
        }

    def _guard_bytes(self, guard: _Guard) -> npt.NDArray[np.uint8]:
        return self._bytes[guard.offset : guard.offset + guard.size_bytes]


def _components(
    bundles: Iterable[Bundle], layers: Collection[int], components: Collection[Component]
) -> list[tuple[int, Component, ComponentSpec]]:
    by_index = {bundle.index: bundle for bundle in bundles}
    unknown = sorted(set(layers) - by_index.keys())
    if unknown:
        raise ValueError(f"layers {unknown} are not among the planned layers {sorted(by_index)}")
    found = []
    for index in sorted(set(layers)):
        bundle = by_index[index]
        specs = {Component.MAIN: bundle.main, Component.INDEXER: bundle.indexer}
        for component, spec in specs.items():
            if spec is not None and component in components:
                found.append((index, component, spec))
    return found


def _lay_out(
    bundles: Iterable[Bundle], num_blocks: int, layers: Collection[int], components: Collection[Component]
) -> tuple[list[_Part], list[_Guard], int]:
    """Guard, part, guard, part, ..., guard; parts aligned. Also the size of it all."""
    found = _components(bundles, layers, components)
    if num_blocks <= 0 or not found:
        names = [component.value for component in components]
        raise ValueError(
            f"a host pool needs blocks and layers, got {num_blocks} blocks of {sorted(layers)} ({names})"
        )
    parts: list[_Part] = []
    guards = [_Guard(offset=0, size_bytes=ALIGN_BYTES, after="the start")]
    offset = ALIGN_BYTES
    for layer, component, spec in found:
        part = _Part(
            layer=layer,
            component=component,
            offset=offset,
            page_bytes=spec.page_bytes,
            block_tokens=spec.block_tokens,
        )
        parts.append(part)
        end = offset + num_blocks * spec.page_bytes
        offset = -(-(end + MIN_GUARD_BYTES) // ALIGN_BYTES) * ALIGN_BYTES
        guards.append(_Guard(offset=end, size_bytes=offset - end, after=str(part)))
    return parts, guards, offset


def _pattern(guard: _Guard) -> npt.NDArray[np.uint8]:
    """Depends on the place, so that a copy of one guard over another shows too."""
    places = np.arange(guard.offset, guard.offset + guard.size_bytes, dtype=np.uint64)
    return ((places * np.uint64(2654435761)) >> np.uint64(13)).astype(np.uint8)
