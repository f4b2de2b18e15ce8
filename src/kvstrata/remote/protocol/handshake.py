"""What must agree before a consumer reads from a producer; a mismatch is refused with both sides' values.

Source: seed, Unequal Tensor Parallelism, Validation and Failure Handling, System Overview (MemFabric).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence

from kvstrata.core.bundle import Bundle
from kvstrata.core.shares import Topology
from kvstrata.errors import KVStrataError
from kvstrata.remote.protocol.messages import (
    MAX_TEXT_CHARS,
    PROTOCOL_VERSION,
    ComponentLayout,
    Hello,
    Place,
    TransportOffer,
)
from kvstrata.remote.transports.base import Transport

_MAX_DIFFERENCES = 8
_MAX_VALUE_CHARS = 120
_ADDRESSABLE_BYTES = 1 << 62


class Mismatch(KVStrataError, ValueError):  # noqa: N818 - named for what happened
    """Two engines that cannot exchange KV; `reason` says in what they differ, with both sides' values."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason[:MAX_TEXT_CHARS])
        self.reason = reason[:MAX_TEXT_CHARS]


def component_layouts(bundles: Iterable[Bundle]) -> tuple[ComponentLayout, ...]:
    """Return what a side announces of its caches, by layer, main before indexer."""
    return tuple(
        ComponentLayout(
            layer=bundle.index,
            component=spec.layer.component.value,
            is_draft=bundle.is_draft,
            page_bytes=spec.page_bytes,
            block_tokens=spec.block_tokens,
            layout=spec.layout,
        )
        for bundle in sorted(bundles, key=lambda bundle: bundle.index)
        for spec in (bundle.main, bundle.indexer)
        if spec is not None
    )


def check_hello(
    hello: Hello,
    *,
    components: Sequence[ComponentLayout],
    tp_rank: int,
    tp_size: int,
    transports: Sequence[Transport],
    memfabric_protocol: str,
    model: str = "",
    version: int = PROTOCOL_VERSION,
) -> str:
    """Return the name of the transport to read with: the first of `transports` that works for this producer.

    `components`, `tp_rank`, `tp_size` and `model` are the consumer's own. Raises Mismatch and nothing else,
    whatever the producer says.
    """
    if hello.version != version:
        raise Mismatch(f"protocol version {hello.version} at prefill, {version} at decode")
    _check_ranks(hello, tp_rank, tp_size)
    _check_components(hello.components, components)
    _check_places(hello.components, hello.places)
    if hello.model != model:
        raise Mismatch(
            f"model {_shown(hello.model)} at prefill, {_shown(model)} at decode: rows of one mean nothing to "
            "the other; serve the same model, dtype and speculative_config on both"
        )
    if hello.memfabric_protocol != memfabric_protocol:
        raise Mismatch(
            f"memfabric_transfer_protocol {_shown(hello.memfabric_protocol)} at prefill, "
            f"{_shown(memfabric_protocol)} at decode"
        )
    if not (math.isfinite(hello.lease_s) and hello.lease_s > 0):
        raise Mismatch(f"lease of {hello.lease_s} s at prefill; a lease is positive and ends")
    return _choose_transport(hello.offers, transports)


def _check_ranks(hello: Hello, tp_rank: int, tp_size: int) -> None:
    if hello.pp_size != 1:
        raise Mismatch(f"pipeline_parallel_size {hello.pp_size} at prefill, 1 at decode")
    try:
        consumer = Topology(hello.tp_size, tp_size).consumer_of(hello.rank)
    except ValueError as error:
        raise Mismatch(str(error)) from error
    if consumer != tp_rank:
        raise Mismatch(
            f"prefill rank {hello.rank} of {hello.tp_size} belongs to decode rank {consumer} of {tp_size}, "
            f"but spoke to rank {tp_rank}"
        )


def _check_components(theirs: Sequence[ComponentLayout], ours: Sequence[ComponentLayout]) -> None:
    repeated = [key for key, count in Counter(map(_key, theirs)).items() if count > 1]
    if repeated:
        raise Mismatch(f"prefill announced {_named(*repeated[0])} more than once")
    prefill = {_key(layout): layout for layout in theirs}
    decode = {_key(layout): layout for layout in ours}
    differences = []
    for key in sorted(prefill.keys() | decode.keys()):
        there, here = prefill.get(key), decode.get(key)
        if there is None or here is None:
            side = "prefill" if here is None else "decode"
            differences.append(f"{_named(*key)} exists only at {side}")
            continue
        for what in ("is_draft", "page_bytes", "block_tokens", "layout"):
            at_prefill, at_decode = getattr(there, what), getattr(here, what)
            if at_prefill != at_decode:
                skip = _common_chars(at_prefill, at_decode)
                differences.append(
                    f"{_named(*key)}: {what} {_shown(at_prefill, skip)} at prefill, "
                    f"{_shown(at_decode, skip)} at decode"
                )
    if differences:
        more = len(differences) - _MAX_DIFFERENCES
        raise Mismatch("; ".join(differences[:_MAX_DIFFERENCES]) + (f"; and {more} more" if more > 0 else ""))


def _check_places(components: Sequence[ComponentLayout], places: Sequence[Place]) -> None:
    if len(places) != len(components):
        raise Mismatch(f"prefill announced {len(components)} caches and {len(places)} places")
    for layout, place in zip(components, places, strict=True):
        span = place.num_blocks * place.block_stride_bytes
        if place.num_blocks < 1 or place.block_stride_bytes < layout.page_bytes:
            raise Mismatch(
                f"{_named(*_key(layout))}: {place.num_blocks} blocks {place.block_stride_bytes} bytes apart "
                f"are at prefill no place for pages of {layout.page_bytes} bytes"
            )
        if place.offset + span >= _ADDRESSABLE_BYTES:
            raise Mismatch(f"{_named(*_key(layout))}: ends at byte {place.offset + span} of its region")


def _choose_transport(offers: Sequence[TransportOffer], transports: Sequence[Transport]) -> str:
    tickets = {offer.name: offer.ticket for offer in offers}
    if len(tickets) < len(offers):
        # Which of them was looked at must not be open: the name alone is agreed on.
        raise Mismatch(f"prefill offers {_shown([offer.name for offer in offers])}, one of them twice")
    refused = []
    for transport in transports:
        if transport.name not in tickets:
            continue
        why = _reaches(transport, tickets[transport.name])
        if why is None:
            return transport.name
        refused.append(f"{transport.name}: {why}")
    raise Mismatch(
        f"no common transport: prefill offers {_shown(sorted(tickets))}, decode has "
        f"{_shown([transport.name for transport in transports])}" + "".join(f"; {why}" for why in refused)
    )


def _reaches(transport: Transport, ticket: bytes) -> str | None:
    try:
        return transport.reaches(ticket)
    except Exception as error:
        # The ticket is the peer's: a transport that stumbles over it must not take the consumer down.
        return f"cannot read the ticket ({type(error).__name__}: {_shown(str(error))})"


def _key(layout: ComponentLayout) -> tuple[int, str]:
    return layout.layer, layout.component


def _named(layer: int, component: str) -> str:
    # What a peer sends is quoted unless it is one of our own words.
    return f"layer {layer} {component if component in ('main', 'indexer') else _shown(component)}"


def _common_chars(one: object, other: object) -> int:
    """How much of two long texts can be left out, so that what differs is still seen."""
    texts = str(one), str(other)
    if max(map(len, texts)) <= _MAX_VALUE_CHARS:
        return 0
    pairs = enumerate(zip(*texts, strict=False))
    common = next((at for at, (left, right) in pairs if left != right), min(map(len, texts)))
    return max(0, common - 20)


def _shown(value: object, skip: int = 0) -> str:
    if skip:
        value = "..." + str(value)[skip:]
    text = repr(value)
    return text if len(text) <= _MAX_VALUE_CHARS else text[: _MAX_VALUE_CHARS - 3] + "..."
