"""Everything at once: engines with as many features as may be had together, each pair of them in some engine.

The model is the trained one with its draft layer. Every prompt asks for one of 24 facts, so that a damaged
row changes an answer; what is expected are the facts themselves, which plain vLLM and transformers answer.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from checks import ModelOf, Truth
from engine_process import ask_in_new_process
from engines import STATISTICS
from features import COMPILED, arguments_with, idle, misplaced_experts
from models import Ledger, ledger
from pd import Fleet, Pair, assert_at_rest, free_port
from pd_engine import PdEngine
from rank_extension import HELD_EXPERTS
from replicas import COUNT, Replica, ReplicatedEngine

pytestmark = pytest.mark.whole_machine

CORES = "0|1"
ASKED = 6  # of 24 facts; the context, which all of them share, is in every prompt
MODEL = "tiny-dsv32-mtp"

IN_STAGES = ("li-c8", "sfa-c8", "chunked", "prefix")
EVERYWHERE = (*IN_STAGES, "mtp", "compiled")
STAGES = {
    "kvpp": ("layerwise", "kvpp", "store", "tp", "pp", "ep", *IN_STAGES),
    "sparse": ("sparse", "store", "tp", "pp", "ep", *IN_STAGES),
}
REPLICAS = {
    "rows": ("dp", "ep", "sparse", *IN_STAGES, "mtp", "async"),
    "layers": ("dp", "pp", "ep", "layerwise", "store", *IN_STAGES),
    "owners": ("dp", "tp", "kvpp", "layerwise", "store", *IN_STAGES, "mtp"),
}
REPLICAS_IN_STAGES = {  # of eight ranks: in one dtype only
    "owner-stages": ("dp", "tp", "pp", "kvpp", "layerwise", "store", *IN_STAGES),
    "row-stages": ("dp", "tp", "pp", "sparse", "store", *IN_STAGES),
}
OF_OWNERS = ("prefill", "layerwise", "kvpp", "tp", "ep", *EVERYWHERE)
OF_ROWS = ("prefill", "sparse", *EVERYWHERE)
TO_ROWS = ("decode", "sparse", "tp", "ep", *EVERYWHERE)
TO_LAYERS = ("decode", "layerwise", "tp", *EVERYWHERE)
BOTH_ROWS = ("prefill", "decode", "sparse", *EVERYWHERE)
BOTH_LAYERS = ("prefill", "decode", "layerwise", *EVERYWHERE)
TRANSFERS = {
    "owners-store": ((*OF_OWNERS, "store"), ((*TO_ROWS, "store"), (*TO_LAYERS, "store"))),
    "owners-async": ((*OF_OWNERS, "async"), ((*TO_ROWS, "async"), (*TO_LAYERS, "async"))),
    "rows-store": ((*OF_ROWS, "store"), (("decode", "sparse", "store", *EVERYWHERE),)),
    "rows-async": ((*OF_ROWS, "async"), (("decode", "async", *EVERYWHERE),)),
    "both-store": ((*BOTH_ROWS, "store"), ((*BOTH_LAYERS, "store"),)),
    "both-async": (
        (*BOTH_LAYERS, "async", "tp", "ep"),
        (("prefill", "decode", "async", "tp", "ep", *EVERYWHERE),),
    ),
}
"""Name -> prefill engine and the decode engines that it feeds; those that are both are asked both ways."""

OF_REPLICAS = ("prefill", "dp", "tp", "kvpp", *IN_STAGES, "mtp", "async")
OF_REPLICAS_TO = ("decode", "layerwise", *IN_STAGES, "mtp", "async")
EACH_OTHER = {
    "rows": ("prefill", "decode", "dp", "ep", "sparse", *IN_STAGES, "mtp", "async"),
    "layers": ("prefill", "decode", "dp", "tp", "layerwise", "store", *IN_STAGES, "mtp"),
}
"""Replicas, of which each computes prompts for the other."""

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


def cores_of(features: Sequence[str]) -> str:
    """What each rank is bound to: half of them to each core."""
    ranks = 2 ** len({"tp", "pp", "dp"} & set(features))
    return "|".join("0" * (ranks // 2) + "1" * (ranks // 2)) if ranks > 1 else CORES


def assert_at_work(features: Sequence[str], *engines: PdEngine | Replica) -> None:
    """Each engine has used each feature; experts are where the features put them in all of them together."""
    for engine in engines:
        assert idle(features, engine.ranks(STATISTICS)) == [], engine.name
    held = [rank for engine in engines for rank in engine.ranks(HELD_EXPERTS)]
    assert misplaced_experts(features, held) == []


@contextlib.contextmanager
def replicated(
    features: Sequence[str], arguments: dict[str, Any], directory: Path
) -> Iterator[ReplicatedEngine]:
    """Run the block with an engine of replicas, which may not be ready yet."""
    engine = ReplicatedEngine(
        "replicated", arguments, cpus=cores_of(features), log=directory / "replicated.log"
    )
    try:
        yield engine
    finally:
        engine.close()


def lone(engines: dict[str, tuple[str, ...]], dtypes: Sequence[str] = DTYPES) -> list[object]:
    return [
        pytest.param(
            with_dtype(features, dtype),
            id=f"{name}-{dtype}",
            marks=pytest.mark.features(*with_dtype(features, dtype)),
        )
        for name, features in engines.items()
        for dtype in dtypes
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


def test_experts_in_other_places_are_named() -> None:
    def rank(*ids: int, weights: int | None = None) -> dict[str, Any]:
        return {"ids": {"layer": list(ids)}, "counts": {"layer": len(ids) if weights is None else weights}}

    halves, every = [rank(0, 2, 4, 6), rank(1, 3, 5, 7)], [rank(*range(8)), rank(*range(8))]
    assert misplaced_experts({"tp", "ep"}, halves) == misplaced_experts({"tp"}, every) == []
    for features, held in (
        ({"tp", "ep"}, every),
        ({"tp"}, halves),
        ({"tp", "ep"}, [rank(0, 1, 2, 3), rank(0, 1, 2, 3)]),
        ({"tp", "ep"}, [rank(0, 1), rank(2, 3, 4, 5, 6, 7)]),
        ({"tp", "ep"}, [rank(0, 2, 4, 6, weights=8), rank(1, 3, 5, 7)]),
    ):
        assert misplaced_experts(features, held) == ["layer"]


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
        environment={"VLLM_CPU_OMP_THREADS_BIND": cores_of(features)},
        calls=[HELD_EXPERTS],
    )
    assert got.tokens == [answers[:1], answers, answers]
    assert min(got.cached_tokens[2]) > 0
    assert idle(features, got.statistics) == []
    assert misplaced_experts(features, got.said[HELD_EXPERTS]) == []


@pytest.mark.timeout(1200)  # eight ranks take their time to start
@pytest.mark.parametrize("features", lone(REPLICAS) + lone(REPLICAS_IN_STAGES, DTYPES[:1]))
def test_replicas_are_exact(
    features: tuple[str, ...], tmp_path: Path, model_of: ModelOf, book: Ledger
) -> None:
    """Both answer at once; then one alone, while the other has nothing to do."""
    model = model_of(MODEL)
    prompts, answers = book.prompts[:ASKED], [list(answer) for answer in book.answers[:ASKED]]
    arguments = arguments_with(features, model, store=tmp_path / "store")
    with replicated(features, arguments, tmp_path) as engine:
        engine.wait_until_ready()
        for first, second in (
            (slice(0, 3), slice(3, 6)),
            (slice(0, 6), slice(0, 6)),
            (slice(0, 6), slice(0, 0)),
        ):
            got = engine.ask(prompts[first], prompts[second], new_tokens=len(answers[0]))
            assert [one.tokens for one in got] == [answers[first], answers[second]]
        assert_at_work(features, *engine.replicas)


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
                assert_at_work(features, engine)
                assert engine.statistics()["bad_messages"] == 0
            receiver.close()


def assert_exact(book: Ledger, pairs: list[Pair]) -> None:
    """All pairs at once, twice, so that prefixes are hit; then the decode ends alone."""
    prompts, answers = book.prompts[:ASKED], [list(answer) for answer in book.answers[:ASKED]]
    for _ in range(2):
        asked = [[pair.submit(prompt, len(answers[0])) for prompt in prompts] for pair in pairs]
        for pair, names in zip(pairs, asked, strict=True):
            assert [pair.tokens(name) for name in names] == answers, pair.decode.name
    for pair in pairs:
        pair.forget_prefixes()
        alone = [pair.submit_local(prompt, len(answers[0])) for prompt in prompts]
        assert [pair.tokens(name) for name in alone] == answers, pair.decode.name
        pair.forget_prefixes()


@pytest.mark.parametrize("features", lone(EACH_OTHER))
def test_replicas_feed_each_other_and_are_exact(
    features: tuple[str, ...], tmp_path: Path, model_of: ModelOf, book: Ledger
) -> None:
    """Both ways at once: each replica of one engine computes prompts for the other, and answers."""
    model = model_of(MODEL)
    arguments = arguments_with(
        features,
        model,
        store=tmp_path / "store",
        port=free_port(COUNT * 2),
        in_halves={"tp", "store"} <= set(features),
    )
    with replicated(features, arguments, tmp_path) as engine, Fleet(model, tmp_path) as fleet:
        engine.wait_until_ready()
        assert_exact(book, [fleet.pair(*pair) for pair in itertools.permutations(engine.replicas)])
        assert_at_work(features, *engine.replicas)
        for replica in engine.replicas:
            replica.check_at_rest()
            assert replica.statistics()["bad_messages"] == 0


@pytest.mark.features(*OF_REPLICAS)
@pytest.mark.features(*OF_REPLICAS_TO)
def test_replicas_of_owners_feed_one_decode_engine(tmp_path: Path, model_of: ModelOf, book: Ledger) -> None:
    """Both replicas at once; each rank of each of them owns half of the layers."""
    model = model_of(MODEL)
    prefill = arguments_with(OF_REPLICAS, model)
    decode = arguments_with(OF_REPLICAS_TO, model, port=free_port())
    with replicated(OF_REPLICAS, prefill, tmp_path) as engine, Fleet(model, tmp_path) as fleet:
        (receiver,) = fleet.start_given(("decode", decode, "1"))
        engine.wait_until_ready()
        assert_exact(book, [fleet.pair(replica, receiver) for replica in engine.replicas])
        assert_at_work(OF_REPLICAS, *engine.replicas)
        assert_at_work(OF_REPLICAS_TO, receiver)
        for replica in engine.replicas:
            replica.check_at_rest()
        assert_at_rest(receiver)
        assert receiver.statistics()["bad_messages"] == 0
