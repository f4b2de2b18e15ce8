"""The network between the ranks of two engines: loses, doubles, delays and reorders until it calms down.

Kinder to the machines than no network in one thing alone: a message that arrives is whole. That forged and
broken frames are dropped is the codec's business, and tested there.
"""

from __future__ import annotations

from typing import Protocol

from kvstrata.remote.protocol.messages import AnyMessage
from kvstrata.sim.options import Options
from kvstrata.sim.world import Process, World


class Endpoint(Protocol):
    """A rank that has a machine."""

    process: Process

    def receive(self, peer: str, message: AnyMessage) -> None:
        """Hand a message to the machine."""


class Network:
    """Carries messages between addresses. An address outlives the process behind it, or does not."""

    def __init__(self, world: World, options: Options) -> None:
        self._world = world
        self._options = options
        self._endpoints: dict[str, Endpoint] = {}
        self._cut: set[tuple[str, str]] = set()
        self._last_s: dict[tuple[str, str], float] = {}

    def attach(self, address: str, endpoint: Endpoint) -> None:
        """Deliver to `endpoint` what is sent to `address`."""
        self._endpoints[address] = endpoint

    def detach(self, address: str) -> None:
        """Lose what is sent to `address`."""
        self._endpoints.pop(address, None)

    def process_of(self, address: str) -> Process:
        """Who is behind an address."""
        return self._endpoints[address].process

    def cut(self, one: str, other: str) -> None:
        """Lose everything between two processes."""
        self._cut |= {(one, other), (other, one)}

    def mend(self, one: str, other: str) -> None:
        """End a cut."""
        self._cut -= {(one, other), (other, one)}

    def is_cut(self, one: str, other: str) -> bool:
        """Whether nothing passes from one process to the other."""
        return (one, other) in self._cut

    def send(self, source: Process, sender: str, address: str, message: AnyMessage) -> None:
        """Send from the address `sender` of `source` to `address`."""
        world, options = self._world, self._options
        random = world.random.random
        world.count("messages")
        is_calm = world.now_s >= options.calm_s
        if not is_calm and random() < options.loss:
            world.counts["messages lost"] += 1
            return
        copies = 1
        if not is_calm and random() < options.duplication:
            copies = 2
            world.counts["messages doubled"] += 1
        for copy in range(copies):
            delay_s = options.network_s * (0.1 + random())
            # A second copy is what was said again, so it is often late.
            if not is_calm and random() < options.lateness * (1 + 3 * copy):
                delay_s += options.late_s * random()
                world.counts["messages late"] += 1
            elif options.reorders and not is_calm:
                delay_s += options.network_s * 3 * random()
            else:
                # In order, as on one connection.
                key = (sender, address)
                delay_s = max(delay_s, self._last_s.get(key, 0.0) - world.now_s) + 1e-6
                self._last_s[key] = world.now_s + delay_s
            world.at(delay_s, self._arrive, source.name, sender, address, message)

    def _arrive(self, source_name: str, sender: str, address: str, message: AnyMessage) -> None:
        endpoint = self._endpoints.get(address)
        if endpoint is None or not endpoint.process.is_up or self.is_cut(source_name, endpoint.process.name):
            self._world.counts["messages to nobody"] += 1
            return
        endpoint.process.hear(endpoint.receive, sender, message)
