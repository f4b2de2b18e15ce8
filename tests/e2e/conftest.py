"""Environment, checkpoints and cached answers that all end-to-end tests share.

Engines run one after the other in this process, so a model's unoffloaded answers are computed once and kept.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

# vLLM reads these when an engine starts. What the caller has set stays, except what the suite rests on.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["VLLM_NO_USAGE_STATS"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
# For DSA models vLLM turns torch.compile off, for the whole process, in favour of breakable CUDA graphs.
os.environ["VLLM_USE_BREAKABLE_CUDAGRAPH"] = "0"
if (
    "PYTEST_XDIST_WORKER" in os.environ
):  # one of several, as gw1: each has one core, or they wait for each other
    cores = sorted(os.sched_getaffinity(0))
    core = cores[int(os.environ["PYTEST_XDIST_WORKER"].removeprefix("gw")) % len(cores)]
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = str(core)
    os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("OMP_NUM_THREADS", "2")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

import pytest
import references
from checks import NEW_TOKENS, ModelOf, PlainAnswers, Prompts, TransformersTokens, Truth
from engines import Outcome, open_engine
from models import RECIPES, Model, build_seeded, trained
from support_tiers import left_out


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    later = left_out()
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.e2e)
            if item.nodeid in later:
                item.add_marker(pytest.mark.extended)


@pytest.fixture(scope="session")
def model_of(tmp_path_factory: pytest.TempPathFactory) -> ModelOf:
    """Return the model of a name, its checkpoint written on first use."""
    root = tmp_path_factory.mktemp("checkpoints")
    built: dict[str, Model] = {}

    def get(name: str) -> Model:
        if name not in built:
            built[name] = build_seeded(name, root) if name in RECIPES else trained(name)
        return built[name]

    return get


@pytest.fixture(scope="session")
def transformers_tokens(model_of: ModelOf) -> TransformersTokens:
    """Return transformers' greedy answers to a model's own prompts."""
    answers: dict[str, list[list[int]]] = {}

    def get(name: str) -> list[list[int]]:
        if name not in answers:
            model = model_of(name)
            answers[name] = references.greedy(model.path, model.prompts, NEW_TOKENS).tokens
        return answers[name]

    return get


@pytest.fixture(scope="session")
def plain(model_of: ModelOf) -> PlainAnswers:
    """Return what plain vLLM with our backend answers to a model's own prompts."""
    outcomes: dict[str, Outcome] = {}

    def get(name: str, **arguments: Any) -> Outcome:
        key = f"{name} {sorted(arguments.items())}"
        if key not in outcomes:
            model = model_of(name)
            with open_engine(model, **arguments) as engine:
                outcomes[key] = engine.ask(model.prompts, NEW_TOKENS)
        return outcomes[key]

    return get


@pytest.fixture(scope="session")
def truth(model_of: ModelOf) -> Truth:
    """Return what plain vLLM answers to any prompts, once transformers has answered the same."""
    outcomes: dict[str, Outcome] = {}

    def get(name: str, prompts: Prompts, new_tokens: int = NEW_TOKENS) -> Outcome:
        key = f"{name} {[list(prompt) for prompt in prompts]} {new_tokens}"
        if key not in outcomes:
            model = model_of(name)
            reference = references.greedy(model.path, prompts, new_tokens)
            with open_engine(model) as engine:
                outcome = engine.ask(prompts, new_tokens)
            assert outcome.tokens == reference.tokens
            outcomes[key] = outcome
        return outcomes[key]

    return get
