"""M5, and the store's side of M4: a store may lose anything at any time, and no wrong byte counts as good."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from kvstrata.core.bundle import layout_digest
from kvstrata.core.layers import Component
from kvstrata.errors import DeadlineExceeded, StoreError, TransferFailed
from kvstrata.move.engine import CopyEngine
from kvstrata.move.inline import InlineEngine
from kvstrata.move.store_io import FETCH_LANE, PUT_LANE, StoreIO
from kvstrata.move.testing import Memory, make_pipeline, make_plan
from kvstrata.move.threads import ThreadEngine
from kvstrata.store.base import ByteRange, ReadLease, Status, Store, StoreKey, WriteHandle
from kvstrata.store.faulty import Call, FaultyStore, LeaseFault, Script, no_faults, on
from kvstrata.store.local import LocalStore
from kvstrata.store.testing import put_bytes

BLOCKS, TOKENS = 6, 4
HASH = [bytes([at]) * 32 for at in range(BLOCKS)]
PLAN = make_plan(layers=3, drafts=1, indexers=[1, 3], shared=1, independent=[0], tokens=TOKENS)
PIECES = [
    (bundle.index, component)
    for bundle in PLAN.bundles
    for component in (Component.MAIN, Component.INDEXER)
    if component is Component.MAIN or bundle.indexer is not None
]
OBJECT_BYTES = sum(bundle.page_bytes for bundle in PLAN.bundles)
LAYOUT = layout_digest(PLAN.bundles)


@dataclass
class Rank:
    """One rank's homes with its store traffic."""

    memory: Memory
    engine: CopyEngine
    io: StoreIO
    store: Store
    rank: str
    home: Callable

    def page(self, layer: int, component: Component, block: int) -> np.ndarray:
        view = self.home(layer, component)
        address = int(view.page_address(np.array([block]))[0])
        return np.ctypeslib.as_array((ctypes.c_uint8 * view.page_bytes).from_address(address))

    def block(self, block: int) -> bytes:
        """All layers' pages of a block, as an object holds them."""
        return b"".join(self.page(*piece, block).tobytes() for piece in PIECES)

    def fill(self, block: int, seed: int) -> bytes:
        rng = np.random.default_rng(seed)
        for piece in PIECES:
            page = self.page(*piece, block)
            page[:] = rng.integers(0, 256, page.size)
        return self.block(block)

    def key(self, block_hash: bytes) -> StoreKey:
        return StoreKey(namespace="model", rank=self.rank, block_hash=block_hash)

    def lease(self, block_hash: bytes) -> ReadLease | None:
        (answer,) = self.store.acquire([self.key(block_hash)], ttl_s=60.0)
        return answer if isinstance(answer, ReadLease) else None

    def fetch(self, *wanted: tuple[int, bytes]) -> frozenset[int]:
        """A whole step that fetches; answers the failed blocks."""
        tokens = self.io.begin_step([(block, self.lease(block_hash)) for block, block_hash in wanted])
        for layer, token in tokens.items():
            token.wait(deadline_s=30.0, what=f"layer {layer}")
        self.io.end_step()
        return self.io.failed_blocks()

    def put(self, *blocks: tuple[int, bytes]) -> None:
        self.io.put(blocks)
        self.io.settle_puts()


@pytest.fixture
def local(tmp_path: Path) -> Iterator[LocalStore]:
    store = LocalStore.open(tmp_path / "store", size_bytes=1 << 20)
    yield store
    store.check_integrity()
    store.close()


@pytest.fixture
def make_rank() -> Iterator[Callable[..., Rank]]:
    made: list[Rank] = []

    def make(store: Store, *, rank: str = "tp0", engine: CopyEngine | None = None) -> Rank:
        memory = Memory(PLAN, blocks=BLOCKS, tokens=TOKENS)
        engine = engine or InlineEngine()
        home = make_pipeline(memory, engine, prefetch_layers=1).home
        io = StoreIO(
            store=store,
            bundles=PLAN.bundles,
            home=home,
            engine=engine,
            namespace="model",
            rank=rank,
            deadline_s=30.0,
        )
        made.append(Rank(memory=memory, engine=engine, io=io, store=store, rank=rank, home=home))
        return made[-1]

    yield make
    for rank in made:
        rank.engine.check_integrity()
        rank.engine.close(30.0)
        rank.memory.close()


class RaisingStore(FaultyStore):
    """Raises where the contract allows no exception."""

    def __init__(self, inner: Store, method: str, error: Exception) -> None:
        super().__init__(inner)
        self._method, self._error = method, error

    def _check(self, method: str) -> None:
        if method == self._method:
            raise self._error

    def read_many(self, reads: Sequence[tuple[ReadLease, Sequence[ByteRange]]]) -> list[Status]:
        self._check("read")
        return super().read_many(reads)

    def reserve(self, key: StoreKey, size_bytes: int, layout: str) -> WriteHandle | Status:
        self._check("reserve")
        return super().reserve(key, size_bytes, layout)

    def write(self, handle: WriteHandle, offset: int, src_address: int, size_bytes: int) -> Status:
        self._check("write")
        return super().write(handle, offset, src_address, size_bytes)

    def publish(self, handle: WriteHandle) -> Status:
        self._check("publish")
        return super().publish(handle)


@pytest.mark.parametrize("engine_class", [InlineEngine, ThreadEngine])
def test_a_block_comes_back_byte_for_byte_in_every_layer(local, make_rank, engine_class):
    writer = make_rank(local, engine=engine_class())
    reader = make_rank(local, engine=engine_class())
    wanted = {block: writer.fill(block, seed=block) for block in (1, 2, 4)}
    writer.put(*((block, HASH[block]) for block in wanted))
    assert reader.fetch((5, HASH[1]), (0, HASH[2]), (3, HASH[4])) == frozenset()
    assert [reader.block(at) for at in (5, 0, 3)] == [wanted[1], wanted[2], wanted[4]]
    counts = reader.io.statistics()
    assert (counts.fetched_blocks, counts.failed_blocks, counts.fetched_bytes) == (3, 0, 3 * OBJECT_BYTES)
    assert writer.io.statistics().put_blocks == 3
    assert writer.io.statistics().put_bytes == 3 * OBJECT_BYTES


def test_fault_4_another_ranks_block_is_not_found(local, make_rank):
    writer = make_rank(local, rank="tp0of2")
    writer.fill(1, seed=1)
    writer.put((1, HASH[1]))
    assert make_rank(local, rank="tp1of2").fetch((2, HASH[1])) == {2}


READS = len(PLAN.bundles) * 2  # of two blocks, layer by layer


@pytest.mark.parametrize(
    ("count", "fault"),
    list(
        itertools.product(
            range(1, READS + 1), [Status.MISSING, Status.PEER_LOST, Status.BACKEND_DOWN, LeaseFault.LOST]
        )
    ),
)
def test_M5_a_block_lost_at_any_layer_is_reported_and_no_other(local, make_rank, count, fault):  # noqa: N802
    writer = make_rank(local)
    writer.fill(1, seed=1)
    good = {1: writer.block(1), 2: writer.fill(2, seed=2)}
    writer.put((1, HASH[1]), (2, HASH[2]))
    reader = make_rank(FaultyStore(local, on("read", count, fault)))
    failed = reader.fetch((4, HASH[1]), (5, HASH[2]))
    assert len(failed) == 1
    (left,) = {4, 5} - failed
    assert reader.block(left) == good[left - 3]
    counts = reader.io.statistics()
    assert (counts.fetched_blocks, counts.failed_blocks, counts.fetched_bytes) == (1, 1, OBJECT_BYTES)


@pytest.mark.parametrize("error", [StoreError("gone"), RuntimeError("a defect of the store")])
def test_M5_a_store_that_raises_while_reading_costs_a_recompute_only(local, make_rank, error):  # noqa: N802
    writer = make_rank(local)
    writer.fill(1, seed=1)
    writer.put((1, HASH[1]))
    assert make_rank(RaisingStore(local, "read", error)).fetch((4, HASH[1])) == {4}


def test_M5_an_object_removed_under_its_lease_is_reported(local, make_rank):  # noqa: N802
    rank = make_rank(local)
    rank.fill(1, seed=1)
    rank.put((1, HASH[1]))
    lease = rank.lease(HASH[1])
    local.remove([rank.key(HASH[1])], force=True)
    rank.fill(1, seed=2)
    rank.put((1, HASH[1]))  # the same key again is another generation
    rank.io.begin_step([(4, lease)])
    assert rank.io.failed_blocks() == {4}
    rank.io.end_step()


@pytest.mark.parametrize(
    ("size_bytes", "layout"),
    [(OBJECT_BYTES, "0" * 64), (OBJECT_BYTES - 8, LAYOUT), (OBJECT_BYTES + 8, LAYOUT)],
    ids=["other layout", "too short", "too long"],
)
def test_fault_4_an_object_of_another_layout_or_size_is_never_read(local, make_rank, size_bytes, layout):
    rank = make_rank(local)
    assert put_bytes(local, rank.key(HASH[1]), bytes(size_bytes), layout) is Status.OK
    before = rank.fill(4, seed=4)
    assert rank.fetch((4, HASH[1])) == {4}
    assert rank.block(4) == before


def test_a_block_without_a_lease_for_this_rank_is_reported(local, make_rank):
    rank = make_rank(local)
    assert rank.io.begin_step([(3, None)]) == {}
    assert rank.io.failed_blocks() == {3}
    rank.io.end_step()
    assert rank.io.failed_blocks() == {3}, "vLLM may ask before or after the step ends"
    rank.io.begin_step([])
    assert rank.io.failed_blocks() == frozenset()


def test_fault_11_failed_blocks_waits_for_layers_that_nobody_waited_for(local, make_rank):
    writer = make_rank(local)
    writer.fill(1, seed=1)
    writer.put((1, HASH[1]))
    last = len(PLAN.bundles)  # the draft layer, whose forward may come after vLLM has asked
    reader = make_rank(FaultyStore(local, on("read", last, Status.MISSING)))
    tokens = reader.io.begin_step([(4, reader.lease(HASH[1]))])
    tokens[0].wait(deadline_s=1.0, what="the first layer")
    assert reader.io.failed_blocks() == {4}


def refusing(method: str, status: Status) -> Script:
    def script(call: Call) -> Status | None:
        return status if call.method == method and call.key.block_hash == HASH[1] else None

    return script


@pytest.mark.parametrize("status", [Status.FULL, Status.BACKEND_DOWN, Status.MISSING])
@pytest.mark.parametrize("method", ["reserve", "write", "publish"])
def test_M5_a_refused_put_is_a_future_miss_and_leaves_nothing_behind(local, make_rank, method, status):  # noqa: N802
    rank = make_rank(FaultyStore(local, refusing(method, status)))
    rank.fill(1, seed=1)
    kept = rank.fill(2, seed=2)
    rank.put((1, HASH[1]), (2, HASH[2]))
    counts = rank.io.statistics()
    assert (counts.put_blocks, counts.put_known_blocks, counts.put_refused_blocks) == (1, 0, 1)
    assert local.statistics().reservations == 0
    assert rank.fetch((4, HASH[1]), (5, HASH[2])) == {4}
    assert rank.block(5) == kept


@pytest.mark.parametrize("error", [StoreError("gone"), RuntimeError("a defect of the store")])
@pytest.mark.parametrize("method", ["reserve", "write"])
def test_M5_a_store_that_raises_while_writing_loses_that_block_only(local, make_rank, method, error):  # noqa: N802
    class RaisesOnce(RaisingStore):
        def _check(self, method: str) -> None:
            try:
                super()._check(method)
            finally:
                if method == self._method:
                    self._method = ""

    rank = make_rank(RaisesOnce(local, method, error))
    rank.fill(1, seed=1)
    rank.fill(2, seed=2)
    rank.put((1, HASH[1]), (2, HASH[2]))
    counts = rank.io.statistics()
    assert (counts.put_blocks, counts.put_refused_blocks) == (1, 1)
    assert local.statistics().reservations == 0
    rank.put((1, HASH[1]))  # and the lane lives on
    assert rank.io.statistics().put_blocks == 2


def test_every_offered_block_counts_once_whatever_the_store_says(local, make_rank):
    rank = make_rank(FaultyStore(local, refusing("reserve", Status.FULL)))
    rank.put((1, HASH[1]), (2, HASH[2]), (3, HASH[2]), (4, HASH[4]))
    counts = rank.io.statistics()
    assert (counts.put_blocks, counts.put_known_blocks, counts.put_refused_blocks) == (2, 1, 1)


def test_a_writer_that_was_second_counts_the_block_as_known(local, make_rank):
    other = make_rank(local)

    class Overtaken(FaultyStore):
        def publish(self, handle: WriteHandle) -> Status:
            other.put((1, HASH[1]))
            return super().publish(handle)

    rank = make_rank(Overtaken(local, no_faults))
    rank.put((2, HASH[1]))
    counts = rank.io.statistics()
    assert (counts.put_blocks, counts.put_known_blocks, counts.put_bytes) == (0, 1, 0)


def test_puts_end_before_a_step_may_change_their_blocks(local, make_rank):
    rank = make_rank(local)
    offered = rank.fill(1, seed=1)
    rank.io.put([(1, HASH[1])])
    rank.io.begin_step([])
    rank.fill(1, seed=9)
    assert rank.fetch((4, HASH[1])) == frozenset()
    assert rank.block(4) == offered


def test_M3_a_put_that_does_not_end_holds_up_the_next_step_by_name_and_every_later_one(  # noqa: N802
    local, make_rank
):
    rank = make_rank(local)
    lane = rank.engine.lane(PUT_LANE)
    rank.fill(1, seed=1)
    rank.io.put([(1, HASH[1])])
    lane.held = True
    for _ in range(2):
        with pytest.raises(DeadlineExceeded, match="store put of 1 blocks"):
            rank.io.begin_step([])
    lane.held = False
    rank.io.begin_step([])
    assert rank.io.statistics().put_blocks == 1


def test_M3_fetches_of_a_forward_that_broke_off_end_before_the_next_ones(local, make_rank):  # noqa: N802
    rank = make_rank(local)
    rank.fill(1, seed=1)
    rank.put((1, HASH[1]))
    rank.io.begin_step([(4, rank.lease(HASH[1]))])  # and no end_step: the forward raised
    lane = rank.engine.lane(FETCH_LANE)
    lane.held = True
    with pytest.raises(DeadlineExceeded, match=r"store-fetch.*store rows of layer 0"):
        rank.io.begin_step([])
    lane.held = False
    rank.io.begin_step([])
    mine = rank.fill(4, seed=4)
    rank.io.end_step()
    assert rank.block(4) == mine


def test_a_lane_that_is_gone_fails_fetches_by_name_and_costs_puts_only(local, make_rank):
    rank = make_rank(local)
    rank.fill(1, seed=1)
    rank.put((1, HASH[1]))
    lease = rank.lease(HASH[1])
    rank.engine.close(1.0)
    with pytest.raises(TransferFailed, match="store-fetch"):
        rank.io.begin_step([(4, lease)])
    rank.io.put([(1, HASH[2])])
    rank.io.settle_puts()
    assert rank.io.statistics().put_refused_blocks == 1
