"""The one resolver from vLLM's layer names to layer numbers.

Names seen: `model.layers.3.self_attn.attn`, `model.layers.3.self_attn.indexer.k_cache`,
`model.layers.6.mtp_block.self_attn.attn`, `model.mtp.0...`, `mtp.layers.0...`, `model.mtp.layers.1...`.
"""

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from functools import total_ordering

from kvstrata.errors import LayoutError


@total_ordering
class Component(enum.Enum):
    """Which of a layer's caches a name stands for; ordered main first."""

    MAIN = "main"
    INDEXER = "indexer"

    def __lt__(self, other: object) -> bool:
        if not isinstance(other, Component):
            return NotImplemented
        return self is Component.MAIN and other is Component.INDEXER


@dataclass(frozen=True, order=True)
class LayerId:
    """One cache of one layer. Draft (MTP) layers are numbered on from the target's last layer."""

    index: int
    component: Component
    is_draft: bool


def resolve_layer(name: str, component: Component, *, num_base_layers: int) -> LayerId:
    """Number the layer that `name` belongs to.

    A number directly below `mtp` or `mtp.layers` counts draft layers from 0; any other number below `layers`
    is absolute, and is a draft layer from `num_base_layers` on. `mtp_block` is an ordinary module name.

    Raises LayoutError, naming `name`, when no layer number or more than one number is in it: a guess would
    put one layer's KV into another's buffer.
    """
    parts = name.split(".")
    numbers = [at for at, part in enumerate(parts) if part.isascii() and part.isdecimal()]
    if not numbers:
        raise LayoutError(f"cannot tell the layer of {name!r}: no layer number in it")
    if len(numbers) > 1:
        found = ", ".join(parts[at] for at in numbers)
        raise LayoutError(f"cannot tell the layer of {name!r}: ambiguous, numbers {found}")
    at = numbers[0]
    number = int(parts[at])
    above = parts[:at]
    if above[-1:] == ["mtp"] or above[-2:] == ["mtp", "layers"]:
        return LayerId(num_base_layers + number, component, True)
    if above[-1:] == ["layers"] and "mtp" not in parts:
        return LayerId(number, component, number >= num_base_layers)
    raise LayoutError(
        f"cannot tell the layer of {name!r}: number {number} does not follow 'layers', 'mtp' or 'mtp.layers'"
    )


def resolve_layers(components: Mapping[str, Component], *, num_base_layers: int) -> dict[str, LayerId]:
    """Number every named cache; raises LayoutError naming both when two names are the same cache."""
    resolved: dict[str, LayerId] = {}
    name_of: dict[LayerId, str] = {}
    for name, component in components.items():
        layer = resolve_layer(name, component, num_base_layers=num_base_layers)
        if layer in name_of:
            raise LayoutError(
                f"{name_of[layer]!r} and {name!r} both stand for the {component.value} cache "
                f"of layer {layer.index}"
            )
        name_of[layer] = name
        resolved[name] = layer
    return resolved
