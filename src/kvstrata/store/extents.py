"""Free space as a map from offset to length inside the index, so that it commits with the records."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from kvstrata.store.records import Extent

GRANULE_BYTES = 4096
"""Every extent starts and ends on a multiple of this: one page, so that no two objects share one."""

_SCAN_LIMIT = 64
"""Free extents looked at for one that holds the whole object before it is put into pieces. Objects of
one store are mostly of one size, so that the first free extent fits; the limit bounds the rest."""


def round_up(size_bytes: int) -> int:
    """`size_bytes` in whole granules."""
    return -(-size_bytes // GRANULE_BYTES) * GRANULE_BYTES


def segments(extents: Iterable[Extent], offset: int, size_bytes: int) -> Iterator[Extent]:
    """The pieces of the arena (or spill file) behind [offset, offset + size_bytes) of an object."""
    for extent in extents:
        if size_bytes == 0:
            return
        if offset < extent.size_bytes:
            piece = min(size_bytes, extent.size_bytes - offset)
            yield Extent(extent.offset + offset, piece)
            size_bytes -= piece
            offset = 0
        else:
            offset -= extent.size_bytes
    assert size_bytes == 0, "ranges are checked against the object's size before they get here"


class FreeMap:
    """The free extents of one file, seen by one transaction. Neighbours are always merged.

    `transaction` is an lmdb transaction and `database` one of its databases.
    """

    def __init__(self, transaction: Any, database: Any) -> None:
        self._transaction = transaction
        self._database = database

    def __iter__(self) -> Iterator[Extent]:
        """In order of offset."""
        for key, value in self._transaction.cursor(self._database):
            yield Extent(int.from_bytes(key, "big"), int.from_bytes(value, "big"))

    def allocate(self, size_bytes: int) -> tuple[Extent, ...]:
        """Take `size_bytes` (whole granules): in one piece if a short look finds one, else in several.

        The caller has made sure that so much is free.
        """
        assert size_bytes > 0
        assert size_bytes % GRANULE_BYTES == 0
        whole = self._first_that_holds(size_bytes)
        if whole is not None:
            return (self._take(whole, size_bytes),)
        taken: list[Extent] = []
        while size_bytes > 0:
            first = next(iter(self), None)
            assert first is not None, "free_bytes promised more than the free map holds"
            taken.append(self._take(first, min(size_bytes, first.size_bytes)))
            size_bytes -= taken[-1].size_bytes
        return tuple(taken)

    def give_back(self, extents: Iterable[Extent]) -> None:
        """Make extents free again."""
        for extent in extents:
            self._merge_in(extent)

    def _first_that_holds(self, size_bytes: int) -> Extent | None:
        for looked_at, extent in enumerate(self):
            if extent.size_bytes >= size_bytes:
                return extent
            if looked_at >= _SCAN_LIMIT:
                return None
        return None

    def _take(self, free: Extent, size_bytes: int) -> Extent:
        self._delete(free)
        if free.size_bytes > size_bytes:
            self._put(Extent(free.offset + size_bytes, free.size_bytes - size_bytes))
        return Extent(free.offset, size_bytes)

    def _merge_in(self, extent: Extent) -> None:
        before, after = self._neighbours(extent.offset)
        start, end = extent.offset, extent.end
        assert after is None or after.offset >= end, f"{extent} is freed twice: {after} is free"
        assert before is None or before.end <= start, f"{extent} is freed twice: {before} is free"
        if after is not None and after.offset == end:
            self._delete(after)
            end = after.end
        if before is not None and before.end == start:
            self._delete(before)
            start = before.offset
        self._put(Extent(start, end - start))

    def _neighbours(self, offset: int) -> tuple[Extent | None, Extent | None]:
        """The last free extent that starts before `offset` and the first that does not."""
        cursor = self._transaction.cursor(self._database)
        if not cursor.set_range(_key(offset)):
            return (_at(cursor) if cursor.last() else None), None
        after = _at(cursor)
        return (_at(cursor) if cursor.prev() else None), after

    def _put(self, extent: Extent) -> None:
        self._transaction.put(_key(extent.offset), _key(extent.size_bytes), db=self._database)

    def _delete(self, extent: Extent) -> None:
        self._transaction.delete(_key(extent.offset), db=self._database)


def _key(number: int) -> bytes:
    # Big endian: lmdb orders keys as bytes.
    return number.to_bytes(8, "big")


def _at(cursor: Any) -> Extent:
    return Extent(int.from_bytes(cursor.key(), "big"), int.from_bytes(cursor.value(), "big"))
