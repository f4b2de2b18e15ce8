"""One worker's data path put together: windows, host pool, lanes and store, driven as vLLM drives it."""

from __future__ import annotations

import dataclasses
import itertools
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.v1.kv_cache_interface import (
    KVCacheConfig,
    KVCacheGroupSpec,
    MLAAttentionSpec,
    SparseCacheRole,
    UniformTypeKVCacheSpecs,
)

from kvstrata.core.layers import Component
from kvstrata.errors import DeadlineExceeded
from kvstrata.move.carrier import SAVE_LANE
from kvstrata.move.step import StepBlocks
from kvstrata.move.store_io import FETCH_LANE
from kvstrata.store.base import ReadLease, Status, StoreKey
from kvstrata.store.faulty import FaultyStore, on
from kvstrata.store.local import LocalStore
from kvstrata.vllm.layerwise_path import LayerwisePath
from kvstrata.vllm.layout import place_tensors, plan_layout
from kvstrata.vllm.settings import Settings
from kvstrata.vllm.stats import METRICS
from kvstrata.vllm.transfers import Fetch, Put, StepTransfers
from kvstrata.vllm.windows import slot_ranges, windows_of

BLOCKS, TOKENS, ROW = 6, 4, 8
LAYERS = 4  # and one draft layer
RANK = "tp0of1"
HASHES = [bytes([at]) * 32 for at in range(4)]


def specs() -> dict[str, MLAAttentionSpec]:
    found = {}
    for at in range(LAYERS + 1):
        found[f"model.layers.{at}.self_attn.attn"] = MLAAttentionSpec(
            block_size=TOKENS, num_kv_heads=1, head_size=ROW, dtype=torch.float32
        )
    found["model.layers.2.self_attn.indexer.k_cache"] = dataclasses.replace(
        found["model.layers.2.self_attn.attn"], head_size=ROW // 2, cache_role=SparseCacheRole.INDEXER
    )
    return found


def settings_of(**additional: Any) -> tuple[Any, Settings]:
    config = SimpleNamespace(
        model_config=SimpleNamespace(hf_text_config=SimpleNamespace(num_hidden_layers=LAYERS)),
        additional_config={"kvstrata": additional} if additional else None,
        kv_transfer_config=SimpleNamespace(
            kv_connector="KVStrataConnector",
            kv_connector_extra_config={
                "use_layerwise": True,
                "layerwise_num_shared_buffers": 1,
                "layerwise_prefetch_layers": 1,
                "deadline_s": 20.0,
            },
        ),
    )
    return config, Settings.of(config)


class Worker:
    """A data path over tensors placed as the worker places them."""

    def __init__(self, store: Any, **additional: Any) -> None:
        config, settings = settings_of(**additional)
        self.layout = plan_layout(specs(), config, settings)
        uniform = UniformTypeKVCacheSpecs(block_size=TOKENS, kv_cache_specs=specs())
        group = KVCacheGroupSpec(layer_names=list(specs()), kv_cache_spec=uniform)
        placed = place_tensors(KVCacheConfig(BLOCKS, [], [group]), self.layout)
        self.memory = torch.full((placed.kv_cache_tensors[0].size // 4,), torch.nan)
        self.caches = {
            tensor.layers[0]: self.memory[tensor.offset // 4 :][: BLOCKS * tensor.block_stride // 4].view(
                BLOCKS, TOKENS, -1
            )
            for tensor in placed.kv_cache_tensors
        }
        self.path = LayerwisePath(
            layout=self.layout,
            kv_caches=self.caches,
            settings=settings,
            store=store,
            namespace="model",
            rank=RANK,
        )
        self.store = store
        self.number = 0

    def caches_of(self, layer: int) -> list[torch.Tensor]:
        return [self.caches[name] for name, at in self.layout.layer_of.items() if at.index == layer]

    def step(
        self,
        load: list[int],
        save: list[int],
        *,
        fetches: dict[int, bytes] | None = None,
        puts: dict[int, bytes] | None = None,
        seed: float = 0.0,
        stop_at: int | None = None,
        stop_after: int | None = None,
        drafts: bool = True,
    ) -> dict[int, list[torch.Tensor]]:
        """A forward; answers what each layer's window held in the loaded blocks when it attended."""
        self.number += 1
        self.path.begin_step(self.transfers(fetches or {}, puts or {}))
        metadata: Any = SimpleNamespace(
            blocks=StepBlocks(load=np.array(load, np.int64), save=np.array(save, np.int64))
        )
        seen = {}
        for layer in range(LAYERS + drafts):
            hook = self.path.hook(layer)
            hook.acquire(metadata)
            if layer == stop_at:
                raise RuntimeError("the forward broke")
            for at, cache in enumerate(self.caches_of(layer)):
                cache[save] = value(layer, at, seed)
            seen[layer] = [cache[load].clone() for cache in self.caches_of(layer)]
            hook.release(metadata)
            if layer == stop_after:
                raise RuntimeError("the forward broke")
        self.failed_before_end = self.path.failed_blocks()  # vLLM may ask before the drafts have run
        self.path.end_step()
        return seen

    def transfers(self, fetches: dict[int, bytes], puts: dict[int, bytes]) -> StepTransfers:
        found = []
        for block_id, block_hash in fetches.items():
            (lease,) = self.store.acquire([key(block_hash)], ttl_s=60.0)
            leases = {RANK: lease} if isinstance(lease, ReadLease) else {}
            found.append(Fetch(request_id="a", block_id=block_id, leases=leases))
        return StepTransfers(
            number=self.number,
            fetches=found,
            puts=[Put(request_id="b", block_id=at, block_hash=block_hash) for at, block_hash in puts.items()],
        )


def key(block_hash: bytes) -> StoreKey:
    return StoreKey(namespace="model", rank=RANK, block_hash=block_hash)


def value(layer: int, cache: int, seed: float) -> float:
    return 1000 * seed + 10 * layer + cache + 1


@pytest.fixture
def local(tmp_path: Path) -> Iterator[LocalStore]:
    store = LocalStore.open(tmp_path / "store", size_bytes=1 << 20)
    yield store
    store.close()


class Unclosed(FaultyStore):
    def close(self) -> None:
        pass


@pytest.fixture
def make(local: LocalStore) -> Iterator[Callable[..., Worker]]:
    made: list[Worker] = []

    def make(store: Any = None, **additional: Any) -> Worker:
        made.append(Worker(store or Unclosed(local), **additional))
        return made[-1]

    yield make
    for worker in made:
        worker.path.check_integrity()
        worker.path.close()


def stored(local: LocalStore) -> list[bool]:
    return [status is Status.OK for status in local.contains([key(block_hash) for block_hash in HASHES])]


def assert_holds(seen: dict[int, list[torch.Tensor]], seed: float) -> None:
    for layer, caches in seen.items():
        for at, rows in enumerate(caches):
            assert (rows == value(layer, at, seed)).all(), f"layer {layer}, cache {at}"


def test_M4_rows_go_through_the_store_to_another_engine_layer_by_layer(local, make):  # noqa: N802
    writer, reader = make(), make()
    writer.step([], [1, 2], puts={1: HASHES[0], 2: HASHES[1]}, seed=3)
    writer.path.begin_step(StepTransfers())
    assert stored(local)[:2] == [True, True]
    writer.path.end_step()
    seen = reader.step([4, 5], [0], fetches={4: HASHES[0], 5: HASHES[1]})
    assert_holds(seen, seed=3)
    assert reader.path.failed_blocks() == frozenset()
    assert reader.path.counts()["fetched_blocks"] == 2
    assert_holds(reader.step([4, 5], [1], seed=9), seed=3)


def test_M4_a_later_step_reads_what_earlier_ones_wrote_in_spite_of_shared_windows(make):  # noqa: N802
    worker = make()
    worker.step([], [0, 1], seed=1)
    worker.memory[worker.caches_of(0)[0].numel() :] = torch.nan  # layer 0 has a window of its own
    assert_holds(worker.step([0, 1], [2], seed=2), seed=1)


def test_the_negative_control_drops_loads(make):
    worker = make(fault="skip_loads")
    worker.step([], [0, 1], seed=1)
    seen = worker.step([0, 1], [2], seed=2)
    with pytest.raises(AssertionError, match="layer 1, cache 0"):
        assert_holds(seen, seed=1)


def test_fault_11_a_lost_block_is_told_and_nothing_of_its_step_is_offered(local, make):
    writer = make()
    writer.step([], [1, 2], puts={1: HASHES[0], 2: HASHES[1]}, seed=3)
    writer.path.begin_step(StepTransfers())
    writer.path.end_step()
    reader = make(Unclosed(local, on("read", 4, Status.MISSING)))
    reader.step([4, 5], [0, 1], fetches={4: HASHES[0], 5: HASHES[1]}, puts={0: HASHES[2], 1: HASHES[3]})
    assert reader.failed_before_end == reader.path.failed_blocks()
    assert len(reader.path.failed_blocks()) == 1
    reader.step([], [4], puts={0: HASHES[2]}, seed=4)
    assert reader.path.failed_blocks() == frozenset()
    reader.path.begin_step(StepTransfers())
    reader.path.end_step()
    assert stored(local) == [True, True, True, False], "offered again by a step that lost nothing"


@pytest.mark.parametrize("layer", [0, 1, LAYERS - 1])
@pytest.mark.parametrize("ends_step", [True, False])
def test_fault_10_a_forward_that_broke_off_offers_nothing(local, make, layer, ends_step):
    """vLLM ends the step of a forward that raised, unless drafts were to come."""
    worker = make()
    with pytest.raises(RuntimeError, match="the forward broke"):
        worker.step([], [1], puts={1: HASHES[0]}, seed=1, stop_at=layer)
    if ends_step:
        worker.path.end_step()
    worker.path.begin_step(StepTransfers())
    worker.path.end_step()
    assert stored(local) == [False] * 4
    worker.step([], [1], puts={1: HASHES[0]}, seed=2)
    assert_holds(worker.step([1], [2]), seed=2)
    assert stored(local)[0]


def test_a_step_without_drafts_still_offers(local, make):
    worker = make()
    worker.step([], [1], puts={1: HASHES[0]}, drafts=False)
    worker.path.begin_step(StepTransfers())
    worker.path.end_step()
    assert stored(local)[0]


def test_a_step_without_a_forward_offers_nothing(local, make):
    worker = make()
    worker.path.begin_step(worker.transfers({}, {1: HASHES[0]}))
    worker.path.end_step()
    worker.path.begin_step(StepTransfers())
    worker.path.end_step()
    assert stored(local) == [False] * 4


def test_M3_fetches_wait_for_saves_that_a_broken_forward_left_behind(local, make):  # noqa: N802
    """The block of a late save may be a new request's by now; its fetch would be overwritten by the save."""
    writer = make()
    writer.step([], [1], puts={1: HASHES[0]}, seed=3)
    writer.path.begin_step(StepTransfers())
    writer.path.end_step()
    reader = make()
    gate = threading.Event()
    reader.path._engine.lane(SAVE_LANE).call(lambda: gate.wait(20.0) and None, name="something slow")
    with pytest.raises(RuntimeError, match="the forward broke"):
        reader.step([], [4], seed=8, stop_after=1)  # the save of block 4 of layer 1 waits behind
    reader.path._pipeline._deadline_s = 0.01
    with pytest.raises(DeadlineExceeded, match="load of layer 2"):  # which is behind the save
        reader.step([4], [0], fetches={4: HASHES[0]})
    assert FETCH_LANE not in reader.path._engine.statistics().lanes, "no fetch beside the save"
    reader.path._pipeline._deadline_s = 20.0
    gate.set()
    assert_holds(reader.step([4], [0], fetches={4: HASHES[0]}), seed=3)


def test_statistics_keep_to_the_metrics_and_are_reported_once(make):
    worker = make()
    assert set(worker.path.counts()) == {metric.key for metric in METRICS}
    worker.step([], [0], seed=1)
    first = worker.path.take_counts()
    assert first["saved_bytes"] == sum(
        spec.page_size_bytes for name, spec in specs().items() if ".0." not in name
    )
    assert "loaded_bytes" not in first
    assert worker.path.take_counts() == {}
    worker.step([0], [1])
    again = worker.path.take_counts()
    assert again["loaded_bytes"] == first["saved_bytes"]
    assert worker.path.figures()["rank"] == RANK


def test_A1_figures_are_the_bytes_of_the_tensors(make):  # noqa: N802
    worker = make()
    figures = worker.path.figures()
    assert figures["device_bytes"] == worker.memory.numel() * 4
    assert figures["num_blocks"] == BLOCKS
    hosted = sum(spec.page_size_bytes for name, spec in specs().items() if ".0." not in name)
    assert 0 <= figures["host_pool_bytes"] - BLOCKS * hosted < 64 * 1024, "pages, guards and alignment"


def test_M2_a_slots_range_covers_its_main_and_indexer_windows_and_no_other_slots(make):  # noqa: N802
    worker = make()
    windows = windows_of(worker.layout, worker.caches)
    ranges = slot_ranges(worker.layout, windows)
    assert sum(item.size_bytes for item in ranges.values()) == worker.memory.numel() * 4
    for (layer, component), view in windows.items():
        physical = ranges[worker.layout.plan.slot_of(layer)]
        assert physical.start <= view.address
        assert view.address + view.span_bytes <= physical.end, (layer, component)
    ordered = sorted(ranges.values(), key=lambda item: item.start)
    assert all(a.end <= b.start for a, b in itertools.pairwise(ordered))
    assert (
        windows[2, Component.INDEXER].address
        >= windows[2, Component.MAIN].address + windows[2, Component.MAIN].span_bytes
    )


def test_without_a_store_nothing_is_fetched_or_offered(make):
    worker = Worker(None)
    worker.step([], [0], puts={0: HASHES[0]}, seed=1)
    assert_holds(worker.step([0], [1]), seed=1)
    assert worker.path.failed_blocks() == frozenset()
    assert worker.path.step_number == 2
    worker.path.close()


def test_a_closed_data_path_touches_no_memory():
    worker = Worker(None)
    worker.path.close()
    worker.path.close()
    with pytest.raises(ValueError, match="the host pool was closed"):
        worker.step([], [0])
