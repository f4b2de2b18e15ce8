"""The retry policy, without any IO."""

from collections.abc import Collection

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.proxy.dispatch import Attempts
from kvstrata.proxy.failures import Failure, Kind, Refused, Role


class Engines:
    """Says which engines are ready; the first ready one is chosen."""

    def __init__(self, prefill: int, decode: int) -> None:
        self.ready = {
            Role.PREFILL: [f"p{n}" for n in range(prefill)],
            Role.DECODE: [f"d{n}" for n in range(decode)],
        }

    def choose(self, role: Role, avoid: Collection[str]) -> str | None:
        return next((url for url in self.ready[role] if url not in avoid), None)


def attempts(prefill: int, decode: int, *, most: int = 4, wants_remote: bool = True) -> Attempts:
    return Attempts(
        most=most,
        wants_remote=wants_remote,
        choose=Engines(prefill, decode).choose,
        why_none=lambda role: f"every {role} engine is asleep",
    )


def failure(role: Role, backend: str, kind: Kind = Kind.UNREACHABLE, status: int | None = None) -> Failure:
    answer = None if status is None else b'{"error":{}}'
    return Failure(role=role, backend=backend, kind=kind, text="why", status=status, answer=answer)


def test_the_first_attempt_asks_prefill_where_there_is_one():
    assert attempts(1, 1).next().is_remote
    assert not attempts(0, 1).next().is_remote
    assert not attempts(1, 1, wants_remote=False).next().is_remote


def test_prefills_are_tried_one_after_the_other_then_none():
    tries = attempts(2, 1)
    seen = []
    for _ in range(3):
        plan = tries.next()
        seen.append(tries.prefiller() if plan.is_remote else None)
        if plan.is_remote:
            tries.failed(failure(Role.PREFILL, str(tries.prefiller())))
    assert seen == ["p0", "p1", None]


def test_the_last_attempt_never_asks_prefill():
    tries = attempts(9, 1, most=3)
    remote = []
    for _ in range(3):
        remote.append(tries.next().is_remote)
        tries.failed(failure(Role.PREFILL, str(tries.prefiller())))
    assert remote == [True, True, False]
    with pytest.raises(Refused, match="gave up after 3 attempts"):
        tries.next()


def test_with_one_attempt_only_prefill_is_still_asked():
    assert attempts(1, 1, most=1).next().is_remote


def test_no_prefill_when_the_advert_came_means_decode_computes():
    tries = attempts(1, 1)
    tries.next()
    tries.failed(failure(Role.PREFILL, "", Kind.NOBODY))
    assert not tries.next().is_remote


@pytest.mark.parametrize("kind", [Kind.UNREACHABLE, Kind.LOST])
def test_a_broken_decode_is_not_asked_again(kind: Kind):
    tries = attempts(1, 2)
    assert tries.next().decode == "d0"
    tries.failed(failure(Role.DECODE, "d0", kind))
    plan = tries.next()
    assert (plan.decode, plan.is_remote, plan.number) == ("d1", True, 2)
    tries.failed(failure(Role.DECODE, "d1", kind))
    with pytest.raises(Refused, match="no decode engine is ready: decode d0: why; decode d1: why") as refused:
        tries.next()
    assert refused.value.status == 503


def test_a_prompt_that_breaks_engines_is_not_carried_from_one_to_the_next():
    tries = attempts(3, 4, most=9)
    for engine in ("d0", "d1"):
        assert tries.next().decode == engine
        tries.failed(failure(Role.DECODE, engine, Kind.BROKEN))
    with pytest.raises(Refused, match="gave up after 2 attempts") as refused:
        tries.next()
    assert refused.value.status == 503


def test_a_prompt_that_breaks_prefills_is_computed_by_decode():
    tries = attempts(3, 1, most=9)
    for engine in ("p0", "p1"):
        assert tries.next().is_remote
        tries.failed(failure(Role.PREFILL, engine, Kind.BROKEN))
    assert not tries.next().is_remote


def test_a_decode_that_failed_with_prefill_gets_a_second_chance_alone():
    tries = attempts(1, 1)
    tries.next()
    tries.failed(failure(Role.DECODE, "d0", Kind.STATUS, 500))
    plan = tries.next()
    assert (plan.decode, plan.is_remote) == ("d0", False)
    tries.failed(failure(Role.DECODE, "d0", Kind.STATUS, 503))
    with pytest.raises(Refused) as refused:
        tries.next()
    assert (refused.value.status, refused.value.body) == (503, b'{"error":{}}')


def test_another_decode_is_preferred_to_one_that_failed():
    tries = attempts(1, 2)
    tries.next()
    tries.failed(failure(Role.DECODE, "d0", Kind.STATUS, 500))
    assert tries.next().decode == "d1"


@pytest.mark.parametrize("status", [400, 404, 422, 429])
def test_decodes_refusal_is_final(status: int):
    tries = attempts(1, 2)
    tries.next()
    tries.failed(failure(Role.DECODE, "d0", Kind.STATUS, status))
    with pytest.raises(Refused) as refused:
        tries.next()
    assert refused.value.status == status


def test_silence_of_decode_is_final_and_a_504():
    tries = attempts(1, 2)
    tries.next()
    tries.failed(failure(Role.DECODE, "d0", Kind.SILENCE))
    with pytest.raises(Refused) as refused:
        tries.next()
    assert refused.value.status == 504


def test_after_the_first_token_nothing_is_tried_again():
    tries = attempts(2, 2)
    tries.next()
    tries.speak()
    tries.failed(failure(Role.DECODE, "d0"))
    with pytest.raises(Refused) as refused:
        tries.next()
    assert refused.value.status == 502


def test_no_decode_at_all_is_a_503_with_the_reasons():
    with pytest.raises(Refused, match="no decode engine is ready: every decode engine is asleep") as refused:
        attempts(1, 0).next()
    assert refused.value.status == 503


@given(
    st.integers(0, 3),
    st.integers(0, 3),
    st.integers(1, 6),
    st.lists(
        st.tuples(
            st.sampled_from(Role),
            st.sampled_from(Kind),
            st.sampled_from([None, 400, 500, 503]),
            st.booleans(),
        ),
        min_size=8,
        max_size=8,
    ),
)
def test_whatever_fails_the_attempts_end_and_never_repeat_what_cannot_help(prefill, decode, most, script):
    tries = attempts(prefill, decode, most=most)
    tried_remotely: set[tuple[str, str]] = set()
    for made, (role, kind, status, speaks) in enumerate(script):
        try:
            plan = tries.next()
        except Refused:
            return
        assert made < most
        assert plan.number == made + 1
        assert made + 1 < most or made == 0 or not plan.is_remote
        prefiller = tries.prefiller()
        if plan.is_remote:
            assert (plan.decode, str(prefiller)) not in tried_remotely
            tried_remotely.add((plan.decode, str(prefiller)))
        if speaks:
            tries.speak()
        if role is Role.PREFILL and plan.is_remote:
            tries.failed(failure(role, str(prefiller), kind, status))
        else:
            tries.failed(failure(Role.DECODE, plan.decode, kind, status if kind is Kind.STATUS else None))
    raise AssertionError("more attempts than allowed")
