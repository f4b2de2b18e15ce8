"""Expert parallelism on two ranks: each holds half of the experts, and answers are those of one rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from checks import NEW_TOKENS, ModelOf, PlainAnswers, TransformersTokens
from engine_process import ProcessAnswer, ask_in_new_process
from engines import engine_arguments, kvpp, sparse
from models import ledger
from rank_extension import COUNT_OTHERS, EXTENSION, HELD_EXPERTS

pytestmark = pytest.mark.whole_machine

CHUNKED = {"max_num_batched_tokens": 48}
TENSOR = {"tensor_parallel_size": 2}
EXPERTS = {"enable_expert_parallel": True, **EXTENSION}
TWO_RANKS = {"VLLM_CPU_OMP_THREADS_BIND": "0|1", "VLLM_USE_BREAKABLE_CUDAGRAPH": "0", "VLLM_CPU_CI_ENV": "1"}
MTP = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 2}}
ALL_EXPERTS = 8
SPREAD = ("tp", "ep", "chunked")


def check_halves(answer: ProcessAnswer, *, layers: int) -> None:
    """In each layer with experts, each rank has weights of its half of them and of no other."""
    first, second = answer.said[HELD_EXPERTS]
    assert len(first["ids"]) == layers
    assert first["ids"].keys() == second["ids"].keys()
    for name, ids in first["ids"].items():
        assert sorted(ids + second["ids"][name]) == list(range(ALL_EXPERTS)), name
        assert first["counts"][name] == second["counts"][name] == ALL_EXPERTS // 2, name
    assert first["bytes"] == second["bytes"] > 0


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        # Groups of experts, of which the router picks one, lie on one rank each.
        pytest.param("dense", TENSOR, id="dense"),
        pytest.param("glm", TENSOR | {"enforce_eager": False}, id="compiled"),
        pytest.param("glm", kvpp(), id="kvpp", marks=pytest.mark.features("kvpp", *SPREAD, "prefix")),
        pytest.param(
            "dsa",
            TENSOR | sparse(buffer=32),
            id="sparse",
            marks=pytest.mark.features("sparse", *SPREAD, "prefix"),
        ),
    ],
)
def test_each_rank_holds_half_of_the_experts_and_answers_are_exact(
    name: str,
    arguments: dict[str, Any],
    tmp_path: Path,
    model_of: ModelOf,
    plain: PlainAnswers,
    transformers_tokens: TransformersTokens,
) -> None:
    """Prompts in chunks, decode, and prefix hits, in layers with shared experts beside the routed ones."""
    model = model_of(name)
    answer = ask_in_new_process(
        engine_arguments(model, **arguments, **EXPERTS, **CHUNKED, enable_prefix_caching=True),
        [model.prompts, model.prompts],
        NEW_TOKENS,
        directory=tmp_path,
        environment=TWO_RANKS,
        calls=[HELD_EXPERTS],
    )
    assert answer.tokens[0] == answer.tokens[1] == transformers_tokens(name) == plain(name).tokens
    assert sum(answer.cached_tokens[1]) > 0
    check_halves(answer, layers=model.cache.layers - 1)


def test_another_ranks_share_counted_here_too_is_wrong(
    tmp_path: Path, model_of: ModelOf, plain: PlainAnswers
) -> None:
    """The negative control: a token's experts elsewhere must add nothing here."""
    model = model_of("dense")
    answer = ask_in_new_process(
        engine_arguments(model, **TENSOR, **EXPERTS, **CHUNKED),
        [model.prompts],
        NEW_TOKENS,
        directory=tmp_path,
        environment=TWO_RANKS,
        calls=[COUNT_OTHERS],
    )
    changed = sum(a != b for a, b in zip(answer.tokens[0], plain("dense").tokens, strict=True))
    assert changed == len(model.prompts)


@pytest.mark.features("kvpp", *SPREAD, "mtp")
def test_the_draft_layers_experts_are_halved_too_and_draft_as_well(tmp_path: Path, model_of: ModelOf) -> None:
    """With KVPP. A draft layer that went wrong would change no answer: its drafts would be refused."""
    model = model_of("tiny-dsv32-mtp")
    book = ledger(seed=1)
    new_tokens = len(book.answers[0])
    arguments = engine_arguments(model, **kvpp(), **MTP, max_num_batched_tokens=96)
    together, apart = (
        ask_in_new_process(
            arguments | more,
            [book.prompts],
            new_tokens,
            directory=tmp_path / str(len(calls)),
            environment=TWO_RANKS,
            calls=calls,
        )
        for more, calls in (({}, []), (EXPERTS, [HELD_EXPERTS]))
    )
    assert apart.tokens == together.tokens
    assert apart.accepted_drafts == together.accepted_drafts > 0
    check_halves(apart, layers=model.cache.layers - 1 + 1)
