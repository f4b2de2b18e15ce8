"""KVPP plan: which rank of a group keeps which layers, and where the layers of the others pass through.

Source: seed, KVPP, Layer ownership (2.1) and Physical layout and memory budget (2.2). A *member* is a rank's
index in its group of TP x PCP ranks; drafts belong to nobody, every member keeps its own.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from kvstrata.core.buffers import BufferPlan, Slot, SlotId, check_same_block
from kvstrata.core.bundle import Bundle
from kvstrata.errors import ConfigurationError

SCRATCH_BUFFERS = 2
"""One for the layer that computes, one for the layer that arrives."""


def owner_groups(world_size: int, *, tp: int, pcp: int) -> tuple[tuple[int, ...], ...]:
    """Return the ranks of every KVPP group; a rank's place in its group is `pcp_rank * tp + tp_rank`.

    All ranks, numbered with the TP rank varying fastest and the PCP rank next, in rows of `pcp * tp`.
    Raises ConfigurationError where the rows do not come out even.
    """
    if tp < 1 or pcp < 1 or world_size < 1 or world_size % (tp * pcp):
        raise ConfigurationError(
            f"{world_size} ranks cannot be divided into groups of tensor_parallel_size={tp} x "
            f"prefill_context_parallel_size={pcp}"
        )
    width = tp * pcp
    return tuple(tuple(range(first, first + width)) for first in range(0, world_size, width))


@dataclass(frozen=True, kw_only=True)
class OwnerPlan:
    """The layers of one pipeline stage, sorted by number, and the members that share the target layers."""

    bundles: tuple[Bundle, ...]
    group_size: int

    @cached_property
    def targets(self) -> tuple[int, ...]:
        """Target layers in the order in which they run."""
        return tuple(bundle.index for bundle in self.bundles if not bundle.is_draft)

    @cached_property
    def drafts(self) -> tuple[int, ...]:
        """Draft layers, which every member keeps for itself."""
        return tuple(bundle.index for bundle in self.bundles if bundle.is_draft)

    def owned(self, member: int) -> tuple[int, ...]:
        """Return the target layers whose home is `member`; the first members own one more where needed."""
        self._check_member(member)
        each, more = divmod(len(self.targets), self.group_size)
        first = member * each + min(member, more)
        return self.targets[first : first + each + (member < more)]

    def owner_of(self, layer: int) -> int:
        """Return the member that keeps `layer`; KeyError for a draft layer and for one not in the plan."""
        return self._owner_by_layer[layer]

    def ordinal(self, layer: int) -> int:
        """Return which of the target layers runs as `layer`, from 0; KeyError as for `owner_of`."""
        return self._ordinal_by_layer[layer]

    def scratch_of(self, layer: int) -> int:
        """Return which scratch buffer `layer` takes on members that do not own it; owned layers count too."""
        return self.ordinal(layer) % SCRATCH_BUFFERS

    @cached_property
    def largest_bundle_bytes(self) -> int:
        """Bytes one block takes in a scratch buffer; 0 without target layers."""
        return max((bundle.page_bytes for bundle in self.bundles if not bundle.is_draft), default=0)

    @cached_property
    def logical_page_bytes(self) -> int:
        """Bytes one block would take with every layer on every member."""
        return sum(bundle.page_bytes for bundle in self.bundles)

    def physical_page_bytes(self, member: int) -> int:
        """Return the bytes one block takes on `member`: owned targets, drafts, two scratch buffers."""
        own = sum(self._bundle_by_layer[layer].page_bytes for layer in (*self.owned(member), *self.drafts))
        return own + SCRATCH_BUFFERS * self.largest_bundle_bytes

    def buffer_plan(self, member: int) -> BufferPlan:
        """Return `member`'s buffers: one for each owned and draft layer, then the two scratch buffers.

        The scratch buffers are there, and as large as the largest target bundle, whatever passes through.
        """
        held = sorted((*self.owned(member), *self.drafts))
        slots = [self._own_slot(SlotId(at), layer) for at, layer in enumerate(held)]
        if self.targets:
            others = [layer for layer in self.targets if self.owner_of(layer) != member]
            largest = max(
                (bundle for bundle in self.bundles if not bundle.is_draft),
                key=lambda bundle: bundle.page_bytes,
            )
            slots += [
                Slot(
                    id=SlotId(len(held) + scratch),
                    layers=tuple(layer for layer in others if self.scratch_of(layer) == scratch),
                    main_page_bytes=largest.main.page_bytes,
                    indexer_page_bytes=largest.indexer.page_bytes if largest.indexer else 0,
                    independent=False,
                )
                for scratch in range(SCRATCH_BUFFERS)
            ]
        return BufferPlan(slots=tuple(slots), bundles=self.bundles)

    def describe(self, member: int) -> str:
        """Return the owner table for the log, one line a member, and what the plan gains by its fullest."""
        rows = [("member", "layers", "B/block")]
        rows += [
            (str(at), _listed(self.owned(at)), str(self.physical_page_bytes(at)))
            for at in range(self.group_size)
        ]
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        lines = [
            "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows
        ]
        physical, logical = self.physical_page_bytes(member), self.logical_page_bytes
        fullest = max(self.physical_page_bytes(at) for at in range(self.group_size))
        drafts = f", drafts {_listed(self.drafts)} on each member" if self.drafts else ""
        lines.append(
            f"member {member} of {self.group_size}{drafts}: {physical} of {logical} bytes per block, "
            f"scratch 2 x {self.largest_bundle_bytes}; {logical / fullest:.2f} x the blocks of plain vLLM"
        )
        return "\n".join(lines)

    def _own_slot(self, slot_id: SlotId, layer: int) -> Slot:
        bundle = self._bundle_by_layer[layer]
        return Slot(
            id=slot_id,
            layers=(layer,),
            main_page_bytes=bundle.main.page_bytes,
            indexer_page_bytes=bundle.indexer.page_bytes if bundle.indexer else 0,
            independent=True,
        )

    def _check_member(self, member: int) -> None:
        if not 0 <= member < self.group_size:
            raise ValueError(f"member {member} is outside 0..{self.group_size - 1}")

    @cached_property
    def _bundle_by_layer(self) -> Mapping[int, Bundle]:
        return {bundle.index: bundle for bundle in self.bundles}

    @cached_property
    def _owner_by_layer(self) -> Mapping[int, int]:
        return {layer: member for member in range(self.group_size) for layer in self.owned(member)}

    @cached_property
    def _ordinal_by_layer(self) -> Mapping[int, int]:
        return {layer: ordinal for ordinal, layer in enumerate(self.targets)}


def plan_owners(bundles: Iterable[Bundle], *, group_size: int) -> OwnerPlan:
    """Divide a stage's target layers into contiguous, balanced parts; the order of `bundles` is no matter.

    Raises ConfigurationError for a group of one rank, which has nobody to share with, and LayoutError naming
    two caches of different block sizes: one block table serves all layers.
    """
    if group_size < 2:
        raise ConfigurationError(
            "enable_kvpp=true spreads layers over tensor_parallel_size x prefill_context_parallel_size "
            f"ranks, {group_size} here; set tensor_parallel_size to at least 2, or enable_kvpp to false"
        )
    ordered = tuple(sorted(bundles, key=lambda bundle: bundle.index))
    check_same_block(ordered)
    return OwnerPlan(bundles=ordered, group_size=group_size)


def _listed(layers: Iterable[int]) -> str:
    return ",".join(str(layer) for layer in layers) or "-"
