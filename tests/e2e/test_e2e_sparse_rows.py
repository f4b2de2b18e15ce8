"""What sparse decode offload moves, counted by hand on small cases, and the aid that compares every row."""

from __future__ import annotations

from typing import Any

import pytest
from checks import ModelOf, Truth, assert_true
from engines import BLOCK_SIZE, Engine, open_engine, sparse
from models import FLOAT32_BYTES, random_prompts

from kvstrata.errors import TransferFailed

CHUNKED = {"max_num_batched_tokens": 48}
ONE_BY_ONE = {"max_num_seqs": 1}
COUNTS = (
    *("selected_rows", "hit_rows", "missed_rows", "placed_rows", "evicted_rows", "invalidated_rows"),
    *("miss_bytes", "written_rows", "written_bytes", "prompt_loaded_bytes"),
)
ROW_BYTES = 576 * FLOAT32_BYTES


def counted(engine: Engine, prompts: Any, new_tokens: int) -> dict[str, int]:
    """What answering the prompts adds to the counts."""
    before = engine.statistics()
    engine.ask(prompts, new_tokens, logprobs=False)
    after = engine.statistics()
    engine.check_integrity()
    counts = {name: int(after[name] - before[name]) for name in COUNTS}
    assert counts["hit_rows"] + counts["missed_rows"] == counts["selected_rows"]
    return counts


@pytest.mark.parametrize(("name", "layers", "tables"), [("dsa", 4, 4), ("glm", 6, 4)])
def test_a_short_context_is_loaded_once_and_grows_without_a_round_trip(
    name: str, layers: int, tables: int, model_of: ModelOf
) -> None:
    """11 prompt tokens and 16 decode steps stay below the 32 rows of the top-k: every row is selected."""
    model = model_of(name)
    prompt = model.prompts[1]
    assert len(prompt) == 11
    with open_engine(model, **sparse(buffer=32), **ONE_BY_ONE) as engine:
        groups = engine.statistics()["share_groups"]
        first = counted(engine, [prompt], 2)  # the prompt answers one token, a decode step the other
        longer = counted(engine, [prompt], 17)
        prefill = counted(engine, [prompt], 1)
    # Layers 2 and 4 of the second model have no indexer.
    assert groups == ([[0], [1], [2], [3]] if name == "dsa" else [[0], [1, 2], [3, 4], [5]])
    # The step selects 12 rows: 11 come from the host pool, in every layer, and the new one from the step.
    assert first["selected_rows"] == tables * 12
    assert first["missed_rows"] == tables * 11
    assert first["placed_rows"] == tables
    assert first["hit_rows"] == tables
    assert first["miss_bytes"] == layers * 11 * ROW_BYTES
    assert first["written_rows"] == layers * 12
    assert first["written_bytes"] == layers * 12 * ROW_BYTES
    # 16 steps select 12, 13, ... 27 rows: what the first of them misses is all that is ever missed.
    assert longer["selected_rows"] == tables * sum(range(12, 28))
    assert longer["missed_rows"] == tables * 11
    assert longer["placed_rows"] == tables * 16
    assert longer["miss_bytes"] == layers * 11 * ROW_BYTES
    # A prompt in one chunk attends to rows where they were computed. Its blocks were another request's.
    del prefill["invalidated_rows"]
    written = {"written_rows": layers * 11, "written_bytes": layers * 11 * ROW_BYTES}
    assert prefill == dict.fromkeys(prefill, 0) | written
    assert first["prompt_loaded_bytes"] == longer["prompt_loaded_bytes"] == 0


def test_a_long_context_is_loaded_by_selected_rows(model_of: ModelOf) -> None:
    """129 tokens: each step selects 32 rows of each layer, whatever the length of the context."""
    model = model_of("dsa")
    prompt = model.prompts[3]
    with open_engine(model, **sparse(buffer=32, prompt_window_tokens=32), **CHUNKED, **ONE_BY_ONE) as engine:
        prefill = counted(engine, [prompt], 1)
        step = counted(engine, [prompt], 2)
        tight = counted(engine, [prompt], 21)
    # Chunks of 48, 48 and 33 tokens, the second and third behind 3 and 6 blocks of context.
    page_bytes = model.cache.main_page_bytes(BLOCK_SIZE)
    assert prefill["prompt_loaded_bytes"] == model.cache.layers * (3 + 6) * page_bytes
    assert prefill["selected_rows"] == 0
    # The buffer holds nothing of the request yet: what is not new is missed.
    assert step["selected_rows"] == 4 * 32
    assert step["missed_rows"] + step["placed_rows"] == 4 * 32
    assert 0 <= step["placed_rows"] <= 4
    assert step["miss_bytes"] == step["missed_rows"] * ROW_BYTES
    assert tight["selected_rows"] == 20 * 4 * 32
    # A row that is selected gets in by a load or as it was made, and a full buffer gives one up for it.
    assert tight["evicted_rows"] >= tight["missed_rows"] + tight["placed_rows"] - 4 * 32
    assert tight["evicted_rows"] > 0
    with open_engine(model, **sparse(buffer=160, prompt_window_tokens=32), **CHUNKED, **ONE_BY_ONE) as engine:
        roomy = counted(engine, [prompt], 21)
    # 149 rows fit into 160: each gets in once at most, and none is given up.
    assert roomy["selected_rows"] == tight["selected_rows"]
    assert roomy["missed_rows"] + roomy["placed_rows"] <= 4 * 149
    assert roomy["missed_rows"] < tight["missed_rows"]
    assert roomy["evicted_rows"] == 0


def test_a_shared_prefix_is_hot_once(model_of: ModelOf) -> None:
    """Two requests of one step with a block in common: its 16 rows are loaded once, not twice."""
    model = model_of("dsa")
    base, *tails = random_prompts(48, (16, 5, 5))
    prompts = [base + tail for tail in tails]
    with open_engine(model, **sparse(buffer=32), enable_prefix_caching=True, max_num_seqs=2) as engine:
        engine.ask([[*base, 4]], 1)
        got = engine.ask(prompts, 1)
        assert got.cached_tokens == [16, 16]
        both = counted(engine, prompts, 2)
    # Contexts of 21 tokens and the new one each; 5 rows of each request are its own.
    assert both["selected_rows"] == 4 * 2 * 22
    assert both["placed_rows"] == 4 * 2
    assert both["missed_rows"] == 4 * (16 + 5 + 5)


@pytest.mark.features("sparse", "chunked")
def test_a_kept_device_cache_confirms_every_row(model_of: ModelOf, truth: Truth) -> None:
    """keep_device_kv_cache: exact, and no gain in blocks, for the device holds everything."""
    model = model_of("glm")
    prompts = model.prompts
    with open_engine(
        model, **sparse(buffer=32, prompt_window_tokens=32, keeps_device_cache=True), **CHUNKED
    ) as engine:
        got = engine.ask(prompts, 16)
        engine.check_integrity()
        statistics = engine.statistics()
    assert_true(got, truth("glm", prompts, 16))
    assert statistics["missed_rows"] > 0
    assert statistics["physical_page_bytes"] > statistics["logical_page_bytes"]


def test_negative_control_a_kept_device_cache_names_stale_rows(model_of: ModelOf) -> None:
    model = model_of("dsa")
    arguments = sparse(buffer=32, keeps_device_cache=True, fault="stale_rows")
    with (
        open_engine(model, **arguments, **CHUNKED) as engine,
        pytest.raises(TransferFailed, match=r"hot rows of layer 0 differ .* first is host row \d+"),
    ):
        engine.ask(model.prompts[1:2], 2)
