"""The free map and the pieces that an object is kept in."""

from __future__ import annotations

import itertools
import tempfile
from pathlib import Path

import lmdb
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstrata.store.extents import GRANULE_BYTES, FreeMap, segments
from kvstrata.store.records import Extent


@settings(max_examples=60, deadline=None)
@given(st.lists(st.one_of(st.integers(1, 9), st.integers(-20, -1)), max_size=40))
def test_the_free_map_hands_out_each_granule_once(steps: list[int]) -> None:
    """Positive: allocate so many granules; negative: give back that allocation, counted from the last."""
    capacity = 24
    free = set(range(capacity))
    taken: list[set[int]] = []
    with tempfile.TemporaryDirectory() as path:
        environment = lmdb.open(path, max_dbs=1, sync=False)
        database = environment.open_db(b"free")
        with environment.begin(write=True) as transaction:
            free_map = FreeMap(transaction, database)
            free_map.give_back([Extent(0, capacity * GRANULE_BYTES)])
            for step in steps:
                if step > 0 and step <= len(free):
                    extents = free_map.allocate(step * GRANULE_BYTES)
                    got = granules(extents)
                    assert len(got) == step
                    assert got <= free
                    free -= got
                    taken.append(got)
                elif step < 0 and -step <= len(taken):
                    back = taken.pop(step)
                    free_map.give_back([Extent(item * GRANULE_BYTES, GRANULE_BYTES) for item in sorted(back)])
                    free |= back
                left = list(free_map)
                assert granules(left) == free
                assert all(one.end < two.offset for one, two in itertools.pairwise(left))
            transaction.abort()
        environment.close()


def granules(extents: list[Extent] | tuple[Extent, ...]) -> set[int]:
    return {
        number
        for extent in extents
        for number in range(extent.offset // GRANULE_BYTES, extent.end // GRANULE_BYTES)
    }


def test_giving_back_twice_is_noticed(tmp_path: Path) -> None:
    environment = lmdb.open(str(tmp_path), max_dbs=1)
    database = environment.open_db(b"free")
    with environment.begin(write=True) as transaction:
        free_map = FreeMap(transaction, database)
        free_map.give_back([Extent(0, 8192)])
        for extent in (Extent(0, 4096), Extent(4096, 4096), Extent(4096, 8192)):
            with pytest.raises(AssertionError, match="freed twice"):
                free_map.give_back([extent])
    environment.close()


@given(st.lists(st.integers(1, 5), min_size=1, max_size=5), st.data())
def test_segments_are_the_bytes_of_the_object(lengths: list[int], data: st.DataObject) -> None:
    extents = [Extent(1000 * number, length) for number, length in enumerate(lengths)]
    addresses = [extent.offset + at for extent in extents for at in range(extent.size_bytes)]
    offset = data.draw(st.integers(0, len(addresses)))
    size = data.draw(st.integers(0, len(addresses) - offset))
    pieces = list(segments(extents, offset, size))
    assert [piece.offset + at for piece in pieces for at in range(piece.size_bytes)] == (
        addresses[offset : offset + size]
    )
