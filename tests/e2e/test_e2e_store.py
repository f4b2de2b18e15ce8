"""The local store in running engines: hits from earlier calls, engines and processes; losses; strangers."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import pytest
from checks import (
    NEW_TOKENS,
    ModelOf,
    PlainAnswers,
    TransformersTokens,
    Truth,
    assert_exact,
    assert_true,
    count_changed,
)
from engine_process import ask_in_new_process
from engines import BLOCK_SIZE, SKIP_LOADS, Engine, engine_arguments, layerwise, open_engine
from models import Model, random_prompts

from kvstrata.store.base import Status, Store
from kvstrata.store.faulty import Call, FaultyStore, LeaseFault
from kvstrata.store.local import LocalStore
from kvstrata.vllm import connector as connector_module
from kvstrata.vllm import open_path as open_path_module

CHUNKED = {"max_num_batched_tokens": 48}
GIB = 1 << 30
# Prompts of 1, 11, 64, 129 and 250 tokens. One token at least is always computed.
FULL_HIT = [0, 0, 48, 128, 240]
HIT_BLOCKS = sum(FULL_HIT) // BLOCK_SIZE
# What the prompts and 16 answered tokens come to, the last of which never has a row: 1, 1, 4, 9, 16 blocks.
PUT_BLOCKS = sum((length + NEW_TOKENS - 1) // BLOCK_SIZE for length in (1, 11, 64, 129, 250))


def store(path: Path, **options: Any) -> dict[str, Any]:
    """Arguments of an engine with layerwise offload and a store in `path`."""
    return {**layerwise(**{"shared": 2, "backend": "local", "store_path": str(path), **options}), **CHUNKED}


def stored_statistics(path: Path) -> Any:
    """What the store counts, after its own check."""
    attached = LocalStore.attach(path)
    try:
        attached.check_integrity()
        return attached.statistics()
    finally:
        attached.close()


def ask_twice(engine: Engine, model: Model) -> list[Any]:
    return [engine.ask(model.prompts, NEW_TOKENS) for _ in range(2)]


@pytest.mark.features("layerwise", "store", "chunked")
@pytest.mark.parametrize("name", ["dense", "dsa", "glm"])
def test_hits_of_the_same_engine_are_exact(
    name: str,
    tmp_path: Path,
    model_of: ModelOf,
    plain: PlainAnswers,
    transformers_tokens: TransformersTokens,
) -> None:
    """Without vLLM's prefix cache every hit comes from the store."""
    model = model_of(name)
    with open_engine(model, **store(tmp_path)) as engine:
        first, second = ask_twice(engine, model)
        statistics = engine.statistics()
    for got in (first, second):
        assert_exact(got, plain(name), transformers_tokens(name))
    assert first.cached_tokens == [0, 0, 0, 0, 0]
    assert second.cached_tokens == FULL_HIT
    assert statistics["fetched_blocks"] == HIT_BLOCKS
    object_bytes = model.cache.plain_block_bytes(BLOCK_SIZE)
    assert statistics["fetched_bytes"] == HIT_BLOCKS * object_bytes
    assert statistics["put_bytes"] == statistics["put_blocks"] * object_bytes
    assert statistics["failed_blocks"] == statistics["put_refused_blocks"] == 0
    assert stored_statistics(tmp_path).published == statistics["put_blocks"]
    assert stored_statistics(tmp_path).leases == 0


@pytest.mark.features("layerwise", "store", "prefix", "chunked")
def test_hits_of_an_engine_before_and_beside_are_exact(
    tmp_path: Path,
    model_of: ModelOf,
    plain: PlainAnswers,
    transformers_tokens: TransformersTokens,
) -> None:
    """An engine restarted in this process, then one in another process while it runs."""
    model = model_of("dsa")
    with open_engine(model, **store(tmp_path)) as engine:
        engine.ask(model.prompts, NEW_TOKENS)
    with open_engine(model, enable_prefix_caching=True, **store(tmp_path)) as engine:
        restarted = engine.ask(model.prompts, NEW_TOKENS)
        engine.forget_prefixes()
        forgot = engine.ask(model.prompts, NEW_TOKENS)
        statistics = engine.statistics()
        beside = ask_in_new_process(
            engine_arguments(model, **store(tmp_path)),
            [model.prompts],
            NEW_TOKENS,
            directory=tmp_path / "job",
        )
        assert_exact(engine.ask(model.prompts, NEW_TOKENS), plain("dsa"), transformers_tokens("dsa"))
    for got in (restarted, forgot):
        assert_exact(got, plain("dsa"), transformers_tokens("dsa"))
        assert got.cached_tokens == FULL_HIT
    assert statistics["fetched_blocks"] == 2 * HIT_BLOCKS
    assert beside.tokens == [transformers_tokens("dsa")]
    assert beside.cached_tokens == [FULL_HIT]
    assert beside.statistics[0]["fetched_blocks"] == HIT_BLOCKS
    assert beside.statistics[0]["put_blocks"] == 0


def test_a_hit_without_loads_is_wrong(tmp_path: Path, model_of: ModelOf, plain: PlainAnswers) -> None:
    """Negative control: what the store brought reaches attention by the loads, and by them alone."""
    model = model_of("dsa")
    with open_engine(model, **store(tmp_path)) as engine:
        engine.ask(model.prompts, NEW_TOKENS)
    with open_engine(model, **store(tmp_path), **SKIP_LOADS) as engine:
        got = engine.ask(model.prompts, NEW_TOKENS)
    assert got.cached_tokens == FULL_HIT
    assert count_changed(got, plain("dsa")) >= 3


@pytest.mark.features("store", "chunked")
@pytest.mark.parametrize(
    "options",
    [
        {"shared": None},
        {"shared": 2, "independent": "all"},
        {"shared": None, "use_layerwise": None},
    ],
    ids=["null", "all", "store-only"],
)
def test_a_store_without_shared_buffers_is_exact(
    options: dict[str, Any],
    tmp_path: Path,
    model_of: ModelOf,
    plain: PlainAnswers,
    transformers_tokens: TransformersTokens,
) -> None:
    """The store then reads and writes the layers' own buffers; no host pool is needed."""
    model = model_of("dsa")
    with open_engine(model, **store(tmp_path, **options)) as engine:
        first, second = ask_twice(engine, model)
        statistics = engine.statistics()
    for got in (first, second):
        assert_exact(got, plain("dsa"), transformers_tokens("dsa"))
    assert second.cached_tokens == FULL_HIT
    assert statistics["fetched_blocks"] == HIT_BLOCKS
    assert statistics["loaded_bytes"] == statistics["host_pool_bytes"] == 0


@pytest.mark.features("layerwise", "store", "chunked")
def test_engines_with_other_buffer_plans_share_one_store(
    tmp_path: Path,
    model_of: ModelOf,
    plain: PlainAnswers,
    transformers_tokens: TransformersTokens,
) -> None:
    """An object holds all layers in order, whatever buffers they came from."""
    model = model_of("glm")
    for at, options in enumerate(({"shared": 1}, {"shared": 3}, {"independent": "all"})):
        with open_engine(model, **store(tmp_path, **options)) as engine:
            got = engine.ask(model.prompts, NEW_TOKENS)
        assert_exact(got, plain("glm"), transformers_tokens("glm"))
        assert got.cached_tokens == (FULL_HIT if at else [0, 0, 0, 0, 0])


@pytest.mark.features("layerwise", "store", "chunked")
def test_a_store_smaller_than_the_working_set_is_exact(
    tmp_path: Path,
    model_of: ModelOf,
    plain: PlainAnswers,
    transformers_tokens: TransformersTokens,
) -> None:
    """12 blocks for prompts of 30: objects come and go, some hits remain, no answer changes."""
    model = model_of("dsa")
    size_bytes = 12 * model.cache.plain_block_bytes(BLOCK_SIZE)
    # One prompt at a time, the 129 tokens again right after themselves: their 8 blocks are still there.
    order = [4, 3, 3, 2, 4, 3, 4]
    cached = []
    with open_engine(model, **store(tmp_path, store_size_GB=size_bytes / GIB)) as engine:
        for at in order:
            got = engine.ask([model.prompts[at]], NEW_TOKENS)
            assert got.tokens == [transformers_tokens("dsa")[at]] == [plain("dsa").tokens[at]]
            cached += got.cached_tokens
        statistics = engine.statistics()
    stored = stored_statistics(tmp_path)
    assert stored.evictions > 30
    assert stored.objects <= 12
    assert cached[:3] == [0, 0, 128]
    assert statistics["fetched_blocks"] * BLOCK_SIZE == sum(cached)
    assert statistics["failed_blocks"] == 0


@pytest.mark.features("layerwise", "store", "chunked")
def test_what_no_longer_fits_comes_back_from_the_spill_file(
    tmp_path: Path,
    model_of: ModelOf,
    plain: PlainAnswers,
    transformers_tokens: TransformersTokens,
) -> None:
    model = model_of("dsa")
    size_bytes = 12 * model.cache.plain_block_bytes(BLOCK_SIZE)
    options = {
        "store_size_GB": size_bytes / GIB,
        "store_spill_path": str(tmp_path / "spill"),
        "store_spill_size_GB": 0.1,
    }
    with open_engine(model, **store(tmp_path / "store", **options)) as engine:
        first, second = ask_twice(engine, model)
        statistics = engine.statistics()
    for got in (first, second):
        assert_exact(got, plain("dsa"), transformers_tokens("dsa"))
    assert second.cached_tokens == FULL_HIT
    assert statistics["fetched_blocks"] == HIT_BLOCKS
    stored = stored_statistics(tmp_path / "store")
    assert stored.spilled_objects > 0
    assert stored.evictions > 0
    assert stored.spill_corrupt == 0


class Script:
    """Faults of the next reads; silent until `armed`."""

    def __init__(self) -> None:
        self.armed = False
        self.lost: list[Any] = []

    def __call__(self, call: Call) -> Status | LeaseFault | None:
        if not self.armed or call.method != "read" or len(self.lost) >= 3:
            return None
        self.lost.append(call.key)
        return LeaseFault.LOST


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> Script:
    """Put a script between the engine and its store."""
    script = Script()
    opened = connector_module.open_configured_store

    def open_faulty(config: Any, **options: Any) -> Store | None:
        inner = opened(config, **options)
        return None if inner is None else FaultyStore(inner, script)

    for module in (connector_module, open_path_module):  # the scheduler's side and the workers'
        monkeypatch.setattr(module, "open_configured_store", open_faulty)
    return script


@pytest.mark.features("layerwise", "store", "chunked")
@pytest.mark.parametrize(
    ("shared", "prefix_caching", "async_scheduling"),
    [(1, False, False), (2, True, False), (None, True, False), (2, True, True)],
)
def test_objects_lost_between_lookup_and_read_are_recomputed(
    shared: int | None,
    prefix_caching: bool,
    async_scheduling: bool,
    faults: Script,
    tmp_path: Path,
    model_of: ModelOf,
    plain: PlainAnswers,
    transformers_tokens: TransformersTokens,
) -> None:
    """Three objects vanish although they are leased; other requests of the same step keep their hits."""
    model = model_of("dsa")
    with open_engine(model, enable_prefix_caching=prefix_caching, **store(tmp_path, shared=shared)) as engine:
        engine.ask(model.prompts, NEW_TOKENS)
        engine.forget_prefixes()
        faults.armed = True
        got = engine.ask(model.prompts, NEW_TOKENS)
        faults.armed = False
        statistics = engine.statistics()
        engine.forget_prefixes()
        again = engine.ask(model.prompts, NEW_TOKENS)
    assert len(set(faults.lost)) == 3
    assert_exact(got, plain("dsa"), transformers_tokens("dsa"))
    assert statistics["failed_blocks"] >= 3
    assert statistics["fetched_blocks"] >= HIT_BLOCKS - 3
    # The recomputed blocks went back into the store.
    assert_exact(again, plain("dsa"), transformers_tokens("dsa"))
    assert again.cached_tokens == FULL_HIT


@pytest.mark.features("layerwise", "store", "prefix")
@pytest.mark.parametrize("async_scheduling", [False, True])
def test_a_lost_prefix_that_requests_share_never_spoils_the_store(
    async_scheduling: bool, faults: Script, tmp_path: Path, model_of: ModelOf, truth: Truth
) -> None:
    """Only the first request fetches; the other reads its blocks in the same step, and must not publish."""
    base, *tails = random_prompts(44, (70, 40, 50))
    prompts = [base + tail for tail in tails]
    expected = truth("dsa", prompts)
    with open_engine(
        model_of("dsa"),
        enable_prefix_caching=True,
        async_scheduling=async_scheduling,
        **{**store(tmp_path), "max_num_batched_tokens": 256},
    ) as engine:
        # vLLM cannot take back a step in flight: kvstrata turns asynchronous scheduling off with a store.
        assert not engine.llm.llm_engine.vllm_config.scheduler_config.async_scheduling
        engine.ask([base], 4)  # a later step is where the puts of one are known to have ended
        engine.forget_prefixes()
        faults.armed = True
        got = engine.ask(prompts, NEW_TOKENS)
        faults.armed = False
        assert faults.lost
        assert engine.statistics()["failed_blocks"] > 0
        engine.forget_prefixes()
        again = engine.ask(prompts, NEW_TOKENS)
    assert got.tokens == expected.tokens
    assert min(again.cached_tokens) >= 64
    assert_true(again, expected)


@pytest.mark.features("layerwise", "store", "chunked")
def test_a_store_cleared_between_two_calls_only_misses(
    tmp_path: Path,
    model_of: ModelOf,
    plain: PlainAnswers,
    transformers_tokens: TransformersTokens,
) -> None:
    model = model_of("dsa")
    with open_engine(model, **store(tmp_path)) as engine:
        engine.ask(model.prompts, NEW_TOKENS)
        beside = LocalStore.attach(tmp_path)
        assert beside.clear() > 0
        beside.close()
        cleared, filled = ask_twice(engine, model)
    for got in (cleared, filled):
        assert_exact(got, plain("dsa"), transformers_tokens("dsa"))
    assert cleared.cached_tokens == [0, 0, 0, 0, 0]
    assert filled.cached_tokens == FULL_HIT


def test_strangers_get_no_hits(tmp_path: Path, model_of: ModelOf, truth: Truth) -> None:
    """The same prompts to other weights, another dtype, block size and indexer cache: one store, no hits."""
    prompts = random_prompts(43, (129, 250))
    expected = truth("dsa", prompts)
    other = dataclasses.replace(model_of("dsa"), path=model_of("tiny-dsv32").path)
    users: list[tuple[Model, dict[str, Any]]] = [
        (model_of("dsa"), {}),
        (other, {}),
        (model_of("dsa"), {"dtype": "bfloat16"}),
        (model_of("dsa"), {"block_size": 32}),
        (model_of("dsa"), {"additional_config": {"kvstrata": {"indexer_cache_dtype": "int8"}}}),
    ]
    objects = [0]
    for model, arguments in users:
        with open_engine(model, **store(tmp_path), **arguments) as engine:
            got = engine.ask(prompts, NEW_TOKENS)
        assert got.cached_tokens == [0, 0], arguments
        objects.append(stored_statistics(tmp_path).objects)
    assert all(after > before for before, after in itertools.pairwise(objects))
    with open_engine(model_of("dsa"), **store(tmp_path)) as engine:
        got = engine.ask(prompts, NEW_TOKENS)
    assert got.cached_tokens == [128, 240]
    assert got.tokens == expected.tokens


@pytest.mark.features("layerwise", "store", "bf16", "chunked")
def test_bfloat16_hits_are_the_bits_that_were_computed(tmp_path: Path, model_of: ModelOf) -> None:
    """Against a bf16 engine without offload; one that hits its own prefix cache makes the same batches."""
    model = model_of("dsa")
    with open_engine(model, dtype="bfloat16", enable_prefix_caching=True, **CHUNKED) as engine:
        expected = ask_twice(engine, model)
    with open_engine(model, dtype="bfloat16", **store(tmp_path)) as engine:
        got = ask_twice(engine, model)
    assert [outcome.cached_tokens for outcome in got] == [outcome.cached_tokens for outcome in expected]
    assert got[1].cached_tokens == FULL_HIT
    for ours, plain_ones in zip(got, expected, strict=True):
        assert ours.tokens == plain_ones.tokens
        assert ours.logprobs == plain_ones.logprobs
