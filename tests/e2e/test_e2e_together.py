"""Everything at once: engines with as many features as may be had together, each pair of them in some engine.

The model is the trained one with its draft layer. Every prompt asks for one of 24 facts, so that a damaged
row changes an answer; what is expected are the facts themselves, which plain vLLM and transformers answer.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from checks import ModelOf, Truth
from engine_process import ask_in_new_process
from features import COMPILED, arguments_with, idle
from models import Ledger, ledger
from pd import Fleet, assert_at_rest, free_port
from pd_engine import PdEngine
from rank_extension import EXTENSION
from replicas import ReplicatedEngine

pytestmark = pytest.mark.whole_machine

FOUR_RANKS = "0|0|1|1"
CORES = "0|1"
ASKED = 6  # of 24 facts; the context, which all of them share, is in every prompt
MODEL = "tiny-dsv32-mtp"

IN_STAGES = ("li-c8", "sfa-c8", "chunked", "prefix")
EVERYWHERE = (*IN_STAGES, "mtp", "compiled")
STAGES = {
    "kvpp": ("layerwise", "kvpp", "store", "tp", "pp", *IN_STAGES),
    "sparse": ("sparse", "store", "tp", "pp", *IN_STAGES),
}
REPLICAS = {
    "rows": ("dp", "sparse", *IN_STAGES, "mtp", "async"),
    "layers": ("dp", "pp", "layerwise", "store", *IN_STAGES),
    "owners": ("dp", "tp", "kvpp", "layerwise", "store", *IN_STAGES, "mtp"),
}
OF_OWNERS = ("prefill", "layerwise", "kvpp", "tp", *EVERYWHERE)
OF_ROWS = ("prefill", "sparse", *EVERYWHERE)
TO_ROWS = ("decode", "sparse", "tp", *EVERYWHERE)
TO_LAYERS = ("decode", "layerwise", "tp", *EVERYWHERE)
BOTH_ROWS = ("prefill", "decode", "sparse", *EVERYWHERE)
BOTH_LAYERS = ("prefill", "decode", "layerwise", *EVERYWHERE)
TRANSFERS = {
    "owners-store": ((*OF_OWNERS, "store"), ((*TO_ROWS, "store"), (*TO_LAYERS, "store"))),
    "owners-async": ((*OF_OWNERS, "async"), ((*TO_ROWS, "async"), (*TO_LAYERS, "async"))),
    "rows-store": ((*OF_ROWS, "store"), (("decode", "sparse", "store", *EVERYWHERE),)),
    "rows-async": ((*OF_ROWS, "async"), (("decode", "async", *EVERYWHERE),)),
    "both-store": ((*BOTH_ROWS, "store"), ((*BOTH_LAYERS, "store"),)),
    "both-async": ((*BOTH_LAYERS, "async", "tp"), (("prefill", "decode", "async", "tp", *EVERYWHERE),)),
}
"""Name -> prefill engine and the decode engines that it feeds; those that are both are asked both ways."""

DTYPES = ("float32", "bf16")


@pytest.fixture(scope="module")
def book() -> Ledger:
    return ledger(seed=1)


@pytest.fixture(autouse=True)
def traced(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in COMPILED.items():
        monkeypatch.setenv(name, value)


def with_dtype(features: tuple[str, ...], dtype: str) -> tuple[str, ...]:
    return features if dtype == "float32" else (*features, dtype)


def lone(engines: dict[str, tuple[str, ...]]) -> list[object]:
    return [
        pytest.param(
            with_dtype(features, dtype),
            id=f"{name}-{dtype}",
            marks=pytest.mark.features(*with_dtype(features, dtype)),
        )
        for name, features in engines.items()
        for dtype in DTYPES
    ]


def transfers() -> list[object]:
    params = []
    for name, (prefill, decodes) in TRANSFERS.items():
        for dtype in DTYPES:
            engines = [with_dtype(features, dtype) for features in (prefill, *decodes)]
            marks = [pytest.mark.features(*features) for features in engines]
            params.append(pytest.param(engines[0], engines[1:], id=f"{name}-{dtype}", marks=marks))
    return params


def test_the_facts_are_what_plain_vllm_and_transformers_answer(book: Ledger, truth: Truth) -> None:
    answers = truth(MODEL, book.prompts[:ASKED], len(book.answers[0])).tokens
    assert answers == [list(answer) for answer in book.answers[:ASKED]]


@pytest.mark.parametrize("features", lone(STAGES))
def test_stages_of_ranks_are_exact(
    features: tuple[str, ...], tmp_path: Path, model_of: ModelOf, book: Ledger
) -> None:
    model = model_of(MODEL)
    prompts, answers = book.prompts[:ASKED], [list(answer) for answer in book.answers[:ASKED]]
    got = ask_in_new_process(
        arguments_with(features, model, store=tmp_path / "store"),
        [prompts[:1], prompts, prompts],
        len(answers[0]),
        directory=tmp_path,
        environment={"VLLM_CPU_OMP_THREADS_BIND": FOUR_RANKS},
    )
    assert got.tokens == [answers[:1], answers, answers]
    assert min(got.cached_tokens[2]) > 0
    assert idle(features, got.statistics) == []


@pytest.mark.parametrize("features", lone(REPLICAS))
def test_replicas_are_exact(
    features: tuple[str, ...], tmp_path: Path, model_of: ModelOf, book: Ledger
) -> None:
    """Both answer at once; then one alone, while the other has nothing to do."""
    model = model_of(MODEL)
    prompts, answers = book.prompts[:ASKED], [list(answer) for answer in book.answers[:ASKED]]
    arguments = arguments_with(features, model, store=tmp_path / "store") | EXTENSION
    cpus = FOUR_RANKS if {"tp", "pp"} & set(features) else CORES
    engine = ReplicatedEngine("replicated", arguments, cpus=cpus, log=tmp_path / "log.txt")
    try:
        engine.wait_until_ready()
        for first, second in (
            (slice(0, 3), slice(3, 6)),
            (slice(0, 6), slice(0, 6)),
            (slice(0, 6), slice(0, 0)),
        ):
            got = engine.ask(prompts[first], prompts[second], new_tokens=len(answers[0]))
            assert [one.tokens for one in got] == [answers[first], answers[second]]
        for replica in engine.replicas:
            assert idle(features, replica.ranks("kvstrata_statistics")) == [], replica.name
    finally:
        engine.close()


@pytest.mark.parametrize(("prefill", "decodes"), transfers())
def test_transfers_are_exact(
    prefill: tuple[str, ...], decodes: list[tuple[str, ...]], tmp_path: Path, model_of: ModelOf, book: Ledger
) -> None:
    """One prefill engine feeds one decode engine after the other; twice, so that prefixes are hit.

    Several ranks with a store are launched as by the seeds: two connectors under vLLM's MultiConnector.
    """
    model = model_of(MODEL)
    prompts, answers = book.prompts[:ASKED], [list(answer) for answer in book.answers[:ASKED]]

    def cores(features: tuple[str, ...], alone: str) -> str:
        return CORES if "tp" in features else alone

    with Fleet(model, tmp_path) as fleet:
        sender: PdEngine | None = None
        for decode in decodes:
            given = [("decode", decode, "1")] + [("prefill", prefill, "0")] * (sender is None)
            started = fleet.start_given(
                *(
                    (
                        name,
                        arguments_with(
                            features,
                            model,
                            store=tmp_path / "store",
                            port=free_port(2),
                            in_halves={"tp", "store"} <= set(features),
                        ),
                        cores(features, core),
                    )
                    for name, features, core in given
                )
            )
            receiver, sender = started[0], started[1] if sender is None else sender
            for pair in [fleet.pair(sender, receiver)] + [fleet.pair(receiver, sender)] * (
                "decode" in prefill
            ):
                for _ in range(2):
                    assert pair.ask(prompts, len(answers[0])) == answers
                assert_at_rest(sender, receiver)
                pair.forget_prefixes()
                assert [
                    pair.tokens(pair.submit_local(prompt, len(answers[0]))) for prompt in prompts
                ] == answers
                pair.forget_prefixes()
            for engine, features in ((sender, prefill), (receiver, decode)):
                assert idle(features, engine.call("statistics")) == [], engine.name
                assert engine.statistics()["bad_messages"] == 0
            receiver.close()
