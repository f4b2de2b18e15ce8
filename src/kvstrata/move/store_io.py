"""Between the store and a rank's homes: rows of a prefix hit come in layer by layer, finished blocks go out.

One object holds one block of all the rank's layers, in layer order, main rows before indexer rows. Both
directions run on lanes of their own, so that a forward waits only for the layer it is about to read.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from kvstrata.core.bundle import Bundle, layout_digest
from kvstrata.core.layers import Component
from kvstrata.errors import KVStrataError
from kvstrata.memory.pages import PageView
from kvstrata.move.engine import CopyEngine, CopyToken
from kvstrata.store.base import ByteRange, ReadLease, Status, Store, StoreKey, WriteHandle

FETCH_LANE = "store-fetch"
PUT_LANE = "store-put"

logger = logging.getLogger("vllm.kvstrata.store")

Home = Callable[[int, Component], PageView]


@dataclass(frozen=True, kw_only=True)
class StoreIOStatistics:
    """Totals since start; a fetched block counts once when all its layers arrived, else as failed."""

    fetched_blocks: int = 0
    failed_blocks: int = 0
    fetched_bytes: int = 0
    put_blocks: int = 0
    put_known_blocks: int = 0
    put_refused_blocks: int = 0
    put_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class _Piece:
    """One layer's part of an object."""

    layer: int
    component: Component
    offset: int
    size_bytes: int


class StoreIO:
    """Moves blocks between one rank's homes and the store. Called by the engine thread only.

    ``home`` answers where a layer's pages persist; pages are addressed by vLLM's block ids.
    """

    def __init__(
        self,
        *,
        store: Store,
        bundles: Sequence[Bundle],
        home: Home,
        engine: CopyEngine,
        namespace: str,
        rank: str,
        deadline_s: float,
    ) -> None:
        self._store = store
        self._home = home
        self._engine = engine
        self._namespace = namespace
        self._rank = rank
        self._deadline_s = deadline_s
        self._layout = layout_digest(bundles)
        self._pieces = _pieces(bundles)
        self._size_bytes = sum(piece.size_bytes for piece in self._pieces)
        self._putting: CopyToken | None = None
        self._failed: set[int] = set()
        self._fetching: list[tuple[int, ReadLease]] = []
        self._statistics = StoreIOStatistics()
        self._counting = threading.Lock()  # puts are counted on their lane

    def begin_step(self, fetches: Sequence[tuple[int, ReadLease | None]]) -> Mapping[int, CopyToken]:
        """Start filling blocks; return, per layer, the token after which its rows are in their home.

        Waits first for the puts of the step before: their source blocks may be written again from now on. A
        block without a lease, or whose object has another layout or size, counts as failed.
        """
        self.settle_puts()
        self._failed = set()
        self._fetching = []
        for block_id, lease in fetches:
            if lease is None or lease.layout != self._layout or lease.size_bytes != self._size_bytes:
                self._failed.add(block_id)
            else:
                self._fetching.append((block_id, lease))
        if not self._fetching:
            return {}
        lane = self._engine.lane(FETCH_LANE)
        tokens: dict[int, CopyToken] = {}
        for layer in dict.fromkeys(piece.layer for piece in self._pieces):
            tokens[layer] = lane.call(partial(self._fetch_layer, layer), name=f"store rows of layer {layer}")
        return tokens

    def failed_blocks(self) -> frozenset[int]:
        """Return the blocks of this step that hold doubtful rows; legal once every layer was waited for."""
        return frozenset(self._failed)

    def end_step(self) -> None:
        """Wait for fetches that no layer waited for, and count the step."""
        if self._fetching:
            self._engine.lane(FETCH_LANE).drain(deadline_s=self._deadline_s)
        good = [block_id for block_id, _ in self._fetching if block_id not in self._failed]
        self._count(
            fetched_blocks=len(good),
            failed_blocks=len(self._failed),
            fetched_bytes=len(good) * self._size_bytes,
        )
        self._fetching = []

    def put(self, blocks: Sequence[tuple[int, bytes]]) -> None:
        """Offer finished blocks (block id, block hash); their homes must not change until settled."""
        if not blocks:
            return
        assert self._putting is None, "puts of the step before were not settled"

        def run() -> None:
            for block_id, block_hash in blocks:
                self._put_block(block_id, block_hash)

        self._putting = self._engine.lane(PUT_LANE).call(run, name=f"store put of {len(blocks)} blocks")

    def settle_puts(self) -> None:
        """Wait until no put reads a home any more. A put that failed is a future miss, nothing else."""
        token, self._putting = self._putting, None
        if token is None:
            return
        try:
            token.wait(deadline_s=self._deadline_s, what=token.name)
        except KVStrataError as error:
            if isinstance(error, TimeoutError):
                self._putting = token  # still reading: the blocks may not be written
                raise
            logger.warning("%s failed, the blocks stay out of the store: %s", token.name, error)

    def statistics(self) -> StoreIOStatistics:
        """Return totals since start."""
        return self._statistics

    def _fetch_layer(self, layer: int) -> None:
        # Runs on the fetch lane.
        wanted = [(block_id, lease) for block_id, lease in self._fetching if block_id not in self._failed]
        reads = [(lease, self._ranges(layer, block_id)) for block_id, lease in wanted]
        try:
            statuses = self._store.read_many(reads)
        except KVStrataError as error:
            logger.warning("store read of layer %d failed: %s", layer, error)
            statuses = [Status.BACKEND_DOWN] * len(reads)
        for (block_id, _), status in zip(wanted, statuses, strict=True):
            if status is not Status.OK:
                logger.info(
                    "block %d: layer %d is %s in the store; recomputing", block_id, layer, status.value
                )
                self._failed.add(block_id)

    def _ranges(self, layer: int, block_id: int) -> list[ByteRange]:
        return [
            ByteRange(
                offset=piece.offset, dst_address=self._address(piece, block_id), size_bytes=piece.size_bytes
            )
            for piece in self._pieces
            if piece.layer == layer
        ]

    def _put_block(self, block_id: int, block_hash: bytes) -> None:
        key = StoreKey(namespace=self._namespace, rank=self._rank, block_hash=block_hash)
        handle = self._store.reserve(key, self._size_bytes, self._layout)
        if not isinstance(handle, WriteHandle):
            known = handle is Status.EXISTS
            self._count(put_known_blocks=int(known), put_refused_blocks=int(not known))
            return
        try:
            for piece in self._pieces:
                status = self._store.write(
                    handle, piece.offset, self._address(piece, block_id), piece.size_bytes
                )
                if status is not Status.OK:
                    self._store.abandon(handle)
                    self._count(put_refused_blocks=1)
                    return
        except BaseException:
            self._store.abandon(handle)
            raise
        published = self._store.publish(handle) is Status.OK
        self._count(
            put_blocks=int(published),
            put_known_blocks=int(not published),
            put_bytes=self._size_bytes if published else 0,
        )

    def _address(self, piece: _Piece, block_id: int) -> int:
        page = self._home(piece.layer, piece.component)
        return int(page.page_address(np.array([block_id]))[0])

    def _count(self, **more: int) -> None:
        with self._counting:
            now = self._statistics
            self._statistics = replace(
                now, **{name: getattr(now, name) + value for name, value in more.items()}
            )


def _pieces(bundles: Sequence[Bundle]) -> tuple[_Piece, ...]:
    pieces: list[_Piece] = []
    offset = 0
    for bundle in bundles:
        for component, spec in ((Component.MAIN, bundle.main), (Component.INDEXER, bundle.indexer)):
            if spec is not None:
                pieces.append(
                    _Piece(layer=bundle.index, component=component, offset=offset, size_bytes=spec.page_bytes)
                )
                offset += spec.page_bytes
    return tuple(pieces)
