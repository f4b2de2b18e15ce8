"""What every part of one simulated run shares."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass, field

from kvstrata.core.layers import Component
from kvstrata.core.shares import Topology
from kvstrata.remote.protocol.actions import Ending, Finish, Settle
from kvstrata.remote.protocol.messages import ComponentLayout
from kvstrata.sim.network import Network
from kvstrata.sim.options import Options
from kvstrata.sim.pages import Exported
from kvstrata.sim.parts import Parts
from kvstrata.sim.watch import Watch
from kvstrata.sim.world import Process, Violation, World

PAGE_BYTES = 64
TRANSPORT = "sim"


@dataclass(frozen=True, kw_only=True, eq=False)
class Setting:
    """One run's world, options, network and classes."""

    world: World
    options: Options
    network: Network
    parts: Parts
    topology: Topology
    watch: Watch
    exported: dict[bytes, Exported] = field(default_factory=dict)  # what a ticket leads to
    expected: dict[str, Collection[str]] = field(default_factory=dict)  # transfers, by decode rank
    # Transfer, member, layer and part of every read that succeeded, by decode rank.
    landed: defaultdict[str, set[tuple[str, int, int, int]]] = field(default_factory=lambda: defaultdict(set))

    def check_ending(self, who: str, action: Settle | Finish) -> None:
        """Raise Violation for an ending that nothing in this run accounts for."""
        options = self.options
        if action.ending is Ending.DONE or not (options.is_calm or options.is_fair):
            return
        has_aborts = any(request.gives_up_s is not None for request in options.requests)
        if action.ending is Ending.LAPSED or not has_aborts:
            raise Violation("no reason", f"{who}: {action}")

    def process(self, name: str) -> Process:
        """A new process whose clock is off by a bit of everything."""
        random = self.world.random
        drift = self.options.drift * (2 * random.random() - 1)
        return Process(self.world, name, offset_s=1000 * random.random(), rate=1 + drift)

    def layouts(self, page_bytes: int = PAGE_BYTES) -> tuple[ComponentLayout, ...]:
        """The caches of a side, as a Hello names them."""
        return tuple(
            ComponentLayout(
                layer=layer,
                component=component.value,
                is_draft=False,
                page_bytes=page_bytes,
                block_tokens=self.options.block_tokens,
                layout="pages of words",
            )
            for layer, component in self.options.planes
        )

    def planes_of(self, layer: int) -> list[tuple[int, Component]]:
        """Number and component of each plane of a layer."""
        return [(n, component) for n, (owner, component) in enumerate(self.options.planes) if owner == layer]

    def is_main(self, plane: int) -> bool:
        """Whether the plane is of main KV."""
        return self.options.planes[plane][1] is Component.MAIN

    def filled(self, tokens: int, position: int) -> int:
        """How many of `tokens` are in the block at `position`."""
        return max(0, min(self.options.block_tokens, tokens - position * self.options.block_tokens))
