"""Sparse decode offload on two ranks: one host pool a tensor-parallel group, one a pipeline stage."""

from __future__ import annotations

from pathlib import Path

import pytest
from checks import NEW_TOKENS, ModelOf, PlainAnswers, TransformersTokens
from engine_process import ProcessAnswer, ask_in_new_process
from engines import BLOCK_SIZE, ROOMY_BYTES, engine_arguments, sparse

pytestmark = pytest.mark.whole_machine

CHUNKED = {"max_num_batched_tokens": 48}
TWO_RANKS = {"VLLM_CPU_OMP_THREADS_BIND": "0|1", "VLLM_LOGGING_LEVEL": "INFO"}
TENSOR = {"tensor_parallel_size": 2}
PIPELINE = {"pipeline_parallel_size": 2}
FULL_HIT = [0, 0, 48, 128, 240]
GIB = 1 << 30
OF_THE_SELECTION = (
    *("selected_rows", "hit_rows", "missed_rows", "placed_rows", "evicted_rows", "invalidated_rows"),
    "miss_bytes",
)


def check_ranks(answer: ProcessAnswer) -> None:
    """What holds of the ranks of any plan."""
    first, second = answer.statistics
    assert first["rank"] != second["rank"]
    assert first["num_blocks"] == second["num_blocks"] == answer.num_blocks  # A3
    for rank in (first, second):
        assert rank["device_bytes"] <= ROOMY_BYTES
        assert rank["hit_rows"] + rank["missed_rows"] == rank["selected_rows"]
        assert rank["missed_rows"] > 0
        assert rank["prompt_loaded_bytes"] > 0


@pytest.mark.features("sparse", "tp", "prefix", "chunked")
def test_tensor_parallel_ranks_share_one_pool(
    tmp_path: Path, model_of: ModelOf, plain: PlainAnswers, transformers_tokens: TransformersTokens
) -> None:
    """The first rank makes the pool and writes the rows; the other reads them there, a step's fence apart.

    The second batch hits vLLM's prefix cache: its rows were written by the first rank in the first batch.
    """
    model = model_of("dsa")
    arguments = {**sparse(buffer=32, prompt_window_tokens=32), **CHUNKED, **TENSOR}
    answer = ask_in_new_process(
        engine_arguments(model, **arguments, enable_prefix_caching=True),
        [model.prompts, model.prompts],
        NEW_TOKENS,
        directory=tmp_path,
        environment=TWO_RANKS,
    )
    assert answer.tokens[0] == answer.tokens[1] == transformers_tokens("dsa") == plain("dsa").tokens
    assert answer.cached_tokens == [[0, 0, 0, 0, 0], FULL_HIT]
    check_ranks(answer)
    first, second = sorted(answer.statistics, key=lambda rank: str(rank["rank"]))
    # Every rank holds all heads' rows of MLA and selects alike.
    assert [first[name] for name in OF_THE_SELECTION] == [second[name] for name in OF_THE_SELECTION]
    assert first["host_pool_bytes"] == second["host_pool_bytes"]
    assert first["written_rows"] > 0
    assert second["written_rows"] == 0
    log = (tmp_path / "log.txt").read_text()
    assert log.count("(made here)") == 1, "more than one rank took host memory for the pool"
    assert log.count("(of the group's first rank)") == 1


@pytest.mark.features("sparse", "pp", "chunked")
def test_pipeline_stages_share_the_host_memory(
    tmp_path: Path, model_of: ModelOf, plain: PlainAnswers, transformers_tokens: TransformersTokens
) -> None:
    """Stages of layers 0-2 and 3-5, with indexers on 0, 1 and 3, 5; 40 blocks of host memory for both."""
    model = model_of("glm")
    page_bytes = model.cache.layers * model.cache.main_page_bytes(BLOCK_SIZE)
    host_bytes = int(40.5 * page_bytes)
    more = sparse(buffer=32, prompt_window_tokens=32, dram_gb=host_bytes / GIB)
    answer = ask_in_new_process(
        engine_arguments(model, **more, **CHUNKED, **PIPELINE),
        [model.prompts],
        NEW_TOKENS,
        directory=tmp_path,
        environment=TWO_RANKS,
    )
    assert answer.tokens[0] == transformers_tokens("glm") == plain("glm").tokens
    check_ranks(answer)
    assert answer.num_blocks == 40
    first, second = sorted(answer.statistics, key=lambda rank: str(rank["rank"]))
    assert (first["share_groups"], second["share_groups"]) == ([[0], [1, 2]], [[3, 4], [5]])
    assert 40 * page_bytes <= first["host_pool_bytes"] + second["host_pool_bytes"] <= host_bytes
    assert first["written_rows"] == second["written_rows"] > 0


def test_negative_control_two_ranks_with_stale_rows_are_wrong(
    tmp_path: Path, model_of: ModelOf, plain: PlainAnswers
) -> None:
    model = model_of("dsa")
    answer = ask_in_new_process(
        engine_arguments(model, **sparse(buffer=32, fault="stale_rows"), **CHUNKED, **TENSOR),
        [model.prompts],
        NEW_TOKENS,
        directory=tmp_path,
        environment=TWO_RANKS,
    )
    assert sum(a != b for a, b in zip(answer.tokens[0], plain("dsa").tokens, strict=True)) >= 4
