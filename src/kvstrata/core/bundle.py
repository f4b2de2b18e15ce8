"""What a layer's cache is made of, in bytes: main KV and, where the layer has one, its indexer."""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass

from kvstrata.core.layers import Component, LayerId
from kvstrata.errors import LayoutError

# Part of every digest: raise it when the meaning of the digest's fields changes.
_DIGEST_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class ComponentSpec:
    """One cache tensor of one layer.

    `page_bytes` is what one block takes in it, padding included; `block_tokens` the tokens of that block.
    `layout` describes the inside of a page (dtype, row bytes, ...): compared, never interpreted.
    """

    name: str
    layer: LayerId
    page_bytes: int
    block_tokens: int
    layout: str

    def __post_init__(self) -> None:
        for what, value in (("page_bytes", self.page_bytes), ("block_tokens", self.block_tokens)):
            if value < 1:
                raise LayoutError(f"{self.name!r} has {what}={value}; it must be at least 1")


@dataclass(frozen=True, kw_only=True)
class Bundle:
    """All caches of one layer, planned, moved and owned together."""

    index: int
    is_draft: bool
    main: ComponentSpec
    indexer: ComponentSpec | None

    @property
    def page_bytes(self) -> int:
        """Bytes one block takes in all of the layer's caches."""
        return self.main.page_bytes + (self.indexer.page_bytes if self.indexer else 0)


def build_bundles(specs: Iterable[ComponentSpec]) -> tuple[Bundle, ...]:
    """Join the specs of each layer, sorted by layer; the order of `specs` has no influence.

    A lone indexer counts as its layer's main cache. Raises LayoutError (a ValueError) naming both specs when
    two of one kind lie on one layer.
    """
    by_index: dict[int, dict[Component, ComponentSpec]] = {}
    for spec in specs:
        parts = by_index.setdefault(spec.layer.index, {})
        other = parts.get(spec.layer.component)
        if other is not None:
            raise LayoutError(
                f"{other.name!r} and {spec.name!r} are both the {spec.layer.component.value} cache "
                f"of layer {spec.layer.index}"
            )
        parts[spec.layer.component] = spec
    return tuple(_bundle(index, by_index[index]) for index in sorted(by_index))


def _bundle(index: int, parts: dict[Component, ComponentSpec]) -> Bundle:
    main, indexer = parts.get(Component.MAIN), parts.get(Component.INDEXER)
    if main is None:
        assert indexer is not None, "a layer without specs"
        main, indexer = indexer, None
    if indexer is not None and main.layer.is_draft != indexer.layer.is_draft:
        raise LayoutError(
            f"{main.name!r} and {indexer.name!r} share layer {index}, "
            f"but is_draft differs: {main.layer.is_draft} and {indexer.layer.is_draft}"
        )
    return Bundle(index=index, is_draft=main.layer.is_draft, main=main, indexer=indexer)


def layout_digest(bundles: Iterable[Bundle]) -> str:
    """Return 64 hex digits that are equal exactly when the bytes of all pages mean the same.

    Stable across processes and machines; belongs into every store key. Module names are left out: they may
    change between releases of a model's code without changing a byte of its cache.
    """
    described = [
        [bundle.index, bundle.is_draft, *(_described(part) for part in (bundle.main, bundle.indexer))]
        for bundle in sorted(bundles, key=lambda bundle: bundle.index)
    ]
    text = json.dumps([_DIGEST_VERSION, described], separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _described(spec: ComponentSpec | None) -> list[object] | None:
    if spec is None:
        return None
    return [spec.layer.component.value, spec.page_bytes, spec.block_tokens, spec.layout]
