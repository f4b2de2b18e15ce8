"""Pools in running engines: what one engine computed, another one finds in Mooncake Store and in MemCache.

Real servers. Both engines are processes of their own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from checks import NEW_TOKENS, ModelOf, TransformersTokens
from engine_process import ask_in_new_process
from engines import BLOCK_SIZE, engine_arguments, layerwise
from store_pools import Pool, running

from kvstrata.serve_store.plan import engine_config

# Prompts of 1, 11, 64, 129 and 250 tokens; at least one token is computed.
FULL_HIT = [0, 0, 48, 128, 240]
HIT_BLOCKS = sum(FULL_HIT) // BLOCK_SIZE


def engine_on(pool: Pool, model: Any, **more: Any) -> dict[str, Any]:
    """Arguments of an engine that was started with what `kvstrata store serve` prints."""
    knobs = {**engine_config(pool.plan)["kv_connector_extra_config"], **more}
    return engine_arguments(model, **layerwise(shared=2, **knobs), max_num_batched_tokens=48)


@pytest.mark.features("layerwise", "store", "chunked")
@pytest.mark.parametrize("backend", ["mooncake", "memcache"])
def test_a_second_engine_hits_the_prefixes_of_the_first(
    backend: str, tmp_path: Path, model_of: ModelOf, transformers_tokens: TransformersTokens
) -> None:
    model = model_of("dsa")
    with running(backend, tmp_path / "pool") as pool:
        first, second = (
            ask_in_new_process(
                engine_on(pool, model),
                [model.prompts],
                NEW_TOKENS,
                directory=tmp_path / name,
                environment=pool.plan.environment,
                imports_anew="LD_PRELOAD" in pool.plan.environment,
            )
            for name in ("first", "second")
        )
    assert first.tokens == second.tokens == [transformers_tokens("dsa")]
    assert first.cached_tokens == [[0, 0, 0, 0, 0]]
    assert second.cached_tokens == [FULL_HIT]
    assert second.statistics[0]["fetched_blocks"] == HIT_BLOCKS
    assert second.statistics[0]["failed_blocks"] == 0
