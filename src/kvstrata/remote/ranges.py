"""From blocks to byte ranges: which bytes of the producer's regions a read copies to which addresses here.

Everything is checked before a byte moves: what a producer announced is data, not truth. A refusal never gets
better by trying again. Source: seed, Transfer granularity; Validation and Failure Handling.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvstrata.core.layers import Component
from kvstrata.errors import TransferFailed
from kvstrata.memory.pages import PageView, checked_block_ids
from kvstrata.remote.protocol.messages import Hello, Place
from kvstrata.remote.transports.base import Int64Array, ReadPlan

BlockIds = Sequence[int] | npt.NDArray[np.integer]
CacheKey = tuple[int, Component]
Source = tuple[Place, int]
"""Where a producer's pages of one cache lie, and the bytes of a page."""

_ADDRESSABLE_BYTES = 1 << 62


class RangeRefused(TransferFailed, IndexError):  # noqa: N818 - named for what happened
    """A read that must not happen: the message names layer, cache and both sides' values."""


@dataclass(frozen=True, kw_only=True)
class Pages:
    """Pages `source_blocks[i]` of a cache at the producer, to be read to pages `blocks[i]` here."""

    name: str
    source: Source
    source_blocks: BlockIds
    destination: PageView
    blocks: BlockIds


def sources_of(hello: Hello) -> dict[CacheKey, Source]:
    """Return where a producer's caches lie, from a Hello that `check_hello` has passed."""
    return {
        (layout.layer, Component(layout.component)): (place, layout.page_bytes)
        for layout, place in zip(hello.components, hello.places, strict=True)
    }


def plan_reads(
    *,
    components: Mapping[CacheKey, Source],
    destinations: Mapping[CacheKey, PageView],
    layer: int,
    blocks: Mapping[Component, tuple[BlockIds, BlockIds]],
) -> ReadPlan:
    """Plan the read of some blocks of one layer; main before indexer.

    `blocks` gives, for each cache to read, the producer's block ids and this engine's, pairwise; a cache that
    is left out, or has no ids, is not read. Raises RangeRefused if the layer is unknown, if a cache exists on
    one side only, if page sizes or counts differ, or for a block id that is out of range or given twice.
    """
    theirs = {component for at, component in components if at == layer}
    ours = {component for at, component in destinations if at == layer}
    if not theirs or theirs != ours:
        raise RangeRefused(f"layer {layer}: prefill has {_listed(theirs)}, decode has {_listed(ours)}")
    unknown = blocks.keys() - theirs
    if unknown:
        raise RangeRefused(f"layer {layer}: asked for {_listed(unknown)}, there is {_listed(theirs)}")
    return plan_pages(
        Pages(
            name=f"layer {layer} {component.value}",
            source=components[layer, component],
            source_blocks=blocks[component][0],
            destination=destinations[layer, component],
            blocks=blocks[component][1],
        )
        for component in sorted(blocks)
    )


def plan_pages(parts: Iterable[Pages]) -> ReadPlan:
    """Plan the read of pages of several caches, in their order.

    Pages that are neighbours on both sides become one range; ranges of different caches stay apart. Raises
    RangeRefused as `plan_reads` does.
    """
    columns = [_ranges(part) for part in parts]
    region, offset, dst, size = (
        np.concatenate([column[at] for column in columns]) if columns else np.empty(0, dtype=np.int64)
        for at in range(4)
    )
    return ReadPlan(region=region, offset=offset, dst=dst, size=size)


def _ranges(part: Pages) -> tuple[Int64Array, Int64Array, Int64Array, Int64Array]:
    place, page_bytes = part.source
    view = part.destination
    if page_bytes != view.page_bytes:
        raise RangeRefused(
            f"{part.name}: pages of {page_bytes} bytes at prefill, of {view.page_bytes} at decode"
        )
    if place.block_stride_bytes < page_bytes or (
        place.offset + place.num_blocks * place.block_stride_bytes >= _ADDRESSABLE_BYTES
    ):
        raise RangeRefused(f"{part.name}: {place} is no place for pages of {page_bytes} bytes")
    source_ids = _checked(part.source_blocks, place.num_blocks, f"{part.name} at prefill")
    ids = _checked(part.blocks, view.num_blocks, f"{part.name} at decode")
    if len(source_ids) != len(ids):
        raise RangeRefused(f"{part.name}: {len(source_ids)} blocks at prefill, {len(ids)} at decode")
    # By source: block tables may run backwards, and neighbours are merged only where they follow each other.
    order = np.argsort(source_ids, kind="stable")
    offset = np.int64(place.offset) + source_ids[order] * np.int64(place.block_stride_bytes)
    dst = view.address_of(ids[order])
    is_start = np.ones(len(ids), dtype=np.bool_)
    is_start[1:] = (np.diff(offset) != page_bytes) | (np.diff(dst) != page_bytes)
    starts = np.flatnonzero(is_start)
    pages = np.diff(np.append(starts, len(ids)))
    region = np.full(len(starts), place.region, dtype=np.int64)
    return region, offset[starts], dst[starts], pages * np.int64(page_bytes)


def _checked(block_ids: BlockIds, num_blocks: int, what: str) -> Int64Array:
    try:
        ids = checked_block_ids(np.asarray(block_ids), num_blocks)
    except (IndexError, TypeError, OverflowError) as error:
        raise RangeRefused(f"{what}: {error}") from error
    if len(np.unique(ids)) != len(ids):
        # Two of the request's blocks would end in one page, or come from one.
        raise RangeRefused(f"{what}: a block id is given twice")
    return ids


def _listed(components: Iterable[Component]) -> str:
    return " and ".join(component.value for component in sorted(components)) or "no cache of it"
