"""Two ranks, by tensor and by pipeline parallelism: equal plans, keys of their own, one decision."""

from __future__ import annotations

from pathlib import Path

import pytest
from checks import NEW_TOKENS, ModelOf, PlainAnswers, TransformersTokens, Truth
from engine_process import ask_in_new_process
from engines import BLOCK_SIZE, ROOMY_BYTES, SKIP_LOADS, engine_arguments, layerwise, open_engine
from models import random_prompts

pytestmark = pytest.mark.whole_machine

CHUNKED = {"max_num_batched_tokens": 48}
TWO_RANKS = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}
TENSOR = {"tensor_parallel_size": 2}
PIPELINE = {"pipeline_parallel_size": 2}
FULL_HIT = [0, 0, 48, 128, 240]
HIT_BLOCKS = sum(FULL_HIT) // BLOCK_SIZE


@pytest.mark.parametrize(
    ("name", "parallel", "shared", "loser"),
    [
        pytest.param(
            "dsa", TENSOR, 2, "tp1of2", marks=pytest.mark.features("layerwise", "store", "tp", "chunked")
        ),
        # Stages of layers 0-2 and 3-5, with indexers on 0, 1 and 3, 5: one shared buffer a stage.
        pytest.param(
            "glm", PIPELINE, 1, "pp0of2", marks=pytest.mark.features("layerwise", "store", "pp", "chunked")
        ),
    ],
    ids=["tp2-dsa", "pp2-glm"],
)
def test_two_ranks_with_store_are_exact(
    name: str,
    parallel: dict[str, int],
    shared: int,
    loser: str,
    tmp_path: Path,
    model_of: ModelOf,
    plain: PlainAnswers,
    transformers_tokens: TransformersTokens,
    truth: Truth,
) -> None:
    """Fill the store, hit it, lose one rank's part of a prefix, hit what was computed meanwhile.

    One stage computes the lost rows again; with several, the requests that needed them fail: a later step of
    theirs may be under way when the loss is known.
    """
    model = model_of(name)
    base, *tails = random_prompts(44, (70, 40, 50))
    branches = [base + tail for tail in tails]
    expected = truth(name, branches)
    store = layerwise(shared=shared, backend="local", store_path=str(tmp_path / "store"))
    answer = ask_in_new_process(
        engine_arguments(model, **store, max_num_batched_tokens=256, **parallel),
        [model.prompts, model.prompts, [base], branches, branches],
        NEW_TOKENS,
        directory=tmp_path / "job",
        lose={3: loser},
        environment=TWO_RANKS,
    )
    assert answer.tokens[0] == answer.tokens[1] == transformers_tokens(name) == plain(name).tokens
    assert answer.cached_tokens[:3] == [[0, 0, 0, 0, 0], FULL_HIT, [0]]
    if parallel is PIPELINE:
        assert answer.tokens[3] == [[] for _ in branches], "an answer from rows that were lost"
    else:
        assert answer.tokens[3] == expected.tokens
        assert min(answer.cached_tokens[4]) >= 64
    assert answer.tokens[4] == expected.tokens, "a rank published rows of a prefix that another rank lost"

    first, second = answer.statistics
    assert first["rank"] != second["rank"]
    assert first["num_blocks"] == second["num_blocks"] == answer.num_blocks  # A3
    for rank in (first, second):
        assert rank["device_bytes"] <= ROOMY_BYTES
        assert rank["physical_page_bytes"] < rank["logical_page_bytes"], "no slot is shared on this rank"
        assert rank["loaded_bytes"] > 0
        assert rank["saved_bytes"] > 0
        assert rank["fetched_blocks"] >= HIT_BLOCKS
        assert (rank["failed_blocks"] > 0) == (loser in rank["rank"])

    # One rank of one reads nothing that a rank of two wrote.
    with open_engine(model, **store, **CHUNKED) as engine:
        alone = engine.ask(model.prompts, NEW_TOKENS)
    assert alone.cached_tokens == [0, 0, 0, 0, 0]
    assert alone.tokens == transformers_tokens(name)


def test_two_ranks_without_loads_are_wrong(tmp_path: Path, model_of: ModelOf, plain: PlainAnswers) -> None:
    model = model_of("dsa")
    answer = ask_in_new_process(
        engine_arguments(model, **layerwise(shared=2), **SKIP_LOADS, **CHUNKED, **TENSOR),
        [model.prompts],
        NEW_TOKENS,
        directory=tmp_path,
        environment=TWO_RANKS,
    )
    changed = sum(a != b for a, b in zip(answer.tokens[0], plain("dsa").tokens, strict=True))
    assert changed >= sum(len(prompt) > BLOCK_SIZE for prompt in model.prompts)
