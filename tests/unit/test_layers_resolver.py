"""Layer names to layer numbers."""

import pytest

from kvstrata.core.layers import Component, LayerId, resolve_layer, resolve_layers
from kvstrata.errors import LayoutError

MAIN, INDEXER = Component.MAIN, Component.INDEXER


@pytest.mark.parametrize(
    ("name", "base", "index", "is_draft"),
    [
        # Case 4 of the buffer plan.
        ("model.mtp.0", 4, 4, True),
        ("mtp.layers.0", 4, 4, True),
        ("model.mtp.layers.1", 4, 5, True),
        ("model.layers.4", 4, 4, True),
        # As vLLM writes them.
        ("model.layers.3.self_attn.attn", 6, 3, False),
        ("model.layers.3.self_attn.mla_attn.attn", 6, 3, False),
        ("model.layers.3.self_attn.indexer.k_cache", 6, 3, False),
        ("model.layers.6.mtp_block.self_attn.attn", 6, 6, True),
        ("model.layers.7.mtp_block.self_attn.indexer.k_cache", 6, 7, True),
        ("language_model.model.layers.0.self_attn.attn", 6, 0, False),
        ("model.mtp.0.self_attn.attn", 6, 6, True),
        ("mtp.layers.0.self_attn.indexer.k_cache", 61, 61, True),
        ("layers.5", 6, 5, False),
        ("model.layers.123456.attn", 200000, 123456, False),
    ],
)
def test_known_names(name, base, index, is_draft):
    for component in Component:
        assert resolve_layer(name, component, num_base_layers=base) == LayerId(index, component, is_draft)


@pytest.mark.parametrize(
    "name",
    [
        "",
        "attn",
        "model.layers.attn",
        "model.layers.-1.attn",
        "model.layers.x3.attn",
        "model.layers.\u0663.attn",  # a digit to str.isdecimal, no number to us
        "visual.blocks.3.attn",
        "model.3.attn",
        "model.layers.3.experts.5",
        "model.layers.3.layers.4",
        "mtp.0.layers.1.attn",
        "model.layers.3.mtp.attn",
        "mtp.blocks.layers.0",
    ],
)
def test_a_name_that_says_no_layer_or_two_is_refused_by_name(name):
    with pytest.raises(LayoutError) as caught:
        resolve_layer(name, MAIN, num_base_layers=6)
    assert repr(name) in str(caught.value)


def test_a_draft_layer_is_never_taken_for_a_target_layer():
    # Field fault: `mtp.layers.0` read as `layers.0`.
    resolved = resolve_layers({"model.layers.0.attn": MAIN, "mtp.layers.0.attn": MAIN}, num_base_layers=1)
    assert [layer.index for layer in resolved.values()] == [0, 1]


def test_resolve_layers_keeps_names_and_components_apart():
    names = {"model.layers.1.indexer.k_cache": INDEXER, "model.layers.1.attn": MAIN, "mtp.0.attn": MAIN}
    assert resolve_layers(names, num_base_layers=2) == {
        "model.layers.1.indexer.k_cache": LayerId(1, INDEXER, False),
        "model.layers.1.attn": LayerId(1, MAIN, False),
        "mtp.0.attn": LayerId(2, MAIN, True),
    }


def test_two_names_of_one_cache_are_refused_naming_both():
    with pytest.raises(LayoutError, match=r"mtp\.0\.attn.*model\.layers\.4\.attn.*main.*layer 4"):
        resolve_layers({"mtp.0.attn": MAIN, "model.layers.4.attn": MAIN}, num_base_layers=4)


def test_layer_ids_sort_by_layer_then_main_before_indexer():
    expected = [LayerId(0, MAIN, False), LayerId(0, INDEXER, False), LayerId(1, MAIN, False)]
    assert sorted([expected[2], expected[1], expected[0]]) == expected
    assert Component.MAIN < Component.INDEXER
    assert not Component.INDEXER < Component.MAIN
    assert not Component.MAIN < Component.MAIN
