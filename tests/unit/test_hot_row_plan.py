"""How many hot rows a sequence gets, and which layers share a selection."""

import re

import pytest

from kvstrata.core.bundle import ComponentSpec, build_bundles
from kvstrata.core.hot_row_plan import check_topk_buffer, share_groups
from kvstrata.core.layers import Component, LayerId
from kvstrata.errors import ConfigurationError, LayoutError, UnsupportedError


def bundles(layers, *, indexers, drafts=(), lone=()):
    """Layers by number; those in `lone` have an indexer and no main cache."""

    def spec(index, component):
        layer = LayerId(index, component, index in drafts)
        return ComponentSpec(
            name=f"{index}.{component.value}", layer=layer, page_bytes=64, block_tokens=16, layout="x"
        )

    main = [spec(index, Component.MAIN) for index in layers if index not in lone]
    return build_bundles([*main, *(spec(index, Component.INDEXER) for index in (*indexers, *lone))])


@pytest.mark.parametrize(
    ("layers", "indexers", "drafts", "groups"),
    [
        (range(3), (0, 1, 2), (), ((0,), (1,), (2,))),
        (range(6), (0, 2, 3), (), ((0, 1), (2,), (3, 4, 5))),
        (range(5), (2,), (), ((0, 1), (2, 3, 4))),  # the first two follow a selection made before this stage
        (range(9, 13), (10,), (), ((9,), (10, 11, 12))),
        (range(4), (0,), (3,), ((0, 1, 2), (3,))),  # a draft without an indexer shares with nobody
        (range(5), (0, 3, 4), (3, 4), ((0, 1, 2), (3,), (4,))),
        (range(5), (0, 3), (3, 4), ((0, 1, 2), (3,), (4,))),
        (range(3), (1,), (0,), ((1, 2), (0,))),  # drafts run after the target whatever their number
    ],
)
def test_a_layer_shares_the_selection_of_the_indexer_before_it(layers, indexers, drafts, groups):
    assert share_groups(bundles(layers, indexers=indexers, drafts=drafts)) == groups


def test_the_order_of_the_layers_given_does_not_matter():
    planned = bundles(range(6), indexers=(0, 3), drafts=(5,))
    assert share_groups(reversed(planned)) == share_groups(planned) == ((0, 1, 2), (3, 4), (5,))


@pytest.mark.parametrize("layers", [(), range(4)])
def test_a_model_without_indexers_is_refused_by_name(layers):
    words = rf"sparse_kv_offload_config\.enabled=true.*none of the {len(layers)} layers.*set it to false"
    with pytest.raises(UnsupportedError, match=words):
        share_groups(bundles(layers, indexers=()))


def test_a_layer_without_main_kv_is_refused_by_name():
    with pytest.raises(LayoutError, match=r"layer 1 .*'1\.indexer'"):
        share_groups(bundles(range(3), indexers=(0,), lone=(1,)))


@pytest.mark.parametrize(
    ("size", "topk", "block", "rows"),
    [
        (None, 64, 16, 128),
        (None, 2048, 64, 4096),
        (None, 50, 16, 112),
        (None, 8, 128, 128),
        (64, 64, 16, 64),
        (4096, 2048, 64, 4096),
        (112, 100, 16, 112),
    ],
)
def test_the_buffer_of_a_sequence(size, topk, block, rows):
    assert check_topk_buffer(size, index_topk=topk, block_tokens=block) == rows


@pytest.mark.parametrize(
    ("size", "topk", "block", "fix"),
    [
        (63, 64, 16, "set it to at least 64"),
        (1, 50, 16, "set it to at least 64"),
        (48, 50, 16, "set it to at least 64"),
        (100, 64, 16, "set it to 96 or 112"),
        (65, 64, 16, "set it to 64 or 80"),
        (51, 50, 16, "set it to 64"),
    ],
)
def test_R5_a_buffer_that_does_not_fit_is_refused_at_start(size, topk, block, fix):  # noqa: N802
    with pytest.raises(ConfigurationError) as caught:
        check_topk_buffer(size, index_topk=topk, block_tokens=block)
    message = str(caught.value)
    assert message.startswith(f"sparse_kv_offload_config.topk_buffer_size={size} is ")
    assert re.search(f"{fix}$", message), message
    rows = int(re.findall(r"\d+", message)[-1])
    assert check_topk_buffer(rows, index_topk=topk, block_tokens=block) == rows, "the advice must be legal"
