"""Bundles and the digest of their layout."""

import dataclasses
import subprocess
import sys

import pytest

from kvstrata.core.bundle import ComponentSpec, build_bundles, layout_digest
from kvstrata.core.layers import Component, LayerId
from kvstrata.errors import LayoutError


def spec(index=0, component=Component.MAIN, *, draft=False, **changes):
    fields = {"name": f"l{index}.{component.value}", "page_bytes": 64, "block_tokens": 16, "layout": "bf16"}
    return ComponentSpec(layer=LayerId(index, component, draft), **(fields | changes))


BASE = [spec(0), spec(0, Component.INDEXER, layout="u8"), spec(1)]


def digest(specs):
    return layout_digest(build_bundles(specs))


def test_bundles_are_sorted_and_summed():
    indexer = spec(3, Component.INDEXER, page_bytes=8)
    bundles = build_bundles([indexer, spec(5, draft=True), spec(3)])
    assert [(b.index, b.is_draft, b.page_bytes) for b in bundles] == [(3, False, 72), (5, True, 64)]
    assert bundles[0].indexer == indexer
    assert bundles[1].indexer is None


@pytest.mark.parametrize("field", ["page_bytes", "block_tokens"])
@pytest.mark.parametrize("value", [0, -1])
def test_a_spec_without_size_is_refused(field, value):
    with pytest.raises(LayoutError, match=rf"l0\.main.*{field}={value}"):
        spec(**{field: value})


def test_main_and_indexer_must_agree_on_being_a_draft():
    with pytest.raises(LayoutError, match=r"l1\.main.*l1\.indexer.*is_draft"):
        build_bundles([spec(1), spec(1, Component.INDEXER, draft=True)])


def test_two_indexers_on_one_layer_are_refused():
    twin = spec(1, Component.INDEXER, name="twin")
    with pytest.raises(LayoutError, match=r"l1\.indexer.*twin"):
        build_bundles([spec(1), spec(1, Component.INDEXER), twin])


def test_the_digest_ignores_order_and_module_names():
    renamed = [dataclasses.replace(s, name="other " + s.name) for s in reversed(BASE)]
    assert digest(renamed) == digest(BASE)
    assert len(digest(BASE)) == 64
    assert set(digest(BASE)) <= set("0123456789abcdef")


CHANGED = {
    "main page": [spec(0, page_bytes=128), *BASE[1:]],
    "main block": [spec(0, block_tokens=32), *BASE[1:]],
    "main layout": [spec(0, layout="f32"), *BASE[1:]],
    "indexer layout": [BASE[0], spec(0, Component.INDEXER, layout="i8"), BASE[2]],
    "no indexer": [BASE[0], BASE[2]],
    "indexer on the other layer": [BASE[0], BASE[2], spec(1, Component.INDEXER, layout="u8")],
    "layer number": [*BASE[:2], spec(2)],
    "draft": [*BASE[:2], spec(1, draft=True)],
    "fewer layers": BASE[:2],
    "lone indexer": [*BASE[:2], spec(1, Component.INDEXER)],
}


def test_every_difference_gives_another_digest():
    digests = [digest(specs) for specs in (BASE, *CHANGED.values())]
    assert len(set(digests)) == len(digests)


def test_the_digest_is_the_same_in_another_process():
    code = (
        "from kvstrata.core.bundle import *; from kvstrata.core.layers import *\n"
        "s = ComponentSpec(name='a', layer=LayerId(0, Component.MAIN, False),"
        " page_bytes=64, block_tokens=16, layout='bf16')\n"
        "print(layout_digest(build_bundles([s])))"
    )
    command = [sys.executable, "-c", code]
    printed = subprocess.run(command, check=True, capture_output=True, text=True, env={"PYTHONHASHSEED": "7"})
    assert printed.stdout.strip() == digest([spec(0)])
