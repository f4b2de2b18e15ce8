"""Hot rows, as far as start-up decides: how many a sequence gets, and which layers share a residency table.

Source: seed, Sparse Decode Offload. A layer without an indexer attends to the rows that the indexer before it
selected (IndexShare), so one table serves both.
"""

from collections.abc import Iterable

from kvstrata.core.bundle import Bundle
from kvstrata.core.layers import Component
from kvstrata.errors import ConfigurationError, LayoutError, UnsupportedError

_KNOB = "sparse_kv_offload_config.topk_buffer_size"


def check_topk_buffer(size: int | None, *, index_topk: int, block_tokens: int) -> int:
    """Return the hot rows per sequence and layer to use for a `topk_buffer_size` of `size`.

    None: twice the model's top-k, rounded up to whole blocks. Raises ConfigurationError for a buffer that one
    token's selection does not fit into (R5), and for one that is no multiple of the block size.
    """
    assert index_topk > 0, "a model with sparse attention selects something"
    assert block_tokens > 0, "a block holds tokens"
    if size is None:
        return _rounded_up(2 * index_topk, block_tokens)
    smallest = _rounded_up(index_topk, block_tokens)
    if size < index_topk:
        raise ConfigurationError(
            f"{_KNOB}={size} is less than the {index_topk} rows that the model's indexer selects for one "
            f"token; set it to at least {smallest}"
        )
    if size % block_tokens:
        above = _rounded_up(size, block_tokens)
        below = above - block_tokens
        choice = f"{below} or {above}" if below >= smallest else f"{above}"
        raise ConfigurationError(
            f"{_KNOB}={size} is not a multiple of the block size of {block_tokens} tokens; set it to {choice}"
        )
    return size


def share_groups(bundles: Iterable[Bundle]) -> tuple[tuple[int, ...], ...]:
    """Return the layers that share a selection, in execution order: target layers, then drafts.

    A layer with an indexer leads a group; target layers after it without one belong to it, and so do those
    before the first indexer, which follow a selection made elsewhere. A draft layer is a group of its own: it
    may run several times a step. Raises UnsupportedError where no layer has an indexer, LayoutError for a
    layer that has nothing but an indexer.
    """
    ordered = sorted(bundles, key=lambda bundle: (bundle.is_draft, bundle.index))
    for bundle in ordered:
        if bundle.main.layer.component is not Component.MAIN:
            raise LayoutError(
                f"layer {bundle.index} has only the indexer cache {bundle.main.name!r}: "
                "without main KV there is nothing to keep in host memory"
            )
    if not any(bundle.indexer for bundle in ordered):
        raise UnsupportedError(
            f"sparse_kv_offload_config.enabled=true needs sparse attention (DSA), but none of the "
            f"{len(ordered)} layers here has an indexer; set it to false, or serve a DSA model"
        )
    groups: list[list[int]] = []
    for bundle in ordered:
        if bundle.indexer is not None or bundle.is_draft or not groups:
            groups.append([bundle.index])
        else:
            groups[-1].append(bundle.index)
    return tuple(tuple(group) for group in groups)


def _rounded_up(rows: int, block_tokens: int) -> int:
    return -(-rows // block_tokens) * block_tokens
