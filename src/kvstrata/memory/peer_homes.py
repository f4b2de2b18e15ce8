"""Pages in another rank's memory: what a rank tells the others of its homes, and how they reach them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvstrata.core.layers import Component
from kvstrata.errors import LayoutError
from kvstrata.memory.pages import PageView
from kvstrata.memory.region import HostRegion, RegionHandle, open_region

PageTable = Mapping[tuple[int, Component], PageView]


@dataclass(frozen=True, kw_only=True)
class PagesInRegion:
    """A page view without an address: `offset_bytes` from the start of region `region` of its maker."""

    region: int
    offset_bytes: int
    block_stride_bytes: int
    page_bytes: int
    num_blocks: int


@dataclass(frozen=True, kw_only=True)
class HomesOffer:
    """The homes that lie in one rank's shared memory; picklable."""

    regions: tuple[RegionHandle, ...]
    pages: Mapping[tuple[int, Component], PagesInRegion]


def offer_homes(homes: PageTable, regions: Sequence[HostRegion]) -> HomesOffer:
    """Describe `homes` to other processes. Raises LayoutError for pages that lie in none of `regions`."""
    pages = {}
    for (layer, component), view in homes.items():
        for at, region in enumerate(regions):
            offset_bytes = view.address - region.address
            if offset_bytes >= 0 and offset_bytes + view.span_bytes <= region.size_bytes:
                pages[layer, component] = PagesInRegion(
                    region=at,
                    offset_bytes=offset_bytes,
                    block_stride_bytes=view.block_stride_bytes,
                    page_bytes=view.page_bytes,
                    num_blocks=view.num_blocks,
                )
                break
        else:
            raise LayoutError(
                f"the home of layer {layer} ({component.value}) lies in none of the {len(regions)} shared "
                "regions of this rank: other ranks could not reach it"
            )
    used = sorted({entry.region for entry in pages.values()})
    place = {region: at for at, region in enumerate(used)}
    return HomesOffer(
        regions=tuple(regions[at].handle for at in used),
        pages={
            key: PagesInRegion(**{**vars(entry), "region": place[entry.region]})
            for key, entry in pages.items()
        },
    )


class PeerHomes:
    """Another rank's homes, mapped here. The views are valid until `close`."""

    def __init__(self, offer: HomesOffer) -> None:
        """Map the regions. Raises StoreUnavailable when their maker is gone."""
        self._regions: list[HostRegion] = []
        try:
            for handle in offer.regions:
                self._regions.append(open_region(handle))
        except BaseException:
            self.close()
            raise
        self.views: PageTable = {
            key: PageView(
                address=self._regions[entry.region].address + entry.offset_bytes,
                block_stride_bytes=entry.block_stride_bytes,
                page_bytes=entry.page_bytes,
                num_blocks=entry.num_blocks,
            )
            for key, entry in offer.pages.items()
        }

    @property
    def regions(self) -> list[HostRegion]:
        """The other rank's memory, as mapped here."""
        return list(self._regions)

    def close(self) -> None:
        """Unmap; harmless when repeated."""
        self.views = {}
        for region in self._regions:
            region.close()
        self._regions.clear()
