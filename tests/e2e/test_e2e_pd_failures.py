"""Prefill and decode when something goes wrong between them: no wrong answer, and nothing is left over.

Engines are killed, stopped and restarted in the middle of a transfer. The affected request is computed by
decode alone, requests beside it never notice, and blocks and leases return within the lease.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from checks import NEW_TOKENS, ModelOf, TransformersTokens
from engines import BLOCK_SIZE, INT8_INDEXER
from models import Model
from pd import Fleet, Pair, assert_at_rest, wait_for
from pd_reads import PASS
from pd_world import Counts, World, begin_held_read, begin_transfer, check_exchange

pytestmark = pytest.mark.whole_machine

INT8_ROW_BYTES = 128 + 4


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory, model_of: ModelOf) -> Iterator[World]:
    with Fleet(model_of("dsa"), tmp_path_factory.mktemp("engines")) as fleet:
        yield World(fleet)


@pytest.fixture
def pair(world: World) -> Pair:
    return world.pair()


class Case:
    """The prompt in trouble, the one beside it, and their answers."""

    def __init__(self, model: Model, answers: Sequence[list[int]]) -> None:
        self.block_bytes = model.cache.plain_block_bytes(BLOCK_SIZE)
        self.beside, self.prompt = model.prompts[-2:]
        self.beside_answer, self.answer = answers[-2:]


@pytest.fixture(scope="module")
def case(model_of: ModelOf, transformers_tokens: TransformersTokens) -> Case:
    return Case(model_of("dsa"), transformers_tokens("dsa"))


def test_killed_prefill_in_mid_transfer(world: World, case: Case) -> None:
    pair = world.pair()
    pulled = Counts(pair.decode)
    name = begin_transfer(pair, case.prompt, NEW_TOKENS)
    beside = pair.submit_local(case.beside, NEW_TOKENS)
    pair.prefill.kill(signal.SIGKILL)
    assert pair.tokens(beside) == case.beside_answer
    assert pair.tokens(name) == case.answer
    assert_at_rest(pair.decode)
    assert sum(pulled.endings().values()) == 1
    assert "pulls_done" not in pulled.endings()
    # The next life of prefill is another one to decode.
    check_exchange(world.pair(), case.prompt, case.answer)


def test_stopped_prefill_wakes_after_its_lease(pair: Pair, case: Case) -> None:
    """Decode gives it up; awake, it learns that its transfer is over, and its blocks are free again."""
    pulled, sent = Counts(pair.decode), Counts(pair.prefill)
    name = begin_transfer(pair, case.prompt, NEW_TOKENS)
    beside = pair.submit_local(case.beside, NEW_TOKENS)
    pair.prefill.kill(signal.SIGSTOP)
    try:
        assert pair.tokens(beside) == case.beside_answer
        assert pair.tokens(name) == case.answer
        assert_at_rest(pair.decode)
    finally:
        pair.prefill.kill(signal.SIGCONT)
    assert pulled.endings() == {"pulls_lapsed": 1}
    pair.prefill.call("allow_steps", None)
    assert_at_rest(pair.prefill)
    assert sum(sent.endings().values()) == 1
    assert "sends_done" not in sent.endings()
    check_exchange(pair, case.prompt, case.answer)


def test_stopped_decode_wakes_after_its_lease_in_mid_read(pair: Pair, case: Case) -> None:
    """Prefill takes its blocks back and fills them anew; the read that goes on then is not believed."""
    pulled, sent = Counts(pair.decode), Counts(pair.prefill)
    name = begin_held_read(pair, case.prompt, NEW_TOKENS, after=3)
    beside = pair.submit_local(case.beside, NEW_TOKENS)
    pair.decode.kill(signal.SIGSTOP)
    try:
        assert_at_rest(pair.prefill)
        assert sent.endings() == {"sends_lapsed": 1}
        for at in range(3):
            pair.prefill.add(f"stranger-{at}-{name}", case.beside, 1, None)
        for at in range(3):
            assert pair.prefill.answer(f"stranger-{at}-{name}")["tokens"] == case.beside_answer[:1]
    finally:
        pair.decode.kill(signal.SIGCONT)
    pair.decode.call("set_reads", PASS)
    assert pair.tokens(beside) == case.beside_answer
    assert pair.tokens(name) == case.answer
    assert_at_rest(pair.decode)
    assert sum(pulled.endings().values()) == 1
    assert "pulls_done" not in pulled.endings()
    check_exchange(pair, case.prompt, case.answer)


def test_killed_decode_in_mid_transfer(world: World, case: Case) -> None:
    """Prefill takes its blocks back within the lease, and serves the next life of decode on the same port."""
    pair = world.pair()
    sent = Counts(pair.prefill)
    begin_transfer(pair, case.prompt, NEW_TOKENS)
    pair.decode.kill(signal.SIGKILL)
    pair.prefill.call("allow_steps", None)
    assert_at_rest(pair.prefill)
    assert sent.endings() == {"sends_lapsed": 1}
    check_exchange(world.pair(), case.prompt, case.answer)


def test_abort_at_decode_before_prefill_begins(pair: Pair, case: Case) -> None:
    """The advert arrives late: the prefill that it starts is told that nobody waits."""
    pulled, sent = Counts(pair.decode), Counts(pair.prefill)
    late: list[dict[str, Any]] = []

    def delay(advert: dict[str, Any]) -> int:
        late.append(advert)
        return 200

    name = pair.submit(case.prompt, NEW_TOKENS, answer=delay)
    wait_for(lambda: late, "an advert")
    pair.decode.abort(name)
    assert_at_rest(pair.decode)
    assert pulled.endings() == {"pulls_aborted": 1}
    pair.send_to_prefill(late[0])
    assert pair.prefill.answer(name)["tokens"] == case.answer[:1]
    assert_at_rest(pair.prefill)
    assert sent.endings() == {"sends_failed": 1}
    check_exchange(pair, case.prompt, case.answer)


def test_abort_at_decode_while_it_reads(pair: Pair, case: Case) -> None:
    """Its blocks come back although the read would never end by itself."""
    pulled, sent = Counts(pair.decode), Counts(pair.prefill)
    name = begin_held_read(pair, case.prompt, NEW_TOKENS, after=5)
    beside = pair.submit_local(case.beside, NEW_TOKENS)
    pair.decode.abort(name)
    assert pair.tokens(beside) == case.beside_answer
    assert_at_rest(pair.decode, pair.prefill)
    assert pulled.endings() == {"pulls_aborted": 1}
    assert sent.endings() == {"sends_aborted": 1}
    assert not pair.decode.has_answered(name)
    pair.decode.call("set_reads", PASS)
    check_exchange(pair, case.prompt, case.answer)


def test_abort_at_prefill_before_the_last_part(pair: Pair, case: Case) -> None:
    pulled, sent = Counts(pair.decode), Counts(pair.prefill)
    name = begin_transfer(pair, case.prompt, NEW_TOKENS)
    beside = pair.submit_local(case.beside, NEW_TOKENS)
    pair.prefill.abort(name)
    pair.prefill.call("allow_steps", None)
    assert pair.tokens(beside) == case.beside_answer
    assert pair.tokens(name) == case.answer
    assert_at_rest(pair.prefill, pair.decode)
    assert pulled.endings() == {"pulls_failed": 1}
    assert sent.endings() == {"sends_aborted": 1}


def test_a_metaserver_that_fails_once_is_asked_again(pair: Pair, case: Case) -> None:
    pulled = Counts(pair.decode)
    statuses: list[int | None] = [500, None]
    name = pair.submit(case.prompt, NEW_TOKENS, answer=lambda advert: statuses.pop(0))
    assert pair.tokens(name) == case.answer
    assert_at_rest(pair.prefill, pair.decode)
    assert pulled.endings() == {"pulls_done": 1}
    assert [advert["transfer_id"] for advert in pair.adverts] == [name, name]


@pytest.mark.parametrize("how", ["refuses", "is-silent"])
def test_a_metaserver_that_finds_no_prefill_is_waited_for_no_longer(how: str, pair: Pair, case: Case) -> None:
    """Refused: decode computes at once. Silent: within remote_wait_s."""
    pulled = Counts(pair.decode)
    over = threading.Event()

    def answer(advert: dict[str, Any]) -> int:
        if how == "is-silent":
            over.wait(120)
        return 404

    name = pair.submit(case.prompt, NEW_TOKENS, answer=answer)
    beside = pair.submit(case.beside, NEW_TOKENS)
    assert pair.tokens(beside) == case.beside_answer
    assert pair.tokens(name) == case.answer
    over.set()
    assert_at_rest(pair.prefill, pair.decode)
    endings = pulled.endings()
    assert endings.pop("pulls_done") == 1
    assert endings in (
        [{"pulls_aborted": 1}] if how == "refuses" else [{"pulls_aborted": 1}, {"pulls_lapsed": 1}]
    )


@pytest.mark.parametrize("fault", ["fail", "truncate"])
def test_a_read_that_fails_is_repeated(fault: str, pair: Pair, case: Case) -> None:
    pulled = Counts(pair.decode)
    pair.decode.call("set_reads", fault, 2, 1)
    assert pair.ask([case.prompt, case.beside], NEW_TOKENS) == [case.answer, case.beside_answer]
    assert_at_rest(pair.prefill, pair.decode)
    assert pulled["retried_reads"] == 1
    assert pulled.endings() == {"pulls_done": 2}


def test_reads_that_go_on_failing_end_the_transfer(pair: Pair, case: Case) -> None:
    pulled, sent = Counts(pair.decode), Counts(pair.prefill)
    pair.decode.call("set_reads", "truncate", 5)
    name = pair.submit(case.prompt, NEW_TOKENS)
    beside = pair.submit_local(case.beside, NEW_TOKENS)
    assert pair.tokens(beside) == case.beside_answer
    assert pair.tokens(name) == case.answer
    assert_at_rest(pair.prefill, pair.decode)
    assert pulled.endings() == {"pulls_failed": 1}
    assert sent.endings() == {"sends_failed": 1}
    assert pulled["retried_reads"] == 2, "three attempts"
    pair.decode.call("set_reads", PASS)
    check_exchange(pair, case.prompt, case.answer)


def test_lost_messages_are_repeated(pair: Pair, case: Case) -> None:
    """Openings, their answers, news of parts and acknowledgements; what is told twice counts once."""
    pulled, sent = Counts(pair.decode), Counts(pair.prefill)
    # Each loss may hold up prefill's next layer until it is repeated, later and later; the second prompt
    # begins after the first one's last, and must do so within WAIT_S.
    pair.decode.call("lose_messages", {"Accept": 1, "ReadDone": 3})
    pair.prefill.call("lose_messages", {"Open": 1, "Ready": 3})
    assert pair.ask([case.prompt, case.beside], NEW_TOKENS) == [case.answer, case.beside_answer]
    assert_at_rest(pair.prefill, pair.decode)
    assert pair.decode.call("messages_to_lose") == pair.prefill.call("messages_to_lose") == 0
    assert pulled.endings() == {"pulls_done": 2}
    assert sent.endings() == {"sends_done": 2}
    blocks = sum(-(-len(prompt) // BLOCK_SIZE) for prompt in (case.prompt, case.beside))
    assert pulled["pulled_bytes"] == blocks * case.block_bytes, "a part was read twice"


def test_a_lost_abort_of_decode_is_made_good(pair: Pair, case: Case) -> None:
    """Prefill goes on offering, and is told that the transfer is over."""
    pulled, sent = Counts(pair.decode), Counts(pair.prefill)
    name = begin_transfer(pair, case.prompt, NEW_TOKENS)
    pair.decode.call("lose_messages", {"Abort": 1})
    pair.decode.abort(name)
    assert_at_rest(pair.decode)
    pair.prefill.call("allow_steps", None)
    assert_at_rest(pair.prefill)
    assert pair.decode.call("messages_to_lose") == 0
    assert pulled.endings() == {"pulls_aborted": 1}
    assert sent.endings() in ({"sends_aborted": 1}, {"sends_failed": 1})
    check_exchange(pair, case.prompt, case.answer)


def test_a_lost_abort_of_prefill_and_its_lost_answer_are_repeated(pair: Pair, case: Case) -> None:
    pulled, sent = Counts(pair.decode), Counts(pair.prefill)
    name = begin_transfer(pair, case.prompt, NEW_TOKENS)
    pair.prefill.call("lose_messages", {"Abort": 1})
    pair.decode.call("lose_messages", {"AbortAck": 1})
    pair.prefill.abort(name)
    pair.prefill.call("allow_steps", None)
    assert pair.tokens(name) == case.answer
    assert_at_rest(pair.prefill, pair.decode)
    assert pair.decode.call("messages_to_lose") == pair.prefill.call("messages_to_lose") == 0
    assert pulled.endings() == {"pulls_failed": 1}
    assert sent.endings() == {"sends_aborted": 1}
    check_exchange(pair, case.prompt, case.answer)


def test_prefills_that_do_not_fit_are_refused(world: World, case: Case) -> None:
    """One keeps another indexer cache, one does not know the secret: decode reads nothing of theirs."""
    pair = world.pair()
    pulled = Counts(pair.decode)
    secret = world.prefill_arguments | {
        "kv_transfer_config": {
            **world.prefill_arguments["kv_transfer_config"],
            "kv_connector_extra_config": {
                **world.prefill_arguments["kv_transfer_config"]["kv_connector_extra_config"],
                "remote_secret": "not-the-secret",
            },
        }
    }
    other, stranger = world.fleet.start(
        ("other-layout", {**world.prefill_arguments, **INT8_INDEXER}, "0"), ("other-secret", secret, "1")
    )
    counts = Counts(other), Counts(stranger)
    names = [pair.submit(case.prompt, NEW_TOKENS, prefill=each) for each in (other, stranger)]
    beside = pair.submit(case.beside, NEW_TOKENS)
    assert pair.tokens(beside) == case.beside_answer
    assert [pair.tokens(name) for name in names] == [case.answer, case.answer]
    assert_at_rest(pair.prefill, pair.decode, other, stranger)
    endings = pulled.endings()
    # The first one was told why it cannot be read; of the second decode believes nothing, not even its end.
    assert endings == {"pulls_done": 1, "pulls_failed": 1, "pulls_lapsed": 1}
    assert counts[0].endings() == {"sends_failed": 1}
    assert counts[1].endings() == {"sends_lapsed": 1}
    values = (
        f"page_bytes {BLOCK_SIZE * INT8_ROW_BYTES} at prefill, "
        f"{world.fleet.model.cache.index_page_bytes(BLOCK_SIZE)} at decode"
    )
    assert values in pair.decode.log()
    assert values in other.log()
    assert pulled["bad_messages"] > 0
    for engine in (other, stranger):
        engine.close()
