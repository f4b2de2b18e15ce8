"""Between the store and a rank's homes: rows of a prefix hit come in layer by layer, finished blocks go out.

One object holds one block of all the rank's layers, in layer order, main rows before indexer rows. Both
directions run on lanes of their own, so that a forward waits only for the layer it is about to read.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from kvstrata.core.bundle import Bundle, layout_digest
from kvstrata.core.layers import Component
from kvstrata.errors import DeadlineExceeded, TransferFailed
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
class _Fetch:
    """One step's blocks to fill. The fetch lane adds to `failed`; others look once the lane is drained."""

    blocks: tuple[tuple[int, ReadLease], ...] = ()
    failed: set[int] = field(default_factory=set)


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
        self._layers = tuple(bundle.index for bundle in bundles)
        self._size_bytes = sum(piece.size_bytes for piece in self._pieces)
        self._putting: CopyToken | None = None
        self._fetch = _Fetch()
        self._statistics = StoreIOStatistics()
        self._counting = threading.Lock()  # puts are counted on their lane

    def begin_step(self, fetches: Sequence[tuple[int, ReadLease | None]]) -> Mapping[int, CopyToken]:
        """Start filling blocks; return, per layer, the token after which its rows are in their home.

        Waits first for the puts of the step before: their source blocks may be written again from now on. A
        block without a lease, or whose object has another layout or size, counts as failed.
        """
        self.settle_puts()
        self._settle_fetches()  # left over where a forward broke off: their blocks may have a new owner now
        failed = {block_id for block_id, lease in fetches if not self._is_readable(lease)}
        self._fetch = _Fetch(
            blocks=tuple(
                (block_id, lease) for block_id, lease in fetches if lease and block_id not in failed
            ),
            failed=failed,
        )
        if not self._fetch.blocks:
            return {}
        lane = self._engine.lane(FETCH_LANE)
        return {
            layer: lane.call(
                partial(self._fetch_layer, layer, self._fetch), name=f"store rows of layer {layer}"
            )
            for layer in self._layers
        }

    def failed_blocks(self) -> frozenset[int]:
        """Return the blocks of this step that hold doubtful rows; waits for every fetch of the step."""
        self._settle_fetches()
        return frozenset(self._fetch.failed)

    def end_step(self) -> None:
        """Wait for every fetch of the step, and count it."""
        failed = self.failed_blocks()
        good = sum(block_id not in failed for block_id, _ in self._fetch.blocks)
        self._count(fetched_blocks=good, failed_blocks=len(failed), fetched_bytes=good * self._size_bytes)
        self._fetch = _Fetch(failed=self._fetch.failed)

    def put(self, blocks: Sequence[tuple[int, bytes]]) -> None:
        """Offer finished blocks (block id, block hash); their homes must not change until settled."""
        if not blocks:
            return
        assert self._putting is None, "puts of the step before were not settled"

        def run() -> None:
            for block_id, block_hash in blocks:
                try:
                    self._put_block(block_id, block_hash)
                except Exception as error:  # whatever a store raises costs a future hit, never this engine
                    logger.warning("a block stays out of the store: %s", error, exc_info=True)
                    self._count(put_refused_blocks=1)

        name = f"store put of {len(blocks)} blocks"
        try:
            self._putting = self._engine.lane(PUT_LANE).call(run, name=name)
        except TransferFailed as error:
            logger.warning("%s failed, the blocks stay out of the store: %s", name, error)
            self._count(put_refused_blocks=len(blocks))

    def settle_puts(self) -> None:
        """Wait until no put reads a home any more. A put that failed is a future miss, nothing else."""
        token, self._putting = self._putting, None
        if token is None:
            return
        try:
            token.wait(deadline_s=self._deadline_s, what=token.name)
        except DeadlineExceeded:
            self._putting = token  # still reading: the blocks may not be written
            raise
        except TransferFailed as error:
            logger.warning("%s failed, the blocks stay out of the store: %s", token.name, error)

    def statistics(self) -> StoreIOStatistics:
        """Return totals since start."""
        return self._statistics

    def _settle_fetches(self) -> None:
        if self._fetch.blocks:
            self._engine.lane(FETCH_LANE).drain(deadline_s=self._deadline_s)

    def _is_readable(self, lease: ReadLease | None) -> bool:
        return lease is not None and lease.layout == self._layout and lease.size_bytes == self._size_bytes

    def _fetch_layer(self, layer: int, fetch: _Fetch) -> None:
        # Runs on the fetch lane.
        blocks = [(block_id, lease) for block_id, lease in fetch.blocks if block_id not in fetch.failed]
        pieces = [piece for piece in self._pieces if piece.layer == layer]
        reads = [(lease, [self._range(piece, block_id) for piece in pieces]) for block_id, lease in blocks]
        try:
            statuses = self._store.read_many(reads)
        except Exception as error:  # whatever a store raises, its rows are computed again
            logger.warning("the store failed to read %d blocks: %s", len(blocks), error, exc_info=True)
            statuses = [Status.BACKEND_DOWN] * len(blocks)
        for (block_id, _), status in zip(blocks, statuses, strict=True):
            if status is not Status.OK:
                logger.info(
                    "block %d: %s in the store at layer %d; recomputing", block_id, status.value, layer
                )
                fetch.failed.add(block_id)

    def _range(self, piece: _Piece, block_id: int) -> ByteRange:
        return ByteRange(
            offset=piece.offset, dst_address=self._address(piece, block_id), size_bytes=piece.size_bytes
        )

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
        status = self._store.publish(handle)
        if status is Status.OK:
            self._count(put_blocks=1, put_bytes=self._size_bytes)
        elif status is Status.EXISTS:  # another engine was first
            self._count(put_known_blocks=1)
        else:
            self._count(put_refused_blocks=1)

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
