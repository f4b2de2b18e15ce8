"""Layerwise plan: which physical buffer (slot) holds which layers.

Source: seed, Layerwise Prefill Offload, Buffer planning. With N layers of one layout, I of them independent
and R = N - I, the plan has I + min(B, R) slots; the R layers take the shared slots in round robin.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NewType

from kvstrata.core.bundle import Bundle, ComponentSpec
from kvstrata.core.layers import Component
from kvstrata.errors import ConfigurationError, ConfigurationTypeError, LayoutError, UnsupportedError

SlotId = NewType("SlotId", int)
"""Position of a slot in `BufferPlan.slots`; never a block number."""

_MAX_DEFAULT_PREFETCH_LAYERS = 8


@dataclass(frozen=True, kw_only=True)
class Slot:
    """One physical buffer; its layers hold it in turn, in the order listed.

    Pages are those of its largest bundle. A layer's main pages begin where the buffer does and its indexer
    pages follow directly, so that a bundle is one piece of memory (`BufferPlan.offset_bytes`).
    """

    id: SlotId
    layers: tuple[int, ...]
    main_page_bytes: int
    indexer_page_bytes: int  # 0 if no layer in it has an indexer
    independent: bool  # not part of the shared pool

    @property
    def page_bytes(self) -> int:
        """Bytes one block takes in the buffer."""
        return self.main_page_bytes + self.indexer_page_bytes


@dataclass(frozen=True, kw_only=True)
class BufferPlan:
    """Slots in the order of their ids and of their memory, bundles by layer number."""

    slots: tuple[Slot, ...]
    bundles: tuple[Bundle, ...]

    def slot_of(self, layer: int) -> SlotId:
        """Return the slot that holds `layer`; KeyError for a layer that is not in the plan."""
        return self._slot_by_layer[layer]

    def previous_owner(self, layer: int) -> int | None:
        """Return the layer that holds `layer`'s slot before it within a step, None for the slot's first."""
        layers = self.slots[self.slot_of(layer)].layers
        at = layers.index(layer)
        return layers[at - 1] if at else None

    def following(self, layer: int, n: int) -> tuple[int, ...]:
        """Return up to `n` layers that run after `layer` in a step: target layers, then drafts."""
        assert n >= 0, f"cannot look {n} layers ahead"
        at = self._ordinal_by_layer[layer] + 1
        return self.execution_order[at : at + n]

    @cached_property
    def execution_order(self) -> tuple[int, ...]:
        """All layers as they run: target layers by number, then drafts by number."""
        return tuple(b.index for b in sorted(self.bundles, key=lambda b: b.is_draft))

    @property
    def is_reused(self) -> bool:
        """Whether any slot holds more than one layer, so that its contents come and go."""
        return any(len(slot.layers) > 1 for slot in self.slots)

    @property
    def physical_page_bytes(self) -> int:
        """Device bytes one block takes in all slots."""
        return sum(slot.page_bytes for slot in self.slots)

    @property
    def logical_page_bytes(self) -> int:
        """Bytes one block would take with a buffer for every layer."""
        return sum(bundle.page_bytes for bundle in self.bundles)

    def bundle(self, layer: int) -> Bundle:
        """Return the caches of `layer`; KeyError for a layer that is not in the plan."""
        return self._bundle_by_layer[layer]

    def offset_bytes(self, layer: int, component: Component, num_blocks: int) -> int:
        """Return where a cache of `num_blocks` pages begins, in one piece of memory that holds all slots."""
        slot = self.slot_of(layer)
        before = sum(held.page_bytes for held in self.slots[:slot])
        if component is Component.INDEXER:
            before += self.bundle(layer).main.page_bytes
        return before * num_blocks

    @property
    def main_slots(self) -> tuple[tuple[int, ...], ...]:
        """Per slot, the layers whose main KV lives there."""
        return tuple(slot.layers for slot in self.slots)

    @property
    def indexer_slots(self) -> tuple[tuple[int, ...], ...]:
        """Per slot with an indexer buffer, the layers whose indexer lives there."""
        with_indexer = {bundle.index for bundle in self.bundles if bundle.indexer}
        held = (tuple(n for n in slot.layers if n in with_indexer) for slot in self.slots)
        return tuple(layers for layers in held if layers)

    def describe(self) -> str:
        """Return a table of the plan for the log, one line a slot."""
        rows = [("slot", "layers", "main B/block", "indexer B/block", "kind")]
        for slot in self.slots:
            layers = ",".join(str(layer) for layer in slot.layers)
            kind = "independent" if slot.independent else "shared"
            rows.append((str(slot.id), layers, str(slot.main_page_bytes), str(slot.indexer_page_bytes), kind))
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        lines = [
            "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows
        ]
        lines.append(
            f"{len(self.bundles)} layers in {len(self.slots)} slots: "
            f"{self.physical_page_bytes} of {self.logical_page_bytes} bytes per block"
        )
        return "\n".join(lines)

    @cached_property
    def _bundle_by_layer(self) -> Mapping[int, Bundle]:
        return {bundle.index: bundle for bundle in self.bundles}

    @cached_property
    def _slot_by_layer(self) -> Mapping[int, SlotId]:
        return {layer: slot.id for slot in self.slots for layer in slot.layers}

    @cached_property
    def _ordinal_by_layer(self) -> Mapping[int, int]:
        return {layer: ordinal for ordinal, layer in enumerate(self.execution_order)}


def default_prefetch_layers(num_shared: int | None) -> int:
    """Return how far ahead to prefetch when the user does not say; without sharing only the cap holds."""
    if num_shared is None:
        return _MAX_DEFAULT_PREFETCH_LAYERS
    return min(num_shared, _MAX_DEFAULT_PREFETCH_LAYERS)


def check_reuse_supported(kinds: Mapping[str, str], *, reuse: bool) -> None:
    """Raise UnsupportedError when buffers are to be reused and a cache is not attention's.

    `kinds` maps layer names to cache kinds. A recurrent state (Mamba) cannot be reloaded block by block.
    Without reuse nothing is looked at: such models run as in plain vLLM.
    """
    if not reuse:
        return
    for name, kind in kinds.items():
        if kind != "attention":
            raise UnsupportedError(
                f"layerwise buffer reuse supports attention caches only, and {name!r} is of kind {kind!r}; "
                "remove layerwise_num_shared_buffers to run this model without reuse"
            )


def plan_buffers(
    bundles: Iterable[Bundle],
    *,
    num_shared_buffers: int | None,
    independent_layers: tuple[int, ...] | Literal["all"],
) -> BufferPlan:
    """Assign every layer to a slot; the order of `bundles` has no influence.

    `num_shared_buffers` is B, per group of layers with equal main layout; None means no reuse.
    `independent_layers` are positions in the sorted layers, negative ones counted from the end.

    Raises ConfigurationError (ValueError) or ConfigurationTypeError for the two knobs, LayoutError naming
    two layers and what differs for bundles that cannot share. Everything is checked before a slot is made.
    """
    ordered = tuple(sorted(bundles, key=lambda bundle: bundle.index))
    _check_shared_buffers(num_shared_buffers)
    independent = _independent_positions(independent_layers, len(ordered))
    if num_shared_buffers is None:
        independent = frozenset(range(len(ordered)))
    shared = [bundle for at, bundle in enumerate(ordered) if at not in independent]
    held: list[tuple[bool, Sequence[Bundle]]] = [(True, (ordered[at],)) for at in independent]
    if num_shared_buffers is not None and shared:
        check_same_block(ordered)
        for group in _by_main_layout(shared):
            width = min(num_shared_buffers, len(group))
            held += [(False, group[first::width]) for first in range(width)]
    for _, members in held:
        _check_same_pages(members)
    held.sort(key=lambda entry: entry[1][0].index)
    slots = tuple(_slot(SlotId(at), members, alone) for at, (alone, members) in enumerate(held))
    return BufferPlan(slots=slots, bundles=ordered)


def _check_shared_buffers(num_shared_buffers: object) -> None:
    knob = "layerwise_num_shared_buffers"
    if num_shared_buffers is None:
        return
    if type(num_shared_buffers) is not int:
        raise ConfigurationTypeError(f"{knob} must be an integer of at least 1, not {num_shared_buffers!r}")
    if num_shared_buffers < 1:
        raise ConfigurationError(f"{knob}={num_shared_buffers}: set it to at least 1, or leave it out")


def _independent_positions(independent_layers: object, num_layers: int) -> frozenset[int]:
    knob = "layerwise_independent_layers"
    if independent_layers == "all":
        return frozenset(range(num_layers))
    if not isinstance(independent_layers, tuple | list):
        raise ConfigurationTypeError(
            f'{knob} must be a list of positions or "all", not {independent_layers!r}'
        )
    positions = set()
    for entry in independent_layers:
        if type(entry) is not int:
            raise ConfigurationTypeError(f"{knob} must hold integers only, not {entry!r}")
        if num_layers == 0:
            continue  # a rank without cache-bearing layers has nothing to place
        if not -num_layers <= entry < num_layers:
            raise ConfigurationError(
                f"{knob} holds {entry}: this rank has {num_layers} layers, "
                f"set positions from {-num_layers} to {num_layers - 1}"
            )
        positions.add(entry % num_layers)
    return frozenset(positions)


def _by_main_layout(bundles: Sequence[Bundle]) -> list[list[Bundle]]:
    groups: dict[str, list[Bundle]] = {}
    for bundle in bundles:
        groups.setdefault(bundle.main.layout, []).append(bundle)
    return list(groups.values())


def check_same_block(bundles: Sequence[Bundle]) -> None:
    """Raise LayoutError naming two caches of different block sizes.

    One block table serves all layers; caches with other block sizes would be a hybrid layout.
    """
    specs = [spec for bundle in bundles for spec in (bundle.main, bundle.indexer) if spec]
    for spec in specs[1:]:
        _require_equal(specs[0], spec, "block_tokens", specs[0].block_tokens, spec.block_tokens)


def _check_same_pages(members: Sequence[Bundle]) -> None:
    main = [bundle.main for bundle in members]
    indexers = [bundle.indexer for bundle in members if bundle.indexer]
    for specs in (main, indexers):
        for spec in specs[1:]:
            _require_equal(specs[0], spec, "page_bytes", specs[0].page_bytes, spec.page_bytes)
            _require_equal(specs[0], spec, "layout", specs[0].layout, spec.layout)


def _require_equal(a: ComponentSpec, b: ComponentSpec, what: str, of_a: object, of_b: object) -> None:
    if of_a != of_b:
        raise LayoutError(
            f"{a.name!r} (layer {a.layer.index}, {a.layer.component.value}) and {b.name!r} (layer "
            f"{b.layer.index}, {b.layer.component.value}) cannot share buffers: {what} is {of_a} and {of_b}"
        )


def _slot(slot_id: SlotId, members: Sequence[Bundle], independent: bool) -> Slot:
    return Slot(
        id=slot_id,
        layers=tuple(bundle.index for bundle in members),
        main_page_bytes=members[0].main.page_bytes,
        indexer_page_bytes=next((b.indexer.page_bytes for b in members if b.indexer), 0),
        independent=independent,
    )
